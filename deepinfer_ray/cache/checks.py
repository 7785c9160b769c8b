"""Host checks of everything that cache kernels take for granted (attention spec §19).

Knows: the preconditions of stores, loads and index lists, with their equations. Does not know: who broke one.

A broken rule of configuration is a `ConfigError`; a broken step or plan is a `PlanError`, which is a defect
of the program, not of the user. Messages carry the numbers of the equation that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_ray.cache.layout import BLOCK_ALIGN, PART_ALIGN, CacheLayout, align_up
from deepinfer_ray.cache.metadata import StepMetadata
from deepinfer_ray.errors import ConfigError

INT32_MAX = 2**31 - 1


class PlanError(ValueError):
    """An index plan breaks a precondition of the cache kernels."""


def max_num_blocks(runtime_max_model_len: int, block_tokens: int = 128) -> int:
    """Width of a decode block table: ⌈len/128⌉ rounded up to 64 blocks (engine spec §6.3)."""
    return align_up(-(-runtime_max_model_len // block_tokens), 64)


# Start-up ------------------------------------------------------------------------------------------------


def check_layout(layout: CacheLayout) -> None:
    """Strides and alignments that typed views and kernels need (rule 10)."""
    record = layout.window_record.bytes
    _aligned("slot bytes", layout.slot_bytes, PART_ALIGN)
    _aligned("slot bytes", layout.slot_bytes, record)
    _aligned("block bytes", layout.block_bytes, BLOCK_ALIGN)
    _aligned("block bytes", layout.block_bytes, layout.main_record.bytes)
    for layer, offset in layout.state_offsets.items():
        _aligned(f"offset of the compression state of layer {layer}", offset, PART_ALIGN)
    rows = layout.max_backtracking
    if layout.ring_rows < layout.window + rows - 1:
        raise ConfigError(
            f"window rings have S = {layout.ring_rows} rows; window {layout.window} and {rows} rows a "
            f"sequence and step need W + rows - 1 = {layout.window + rows - 1}"
        )
    if layout.state_offsets and layout.state_rows < 2 + rows - 1:
        raise ConfigError(
            f"compression state rings have C = {layout.state_rows} rows; ratio 2 and {rows} rows a "
            f"sequence and step need r + rows - 1 = {2 + rows - 1}"
        )


def _aligned(what: str, value: int, unit: int) -> None:
    if value % unit:
        raise ConfigError(f"{what} {value} is not a multiple of {unit} (remainder {value % unit})")


def check_geometry(block_tokens: int, ratios: Sequence[int], candidate_block: int = 0) -> None:
    """A block holds whole groups, and whole candidate blocks (rule 2)."""
    for ratio in ratios:
        if block_tokens % ratio:
            raise ConfigError(f"block_tokens {block_tokens} is not a multiple of compression ratio {ratio}")
        entries = block_tokens // ratio
        if candidate_block and entries % candidate_block:
            raise ConfigError(
                f"candidate blocks of {candidate_block} entries cross cache blocks of {entries} entries "
                f"(ratio {ratio}): {entries} mod {candidate_block} = {entries % candidate_block}"
            )


def check_dense_indices(rows: int, num_blocks: int, entries: int) -> None:
    """Dense entry indices are int32 in kernels: `rows * num_blocks * entries` must fit (rule 8)."""
    product = rows * num_blocks * entries
    if product > INT32_MAX:
        raise ConfigError(
            f"{rows} rows x {num_blocks} blocks x {entries} entries = {product} dense indices do not fit "
            "int32; lower max_model_len or the number of rows a step"
        )


# A step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step's arrays are held against. rope_rows: positions the rotary tables cover."""

    layout: CacheLayout
    ratios: tuple[int, ...]
    num_blocks: int
    num_slots: int
    max_blocks: int
    rope_rows: int

    def check(
        self,
        *,
        is_prefill: bool,
        q: np.ndarray,
        k: np.ndarray,
        state_ids: np.ndarray,
        block_tables: np.ndarray,
        num_blocks_of: np.ndarray | None = None,
        valid_start: np.ndarray | None = None,
    ) -> None:
        """Rules 2, 3, 5, 6 on the inputs of the metadata builders; raises `PlanError`.

        num_blocks_of: int [n] valid columns of each table; default: all of them.
        """
        layout = self.layout
        check_lengths(q, k, valid_start)
        if not is_prefill:
            check_rows_per_sequence(layout, q)
        if len(k) and int(k.max()) > self.rope_rows:
            raise PlanError(
                f"position {int(k.max()) - 1} is outside the rotary table of {self.rope_rows} rows"
            )
        if len(state_ids) and (int(state_ids.min()) < 0 or int(state_ids.max()) >= self.num_slots):
            raise PlanError(f"state slots {state_ids.tolist()} are outside [0, {self.num_slots})")
        owned = state_ids[state_ids > 0]
        if len(np.unique(owned)) != len(owned):
            raise PlanError(f"two sequences of a step share a state slot: {state_ids.tolist()}")
        widths = np.full(len(k), block_tables.shape[1]) if num_blocks_of is None else num_blocks_of
        check_block_tables(layout, self.ratios, k, block_tables, widths, self.num_blocks, self.max_blocks)


def check_lengths(q: np.ndarray, k: np.ndarray, valid_start: np.ndarray | None = None) -> None:
    """`0 <= q <= k` and `valid_start <= k - q` for every sequence (rule 2)."""
    if bad := _first((q < 0) | (q > k)):
        raise PlanError(
            f"sequence {bad[0]} has q_len {q[bad[0]]} and k_len {k[bad[0]]}; 0 <= q <= k must hold"
        )
    if valid_start is not None and (bad := _first(valid_start > k - q)):
        i = bad[0]
        raise PlanError(
            f"sequence {i} has window history from {valid_start[i]} on, after its first query {k[i] - q[i]}"
        )


