"""The commit: stop rule against a sequential loop, lengths, hooks, books (spec/engine.md §2.3, §2.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.plan import StepOutputs, StepPlan
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.simulation import create_scheduler

EOS = 1


def started(
    params: list[SamplingParams], prompt_len: int = 10, **overrides: Any
) -> tuple[Scheduler, StepPlan]:
    """A scheduler in the plain loop whose sequences have one output each (token 50), and a decode plan."""
    scheduler = create_scheduler(**({"zos": False, "max_seqs": max(8, len(params))} | overrides))
    for one in params:
        scheduler.add(Request(np.full(prompt_len, 7, np.int32), one))
    plan = scheduler.schedule()
    assert plan.num_seqs == len(params)
    scheduler.reclaim()
    scheduler.commit(plan, StepOutputs(np.full(len(params), 50, np.int32)))
    return scheduler, scheduler.schedule()


def sequential(
    tokens: list[int], outputs: int, length: int, params: SamplingParams, max_model_len: int
) -> tuple[int, str | None]:
    """Token by token: (kept, reason). The order of checks is the specification's."""
    for count, token in enumerate(tokens, start=1):
        outputs, length = outputs + 1, length + 1
        stops = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if stops and outputs >= params.min_tokens:
            return count, "stop"
        if length > max_model_len:
            return count, "length"
        if params.max_tokens is not None and outputs == params.max_tokens:
            return count, "length"
    return len(tokens), None


@pytest.mark.parametrize("seed", range(40))
def test_stop_rule_equals_the_sequential_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 24
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(3, 9)),
            ignore_eos=bool(rng.random() < 0.3),
            min_tokens=int(rng.integers(0, 4)),
            stop_token_ids=tuple(rng.integers(2, 8, rng.integers(0, 4)).tolist()),
        )
        for _ in range(count)
    ]
    limit = int(rng.integers(11, 18))
    scheduler, plan = started(params, max_model_len=limit, num_blocks=200, state_slots=60)
    accepted_counts = rng.integers(0, 6, count)
    tokens = rng.integers(1, 12, (count, 6)).astype(np.int32)
    accepted = np.where(np.arange(5) < accepted_counts[:, None], tokens[:, :5], -1).astype(np.int32)
    sampled = tokens[np.arange(count), accepted_counts]
    table = scheduler.table
    order = [int(row) for row in plan.rows]
    rows = {row: table.sequences[row] for row in order}
    before = {row: int(table.len[row]) for row in order}
    result = scheduler.commit(plan, StepOutputs(sampled, accepted))
    reasons = {t.request_id: str(t.reason) for t in result.terminals}
    for index, row in enumerate(order):
        sequence = rows[row]
        assert sequence is not None
        emitted = tokens[index, : accepted_counts[index] + 1].tolist()
        kept, reason = sequential(emitted, 1, before[row], sequence.request.params, limit)
        assert int(result.counts[index]) == kept
        assert int(table.len[row]) == before[row] + kept
        assert table.tokens[row, before[row] : before[row] + kept].tolist() == emitted[:kept]
        assert reasons.get(sequence.request_id) == reason
        assert int(table.num_cached[row]) == before[row] - 1 + kept
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("accepted", "sampled", "params", "kept", "reason"),
    [
        ([2, 3], 4, {}, 3, None),
        ([], 4, {}, 1, None),
        ([2, EOS], 4, {}, 2, "stop"),
        ([EOS, 3], 4, {}, 1, "stop"),
        ([2, 3], EOS, {}, 3, "stop"),
        ([EOS, 3], 4, {"ignore_eos": True}, 3, None),
        ([2, 3], 4, {"max_tokens": 2}, 1, "length"),
        ([2, 3], 4, {"max_tokens": 4}, 3, "length"),
        ([2, 3], 4, {"max_tokens": 5}, 3, None),
        ([EOS, 3], 4, {"max_tokens": 2}, 1, "stop"),  # both at once: stop comes first
        ([2, 3], 4, {"stop_token_ids": (3,)}, 2, "stop"),
        ([2, 3], 4, {"stop_token_ids": (9, 8, 4)}, 3, "stop"),
        ([2, 3], 4, {"stop_token_ids": (3,), "ignore_eos": True}, 2, "stop"),
        ([EOS, EOS], EOS, {"min_tokens": 3}, 2, "stop"),
        ([EOS, 3], 4, {"min_tokens": 3}, 3, None),
        ([3, 3], 3, {"min_tokens": 4, "stop_token_ids": (3,)}, 3, "stop"),
        ([2, 3], 4, {"max_tokens": None}, 3, None),
    ],
)
def test_stop_rule(
    accepted: list[int], sampled: int, params: dict[str, Any], kept: int, reason: str | None
) -> None:
    scheduler, plan = started([SamplingParams(**({"max_tokens": 100} | params))])
    padded = np.array([accepted + [-1] * (5 - len(accepted))], np.int32)
    result = scheduler.commit(plan, StepOutputs(np.array([sampled], np.int32), padded))
    assert result.counts.tolist() == [kept]
    assert [str(t.reason) for t in result.terminals] == ([reason] if reason else [])
    if reason:
        assert result.terminals[0].token_ids.tolist() == [50, *[*accepted, sampled][:kept]]


