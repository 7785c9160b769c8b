"""Recorded schedules T1–T16 (spec/engine.md §16) replay step for step in parity mode.

A step is written `P|D seq:q,k … free=F d=D`; sequences inside a step are sorted by number, because the order
inside a step is not normative. Every trace ends with balanced books.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deepinfer_ray.engine.phase_vote import InProcessGroup
from deepinfer_ray.engine.simulation import Loop, Turn, create_scheduler, fixed_acceptance

PARITY: dict[str, Any] = {
    "idle_fast_path": False,
    "strict_block_headroom": True,
    "prefill_all_interval": 70,
    "prefill_any_interval": 100,
}


class Trace:
    """A loop whose requests are numbered from 0, as the traces number them."""

    def __init__(self, **overrides: Any) -> None:
        self.loop = Loop(create_scheduler(**(PARITY | overrides)), fixed_acceptance(2))
        self.ids: list[int] = []

    def add(self, *lengths: int, max_tokens: int = 100, **keywords: Any) -> None:
        for length in lengths:
            self.ids.append(self.loop.add(length, max_tokens, **keywords).request_id)

    def step(self) -> str:
        return self.text(self.loop.turn())

    def text(self, turn: Turn) -> str:
        chunks = sorted((self.ids.index(request), q, k) for request, q, k in turn.chunks)
        body = " ".join(f"{i}:{q},{k}" for i, q, k in chunks)
        kind = "P" if turn.plan.is_prompt else "D"
        return f"{kind} {body} free={turn.free_blocks} d={turn.plan.decode_step}".replace("  ", " ")

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def finish(self) -> dict[int, tuple[str, int]]:
        """Runs to the end; by number: finish reason and total length."""
        results = self.loop.run(5000)
        self.loop.scheduler.check_integrity()
        return {
            i: (str(results[r].reason), results[r].sequence.prompt_len + len(results[r].token_ids))
            for i, r in enumerate(self.ids)
        }


def test_t1_basic() -> None:
    trace = Trace()
    trace.add(100, 300, 128, max_tokens=12)
    assert trace.steps(7) == [
        "P 0:100,100 1:300,300 2:128,128 free=58 d=0",
        "D 0:6,106 1:6,306 2:6,134 free=57 d=1",
        "D 0:6,112 1:6,312 2:6,140 free=57 d=2",
        "D 0:6,115 1:6,315 2:6,143 free=57 d=3",
        "D 0:6,118 1:6,318 2:6,146 free=57 d=4",
        "D 0:6,121 1:6,321 2:6,149 free=57 d=5",
        "D free=57 d=6",
    ]
    state = trace.loop.scheduler.state
    assert (state.blocks.num_free, state.slots.num_free) == (63, 39)
    assert trace.finish() == {0: ("length", 112), 1: ("length", 312), 2: ("length", 140)}


def test_t2_chunked() -> None:
    trace = Trace(max_batched_tokens=256)
    trace.add(100, 300, 128, max_tokens=3)
    assert trace.steps(6) == [
        "P 0:100,100 1:156,156 free=59 d=0",
        "P 1:144,300 2:112,112 free=58 d=0",
        "P 2:16,128 free=58 d=0",
        "D 0:6,106 1:6,306 2:6,134 free=57 d=1",
        "D 0:6,112 1:6,312 2:6,140 free=57 d=2",
        "D free=57 d=3",
    ]
    assert trace.finish() == {0: ("length", 103), 1: ("length", 303), 2: ("length", 131)}


def test_t3_not_chunked() -> None:
    trace = Trace(chunked_prefill=False)
    trace.add(600, 600, 100, max_tokens=3)
    kinds = [step.split(" free")[0] for step in trace.steps(3)]
    assert kinds == ["P 0:600,600", "P 1:600,600 2:100,100", "D 0:6,606 1:6,606 2:6,106"]
    assert {reason for reason, _ in trace.finish().values()} == {"length"}


def test_t4_context_parallel_alignment() -> None:
    trace = Trace(cp=2, max_batched_tokens=256)
    trace.add(101, 101, 101, max_tokens=3)
    first = trace.loop.turn()
    assert trace.text(first).startswith("P 0:101,101 1:101,101 2:48,48 ")
    assert first.plan.num_tokens == 256
    second = trace.loop.turn()
    assert trace.text(second).startswith("P 2:53,101 ")
    assert second.plan.num_tokens == 56
    assert trace.step().startswith("D ")
    trace.finish()


def test_t5_checkpoints() -> None:
    trace = Trace()
    trace.add(500, checkpoints=[128, 384], max_tokens=3)
    trace.add(30, max_tokens=3)
    kinds = [step.split(" free")[0] for step in trace.steps(4)]
    assert kinds == ["P 0:128,128", "P 0:256,384", "P 0:116,500 1:30,30", "D 0:6,506 1:6,36"]
    trace.finish()


def test_t6_sum_of_lengths() -> None:
    trace = Trace(prefill_max_sum_k=600, max_model_len=600)
    trace.add(250, 250, 250, 250, max_tokens=3)
    kinds = [step.split(" free")[0] for step in trace.steps(3)]
    assert kinds[:2] == ["P 0:250,250 1:250,250", "P 2:250,250 3:250,250"]
    assert kinds[2] == "D 0:6,256 1:6,256 2:6,256 3:6,256"
    trace.finish()


def test_t7_image() -> None:
    trace = Trace(max_batched_tokens=256)
    trace.add(350, image_spans=[(100, 300)], max_tokens=3)
    kinds = [step.split(" free")[0] for step in trace.steps(3)]
    assert kinds == ["P 0:100,100", "P 0:250,350", "D 0:6,356"]
    trace.finish()


def test_t8_seats_block_the_queue() -> None:
    trace = Trace(max_seqs=2)
    trace.add(10, 10, 10, 10, max_tokens=3)
    steps = trace.steps(72)
    assert steps[0].startswith("P 0:10,10 1:10,10 ")
    assert steps[1].startswith("D 0:6,16 1:6,16 ")
    assert steps[2].startswith("D 0:6,22 1:6,22 ")
    assert steps[3].startswith("D free")
    assert all(step.startswith("D free") for step in steps[3:71])
    assert steps[70].endswith(" d=70")
    assert steps[71].startswith("P 2:10,10 3:10,10 ")
    trace.finish()


def test_t9_one_token_requests() -> None:
    trace = Trace(max_batched_tokens=128, max_seqs=2)
    trace.add(128, 128, 128, 128, max_tokens=1)
    steps = trace.steps(73)
    assert steps[0] == "P 0:128,128 free=62 d=0"
    assert steps[1] == "P 1:128,128 free=61 d=0"
    assert steps[2] == "D free=61 d=1"
    assert all(step.startswith("D free=63") for step in steps[3:72])
    assert steps[71].endswith(" d=70")
    assert steps[72].startswith("P 2:128,128 ")
    assert {reason for reason, _ in trace.finish().values()} == {"length"}


def test_t10_late_arrival() -> None:
    trace = Trace()
    trace.add(50, max_tokens=900)
    first = trace.steps(4)
    trace.add(50, max_tokens=3)
    steps = first + trace.steps(68)
    assert [index for index, step in enumerate(steps) if step.startswith("P")] == [0, 71]
    assert steps[70].endswith(" d=70")
    assert steps[71].startswith("P 1:50,50 ")
    trace.finish()


def test_t11_two_ranks_one_with_work() -> None:
    group = InProcessGroup(2)
    phases: list[list[str]] = [[], []]
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            loop = Loop(create_scheduler(votes=group.member(number), **PARITY))
            if number == 0:
                loop.add(50, 3)
            while loop.scheduler.agree().unfinished:
                turn = loop.turn()
                phases[number].append(("P" if turn.plan.is_prompt else "D") + str(turn.plan.num_seqs))
            loop.flush()
            loop.scheduler.check_integrity()
        except BaseException as error:
            failures.append(error)
            group.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert phases[0][:102] == ["D0"] * 100 + ["P1", "D1"]
    assert phases[1][:102] == ["D0"] * 100 + ["P0", "D0"]
    assert [step[0] for step in phases[0]] == [step[0] for step in phases[1]]


def test_t12_length_limit() -> None:
    trace = Trace(max_model_len=140)
    trace.add(140, 139, 141, max_tokens=50)
    assert trace.finish() == {0: ("length", 141), 1: ("length", 141), 2: ("error", 141)}
    refused = trace.loop.results[trace.ids[2]]
    assert len(refused.token_ids) == 0
    assert refused.error_code == "prompt_too_long"
    assert refused.error == (
        "141 tokens, but scheduler.max_model_len allows 140; shorten the prompt or raise it"
    )


def test_t13_tiny_pool() -> None:
    trace = Trace(num_blocks=8, max_model_len=4096, max_batched_tokens=4096)
    trace.add(1024, 896, 5000)
    first = trace.loop.turn()
    assert trace.text(first) == "P 1:896,896 free=0 d=0"
    codes = {t.request_id: t.error_code for t in first.terminals}
    assert codes == {trace.ids[0]: "out_of_blocks", trace.ids[2]: "prompt_too_long"}
    assert trace.step() == "D free=7 d=1"  # the lone sequence gave way to itself
    assert [s.request_id for s in trace.loop.scheduler.state.waiting] == [trace.ids[1]]
    # Its 897 tokens need 8 blocks and can never come back: the record keeps the token that it has.
    assert trace.finish()[1] == ("preempted", 897)
    assert trace.loop.results[trace.ids[1]].error_code == "out_of_blocks"


def test_t14_recompute() -> None:
    trace = Trace(num_blocks=6, prefill_all_interval=4, prefill_any_interval=6)
    trace.add(120, 120, 120, max_tokens=24)
    steps = trace.steps(7)
    assert steps[:6] == [
        "P 0:120,120 1:120,120 2:120,120 free=2 d=0",
        "D 0:6,126 1:6,126 2:6,126 free=2 d=1",
        "D 0:6,132 1:6,132 free=1 d=2",
        "D 0:6,135 1:6,135 free=1 d=3",
        "D 0:6,138 1:6,138 free=1 d=4",
        "P 2:121,121 free=0 d=0",
    ]
    # One of the two longest outputs gives way; among equals the trace may take either, ours the younger one.
    assert steps[6] in ("D 0:6,138 2:6,127 free=2 d=1", "D 1:6,138 2:6,127 free=2 d=1")
    assert trace.finish() == dict.fromkeys(range(3), ("length", 144))
    assert trace.loop.scheduler.num_preempted == 2


def test_t15_stop() -> None:
    trace = Trace(num_blocks=5, preemption="stop", prefill_all_interval=4, prefill_any_interval=6)
    trace.add(120, 120, 120, max_tokens=24)
    assert sorted(trace.finish().values()) == [("length", 144), ("preempted", 121), ("preempted", 124)]


@pytest.mark.parametrize("zos", [True, False])
def test_t16_outputs_and_abort(zos: bool) -> None:
    trace = Trace(zos=zos)
    trace.add(50, max_tokens=6)
    trace.add(50, max_tokens=50)
    trace.add(2000)  # refused
    emitted: list[list[int]] = []
    records: list[list[str]] = []

    def turn() -> None:
        now = trace.loop.turn()
        emitted.append([int(count) for commit in now.commits for count in commit.counts])
        records.append([str(terminal.reason) for terminal in now.terminals])

    turn()
    assert (emitted[0], records[0]) == ([1, 1], ["error"])
    turn()
    if zos:
        assert emitted[1] == []
        turn()
    assert emitted[-1] == [3, 3]
    trace.loop.scheduler.abort(trace.ids[1])
    turn()
    assert emitted[-1] == [2]  # three were verified, max_tokens leaves two
    assert sorted(records[-1]) == ["aborted", "length"]
    reasons = trace.finish()
    assert reasons[0] == ("length", 56)
    assert reasons[1] == ("aborted", 54)
