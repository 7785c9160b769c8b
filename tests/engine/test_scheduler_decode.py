"""Decode steps: reservations, lengths, order, victims, seats (spec/engine.md §5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.block_manager import IntegrityError
from deepinfer_ray.engine.sequence import Status
from deepinfer_ray.engine.simulation import Loop, create_scheduler, fixed_acceptance
from deepinfer_ray.engine.table import SequenceTable


def start(*lengths: int, max_tokens: int = 400, accept: int = 2, **overrides: Any) -> Loop:
    """A loop whose sequences have just been prefilled."""
    loop = Loop(create_scheduler(**overrides), fixed_acceptance(accept))
    for length in lengths:
        loop.add(length, max_tokens)
    while loop.scheduler.state.waiting:
        assert loop.turn().plan.is_prompt
    return loop


def end(loop: Loop) -> None:
    loop.run(20_000)
    loop.scheduler.check_integrity()


# -- reservations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("zos", [True, False])
@pytest.mark.parametrize("length", [1, 100, 121, 122, 127, 128, 129, 250])
def test_reserved_blocks_cover_every_position_of_the_step(drafts: int, zos: bool, length: int) -> None:
    loop = start(length, num_drafts=drafts, zos=zos, accept=drafts)
    table = loop.scheduler.table
    for _ in range(60):
        plan = loop.scheduler.schedule()
        if plan.is_empty:
            break
        row = int(plan.rows[0])
        reserved = int(table.len[row] + table.inflight[row] - (drafts + 1) + table.n_draft[row])
        assert table.n_blocks[row] == -(-reserved // 128)
        assert int(plan.k[0]) <= table.n_blocks[row] * 128
        outputs = loop.previous
        if outputs is not None:
            loop.scheduler.commit(*outputs)
            loop.scheduler.refresh(plan)
            loop.previous = None
        result = loop.model.run(plan)
        loop.scheduler.reclaim()
        if zos:
            loop.previous = (plan, result)
        else:
            loop.scheduler.commit(plan, result)


@pytest.mark.parametrize("accept", range(6))
@pytest.mark.parametrize("length", [90, 120, 127])
def test_one_new_block_a_step_is_enough(accept: int, length: int) -> None:
    """`IntegrityError` would be raised if a step ever needed two."""
    loop = start(length, accept=accept, max_tokens=300)
    end(loop)


def test_surplus_block_returns_after_a_flush() -> None:
    loop = start(119, max_tokens=400, prefill_all_interval=1, accept=0)
    table = loop.scheduler.table
    loop.turn()
    loop.turn()  # 120 + 6 in flight + 5 drafts: two blocks
    assert table.n_blocks[1] == 2
    loop.add(10, max_tokens=1)
    assert loop.turn().plan.is_prompt  # flushes the pipeline: 122 + 5
    while loop.turn().plan.is_prompt:
        pass
    assert table.n_blocks[1] == 1
    end(loop)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_first_decode_verifies_placeholders(drafts: int) -> None:
    loop = start(50, num_drafts=drafts)
    plan = loop.scheduler.schedule()
    assert plan.q.tolist() == [drafts + 1]
    assert plan.draft_read.tolist() == [0]
    assert plan.draft_write.tolist() == [1 if drafts else 0]
    assert loop.scheduler.table.draft[1].tolist() == [999] * drafts


# -- lengths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [0, 2, 5])
@pytest.mark.parametrize("zos", [True, False])
def test_repaired_length_is_exact(accept: int, zos: bool) -> None:
    """k as scheduled is an upper bound; minus the drafts the step in flight rejects it is the true one."""
    loop = start(100, 200, zos=zos, accept=accept)
    committed = {1: 101, 2: 201}
    for step in range(12):
        plan = loop.scheduler.schedule()
        bound = dict(zip(plan.rows.tolist(), plan.k.tolist(), strict=True))
        overlap = zos and step > 0
        assert plan.overlaps == overlap
        if loop.previous is not None:
            result = loop.scheduler.commit(*loop.previous)
            committed |= {
                int(r): int(s + c) for r, s, c in zip(result.rows, result.starts, result.counts, strict=True)
            }
            loop.scheduler.refresh(plan)
        for row, k in zip(plan.rows.tolist(), plan.k.tolist(), strict=True):
            assert k == committed[row] - 1 + 6
            assert bound[row] - ((5 - accept) if overlap else 0) == k
        outputs = loop.model.run(plan)
        loop.scheduler.reclaim()
        if zos:
            loop.previous = (plan, outputs)
        else:
            result = loop.scheduler.commit(plan, outputs)
            committed |= {
                int(r): int(s + c) for r, s, c in zip(result.rows, result.starts, result.counts, strict=True)
            }


@pytest.mark.parametrize("zos", [True, False])
def test_without_drafts_the_scheduled_length_is_exact(zos: bool) -> None:
    loop = start(100, num_drafts=0, zos=zos)
    assert [int(loop.turn().plan.k[0]) for _ in range(5)] == [101, 102, 103, 104, 105]


def test_position_bound_is_checked() -> None:
    loop = start(100)
    loop.scheduler.table.num_cached[1] = 1030
    with pytest.raises(IntegrityError, match="a decode step would touch position 1040, the bound is 1040"):
        loop.scheduler.schedule()


@pytest.mark.parametrize(
    ("drafts", "zos", "extra"), [(5, True, 16), (5, False, 10), (0, True, 1), (0, False, 0), (1, True, 4)]
)
def test_runtime_bound(drafts: int, zos: bool, extra: int) -> None:
    settings = create_scheduler(num_drafts=drafts, zos=zos).settings
    assert settings.runtime_max_model_len == settings.max_model_len + extra


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("zos", [True, False])
def test_a_sequence_at_the_length_limit_stays_inside_the_bound(drafts: int, zos: bool) -> None:
    loop = start(1000, max_tokens=400, num_drafts=drafts, zos=zos, accept=drafts)
    end(loop)
    (record,) = loop.results.values()
    assert (str(record.reason), len(record.token_ids)) == ("length", 25)  # 1024 + 1


# -- order and remap -----------------------------------------------------------------------------------


def test_batch_order_is_longest_first_then_oldest() -> None:
    loop = start(100, 300, 100, 200)
    assert loop.scheduler.schedule().rows.tolist() == [2, 4, 1, 3]


def test_order_of_equals_does_not_flip() -> None:
    """Ties used to change places every step."""
    loop = start(*[64] * 8)
    orders = {tuple(loop.turn().plan.rows.tolist()) for _ in range(10)}
    assert orders == {(1, 2, 3, 4, 5, 6, 7, 8)}


def test_remap_points_into_the_step_in_flight() -> None:
    loop = start(100, 300, max_tokens=400)
    first = loop.turn().plan
    assert first.remap.tolist() == [-1, -1]
    second = loop.turn().plan
    assert second.remap.tolist() == [0, 1]
    loop.add(200)
    while not loop.turn().plan.is_prompt:
        pass
    after_prompt = loop.turn().plan
    assert after_prompt.remap.tolist() == [-1, -1, -1]
    assert not after_prompt.overlaps
    assert loop.turn().plan.remap.tolist() == [0, 1, 2]


def test_remap_follows_a_changed_order() -> None:
    rng = np.random.default_rng(3)
    loop = Loop(create_scheduler(), lambda ids: rng.integers(0, 6, len(ids)).astype(np.int32))
    for _ in range(8):
        loop.add(64, 300)
    loop.turn()
    previous, moved = loop.turn().plan, 0
    for _ in range(40):
        plan = loop.turn().plan
        assert previous.seq_ids[plan.remap].tolist() == plan.seq_ids.tolist()
        moved += plan.remap.tolist() != list(range(len(plan.remap)))
        previous = plan
    assert moved > 0


def test_remap_is_not_fooled_by_a_recycled_row() -> None:
    loop = start(100)
    plan = loop.turn().plan
    table = loop.scheduler.table
    table.seq_id[plan.rows[0]] += 100  # as if the row had changed hands
    assert loop.scheduler.schedule().remap.tolist() == [-1]


def test_custom_draft_lengths() -> None:
    class OneEach:
        def choose(self, table: SequenceTable, rows: np.ndarray) -> np.ndarray:
            return np.ones(len(rows), np.int32)

    loop = start(50, 60)
    loop.scheduler._decode.draft_lengths = OneEach()
    plan = loop.scheduler.schedule()
    assert (plan.q.tolist(), plan.num_tokens) == ([1, 1], 2)
    assert loop.scheduler.table.inflight[plan.rows].tolist() == [6, 6]  # always the most a step can add


# -- preemption ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strict", [True, False])
def test_victim_is_the_longest_output(seed: int, strict: bool) -> None:
    rng = np.random.default_rng(seed)
    loop = Loop(
        create_scheduler(num_blocks=7, strict_block_headroom=strict, prefill_all_interval=2),
        lambda ids: rng.integers(0, 6, len(ids)).astype(np.int32),
    )
    for _ in range(12):
        loop.add(int(rng.integers(1, 250)), int(rng.integers(150, 400)))
    outputs: dict[int, int] = {}
    while loop.scheduler.num_preempted == 0:
        outputs = {s.request_id: loop.scheduler.state.length(s) - s.prompt_len for s in _running(loop)}
        loop.turn()
    victims = [s.request_id for s in loop.scheduler.state.waiting if s.num_preemptions]
    assert max(outputs.values()) in [outputs[victim] for victim in victims]
    end(loop)


def _running(loop: Loop) -> list[Any]:
    return [loop.scheduler.table.sequences[row] for row in loop.scheduler.state.running.tolist()]


def test_among_equal_outputs_the_youngest_gives_way() -> None:
    loop = start(120, 120, 120, num_blocks=6)
    sequences = _running(loop)
    while loop.scheduler.num_preempted == 0:
        loop.turn()
    assert loop.scheduler.state.waiting[0] is max(sequences, key=lambda s: s.seq_id)
    end(loop)


@pytest.mark.parametrize("strict", [True, False])
def test_a_block_is_asked_for_only_when_needed(strict: bool) -> None:
    """Nobody needs a block, none is free: only the strict rule takes a victim (D6)."""
    loop = start(100, 100, 100, num_blocks=4, strict_block_headroom=strict)
    plan = loop.scheduler.schedule()
    assert loop.scheduler.num_preempted == (1 if strict else 0)
    assert plan.num_seqs == (2 if strict else 3)


@pytest.mark.parametrize(("blocks", "victims"), [(7, 0), (6, 1), (5, 1), (4, 2)])
def test_strict_rule_wants_a_free_block_for_each(blocks: int, victims: int) -> None:
    """Three sequences of one block; each crosses into its second block in the same step."""
    loop = start(122, 122, 122, num_blocks=blocks, strict_block_headroom=True)
    loop.turn()
    loop.turn()
    assert loop.scheduler.num_preempted >= victims
    assert (loop.scheduler.num_preempted == 0) == (victims == 0)
    end(loop)


def test_exactly_enough_blocks_need_no_victim() -> None:
    loop = start(122, 122, 122, num_blocks=7)
    loop.turn()
    assert (loop.scheduler.num_preempted, loop.scheduler.state.blocks.num_free) == (0, 3)
    loop.turn()
    assert (loop.scheduler.num_preempted, loop.scheduler.state.blocks.num_free) == (0, 0)
    end(loop)


def test_a_victim_keeps_its_tokens_and_goes_to_the_front() -> None:
    loop = start(120, 120, 120, num_blocks=6, max_tokens=30)
    later = loop.add(10)
    while loop.scheduler.num_preempted == 0:
        loop.turn()
    victim, second = list(loop.scheduler.state.waiting)[:2]
    assert second is later
    assert (victim.row, victim.status, victim.ended) == (0, Status.WAITING, False)
    assert victim.tokens is not None
    assert len(victim.tokens) > victim.prompt_len
    kept = victim.tokens[victim.prompt_len :].tolist()
    end(loop)
    assert loop.results[victim.request_id].token_ids[: len(kept)].tolist() == kept
    assert len(loop.results[victim.request_id].token_ids) == 30


def test_stop_option_ends_the_victim_with_its_tokens() -> None:
    loop = start(120, 120, 120, num_blocks=5, preemption="stop")
    end(loop)
    ended = [t for t in loop.results.values() if t.reason == "preempted"]
    assert ended
    assert all(len(t.token_ids) >= 1 and t.error_code == "out_of_blocks" for t in ended)


@pytest.mark.parametrize(
    ("status", "on_preempt", "ends"),
    [
        (0, "finish", False),
        (1, "finish", True),
        (2, "finish", True),
        (2, "replay", False),
        (0, "replay", False),
    ],
)
def test_a_grammar_in_progress_cannot_be_recomputed_unless_replayed(
    status: int, on_preempt: str, ends: bool
) -> None:
    loop = start(120, 120, 120, num_blocks=6, on_preempt=on_preempt)
    loop.scheduler.table.so_status[[1, 2, 3]] = status
    while loop.scheduler.num_preempted == 0:
        loop.turn()
    records = [t for t in loop.results.values() if t.reason == "preempted"]
    assert len(records) == (1 if ends else 0)
    assert (len(loop.scheduler.state.waiting) == 1) == (not ends)


def test_lone_sequence_that_fills_the_pool_ends_instead_of_spinning() -> None:
    loop = start(120, num_blocks=2, max_tokens=500, max_model_len=1024)
    end(loop)
    (record,) = loop.results.values()
    assert str(record.reason) == "preempted"
    assert record.error_code == "out_of_blocks"
    assert "the pool has 1" in str(record.error) or "filled all 1 cache blocks alone" in str(record.error)
    assert len(record.token_ids) >= 1


def test_self_preemption_twice_is_the_end() -> None:
    """The recomputed prompt fits, its decode does not: without a limit this goes on for ever."""
    loop = start(116, num_blocks=2, max_tokens=500, accept=0, prefill_all_interval=1)
    end(loop)
    (record,) = loop.results.values()
    assert str(record.error).startswith(
        "the sequence filled all 1 cache blocks alone, 2 times; lower max_tokens"
    )
    assert record.sequence.num_self_preemptions == 2


def test_a_preempted_step_in_flight_is_passed_over() -> None:
    loop = start(120, 120, 120, num_blocks=6)
    while loop.scheduler.num_preempted == 0:
        turn = loop.turn()
    (result,) = turn.commits
    assert len(result.rows) == 2  # three were in flight
    end(loop)


def test_a_released_row_is_not_reused_before_the_late_commit() -> None:
    loop = start(120, 120, 120, num_blocks=6)
    state = loop.scheduler.state
    while True:
        plan = loop.scheduler.schedule()
        if state.num_preempted:
            break
        if loop.previous is not None:
            loop.scheduler.commit(*loop.previous)
            loop.scheduler.refresh(plan)
        loop.previous = (plan, loop.model.run(plan))
        loop.scheduler.reclaim()
    (row,) = state.quarantine
    assert row not in state.slots.free_ids()
    assert loop.previous is not None
    before = loop.scheduler.table.tokens[row].copy()
    loop.scheduler.commit(*loop.previous)
    assert np.array_equal(loop.scheduler.table.tokens[row], before)
    loop.scheduler.reclaim()
    assert row in state.slots.free_ids()


# -- reaping, seats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_finished_sequences_leave_their_seats(fast: bool) -> None:
    """Parity: only a decode step reaps, so one-token requests idle until the next point (D5)."""
    votes = {"prefill_all_interval": 70, "prefill_any_interval": 100}
    loop = Loop(create_scheduler(max_seqs=2, max_batched_tokens=128, idle_fast_path=fast, **votes))
    for _ in range(6):
        loop.add(128, max_tokens=1)
    loop.run()
    loop.scheduler.check_integrity()
    assert loop.turns < 12 if fast else loop.turns > 140


def test_a_finished_sequence_is_computed_once_more_and_discarded() -> None:
    loop = start(50, max_tokens=3)
    loop.turn()
    extra = loop.turn()
    assert [q for _, q, _ in extra.chunks] == [6]  # in flight again when the stop is found
    assert [str(t.reason) for t in extra.terminals] == ["length"]
    last = loop.turn()
    assert last.plan.is_empty
    assert [s.request_id for s in last.plan.finished] == [extra.chunks[0][0]]
    assert sum(len(commit.rows) for commit in last.commits) == 0
    assert not loop.scheduler.has_unfinished


def test_draft_slots_equal_running_sequences() -> None:
    rng = np.random.default_rng(5)
    loop = Loop(create_scheduler(), lambda ids: rng.integers(0, 6, len(ids)).astype(np.int32))
    for _ in range(30):
        loop.add(int(rng.integers(1, 200)), int(rng.integers(1, 40)))
    while loop.scheduler.has_unfinished:
        loop.turn()
        state = loop.scheduler.state
        assert state.draft_slots.num_used == state.num_decodable()
    end(loop)


def test_completion_role_always_decodes() -> None:
    scheduler = create_scheduler(role="completion", preemption="stop")
    loop = Loop(scheduler)
    loop.add(10, 3)
    assert not any(loop.turn().plan.is_prompt for _ in range(3))


def test_prompt_role_never_decodes() -> None:
    scheduler = create_scheduler(role="prompt")
    loop = Loop(scheduler)
    assert all(loop.turn().plan.is_prompt for _ in range(3))
    assert not scheduler.settings.overlapped