@pytest.mark.parametrize(("length", "ends"), [(139, False), (140, True)])
def test_prompt_at_the_model_limit_gets_one_token(length: int, ends: bool) -> None:
    scheduler = create_scheduler(zos=False, max_model_len=140)
    scheduler.add(Request(np.full(length, 7, np.int32), SamplingParams(max_tokens=50)))
    plan = scheduler.schedule()
    result = scheduler.commit(plan, StepOutputs(np.array([9], np.int32)))
    assert [str(t.reason) for t in result.terminals] == (["length"] if ends else [])


def test_first_token_may_be_the_last() -> None:
    scheduler = create_scheduler(zos=False)
    scheduler.add(Request(np.full(5, 7, np.int32), SamplingParams()))
    plan = scheduler.schedule()
    scheduler.reclaim()
    (terminal,) = scheduler.commit(plan, StepOutputs(np.array([EOS], np.int32))).terminals
    assert (str(terminal.reason), terminal.token_ids.tolist()) == ("stop", [EOS])
    scheduler.schedule()
    scheduler.reclaim()
    scheduler.check_integrity()


def test_logprobs_follow_their_tokens() -> None:
    scheduler, plan = started([SamplingParams(max_tokens=4, logprobs=0)] * 2)
    logprobs = -np.arange(12, dtype=np.float32).reshape(2, 6)
    accepted = np.array([[2, 3, -1, -1, -1], [-1] * 5], np.int32)
    result = scheduler.commit(plan, StepOutputs(np.array([4, 5], np.int32), accepted, logprobs=logprobs))
    (first,) = result.terminals
    assert first.logprobs.tolist() == [0.0, 0.0, -1.0, -2.0]  # the prompt step gave none
    assert first.to_result().logprobs is not None
    row = int(plan.rows[1])
    assert scheduler.table.logprobs[row, 11] == -6.0


