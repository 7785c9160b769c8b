"""Where a prefill step's keys come from: load segments, window pivots, and their flat forms.

Knows: the three segment generators (attention spec §11.2), the window index space of a prefill step (§11.3)
and what truncation changes in it (§13.2). Does not know: tensors on a device, pools, the model.

Everything here is numpy on the host. Shape letters: n sequences, T query rows, m segments, K loaded rows.
A segment is an int32 row `[source block, begin, end, destination row]`; source block -1 means zeros.
The flat form of a plan is one record id per destination row, -1 for zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
ZERO_SOURCE = -1


class LoadPlan:
    """Segments in destination order: each call appends behind what is already planned.

    block_len: records in one source block (128/r for the paged pool, S for window rings).
    """

    def __init__(self, block_len: int) -> None:
        self.block_len = block_len
        self.total = 0
        """Destination rows planned so far."""
        self._segments: list[tuple[int, int, int, int]] = []

    @property
    def segments(self) -> npt.NDArray[np.int32]:
        """int32 [m, 4]."""
        return np.array(self._segments, np.int32).reshape(-1, 4)

    def _append(self, source: int, begin: int, end: int) -> None:
        self._segments.append((source, begin, end, self.total))
        self.total += end - begin

    def zero_fill(self, rows: int) -> None:
        """`rows` zero rows, in pieces of at most one block."""
        for done in range(0, rows, self.block_len):
            self._append(ZERO_SOURCE, 0, min(self.block_len, rows - done))

    def paged(self, table: Sequence[int] | np.ndarray, begin: int, end: int) -> None:
        """Entries `[begin, end)` of a sequence whose blocks are `table`."""
        if begin < 0 or end > len(table) * self.block_len:
            raise ValueError(
                f"entries [{begin}, {end}) do not lie in {len(table)} blocks of {self.block_len} entries"
            )
        while begin < end:
            block, at = divmod(begin, self.block_len)
            stop = min(self.block_len, at + end - begin)
            self._append(int(table[block]), at, stop)
            begin += stop - at

    def ring(self, slot: int, begin: int, end: int) -> None:
        """Positions `[begin, end)` of the ring in `slot`, position p at record p mod S."""
        if begin < 0:
            raise ValueError(f"ring positions [{begin}, {end}) start before the sequence")
        while begin < end:
            at = begin % self.block_len
            stop = min(self.block_len, at + end - begin)
            self._append(slot, at, stop)
            begin += stop - at


def window_plan(
    q_start: np.ndarray,
    state_ids: np.ndarray,
    window: int,
    ring_rows: int,
    valid_start: np.ndarray | None = None,
) -> LoadPlan:
    """History `[q_start - W, q_start)` of each sequence: exactly W rows, zeros before `valid_start`."""
    plan = LoadPlan(ring_rows)
    for i, (start, slot) in enumerate(zip(q_start.tolist(), state_ids.tolist(), strict=True)):
        first = start - window
        pad = min(max((0 if valid_start is None else int(valid_start[i])) - first, 0), window)
        plan.zero_fill(pad)
        plan.ring(slot, first + pad, start)
    return plan


def compressed_plan(k: np.ndarray, block_tables: np.ndarray, ratio: int, block_tokens: int) -> LoadPlan:
    """All `⌊k/r⌋` entries of each sequence, this step's own included; one zero row where there is none."""
    plan = LoadPlan(block_tokens // ratio)
    for length, table in zip(k.tolist(), block_tables, strict=True):
        if length // ratio == 0:
            plan.zero_fill(1)
        else:
            plan.paged(table, 0, length // ratio)
    return plan


def flat_records(segments: np.ndarray, total: int, block_len: int) -> Ints:
    """int64 [total] record id `block * block_len + offset` of every destination row, -1 = zeros."""
    records = np.full(total, ZERO_SOURCE, np.int64)
    for source, begin, end, dst in segments.tolist():
        if source != ZERO_SOURCE:
            records[dst : dst + end - begin] = np.arange(source * block_len + begin, source * block_len + end)
    return records


# The same plans, vectorised ------------------------------------------------------------------------------


def exclusive_sums(counts: np.ndarray) -> Ints:
    """int64 [len + 1]: 0 and the running sums of `counts`."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def ragged_arange(counts: np.ndarray, offsets: np.ndarray) -> tuple[Ints, Ints]:
    """(owner, number inside the owner) of each of `sum(counts)` items; `offsets = exclusive_sums(counts)`."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(offsets[-1]) - offsets[owner]


def entry_slots(block_tables: np.ndarray, owner: np.ndarray, entry: np.ndarray, per_block: int) -> Ints:
    """int64 pool slot `block * per_block + offset` of entry `entry[i]` of sequence `owner[i]`."""
    block, offset = np.divmod(entry, per_block)
    return block_tables[owner, block].astype(np.int64) * per_block + offset


def window_records(
    q_start: np.ndarray,
    state_ids: np.ndarray,
    window: int,
    ring_rows: int,
    valid_start: np.ndarray | None = None,
) -> Ints:
    """int64 [n * W]: `flat_records` of `window_plan`."""
    positions = q_start[:, None].astype(np.int64) + np.arange(-window, 0)
    records = state_ids[:, None] * ring_rows + positions % ring_rows
    first = 0 if valid_start is None else np.maximum(valid_start, 0)[:, None]
    return np.where(positions >= first, records, -1).reshape(-1)


def compressed_slots(
    k: np.ndarray, block_tables: np.ndarray, ratio: int, block_tokens: int
) -> tuple[Ints, Ints]:
    """int64 [K] `flat_records` of `compressed_plan`, and int64 [n+1] where each sequence's rows start."""
    entries = k // ratio
    counts = np.maximum(entries, 1)
    starts = exclusive_sums(counts)
    owner, entry = ragged_arange(counts, starts)
    slots = entry_slots(block_tables, owner, entry, block_tokens // ratio)
    slots[starts[:-1][entries == 0]] = -1
    return slots, starts


def window_pivots(
    q: np.ndarray,
    k: np.ndarray,
    window: int,
    *,
    valid_start: np.ndarray | None = None,
    floor: np.ndarray | None = None,
    clip: np.ndarray | None = None,
) -> Ints:
    """int64 [T', 4] `(p0, l0, p1, l1)` of each query row of a prefill step (attention spec §11.3, §13.2).

    A row's keys are buffer rows `[p0, p0 + l0)` then `[p1, p1 + l1)` of `[history n*W | chunk rows]`.
    floor: int [n], the first position inside the replayed rectangle (`R = N - keep`; rows before it see no
    window key). clip: int [n], leading chunk rows that were dropped; T' counts the kept rows and the chunk
    part of the buffer holds kept rows only.
    """
    n = len(q)
    start = (k - q).astype(np.int64)
    clip = np.zeros(n, np.int64) if clip is None else clip.astype(np.int64)
    kept = q - clip
    cu = exclusive_sums(kept)
    seq, row = ragged_arange(kept, cu)
    start_T, clip_T = start[seq], clip[seq]
    j = row + clip_T
    pos = start_T + j
    lo = np.maximum(pos - window + 1, 0)
    if valid_start is not None:
        lo = np.maximum(lo, valid_start[seq])
    if floor is not None:
        lo = np.minimum(np.maximum(lo, floor[seq]), pos + 1)
    in_history = np.minimum(lo, start_T)
    skipped = np.maximum(lo - start_T, 0)
    return np.stack(
        (
            seq * window + in_history - (start_T - window),
            start_T - in_history,
            n * window + cu[seq] + skipped - clip_T,
            j - skipped + 1,
        ),
        axis=-1,
    )


def replay_floor(total: np.ndarray, keep_tokens: int) -> Ints:
    """int64 [n] `R = N - keep`: N is the whole known length of the sequence, not the end of the chunk."""
    return total.astype(np.int64) - keep_tokens


def compact_clip(q: np.ndarray, k: np.ndarray, floor: np.ndarray) -> Ints:
    """int64 [n] leading chunk rows that consumer layers drop; the last row always stays (placeholder)."""
    return np.clip(floor - (k - q), 0, q.astype(np.int64) - 1)
