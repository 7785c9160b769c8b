"""Rows that begin alike are submitted together; parts, results and their order stay what they are."""

from __future__ import annotations

import itertools
import signal

import numpy as np
import pyarrow as pa
import pytest
from stub_backend import StubBackend

from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.fleet.backend import WorkItem
from deepinfer_ray.job.prefix_order import PrefixWindow
from deepinfer_ray.job.signals import StopSignals


def item(key: int, *head: int, tail: int = 0, length: int = 300) -> WorkItem:
    """A prompt whose blocks are filled with `head`, the rest with `tail`."""
    prompt = np.full(length, tail, np.int32)
    for index, token in enumerate(head):
        prompt[128 * index : 128 * (index + 1)] = token
    return WorkItem(key, prompt, SamplingParams(), seed=0)


def keys(items: list[WorkItem]) -> list[int]:
    return [item.key for item in items]


def test_the_oldest_items_group_goes_first() -> None:
    window = PrefixWindow()
    window.push([item(0, 1), item(1, 2), item(2, 1), item(3, 3), item(4, 2), item(5, 1)])
    assert keys(window.take(6)) == [0, 2, 5, 1, 4, 3]
    assert len(window) == 0


def test_longer_common_beginnings_are_neighbours() -> None:
    window = PrefixWindow()
    window.push([item(0, 1, 8), item(1, 1, 9), item(2, 1, 8, tail=5), item(3, 1, 9, tail=5)])
    order = keys(window.take(4))
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}


def test_the_longest_go_first_turn_by_turn() -> None:
    """A long row that comes late waits for those before it, a short one for the longer ones of its turn."""
    window = PrefixWindow()
    window.push(
        [item(0, 1, length=150), item(1, 2, length=400), item(2, 1, length=300), item(3, 3, length=350)]
    )
    first = keys(window.take(1))
    window.push([item(4, 4, length=130), item(5, 5, length=900)])
    rest = keys(window.take(5))
    assert first + rest[:3] in ([1, 3, 0, 2], [1, 3, 2, 0])
    assert rest[3:] == [5, 4]


def test_max_tokens_counts_as_length() -> None:
    window = PrefixWindow()
    long = WorkItem(1, np.full(10, 7, np.int32), SamplingParams(max_tokens=5000), seed=0)
    window.push([item(0, 1), long])
    assert keys(window.take(2)) == [1, 0]


def test_equal_prompts_keep_their_order() -> None:
    window = PrefixWindow()
    window.push([item(key, 1) for key in range(5)])
    assert keys(window.take(5)) == [0, 1, 2, 3, 4]


def test_a_head_without_end_holds_nobody_up() -> None:
    window = PrefixWindow()
    window.push([item(0, 1), item(1, 2)])
    taken: list[int] = []
    for key in range(2, 20):
        taken += keys(window.take(1))
        window.push([item(key, 1)])
    assert taken.index(1) <= 2
    assert sorted(taken + keys(window.take(99))) == list(range(20))


def test_room_is_counted_in_items_and_bytes() -> None:
    window = PrefixWindow(max_items=3, max_bytes=4000)
    window.push([item(0, 1, length=400), item(1, 1, length=400)])
    assert window.has_room
    window.push([item(2, 1, length=10)])
    assert not window.has_room
    window.take(1)
    assert window.has_room
    window.push([item(3, 1, length=900)])
    assert not window.has_room
    window.take(9)
    assert (len(window), window.has_room) == (0, True)


@pytest.mark.parametrize("n", [1, 3])
def test_a_job_with_heads_in_turn_submits_them_in_groups(job, write_rows, read_output, tmp_path, n) -> None:
    """The rows of the output stand as in the input, each with its own completion."""
    heads = ["a" * 140, "b" * 140, "c" * 140]
    prompts = [heads[row % 3] + f" {row}" for row in range(48)]
    path = write_rows(tmp_path / "in" / "a.parquet", {"prompt": prompts, "row": list(range(48))})

    class Recorder(StubBackend):
        def __init__(self) -> None:
            super().__init__(capacity=16)
            self.order: list[WorkItem] = []

        def submit(self, items: list[WorkItem]) -> None:
            self.order += items
            super().submit(items)

    stub = Recorder()
    outcome = job(input=path, stub=stub, n=n, max_tokens=4)
    assert outcome.exit_code == 0
    firsts = [int(item.prompt[5]) for item in stub.order]
    changes = sum(one != other for one, other in itertools.pairwise(firsts))
    assert len(firsts) == 48 * n
    assert changes <= 8  # in input order there would be 47
    rows = read_output(tmp_path / "out")
    assert [row["row"] for row in rows] == list(range(48))
    for row in rows:
        ids = [byte + 3 for byte in row["prompt"].encode()][::-1][:4]
        assert row["token_ids"] == ([ids] * n if n > 1 else ids)


def test_a_part_is_not_begun_for_the_sake_of_order(job, write_rows, tmp_path) -> None:
    """A signal has to wait for open parts alone; reading ahead opens none."""
    table = pa.table({"prompt": [f"row {row}" for row in range(60)]})
    path = write_rows(tmp_path / "in" / "a.parquet", table, group=10)
    signals = StopSignals()

    def on_poll(stub: StubBackend) -> None:
        if stub.submitted:
            signals.requested = signal.SIGINT

    outcome = job(input=path, stub=StubBackend(capacity=4, on_poll=on_poll), signals=signals, max_tokens=2)
    assert outcome.exit_code == 130
    assert outcome.summary.run.rows == 10
    assert outcome.summary.rows_left == 50
    assert job(input=path, max_tokens=2).summary.counts.rows == 60
