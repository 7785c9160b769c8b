"""Prefill admission, one table per check of spec/engine.md §4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.admission import protect_images
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Sequence, Status
from deepinfer_ray.engine.simulation import Loop, create_scheduler


def admitted(loop: Loop) -> list[tuple[int, int]]:
    """(index of the request, q) of one prompt step, in batch order."""
    turn = loop.turn()
    if not turn.plan.is_prompt:
        return []
    first = min(request_ids(loop))
    return [(request - first, q) for request, q, _ in turn.chunks]


def request_ids(loop: Loop) -> list[int]:
    return [*loop.scheduler.state.live, *loop.results]


def prompts(loop: Loop, *lengths: int, **keywords: Any) -> list[Sequence]:
    return [loop.add(length, **keywords) for length in lengths]


def end(loop: Loop) -> None:
    loop.run(20_000)
    loop.scheduler.check_integrity()


# -- checks 1 and 2: dead and unready heads -------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "bad_schema", "bad_image", "internal"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_dead_request_is_passed_over(how: str, position: int) -> None:
    loop = Loop(create_scheduler())
    sequences = prompts(loop, 10, 10, 10)
    victim = sequences[position]
    if how == "abort":
        assert loop.scheduler.abort(victim.request_id)
    else:
        assert loop.scheduler.fail(victim.request_id, how, "because")
    chunks = admitted(loop)
    assert [i for i, _ in chunks] == [i for i in range(3) if i != position]
    record = loop.results[victim.request_id]
    assert record.reason == ("aborted" if how == "abort" else "error")
    assert record.error_code == (None if how == "abort" else how)
    assert len(record.token_ids) == 0
    end(loop)
    assert len(loop.results) == 3


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_unready_image_holds_up_the_queue(position: int) -> None:
    loop = Loop(create_scheduler())
    sequences = [loop.add(10, schedulable=i != position) for i in range(3)]
    assert [i for i, _ in admitted(loop)] == list(range(position))
    loop.scheduler.set_schedulable(sequences[position].request_id)
    end(loop)
    assert len(loop.results) == 3


# -- check 4: lengths and memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "length", "code"),
    [
        ({}, 1024, None),
        ({}, 1025, "prompt_too_long"),
        ({"max_batched_tokens": 256}, 1024, None),
        ({"max_batched_tokens": 256}, 1025, "prompt_too_long"),
        ({"chunked_prefill": False}, 1024, None),
        ({"chunked_prefill": False}, 1025, "prompt_too_long"),
        ({"num_blocks": 8}, 896, None),
        ({"num_blocks": 8}, 897, "out_of_blocks"),
        ({"num_blocks": 8}, 1024, "out_of_blocks"),
        ({"num_blocks": 9}, 1024, None),
        ({"num_blocks": 2}, 128, None),
        ({"num_blocks": 2}, 129, "out_of_blocks"),
    ],
)
def test_what_can_never_fit_is_refused(overrides: dict[str, Any], length: int, code: str | None) -> None:
    loop = Loop(create_scheduler(**overrides))
    (sequence,) = prompts(loop, length, max_tokens=1)
    loop.turn()
    if code is None:
        assert sequence.row or sequence.ended
    else:
        record = loop.results[sequence.request_id]
        assert (record.reason, record.error_code, len(record.token_ids)) == ("error", code, 0)
        assert record.error is not None
        assert str(length) in record.error
    end(loop)


def test_refusal_with_a_smaller_budget_names_the_budget() -> None:
    loop = Loop(create_scheduler(chunked_prefill=False, max_model_len=1024, max_batched_tokens=1024))
    prompts(loop, 2000)
    loop.turn()
    (record,) = loop.results.values()
    assert "scheduler.max_model_len allows 1024" in str(record.error)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([640, 256], [0, 1]),
        ([640, 257], [0]),
        ([640, 384, 10], [0]),  # the short one may not overtake
        ([128] * 7, [0, 1, 2, 3, 4, 5, 6]),
        ([129] * 4, [0, 1, 2]),
        ([896, 1], [0]),
    ],
)
def test_blocks_of_the_whole_prompt_are_taken_or_none(lengths: list[int], expected: list[int]) -> None:
    loop = Loop(create_scheduler(num_blocks=8))
    prompts(loop, *lengths, max_tokens=2)
    assert [i for i, _ in admitted(loop)] == expected
    end(loop)


def test_a_chunked_prompt_owns_all_its_blocks_from_the_first_chunk() -> None:
    loop = Loop(create_scheduler(max_batched_tokens=128))
    (sequence,) = prompts(loop, 1000)
    turn = loop.turn()
    assert turn.free_blocks == 63 - 8
    assert loop.scheduler.table.n_blocks[sequence.row] == 8
    assert turn.plan.block_updates.shape == (8, 3)
    second = loop.turn()
    assert (second.free_blocks, second.plan.block_updates.shape) == (63 - 8, (0, 3))
    end(loop)


@pytest.mark.parametrize(("slots", "expected"), [(2, 1), (3, 2), (5, 4), (40, 6)])
def test_a_state_slot_comes_with_the_blocks(slots: int, expected: int) -> None:
    loop = Loop(create_scheduler(state_slots=slots))
    prompts(loop, *[10] * 6)
    assert len(admitted(loop)) == expected
    assert loop.scheduler.state.blocks.num_free == 63 - expected
    end(loop)


# -- check 5: seats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [1, 2, 3, 5])
def test_seats(seats: int) -> None:
    loop = Loop(create_scheduler(max_seqs=seats))
    prompts(loop, *[10] * 6, max_tokens=4)
    assert len(admitted(loop)) == seats
    assert admitted(loop) == []  # nobody has left: a decode step
    end(loop)


def test_running_sequences_count_against_the_seats() -> None:
    loop = Loop(create_scheduler(max_seqs=3))
    prompts(loop, 10, 10, max_tokens=500)
    admitted(loop)
    prompts(loop, 10, 10, max_tokens=5)
    while not (chunks := admitted(loop)):
        pass
    assert [i for i, _ in chunks] == [2]
    end(loop)


def test_a_chunk_needs_a_seat_too() -> None:
    loop = Loop(create_scheduler(max_seqs=1, max_batched_tokens=128, prefill_all_interval=1))
    prompts(loop, 100, max_tokens=200)
    prompts(loop, 500)
    assert admitted(loop) == [(0, 100)]
    assert [admitted(loop) for _ in range(3)] == [[], [], []]
    end(loop)


# -- check 6: sum of lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "lengths", "expected"),
    [
        (1024, [512, 512], [0, 1]),
        (1024, [512, 513], [0]),
        (1100, [500, 500, 100], [0, 1, 2]),
        (1100, [500, 500, 101], [0, 1]),
        (1024, [1024], [0]),
    ],
)
def test_sum_of_lengths(limit: int, lengths: list[int], expected: list[int]) -> None:
    loop = Loop(create_scheduler(prefill_max_sum_k=limit, max_batched_tokens=4096))
    prompts(loop, *lengths)
    assert [i for i, _ in admitted(loop)] == expected
    end(loop)


def test_a_later_chunk_counts_its_whole_sequence() -> None:
    loop = Loop(create_scheduler(prefill_max_sum_k=1024, max_batched_tokens=600))
    prompts(loop, 900, 200)
    assert admitted(loop) == [(0, 600)]
    assert admitted(loop) == [(0, 300)]  # 900 of 1024 are used: 200 more do not fit
    end(loop)


# -- checks 7, 8, 11, 13: chunk length -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "cp", "lengths", "expected"),
    [
        (256, 1, [100, 300], [(0, 100), (1, 156)]),
        (256, 1, [256, 10], [(0, 256)]),
        (256, 1, [300], [(0, 256)]),
        (256, 2, [101, 101, 101], [(0, 101), (1, 101), (2, 48)]),
        (258, 2, [300], [(0, 256)]),
        (256, 2, [253, 10], [(0, 253)]),
        (256, 2, [252, 10], [(0, 252), (1, 4)]),
        (256, 4, [249, 10], [(0, 249)]),
        (256, 4, [240, 20], [(0, 240), (1, 16)]),
        (100, 1, [40, 40, 40], [(0, 40), (1, 40), (2, 20)]),
    ],
)
def test_budget(budget: int, cp: int, lengths: list[int], expected: list[tuple[int, int]]) -> None:
    loop = Loop(create_scheduler(max_batched_tokens=budget, cp=cp))
    prompts(loop, *lengths)
    assert admitted(loop) == expected
    end(loop)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [64, 67, 250])
def test_aligned_tokens_stay_in_budget(cp: int, budget: int) -> None:
    loop = Loop(create_scheduler(max_batched_tokens=budget, cp=cp))
    prompts(loop, *range(1, 200, 13), max_tokens=1)
    align = 2 * cp if cp > 1 else 1
    while loop.scheduler.has_unfinished:
        turn = loop.turn()
        if turn.plan.is_prompt:
            assert turn.plan.num_tokens == sum(-(-q // align) * align for _, q, _ in turn.chunks)
            assert turn.plan.num_tokens <= budget
    end(loop)


@pytest.mark.parametrize(
    ("minimum", "lengths", "expected"),
    [
        (0, [250, 50], [(0, 250), (1, 6)]),
        (6, [250, 50], [(0, 250), (1, 6)]),
        (7, [250, 50], [(0, 250)]),
        (64, [250, 5], [(0, 250), (1, 5)]),  # the rest of a prompt is never too small
        (64, [5], [(0, 5)]),
        (300, [1000], [(0, 256)]),  # what opens the step is never too small
    ],
)
def test_smallest_useful_chunk(minimum: int, lengths: list[int], expected: list[tuple[int, int]]) -> None:
    loop = Loop(create_scheduler(max_batched_tokens=256, min_chunk_tokens=minimum))
    prompts(loop, *lengths)
    assert admitted(loop) == expected
    end(loop)


# -- check 9: checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoints", "length", "chunks"),
    [
        ([128, 384], 500, [128, 256, 116]),
        ([128], 128, [128]),
        ([200], 100, [100]),
        ([100, 100, 100], 150, [100, 50]),
        ([0], 50, [50]),
        ([400], 500, [256, 144, 100]),
        ([1, 2, 3], 4, [1, 1, 1, 1]),
        ([256], 300, [256, 44]),
    ],
)
def test_checkpoints_end_chunks(checkpoints: list[int], length: int, chunks: list[int]) -> None:
    loop = Loop(create_scheduler(max_batched_tokens=256))
    loop.add(length, checkpoints=checkpoints)
    seen = []
    while chunk := admitted(loop):
        seen += [q for _, q in chunk]
    assert seen == chunks
    end(loop)


def test_a_refused_chunk_keeps_its_checkpoint() -> None:
    """A checkpoint used to be dropped although a later check sent the sequence back."""
    loop = Loop(create_scheduler(max_seqs=1))
    prompts(loop, 10, max_tokens=3)
    late = loop.add(200, checkpoints=[128])
    admitted(loop)
    assert list(late.checkpoints) == [128]
    seen = []
    while not late.ended:
        seen += [q for i, q in admitted(loop) if i == 1]
    assert seen == [128, 72]
    end(loop)


# -- check 10: images ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "start", "count", "grown", "shrunk"),
    [
        ([(10, 20)], 0, 10, 10, 10),  # exactly before the image
        ([(10, 20)], 0, 11, 20, 10),
        ([(10, 20)], 0, 19, 20, 10),
        ([(10, 20)], 0, 20, 20, 20),  # exactly behind it
        ([(10, 20)], 0, 5, 5, 5),
        ([(10, 20), (20, 30)], 0, 20, 20, 20),  # between two images
        ([(10, 20), (20, 30)], 0, 15, 20, 10),
        ([(10, 20), (20, 30)], 0, 25, 30, 20),
        ([(10, 20)], 10, 5, 10, 0),
        ([(10, 20)], 8, 5, 12, 2),
        ([(0, 20)], 0, 7, 20, 0),
        ([(90, 100)], 0, 100, 100, 100),  # the end of the prompt is never a cut
        ([], 0, 50, 50, 50),
    ],
)
def test_cuts_move_out_of_images(
    spans: list[tuple[int, int]], start: int, count: int, grown: int, shrunk: int
) -> None:
    request = Request(np.zeros(100, np.int32), SamplingParams())
    sequence = Sequence(request, 1, 100, request.prompt, image_spans=spans)
    assert protect_images(sequence, start, count, 100, grow=True) == grown
    assert protect_images(sequence, start, count, 100, grow=False) == shrunk


@pytest.mark.parametrize(
    ("length", "spans", "checkpoints", "chunks"),
    [
        (350, [(100, 300)], [], [100, 250]),
        (310, [(0, 150), (150, 300)], [], [150, 160]),
        (300, [(0, 256)], [], [256, 44]),
        (300, [(50, 306)], [], [50, 250]),
        (200, [(50, 150)], [100], [150, 50]),  # a checkpoint inside an image grows to its end
        (400, [(50, 300)], [100], [50, 250, 100]),  # growing would exceed the budget
        (256, [(10, 20)], [], [256]),
    ],
)
def test_no_chunk_cuts_an_image(
    length: int, spans: list[tuple[int, int]], checkpoints: list[int], chunks: list[int]
) -> None:
    loop = Loop(create_scheduler(max_batched_tokens=256))
    loop.add(length, image_spans=spans, checkpoints=checkpoints)
    seen, position = [], 0
    while chunk := admitted(loop):
        seen += [q for _, q in chunk]
        position += chunk[0][1]
        assert not any(first < position < last for first, last in spans if position < length)
    assert seen == chunks
    end(loop)


@pytest.mark.parametrize(
    ("budget", "cp", "image", "refused"),
    [(256, 1, 256, False), (256, 1, 257, True), (258, 2, 256, False), (258, 2, 257, True)],
)
def test_an_image_beyond_the_budget_is_refused_alone(budget: int, cp: int, image: int, refused: bool) -> None:
    """It used to end the whole engine."""
    loop = Loop(create_scheduler(max_batched_tokens=budget, cp=cp))
    bad = loop.add(image + 20, image_spans=[(10, 10 + image)])
    good = loop.add(10)
    end(loop)
    assert loop.results[good.request_id].reason == "length"
    record = loop.results[bad.request_id]
    assert record.reason == ("error" if refused else "length")
    if refused:
        assert record.error_code == "bad_image"
        assert f"an image of {image} tokens does not fit" in str(record.error)


def test_a_second_sequence_is_not_grown_into() -> None:
    loop = Loop(create_scheduler(max_batched_tokens=256))
    prompts(loop, 50)
    loop.add(400, image_spans=[(100, 290)])
    assert admitted(loop) == [(0, 50), (1, 100)]
    end(loop)


# -- checks 12, 14, 15: chunks close the batch, booking ------------------------------------------------


def test_without_chunking_a_prompt_waits_for_a_step_of_its_own() -> None:
    loop = Loop(create_scheduler(chunked_prefill=False))
    prompts(loop, 600, 600, 100)
    assert admitted(loop) == [(0, 600)]
    assert admitted(loop) == [(1, 600), (2, 100)]
    end(loop)


def test_a_chunk_closes_the_batch() -> None:
    loop = Loop(create_scheduler())
    loop.add(500, checkpoints=[128])
    loop.add(30)
    assert admitted(loop) == [(0, 128)]
    assert admitted(loop) == [(0, 372), (1, 30)]
    end(loop)


def test_a_prompt_engine_goes_on_after_a_chunk() -> None:
    scheduler = create_scheduler(role="prompt")
    loop = Loop(scheduler)
    loop.add(500, checkpoints=[128])
    loop.add(30)
    assert admitted(loop) == [(0, 128), (1, 30)]
    assert admitted(loop) == [(0, 372)]
    for sequence in list(scheduler.state.live.values()):
        scheduler.release_processed(sequence.request_id)
    scheduler.schedule()
    scheduler.reclaim()
    scheduler.check_integrity()


def test_chunks_of_a_prompt_engine_keep_their_order() -> None:
    scheduler = create_scheduler(role="prompt")
    loop = Loop(scheduler)
    for _ in range(3):
        loop.add(300, checkpoints=[100])
    assert admitted(loop) == [(0, 100), (1, 100), (2, 100)]
    assert [i for i, _ in admitted(loop)] == [0, 1, 2]


def test_status_and_slots_of_what_was_booked() -> None:
    loop = Loop(create_scheduler(max_batched_tokens=128))
    whole, part = loop.add(100), loop.add(100)
    plan = loop.scheduler.schedule()
    table = loop.scheduler.table
    assert plan.rows.tolist() == [whole.row, part.row] == [1, 2]
    assert plan.q.tolist() == [100, 28]
    assert plan.k.tolist() == [100, 28]
    assert plan.last_chunk.tolist() == [True, False]
    assert (whole.status, part.status) == (Status.RUNNING, Status.WAITING)
    assert plan.draft_write.tolist() == [1, 0]
    assert table.inflight[[1, 2]].tolist() == [6, 6]
    assert table.block_table[1, 0] == 1
    assert plan.block_updates.tolist() == [[1, 0, 1], [2, 0, 2]]


def test_fifo_nobody_overtakes() -> None:
    loop = Loop(create_scheduler(num_blocks=12, max_seqs=3, max_batched_tokens=200))
    sequences = prompts(loop, *[300, 10, 500, 20, 700, 5, 100] * 3, max_tokens=3)
    order: list[int] = []
    while loop.scheduler.has_unfinished:
        for request, _, _ in loop.turn().chunks:
            if request not in order:
                order.append(request)
    assert order == [sequence.request_id for sequence in sequences]
    end(loop)


# -- the watermark, and queues that would stand still ----------------------------------------------------


@pytest.mark.parametrize(("held", "admits"), [(2000, True), (2176, True), (2177, False)])
def test_watermark(held: int, admits: bool) -> None:
    """Of 20 blocks the sentinel and 17 make 0.90, which is allowed; one more is not, though one is free."""
    loop = Loop(
        create_scheduler(num_blocks=20, prefill_all_interval=1, max_batched_tokens=4096, max_model_len=2400)
    )
    loop.add(held, max_tokens=60)
    loop.turn()
    loop.add(5, max_tokens=1)
    assert loop.turn().plan.is_prompt == admits
    end(loop)


def test_queue_of_partial_prompts_behind_a_preempted_head_moves_on() -> None:
    """A preempted sequence in front of a half prefilled one that holds the blocks used to wait for ever."""
    scheduler: Scheduler = create_scheduler(num_blocks=9, max_batched_tokens=256, prefill_all_interval=1)
    loop = Loop(scheduler)
    loop.add(250, max_tokens=300)
    loop.turn()
    loop.add(600, max_tokens=300)
    results = loop.run(20_000)
    scheduler.check_integrity()
    assert [str(t.reason) for t in results.values()] == ["length", "length"]
    assert scheduler.num_preempted >= 1


def test_empty_prompt_gets_a_record() -> None:
    loop = Loop(create_scheduler())
    sequence = loop.add(0)
    end(loop)
    assert loop.results[sequence.request_id].error_code == "empty_prompt"


def test_duplicate_request_id() -> None:
    scheduler = create_scheduler()
    request = Request(np.ones(3, np.int32), SamplingParams())
    scheduler.add(request)
    with pytest.raises(ValueError, match=f"request id {request.request_id} is already alive"):
        scheduler.add(request)
