"""The sync guard's arbiter: one process-wide mode from the intents of many threads."""

from __future__ import annotations

import threading

import pytest
import torch

from deepinfer_ray.ops import sync_guard
from deepinfer_ray.ops.sync_guard import DEFAULT, ERROR, SyncArbiter, allow_sync, forbid_sync


class Switch:
    """Stands for torch's process-wide debug mode."""

    def __init__(self, mode: int = DEFAULT) -> None:
        self.mode = mode
        self.changes: list[int] = []

    def set(self, mode: int | str) -> None:
        assert isinstance(mode, int)
        self.mode = mode
        self.changes.append(mode)

    def arbiter(self) -> SyncArbiter:
        return SyncArbiter(lambda: self.mode, self.set)


@pytest.mark.parametrize("baseline", [DEFAULT, 1, ERROR])
def test_nesting_ends_in_the_mode_that_was_there_before(baseline: int) -> None:
    switch = Switch(baseline)
    arbiter = switch.arbiter()
    seen = []
    with arbiter.hold("forbid"):
        seen.append(switch.mode)
        with arbiter.hold("allow"):
            seen.append(switch.mode)
            with arbiter.hold("forbid"):
                seen.append(switch.mode)
            seen.append(switch.mode)
        seen.append(switch.mode)
    assert seen == [ERROR, DEFAULT, ERROR, DEFAULT, ERROR]
    assert switch.mode == baseline


def test_an_error_inside_leaks_no_mode() -> None:
    switch = Switch()
    arbiter = switch.arbiter()
    with pytest.raises(ValueError, match="inside"), arbiter.hold("forbid"), arbiter.hold("forbid"):
        raise ValueError("inside")
    assert switch.mode == DEFAULT
    assert not arbiter._stacks


def test_a_decorated_function_can_be_called_again_and_recurse() -> None:
    switch = Switch()
    arbiter = switch.arbiter()
    seen: list[int] = []

    @arbiter.hold("forbid")
    def work(depth: int) -> None:
        seen.append(switch.mode)
        if depth:
            work(depth - 1)

    work(2)
    work(0)
    assert seen == [ERROR] * 4
    assert switch.mode == DEFAULT
    assert switch.changes == [ERROR, DEFAULT, ERROR, DEFAULT]


def test_one_thread_that_allows_wins_and_interleaved_exits_leak_nothing() -> None:
    switch = Switch()
    arbiter = switch.arbiter()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with arbiter.hold("allow"):
            entered.set()
            assert leave.wait(10)

    thread = threading.Thread(target=other)
    with arbiter.hold("forbid"):
        assert switch.mode == ERROR
        thread.start()
        assert entered.wait(10)
        assert switch.mode == DEFAULT
    assert switch.mode == DEFAULT  # the first to enter leaves first
    with arbiter.hold("forbid"):
        assert switch.mode == DEFAULT
        leave.set()
        thread.join(10)
        assert switch.mode == ERROR
    assert switch.mode == DEFAULT


def test_many_threads_end_at_the_baseline() -> None:
    switch = Switch()
    arbiter = switch.arbiter()

    def work(number: int) -> None:
        for turn in range(200):
            with arbiter.hold("forbid" if (number + turn) % 2 else "allow"), arbiter.hold("forbid"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert switch.mode == DEFAULT
    assert not arbiter._stacks


def test_without_a_device_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mode: int | str) -> None:
        raise AssertionError(f"the mode of a process without a device was set to {mode}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(sync_guard._ARBITER, "_set_mode", refuse)

    @forbid_sync()
    def work() -> float:
        with allow_sync():
            return torch.ones(3).sum().item()

    assert work() == 3