def check_rows_per_sequence(layout: CacheLayout, q: np.ndarray) -> None:
    """A decode step brings no more rows a sequence than the rings can take back (rules 2, 6)."""
    rows = int(q.max()) if len(q) else 0
    for name, have, need in (
        ("max_backtracking", layout.max_backtracking, rows),
        ("S", layout.ring_rows, layout.window + rows - 1),
        ("C", layout.state_rows, 2 + rows - 1),
    ):
        if have < need:
            raise PlanError(f"a decode step with {rows} rows a sequence needs {name} >= {need}; it is {have}")


def check_block_tables(
    layout: CacheLayout,
    ratios: Sequence[int],
    k: np.ndarray,
    block_tables: np.ndarray,
    num_blocks_of: np.ndarray,
    num_blocks: int,
    max_blocks: int,
) -> None:
    """Tables are long enough for every entry, not longer than kernels take, with ids of the pool (rule 3)."""
    if bad := _first(num_blocks_of > max_blocks):
        raise PlanError(f"sequence {bad[0]} has {num_blocks_of[bad[0]]} blocks; a table holds {max_blocks}")
    for ratio in ratios:
        entries = layout.block_tokens // ratio
        needed = -(-(k // ratio) // entries)
        if bad := _first(needed > num_blocks_of):
            i = bad[0]
            raise PlanError(
                f"sequence {i} of length {k[i]} needs {needed[i]} blocks of {entries} entries "
                f"(ratio {ratio}); its table has {num_blocks_of[i]}"
            )
    used = np.arange(block_tables.shape[1]) < num_blocks_of[:, None]
    wrong = used & ((block_tables < 0) | (block_tables >= num_blocks))
    if wrong.any():
        i, column = np.argwhere(wrong)[0].tolist()
        raise PlanError(
            f"block {block_tables[i, column]} in column {column} of sequence {i} is outside [0, {num_blocks})"
        )


def _first(condition: np.ndarray) -> list[int]:
    return np.flatnonzero(condition)[:1].tolist()


# Finished plans ------------------------------------------------------------------------------------------


def check_segments(segments: np.ndarray, block_len: int, num_blocks: int, total: int) -> None:
    """Load segments stay in their blocks and cover rows `[0, total)` exactly once (rule 1)."""
    covered = np.zeros(total, np.int64)
    for i, (source, begin, end, dst) in enumerate(segments.tolist()):
        if not -1 <= source < num_blocks:
            raise PlanError(f"load segment {i} reads block {source}, outside [-1, {num_blocks})")
        if not 0 <= begin <= end <= block_len:
            raise PlanError(f"load segment {i} reads [{begin}, {end}) of a block of {block_len} records")
        if dst < 0 or dst + end - begin > total:
            raise PlanError(f"load segment {i} writes rows [{dst}, {dst + end - begin}) of {total}")
        covered[dst : dst + end - begin] += 1
    if twice := _first(covered > 1):
        raise PlanError(f"load segments write row {twice[0]} {covered[twice[0]]} times")
    if never := _first(covered == 0):
        raise PlanError(f"no load segment writes row {never[0]} of {total}")


def check_store_slots(what: str, slots: torch.Tensor, limit: int) -> None:
    """Store slots are unique and inside the pool, -1 only skips (rule 4). Reads the device."""
    kept = slots[slots != -1].reshape(-1)
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= limit):
        bad = int(kept[(kept < 0) | (kept >= limit)][0])
        raise PlanError(f"{what} store slot {bad} is outside [0, {limit}) (only -1 skips)")
    ids, counts = torch.unique(kept, return_counts=True)
    if ids.numel() and int(counts.max()) > 1:
        raise PlanError(
            f"{what} store slot {int(ids[counts > 1][0])} is written {int(counts.max())} times in one call"
        )


def check_load_ids(what: str, ids: torch.Tensor, limit: int) -> None:
    """Loaded ids are -1 or inside the pool (rule 4). Reads the device."""
    if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= limit):
        bad = int(ids[(ids < -1) | (ids >= limit)].reshape(-1)[0])
        raise PlanError(f"{what} id {bad} is outside [-1, {limit})")


def check_metadata(meta: StepMetadata, layout: CacheLayout, num_blocks: int, num_slots: int) -> None:
    """Rule 4 on finished metadata, for debug builds and tests: it reads every index tensor."""
    rings, states = num_slots * layout.ring_rows, num_slots * layout.state_rows
    real = meta.valid
    check_store_slots("window", meta.swa_store[real], rings)
    check_store_slots("compression state", meta.ring_positions[real], states)
    if meta.swa_history is not None:
        check_load_ids("window history", meta.swa_history, rings)
        check_load_ids("window key", meta.swa_keys, meta.num_seqs * layout.window + meta.num_rows)
    else:
        check_load_ids("window key", meta.swa_keys, rings)
    for ratio, plan in meta.ratios.items():
        pool = num_blocks * (layout.block_tokens // ratio)
        stored = plan.entry_slots if meta.is_prefill else plan.entry_slots[real]
        check_store_slots(f"ratio-{ratio} entry", stored, pool)
        check_load_ids(f"ratio-{ratio} state", plan.entry_ring, states)
        if plan.load_slots is not None:
            check_load_ids(f"ratio-{ratio} entry", plan.load_slots, pool)
