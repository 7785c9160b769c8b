"""Segment generators, their flat forms, and the window pivots of attention spec §18."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_ray.cache import load_plan
from deepinfer_ray.cache.checks import check_segments
from deepinfer_ray.cache.load_plan import LoadPlan, window_pivots


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_zero_fill_is_split_at_blocks():
    plan = LoadPlan(64)
    plan.zero_fill(130)
    assert plan.segments.tolist() == [[-1, 0, 64, 0], [-1, 0, 64, 64], [-1, 0, 2, 128]]
    assert plan.segments.dtype == np.int32


def test_paged_is_split_at_block_borders():
    plan = LoadPlan(64)
    plan.paged([5, 9, 7], 60, 130)
    assert plan.segments.tolist() == [[5, 60, 64, 0], [9, 0, 64, 4], [7, 0, 2, 68]]
    assert plan.total == 70


def test_paged_past_the_table_is_refused():
    with pytest.raises(ValueError, match=r"entries \[0, 129\) do not lie in 2 blocks of 64 entries"):
        LoadPlan(64).paged([1, 2], 0, 129)


def test_ring_wraps():
    plan = LoadPlan(134)
    plan.ring(3, 200, 328)
    assert plan.segments.tolist() == [[3, 66, 134, 0], [3, 0, 60, 68]]


def test_ring_before_the_sequence_is_refused():
    with pytest.raises(ValueError, match=r"ring positions \[-1, 5\) start before the sequence"):
        LoadPlan(134).ring(3, -1, 5)


def test_window_plan_is_zeros_then_ring():
    plan = load_plan.window_plan(ints(5, 0, 300), ints(2, 3, 4), 128, 134)
    assert plan.segments.tolist() == [
        [-1, 0, 123, 0],
        [2, 0, 5, 123],
        [-1, 0, 128, 128],
        [4, 38, 134, 256],
        [4, 0, 32, 352],
    ]


def test_window_plan_starts_at_valid_start():
    plan = load_plan.window_plan(ints(300), ints(4), 128, 134, valid_start=ints(290))
    assert plan.segments.tolist() == [[-1, 0, 118, 0], [4, 22, 32, 118]]


def test_compressed_plan_has_a_zero_row_for_a_sequence_without_entries():
    plan = load_plan.compressed_plan(ints(1, 200), np.array([[3, 0], [6, 7]]), 2, 128)
    assert plan.segments.tolist() == [[-1, 0, 1, 0], [6, 0, 64, 1], [7, 0, 36, 65]]


@pytest.mark.parametrize("seed", range(20))
def test_flat_lists_equal_the_segments(seed: int):
    """The engine takes flat record lists; they must say the same as the segment plans."""
    rng = np.random.default_rng(seed)
    n, window, ring, block = int(rng.integers(1, 6)), 16, 22, 32
    start, q = rng.integers(0, 90, n), rng.integers(1, 40, n)
    k, slots = start + q, rng.permutation(20)[:n]
    tables = rng.permutation(200)[: n * 8].reshape(n, 8)
    valid_start = np.minimum(rng.integers(0, 60, n), start) if seed % 2 else None

    plan = load_plan.window_plan(start, slots, window, ring, valid_start)
    check_segments(plan.segments, ring, 20, n * window)
    flat = load_plan.window_records(start, slots, window, ring, valid_start)
    assert flat.tolist() == load_plan.flat_records(plan.segments, plan.total, ring).tolist()

    for ratio in (1, 2):
        plan = load_plan.compressed_plan(k, tables, ratio, block)
        check_segments(plan.segments, block // ratio, 200, int(np.maximum(k // ratio, 1).sum()))
        flat, starts = load_plan.compressed_slots(k, tables, ratio, block)
        assert flat.tolist() == load_plan.flat_records(plan.segments, plan.total, block // ratio).tolist()
        assert starts.tolist() == [0, *np.cumsum(np.maximum(k // ratio, 1)).tolist()]


# Attention spec §18 --------------------------------------------------------------------------------------


def test_pivots_of_a_fresh_prompt():
    pivots = window_pivots(ints(300), ints(300), 128)
    assert pivots[[0, 127, 128, 299]].tolist() == [
        [128, 0, 128, 1],
        [128, 0, 128, 128],
        [128, 0, 129, 128],
        [128, 0, 300, 128],
    ]


def test_pivots_of_a_later_chunk():
    pivots = window_pivots(ints(100), ints(300), 128)
    assert pivots[[0, 50, 99]].tolist() == [[1, 127, 128, 1], [51, 77, 128, 51], [100, 28, 128, 100]]


def test_pivots_of_the_second_sequence_are_shifted():
    pivots = window_pivots(ints(3, 100), ints(3, 300), 128)
    assert pivots[3].tolist() == [128 + 1, 127, 256 + 3, 1]


def compact(q: int, k: int, total: int = 1000, keep: int = 140) -> tuple[int, np.ndarray]:
    floor = load_plan.replay_floor(ints(total), keep)
    clip = load_plan.compact_clip(ints(q), ints(k), floor)
    return int(clip[0]), window_pivots(ints(q), ints(k), 128, floor=floor, clip=clip)


def test_compact_chunk_before_the_rectangle_keeps_a_placeholder():
    clip, pivots = compact(600, 600)
    assert clip == 599
    assert len(pivots) == 1
    assert pivots[0, 1] == pivots[0, 3] == 0


def test_compact_chunk_into_the_rectangle():
    clip, pivots = compact(400, 1000)
    assert (clip, len(pivots)) == (260, 140)
    assert pivots[0].tolist() == [128, 0, 128, 1]
    assert pivots[139].tolist() == [128, 0, 140, 128]


def test_compact_split_inside_the_rectangle():
    clip, pivots = compact(300, 900)
    assert (clip, len(pivots)) == (260, 40)
    clip, pivots = compact(100, 1000)
    assert (clip, len(pivots)) == (0, 100)
    assert pivots[0].tolist() == [88, 40, 128, 1]
    assert pivots[99].tolist() == [100, 28, 128, 100]


def test_mask_narrows_the_window_and_keeps_all_rows():
    floor = load_plan.replay_floor(ints(300), 140)
    pivots = window_pivots(ints(300), ints(300), 128, floor=floor)
    lengths = pivots[:, 1] + pivots[:, 3]
    assert lengths[:160].tolist() == [0] * 160
    assert lengths[160:].tolist() == [min(j + 1, 128) for j in range(140)]
    assert np.array_equal(
        window_pivots(ints(300), ints(300), 128, floor=ints(-5)), window_pivots(ints(300), ints(300), 128)
    )
