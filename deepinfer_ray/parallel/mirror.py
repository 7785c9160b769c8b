"""`MirrorLayout`: how context parallel ranks share the rows of a prefill step (spec/distributed.md §2.2).

Knows: the zig-zag cut, where each rank's rows come from and go back to; numpy alone. Does not know: tensors,
transports, what a row is.

A sequence is cut into 2C blocks of equal length (the last may be short or empty); rank r has block r and
block 2C - 1 - r, so early rows, which see little, and late ones, which see much, are spread evenly. All ranks
have equally many rows: what is missing is padding.

Shape letters: n sequences, T rows of the step, M rows of a rank, C ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Ints = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class MirrorLayout:
    """The cut of one step."""

    size: int
    """C."""
    lengths: Ints
    """int64 [n] rows of each sequence."""
    parts: Ints
    """int64 [n] rows of a block of each sequence: ⌈s / 2C⌉."""

    @classmethod
    def of(cls, lengths: Ints, size: int) -> MirrorLayout:
        """The layout of sequences with `lengths` rows over `size` ranks."""
        lengths = np.asarray(lengths, np.int64)
        return cls(size, lengths, -(-lengths // (2 * size)))

    @property
    def num_local(self) -> int:
        """M: rows of every rank, padding included."""
        return int(2 * self.parts.sum())

    @property
    def local_starts(self) -> Ints:
        """int64 [n + 1] where each sequence's rows start on a rank."""
        return np.concatenate(([0], np.cumsum(2 * self.parts)))

    def index(self, rank: int) -> Ints:
        """int64 [M] row of the step that each of a rank's rows is, -1 = padding."""
        starts = np.cumsum(self.lengths) - self.lengths
        pieces = []
        for length, part, start in zip(self.lengths, self.parts, starts, strict=True):
            for block in (rank, 2 * self.size - 1 - rank):
                offset = block * part + np.arange(part)
                pieces.append(np.where(offset < length, start + offset, -1))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def reverse(self) -> Ints:
        """int64 [T] where each row of the step lies in the ranks' rows, one rank behind the other."""
        pieces = []
        local = self.local_starts
        for length, part, start in zip(self.lengths, self.parts, local, strict=False):
            offset = np.arange(length)
            block = offset // max(1, part)
            half = block >= self.size
            rank = np.where(half, 2 * self.size - 1 - block, block)
            pieces.append(rank * self.num_local + start + half * part + offset % max(1, part))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Redistribution:
    """From one layout to that of some of its rows: every rank packs its rows that stay, all packs are
    gathered, every rank takes its new rows (spec/distributed.md §2.3)."""

    packs: list[Ints]
    """By rank: int64 [P] its old rows that stay, padded with -1 to the same length on all ranks."""
    takes: list[Ints]
    """By rank: int64 [M'] where its new rows lie in the gathered packs, -1 = padding."""

    @classmethod
    def between(cls, old: MirrorLayout, kept: Ints, new: MirrorLayout) -> Redistribution:
        """kept: int64 [T'] rows of the old step that stay, ascending; `new` is the layout of those."""
        place = old.reverse()[kept]
        owner = place // old.num_local if len(place) else place
        width = int(np.bincount(owner, minlength=old.size).max()) if len(place) else 0
        packs, packed = [], np.empty(len(kept), np.int64)
        for rank in range(old.size):
            mine = np.flatnonzero(owner == rank)
            mine = mine[np.argsort(place[mine], kind="stable")]
            packed[mine] = rank * width + np.arange(len(mine))
            pack = np.full(width, -1, np.int64)
            pack[: len(mine)] = place[mine] - rank * old.num_local
            packs.append(pack)
        takes = []
        for rank in range(new.size):
            index = new.index(rank)
            takes.append(np.where(index >= 0, packed[np.maximum(index, 0)], -1) if len(packed) else index)
        return cls(packs, takes)
