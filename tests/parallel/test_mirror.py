"""The zig-zag cut: the worked example of the specification, and what must hold for any lengths."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_ray.parallel.mirror import MirrorLayout, Redistribution


def test_the_worked_example() -> None:
    """spec/distributed.md §2.2."""
    layout = MirrorLayout.of(np.array([7, 3]), 2)
    assert layout.num_local == 6
    assert layout.index(0).tolist() == [0, 1, 6, -1, 7, -1]
    assert layout.index(1).tolist() == [2, 3, 4, 5, 8, 9]
    assert layout.reverse().tolist() == [0, 1, 6, 7, 8, 9, 2, 4, 10, 11]


def test_blocks_that_are_short_or_empty() -> None:
    """spec/attention.md §18."""
    layout = MirrorLayout.of(np.array([5, 3]), 2)
    assert layout.num_local == 6
    assert layout.index(0).tolist() == [0, 1, -1, -1, 5, -1]
    assert layout.index(1).tolist() == [2, 3, 4, -1, 6, 7]
    assert layout.reverse().tolist() == [0, 1, 6, 7, 8, 4, 10, 11]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_row_lies_in_one_place(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(50):
        layout = MirrorLayout.of(random.integers(1, 40, random.integers(1, 6)), size)
        gathered = np.concatenate([layout.index(rank) for rank in range(size)])
        assert len(gathered) == size * layout.num_local
        rows = np.arange(layout.lengths.sum())
        assert (gathered[layout.reverse()] == rows).all()
        assert (np.sort(gathered[gathered >= 0]) == rows).all()
        assert layout.local_starts[-1] == layout.num_local


@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_stay_move_to_their_new_ranks(size: int) -> None:
    random = np.random.default_rng(10 + size)
    for _ in range(50):
        lengths = random.integers(1, 40, random.integers(1, 6))
        kept = np.array([random.integers(1, length + 1) for length in lengths])
        ends = np.cumsum(lengths)
        rows = np.concatenate([np.arange(e - c, e) for e, c in zip(ends, kept, strict=True)])
        old, new = MirrorLayout.of(lengths, size), MirrorLayout.of(kept, size)
        plan = Redistribution.between(old, rows, new)
        assert len({len(pack) for pack in plan.packs}) == 1, "every rank sends equally much"
        gathered = np.concatenate(
            [np.where(p >= 0, old.index(r)[np.maximum(p, 0)], -1) for r, p in enumerate(plan.packs)]
        )
        for rank in range(size):
            index, takes = new.index(rank), plan.takes[rank]
            got = np.where(takes >= 0, gathered[np.maximum(takes, 0)], -1)
            want = np.where(index >= 0, rows[np.maximum(index, 0)], -1)
            assert (got == want).all()