def test_compressed_ids_follow_their_tokens() -> None:
    lookup = (np.arange(1000) // 10).astype(np.int32)
    settings = create_scheduler(zos=False).settings
    scheduler = Scheduler(settings, compress=lookup)
    scheduler.add(Request(np.array([15, 25, 2000], np.int32), SamplingParams(max_tokens=9)))
    plan = scheduler.schedule()
    scheduler.reclaim()
    scheduler.commit(plan, StepOutputs(np.array([37], np.int32)))
    plan = scheduler.schedule()
    scheduler.commit(plan, StepOutputs(np.array([99], np.int32), np.array([[48, 59, -1, -1, -1]], np.int32)))
    assert scheduler.table.compressed[1, :7].tolist() == [1, 2, -1, 3, 4, 5, 9]
    assert scheduler.table.tokens[1, :7].tolist() == [15, 25, 2000, 37, 48, 59, 99]


@pytest.mark.parametrize(
    ("answer", "kept", "reason"), [(0, 3, None), (1, 1, "stop"), (2, 2, "stop"), (3, 3, "stop")]
)
def test_hook_may_stop_a_watched_sequence(answer: int, kept: int, reason: str | None) -> None:
    scheduler, plan = started([SamplingParams(max_tokens=90), SamplingParams(max_tokens=90, stop=("x",))])
    seen: list[list[int]] = []

    def hook(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        (row,), (start,), (count,) = rows.tolist(), starts.tolist(), counts.tolist()
        seen.append(scheduler.table.tokens[row, start : start + count].tolist())
        return np.array([answer], np.int32)

    scheduler.on_tokens = hook
    accepted = np.array([[2, 3, -1, -1, -1], [4, 5, -1, -1, -1]], np.int32)
    result = scheduler.commit(plan, StepOutputs(np.array([8, 9], np.int32), accepted))
    assert seen == [[4, 5, 9]]
    assert result.counts.tolist() == [3, kept]
    assert [str(t.reason) for t in result.terminals] == ([reason] if reason else [])


def test_hook_that_answers_nothing() -> None:
    scheduler, plan = started([SamplingParams(max_tokens=90, stop=("x",))])
    scheduler.on_tokens = lambda rows, starts, counts: None
    result = scheduler.commit(plan, StepOutputs(np.array([8], np.int32)))
    assert result.counts.tolist() == [1]


def test_hook_sees_the_first_token_and_only_kept_ones() -> None:
    scheduler = create_scheduler(zos=False)
    scheduler.add(Request(np.full(5, 7, np.int32), SamplingParams(max_tokens=2, stop=("x",))))
    counts: list[int] = []

    def hook(rows: np.ndarray, starts: np.ndarray, kept: np.ndarray) -> None:
        counts.extend(kept.tolist())

    scheduler.on_tokens = hook
    plan = scheduler.schedule()
    scheduler.commit(plan, StepOutputs(np.array([8], np.int32)))
    plan = scheduler.schedule()
    accepted = np.array([[4, 5, 6, -1, -1]], np.int32)
    scheduler.commit(plan, StepOutputs(np.array([9], np.int32), accepted))
    assert counts == [1, 1]


def test_speculation_books() -> None:
    scheduler, plan = started([SamplingParams(max_tokens=90)] * 2, varlen=True)
    table, rows = scheduler.table, plan.rows
    confidence = np.tile(np.array([0.9, 0.5, 0.5, 0.5, 0.5], np.float32), (2, 1))
    drafts = np.arange(10, dtype=np.int32).reshape(2, 5)
    accepted = np.array([[2, 3, -1, -1, -1], [-1] * 5], np.int32)
    result = scheduler.commit(
        plan, StepOutputs(np.array([4, 5], np.int32), accepted, drafts=drafts, confidence=confidence)
    )
    assert (result.num_drafts_verified, result.num_drafts_accepted) == (10, 2)
    assert table.accepted[rows].tolist() == [2, 0]
    assert table.draft[rows].tolist() == drafts.tolist()
    assert table.has_draft[rows].all()
    np.testing.assert_allclose(table.rate[rows[0]], np.cumprod(confidence[0]), rtol=1e-6)
    assert table.n_rates[rows].tolist() == [1, 1]
    following = scheduler.schedule()
    assert following.draft_read.tolist() == following.draft_write.tolist() == table.draft_slot[rows].tolist()
    assert not table.has_draft[rows].any()  # taking the slot is one-shot
    scheduler.commit(following, StepOutputs(np.array([4, 5], np.int32), accepted, confidence=confidence / 2))
    assert table.n_rates[rows].tolist() == [2, 2]
    np.testing.assert_allclose(table.prev_rate[rows[0]], np.cumprod(confidence[0]), rtol=1e-6)
    assert table.sched_cnt[rows].tolist() == table.proc_cnt[rows].tolist() == [3, 3]


def test_draft_slots_are_refreshed_after_the_late_commit() -> None:
    scheduler = create_scheduler()
    scheduler.add(Request(np.full(5, 7, np.int32), SamplingParams(max_tokens=50)))
    plan = scheduler.schedule()
    scheduler.reclaim()
    scheduler.commit(plan, StepOutputs(np.array([8], np.int32)))
    outputs = StepOutputs(np.array([8], np.int32), np.full((1, 5), -1, np.int32))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (first.draft_read.tolist(), second.draft_read.tolist()) == ([0], [0])
    scheduler.commit(first, outputs)
    scheduler.refresh(second)
    assert second.draft_read.tolist() == [1]
    assert not scheduler.table.has_draft[1]


@pytest.mark.parametrize("zos", [True, False])
def test_counters_of_steps_in_flight(zos: bool) -> None:
    scheduler = create_scheduler(zos=zos)
    scheduler.add(Request(np.full(5, 7, np.int32), SamplingParams(max_tokens=500)))
    outputs = StepOutputs(np.array([8], np.int32), np.full((1, 5), -1, np.int32))
    plan = scheduler.schedule()
    assert scheduler.table.inflight[1] == 6
    scheduler.commit(plan, outputs)
    assert scheduler.table.inflight[1] == 0
    previous = scheduler.schedule()
    for _ in range(5):
        if zos:
            plan = scheduler.schedule()
            assert scheduler.table.inflight[1] == 12
            scheduler.commit(previous, outputs)
            assert scheduler.table.inflight[1] == 6
        else:
            scheduler.commit(previous, outputs)
            assert scheduler.table.inflight[1] == 0
            plan = scheduler.schedule()
        previous = plan


def test_empty_steps_commit_to_nothing() -> None:
    scheduler = create_scheduler()
    result = scheduler.commit(scheduler.schedule(), StepOutputs(np.empty(0, np.int32)))
    assert (len(result.rows), result.terminals) == (0, [])
