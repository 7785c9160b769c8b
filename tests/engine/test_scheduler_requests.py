"""Requests at any moment: abort, failures, forks, hand-over, the record that each gets exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.block_manager import IntegrityError
from deepinfer_ray.engine.plan import StepOutputs
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.simulation import Loop, create_scheduler, made_up_tokens
from deepinfer_ray.errors import ConfigError


def end(loop: Loop) -> None:
    loop.run(20_000)
    loop.scheduler.check_integrity()


def child_request(max_tokens: int = 10) -> Request:
    return Request(np.empty(0, np.int32), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def test_checkpoints_need_chunks() -> None:
    """The queue used to stand still behind a prompt that has to be cut and must not be."""
    loop = Loop(create_scheduler(chunked_prefill=False))
    with pytest.raises(ValueError, match=r"scheduler\.chunked_prefill is off"):
        loop.add(100, checkpoints=[50])
    assert not loop.scheduler.has_unfinished


# -- abort ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zos", [True, False])
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("after", range(8))
def test_abort_at_any_moment_gives_one_record(zos: bool, between: bool, after: int) -> None:
    """Waiting, half prefilled, scheduled, in flight, finished: one record, all memory back (D3, D4, D12)."""
    loop = Loop(create_scheduler(zos=zos, max_batched_tokens=128))
    other = loop.add(60, 8)
    victim = loop.add(300, 3)
    for _ in range(after):
        loop.turn()
    was_alive = not victim.ended
    answers: list[bool] = []
    if between:
        loop.turn(between=lambda: answers.append(loop.scheduler.abort(victim.request_id)))
    else:
        answers.append(loop.scheduler.abort(victim.request_id))
    if not between:
        assert answers == [was_alive]
    assert not loop.scheduler.abort(victim.request_id)
    end(loop)
    assert set(loop.results) == {other.request_id, victim.request_id}
    assert loop.results[other.request_id].reason == "length"
    assert len(loop.results[other.request_id].token_ids) == 8
    assert loop.results[victim.request_id].reason == ("aborted" if answers[0] else "length")


def test_aborted_half_prefilled_prompt_frees_at_once() -> None:
    loop = Loop(create_scheduler(max_batched_tokens=128))
    victim = loop.add(300)
    loop.turn()
    assert loop.scheduler.state.blocks.num_free == 60
    loop.scheduler.abort(victim.request_id)
    assert loop.scheduler.state.blocks.num_free == 63
    end(loop)


def test_abort_while_the_grammar_is_built() -> None:
    loop = Loop(create_scheduler())
    sequence = loop.add(10, ready=False)
    assert loop.scheduler.num_waiting == 1
    assert loop.scheduler.abort(sequence.request_id)
    loop.scheduler.make_ready(sequence.request_id)
    end(loop)
    assert loop.results[sequence.request_id].reason == "aborted"


def test_a_request_joins_the_queue_when_its_grammar_is_ready() -> None:
    loop = Loop(create_scheduler())
    slow, fast = loop.add(10, ready=False), loop.add(10)
    assert loop.turn().chunks == [(fast.request_id, 10, 10)]
    loop.scheduler.make_ready(slow.request_id)
    end(loop)
    assert len(loop.results) == 2


def test_abort_of_an_unknown_request() -> None:
    assert not create_scheduler().abort(12345)


def test_aborted_output_keeps_what_was_committed() -> None:
    loop = Loop(create_scheduler())
    sequence = loop.add(50, 100)
    for _ in range(5):
        loop.turn()
    count = int(loop.scheduler.table.len[sequence.row]) - 50
    loop.scheduler.abort(sequence.request_id)
    end(loop)
    tokens = loop.results[sequence.request_id].token_ids
    assert (
        tokens.tolist()
        == made_up_tokens(np.full(count, sequence.request_id), np.arange(50, 50 + count)).tolist()
    )


@pytest.mark.parametrize("queue", [1, 50])
def test_dead_requests_anywhere_do_not_keep_the_engine_alive(queue: int) -> None:
    """A queue of dead requests behind a live one used to block the votes of all ranks."""
    loop = Loop(create_scheduler(max_seqs=1))
    sequences = [loop.add(10, 5) for _ in range(queue + 1)]
    loop.turn()
    for sequence in sequences[1:]:
        loop.scheduler.abort(sequence.request_id)
    end(loop)
    assert len(loop.results) == queue + 1
    assert not loop.scheduler.state.waiting


# -- a failure ends one request -----------------------------------------------------------------------


@pytest.mark.parametrize("zos", [True, False])
@pytest.mark.parametrize("prompt_step", [True, False])
def test_a_failure_in_a_step_ends_one_request(zos: bool, prompt_step: bool) -> None:
    loop = Loop(create_scheduler(zos=zos))
    good, bad = loop.add(50, 9), loop.add(50, 9)
    original = loop.model.run

    def run(plan: Any) -> StepOutputs:
        outputs = original(plan)
        mine = np.flatnonzero(plan.seq_ids == bad.seq_id)
        if plan.is_prompt == prompt_step and len(mine):
            outputs.failures[int(mine[0])] = ("schema_timeout", "the grammar has no continuation")
        return outputs

    loop.model.run = run  # type: ignore[method-assign]
    end(loop)
    assert (loop.results[good.request_id].reason, len(loop.results[good.request_id].token_ids)) == (
        "length",
        9,
    )
    record = loop.results[bad.request_id]
    assert (record.reason, record.error_code) == ("error", "schema_timeout")
    assert record.error == "the grammar has no continuation"
    assert len(record.token_ids) == (0 if prompt_step else 1)


# -- forks ----------------------------------------------------------------------------------------------


def test_fork_of_a_complete_prompt_copies_the_partial_block_and_the_state() -> None:
    """200 of 201 tokens cached in blocks 1 and 2: the child gets state 2 and a copy of block 2 in 3."""
    loop = Loop(create_scheduler())
    parent = loop.add(200, 20)
    loop.turn()
    assert loop.scheduler.state.blocks.num_free == 61
    child = loop.scheduler.fork(parent.request_id, child_request())
    loop.scheduler.check_integrity()
    turn = loop.turn()
    assert turn.plan.clone_states.tolist() == [[1, 2]]
    assert turn.plan.clone_blocks.tolist() == [[2, 3]]
    assert turn.free_blocks == 60
    assert loop.scheduler.table.blocks_of(2) == [1, 3]
    assert set(turn.chunks) == {(parent.request_id, 6, 206), (child.request_id, 6, 206)}
    assert turn.plan.draft_read.tolist() == [0, 0]
    assert child.cached_tokens == 200
    loop.scheduler.check_integrity()
    end(loop)
    assert loop.results[child.request_id].to_result().cached_tokens == 200


def test_fork_before_the_first_token() -> None:
    """n > 1: the child re-runs the last prompt token alone and samples its own first token."""
    loop = Loop(create_scheduler())
    parent = loop.add(256, 20)
    loop.turn()
    child = loop.scheduler.fork(parent.request_id, child_request(), num_tokens=256)
    turn = loop.turn()
    chunk = next(c for c in turn.chunks if c[0] == child.request_id)
    assert chunk == (child.request_id, 6, 261)
    assert turn.plan.clone_blocks.tolist() == [[2, 3]]  # 255 cached: the second block is partial
    end(loop)
    record = loop.results[child.request_id]
    assert (
        record.token_ids.tolist()
        == made_up_tokens(np.full(10, child.request_id), np.arange(256, 266)).tolist()
    )


def test_full_blocks_are_shared_not_copied() -> None:
    loop = Loop(create_scheduler())
    parent = loop.add(257, 20)
    loop.turn()
    loop.scheduler.fork(parent.request_id, child_request(), num_tokens=257)
    turn = loop.turn()
    assert len(turn.plan.clone_blocks) == 0  # 256 cached: both blocks are full
    assert turn.plan.clone_states.tolist() == [[1, 2]]
    assert loop.scheduler.state.blocks.refs[[1, 2]].tolist() == [2, 2]
    end(loop)


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("length", [100, 129, 300])
def test_many_forks(count: int, length: int) -> None:
    loop = Loop(create_scheduler())
    parent = loop.add(length, 12)
    loop.turn()
    children = [
        loop.scheduler.fork(parent.request_id, child_request(12), num_tokens=length) for _ in range(count)
    ]
    turn = loop.turn()
    assert turn.plan.num_seqs == count + 1
    loop.scheduler.check_integrity()
    end(loop)
    assert all(len(loop.results[child.request_id].token_ids) == 12 for child in children)


def test_fork_of_a_half_prefilled_prompt_goes_to_the_front() -> None:
    loop = Loop(create_scheduler(max_batched_tokens=192, prefill_all_interval=1))
    parent = loop.add(400, 5)
    other = loop.add(10, 5)
    loop.turn()
    child = loop.scheduler.fork(parent.request_id, child_request(5), num_tokens=400)
    assert [s.request_id for s in loop.scheduler.state.waiting] == [
        child.request_id,
        parent.request_id,
        other.request_id,
    ]
    turn = loop.turn()
    assert turn.chunks[0] == (child.request_id, 192, 384)
    assert turn.plan.clone_states.tolist() == [[1, 2]]
    assert len(turn.plan.clone_blocks) == 1  # 192 = one full block and a half
    loop.scheduler.check_integrity()
    end(loop)
    assert len(loop.results) == 3


def test_a_fork_that_comes_too_late_computes_its_prompt() -> None:
    loop = Loop(create_scheduler(max_seqs=1))
    parent = loop.add(200, 8)
    loop.turn()
    child = loop.scheduler.fork(parent.request_id, child_request(4), num_tokens=200)
    assert loop.scheduler.state.slots.refs[1] == 2
    prompts = []
    while loop.scheduler.has_unfinished:
        turn = loop.turn()
        prompts += [chunk for chunk in turn.chunks if turn.plan.is_prompt]
    end(loop)
    assert prompts == [(child.request_id, 200, 200)]
    assert child.cached_tokens == 0
    assert len(loop.results[child.request_id].token_ids) == 4


def test_a_fork_outlives_its_parent() -> None:
    loop = Loop(create_scheduler())
    parent = loop.add(200, 50)
    loop.turn()
    child = loop.scheduler.fork(parent.request_id, child_request(4), num_tokens=200)
    loop.scheduler.abort(parent.request_id)
    turn = loop.turn()
    assert turn.chunks == [(child.request_id, 6, 205)]
    end(loop)
    assert child.cached_tokens == 199


@pytest.mark.parametrize("when", ["waiting", "prompted", "running"])
def test_abort_of_a_fork_returns_its_pins(when: str) -> None:
    loop = Loop(create_scheduler(max_batched_tokens=192))
    parent = loop.add(400, 5)
    loop.turn()
    if when != "waiting":
        while parent.queued:
            loop.turn()
    child = loop.scheduler.fork(parent.request_id, child_request(5))
    assert (child in loop.scheduler.state.waiting) == (when == "waiting")
    if when == "running":
        loop.turn()
    assert loop.scheduler.abort(child.request_id)
    loop.scheduler.check_integrity()
    end(loop)
    assert loop.results[child.request_id].reason == "aborted"


def test_a_forks_preemption_falls_back_to_a_full_prefill() -> None:
    loop = Loop(create_scheduler(num_blocks=6, prefill_all_interval=1))
    parent = loop.add(120, 60)
    loop.turn()
    children = [loop.scheduler.fork(parent.request_id, child_request(60), num_tokens=120) for _ in range(2)]
    end(loop)
    assert loop.scheduler.num_preempted > 0
    assert all(len(loop.results[child.request_id].token_ids) == 60 for child in children)


@pytest.mark.parametrize("moment", ["unknown", "waiting", "ended"])
def test_fork_needs_a_parent_with_a_cache(moment: str) -> None:
    loop = Loop(create_scheduler())
    parent = loop.add(10, 1)
    if moment == "ended":
        end(loop)
    number = 999_999 if moment == "unknown" else parent.request_id
    with pytest.raises(ValueError, match=f"request {number} has no cache to fork from"):
        loop.scheduler.fork(number, child_request())


def test_fork_longer_than_its_parent() -> None:
    loop = Loop(create_scheduler())
    parent = loop.add(10, 9)
    loop.turn()
    with pytest.raises(ValueError, match=r"a fork of 12 tokens, but request .* has 11"):
        loop.scheduler.fork(parent.request_id, child_request(), num_tokens=12)


# -- hand-over between engines --------------------------------------------------------------------------


def test_prompt_engine_to_completion_engine() -> None:
    giver = Loop(create_scheduler(role="prompt"))
    taker = Loop(create_scheduler(role="completion", preemption="stop"))
    source = giver.add(200, 10)
    giver.turn()
    row = source.row
    tokens = giver.scheduler.table.tokens[row, :201].copy()
    received = taker.scheduler.try_receive(source.request, tokens)
    assert received is not None
    assert taker.scheduler.table.num_cached[received.row] == 200
    assert len(taker.scheduler.table.blocks_of(received.row)) == 2
    giver.scheduler.release_processed(source.request_id)
    taker.scheduler.enqueue_received(received)
    turn = taker.turn()
    assert turn.chunks == [(source.request_id, 6, 206)]
    end(taker)
    expected = made_up_tokens(np.full(10, source.request_id), np.arange(200, 210))
    assert taker.results[source.request_id].token_ids.tolist() == expected.tolist()
    giver.scheduler.schedule()
    giver.scheduler.reclaim()
    giver.scheduler.check_integrity()
    assert not giver.scheduler.has_unfinished


def test_nothing_is_received_without_room() -> None:
    taker = create_scheduler(role="completion", preemption="stop", num_blocks=3, state_slots=2)
    request = Request(np.ones(300, np.int32), SamplingParams())
    assert taker.try_receive(request, np.ones(301, np.int32)) is None
    first = taker.try_receive(Request(np.ones(100, np.int32), SamplingParams()), np.ones(101, np.int32))
    assert first is not None
    assert taker.try_receive(Request(np.ones(5, np.int32), SamplingParams()), np.ones(6, np.int32)) is None
    taker.check_integrity()
    assert taker.abort(first.request_id)
    taker.reclaim()
    taker.check_integrity()


# -- misuse, settings ------------------------------------------------------------------------------------


def test_a_prompt_step_must_be_committed_before_the_next_schedule() -> None:
    loop = Loop(create_scheduler())
    loop.add(10)
    loop.scheduler.schedule()
    with pytest.raises(IntegrityError, match="must be committed before the next schedule"):
        loop.scheduler.schedule()


def test_two_steps_in_flight_are_one_too_many() -> None:
    loop = Loop(create_scheduler())
    loop.add(10, 50)
    loop.turn()
    loop.turn()
    loop.scheduler.schedule()
    with pytest.raises(IntegrityError, match="2 steps are uncommitted; at most one may be"):
        loop.scheduler.schedule()


def test_no_step_is_committed_twice() -> None:
    loop = Loop(create_scheduler())
    loop.add(10, 50)
    turn = loop.turn()
    with pytest.raises(IntegrityError, match="was committed twice"):
        loop.scheduler.commit(turn.plan, StepOutputs(np.zeros(1, np.int32)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_blocks": 1}, "cache.num_blocks is 1; it must be at least 2"),
        ({"max_model_len": 0}, "scheduler.max_model_len is 0"),
        ({"max_seqs": 0}, "scheduler.max_seqs is 0"),
        ({"num_drafts": 128}, "speculative.num_drafts is 128"),
        ({"num_drafts": -1}, "speculative.num_drafts is -1"),
        ({"prefill_all_interval": 0}, "scheduler.prefill_all_interval is 0"),
        ({"prefill_any_interval": 0}, "scheduler.prefill_any_interval is 0"),
        ({"state_slots_ratio": 0.5}, "cache.state_slots_ratio is 0.5"),
        ({"cp": 0}, "parallel.cp is 0"),
        ({"max_batched_tokens": 47}, r"max_batched_tokens is 47; it must be at least max_seqs \* \(1"),
        ({"max_batched_tokens": 500, "chunked_prefill": False}, "must hold a prompt of max_model_len = 1024"),
        (
            {"max_batched_tokens": 1001, "max_model_len": 1001, "cp": 4, "chunked_prefill": False},
            "must hold a prompt of max_model_len = 1001 in multiples of 8",
        ),
        ({"prefill_max_sum_k": 1023}, "prefill_max_sum_k is 1023; it must be at least the longest prompt"),
        ({"role": "completion"}, "scheduler.preemption is recompute; it must be stop"),
        ({"role": "completion", "preemption": "stop", "cp": 2}, "parallel.cp is 2; it must be 1"),
    ],
)
def test_settings_name_key_value_and_rule(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_scheduler(**overrides)


@pytest.mark.parametrize(("blocks", "fits"), [(41, True), (40, False)])
def test_one_longest_sequence_must_fit_in_most_of_the_pool(blocks: int, fits: bool) -> None:
    settings = SchedulerSettings(num_blocks=blocks, max_model_len=4096 + 60)
    assert settings.runtime_max_model_len == 4157
    if fits:
        settings.require_headroom()
    else:
        with pytest.raises(ConfigError, match=r"4157 cache tokens for one sequence, but 0.8 of 40 blocks"):
            settings.require_headroom()


def test_default_budget_covers_model_length_and_decode_rows() -> None:
    assert SchedulerSettings(num_blocks=99).token_budget == 4096
    assert SchedulerSettings(num_blocks=99, max_model_len=9000).token_budget == 9000
    assert SchedulerSettings(num_blocks=99, max_seqs=1024, num_drafts=5).token_budget == 6144


def test_nothing_prints_a_prompt() -> None:
    loop = Loop(create_scheduler())
    sequence = loop.scheduler.add(Request(np.array([4242, 4243], np.int32), SamplingParams()))
    plan = loop.scheduler.schedule()
    assert "4242" not in repr(sequence) + repr(plan)
