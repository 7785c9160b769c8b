"""The builders of a step's index plans: `build_prefill`, `build_decode`.

Knows: lengths, block tables, state slots, the cache geometry (attention spec §11, engine spec §8).
Does not know: requests, sampling, weights. Everything that a forward pass needs beside token ids is built
here and nowhere else, on the host, and moved in one copy.

Shape letters as in `cache/plans.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from deepinfer_ray.cache import load_plan
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.plans import ConsumerPlan, DecodeExpansion, RatioPlan, StepMetadata
from deepinfer_ray.cache.transfer import Staging

__all__ = ["ConsumerPlan", "RatioPlan", "StepMetadata", "TruncationMode", "build_decode", "build_prefill"]

TruncationMode = Literal["off", "mask", "compact"]


def _expand_pivots(pivots_T4: torch.Tensor, window: int) -> torch.Tensor:
    """int64 [T, W]: buffer rows of each query row's window keys, -1 padded (attention spec §11.3)."""
    p0, l0, p1, l1 = pivots_T4.unsqueeze(-1).unbind(1)
    column = torch.arange(window, device=pivots_T4.device)
    keys = torch.where(column < l0, p0 + column, p1 + (column - l0))
    return keys.masked_fill_(column >= l0 + l1, -1)


def _send(
    staging: Staging,
    arrays: list[np.ndarray],
    flags: tuple[np.ndarray | None, ...],
    extras: Sequence[np.ndarray],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
    """(arrays, flags as bool, extras) on the device, moved in one copy."""
    given = [flag for flag in flags if flag is not None]
    tensors = staging.send([*arrays, *given, *extras])
    bools = iter(tensors[len(arrays) : len(arrays) + len(given)])
    return (
        tensors[: len(arrays)],
        [None if flag is None else next(bools).bool() for flag in flags],
        tensors[len(arrays) + len(given) :],
    )


def _valid_rows(given: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.bool, device=device) if given is None else given


def build_prefill(
    layout: CacheLayout,
    ratios: Sequence[int],
    *,
    q: np.ndarray,
    k: np.ndarray,
    state_ids: np.ndarray,
    block_tables: np.ndarray,
    input_ids: np.ndarray,
    ngram_ids: np.ndarray,
    valid: np.ndarray | None = None,
    image_mask: np.ndarray | None = None,
    valid_start: np.ndarray | None = None,
    truncation: TruncationMode = "off",
    keep_tokens: int = 0,
    total: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    staging: Staging | None = None,
    extras: Sequence[np.ndarray] = (),
) -> StepMetadata:
    """Metadata of a prefill step: sequence i brings tokens `[k_i - q_i, k_i)`.

    ratios: the compression ratios in use (`Topology.ratios`). q, k: int [n]. state_ids: int [n].
    block_tables: int [n, B], at least ⌈k/128⌉ valid columns. input_ids: int [T]. ngram_ids: int [T, G].
    valid, image_mask: bool [T]. valid_start: int [n], first position with window history (default 0).
    truncation, keep_tokens: attention spec §13.2; `total` int [n] is then the whole known length of each
    sequence. staging: how arrays reach its device, by default afresh to `device`. extras: arrays that go
    along (integers arrive as int64, floats as float32). The caller validates with `cache.checks` where the
    inputs are not its own.
    """
    staging = staging or Staging(device)
    arrays: list[np.ndarray] = []
    n, window, ring = len(q), layout.window, layout.ring_rows
    q, k, state_ids = q.astype(np.int64), k.astype(np.int64), state_ids.astype(np.int64)
    start = k - q
    cu = load_plan.exclusive_sums(q)
    seq, j = load_plan.ragged_arange(q, cu)
    pos = start[seq] + j
    state_T, rest = state_ids[seq], k[seq] - pos
    arrays.append(input_ids)
    arrays.append(pos)
    arrays.append(ngram_ids)
    arrays.append(seq)
    arrays.append(cu)
    arrays.append(cu[1:] - 1)
    swa_store = np.where(rest <= ring, state_T * ring + pos % ring, -1)
    arrays.append(swa_store)
    arrays.append(
        np.where(rest <= layout.state_rows, state_T * layout.state_rows + pos % layout.state_rows, -1)
    )
    arrays.append(load_plan.window_records(start, state_ids, window, ring, valid_start))
    arrays.append(load_plan.window_pivots(q, k, window, valid_start=valid_start))
    ks: dict[int, np.ndarray] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for ratio in ratios:
        first, last = start // ratio, k // ratio
        counts = np.maximum(last - first, 1)
        owner, e = load_plan.ragged_arange(counts, load_plan.exclusive_sums(counts))
        real = (last > first)[owner]
        entry = np.where(real, first[owner] + e, 0)
        member = entry[:, None] * ratio + np.arange(ratio)
        before = member < start[owner][:, None]
        arrays.append(entry * ratio)
        arrays.append(
            np.where(
                real, load_plan.entry_slots(block_tables, owner, entry, layout.block_tokens // ratio), -1
            )
        )
        arrays.append((pos + 1) // ratio)
        rows = (cu[:-1] - start)[owner][:, None] + member
        ring_rows = state_ids[owner][:, None] * layout.state_rows + member % layout.state_rows
        arrays.append(np.where(real[:, None] & before, ring_rows, -1))
        arrays.append(np.where(real[:, None] & ~before, rows, -1))
        slots, starts = load_plan.compressed_slots(k, block_tables, ratio, layout.block_tokens)
        arrays.append(slots)
        ks[ratio] = starts[:-1]
        spans[ratio] = list(zip(starts[:-1].tolist(), last.tolist(), strict=True))
        arrays.append(starts[seq])
    sent, (valid_T, image_T), more = _send(staging, arrays, (valid, image_mask), extras)
    tensors = iter(sent)
    meta = StepMetadata(
        is_prefill=True,
        num_seqs=n,
        num_rows=len(pos),
        input_ids=next(tensors),
        positions=next(tensors),
        ngram_ids=next(tensors),
        valid=_valid_rows(valid_T, len(pos), staging.device),
        image_mask=image_T,
        seq_of_row=next(tensors),
        cu_q=next(tensors),
        last_rows=next(tensors),
        swa_store=next(tensors),
        ring_positions=next(tensors),
        swa_history=next(tensors),
        swa_keys=_expand_pivots(next(tensors), window),
        max_length=int(k.max()),
        all_valid=valid is None or bool(valid.all()),
        sequence_rows=cu.tolist(),
        extras=more,
    )
    for ratio in ratios:
        meta.ratios[ratio] = RatioPlan(
            ratio,
            entry_positions=next(tensors),
            entry_slots=next(tensors),
            klen=next(tensors),
            entry_ring=next(tensors),
            entry_rows=next(tensors),
            load_slots=next(tensors),
            ks=next(tensors),
            spans=spans[ratio],
        )
        meta.max_klen[ratio] = int(k.max()) // ratio
    if truncation != "off":
        assert total is not None, "truncation needs the whole known length of each sequence"
        floor = load_plan.replay_floor(total, keep_tokens)
        meta.consumer = _consumer_plan(
            meta, q, k, pos, swa_store, ks, layout, valid_start, floor, truncation, staging
        )
    return meta


def _consumer_plan(
    meta: StepMetadata,
    q: np.ndarray,
    k: np.ndarray,
    pos: np.ndarray,
    swa_store: np.ndarray,
    ks: dict[int, np.ndarray],
    layout: CacheLayout,
    valid_start: np.ndarray | None,
    floor: np.ndarray,
    truncation: TruncationMode,
    staging: Staging,
) -> ConsumerPlan:
    compact = truncation == "compact"
    clip = load_plan.compact_clip(q, k, floor) if compact else np.zeros(len(q), np.int64)
    pivots = load_plan.window_pivots(q, k, layout.window, valid_start=valid_start, floor=floor, clip=clip)
    kept = q - clip
    cu = load_plan.exclusive_sums(kept)
    seq, row = load_plan.ragged_arange(kept, cu)
    rows = load_plan.exclusive_sums(q)[seq] + clip[seq] + row
    pos = pos[rows]
    store = np.where(pos < floor[seq], -1, swa_store[rows]) if compact else swa_store
    arrays = [rows, pos, seq, cu, cu[1:] - 1, store, pivots]
    arrays += [(pos + 1) // ratio for ratio in ks]
    arrays += [start[seq] for start in ks.values()]
    tensors = iter(staging.send(arrays))
    rows_T = next(tensors)
    return ConsumerPlan(
        rows=rows_T if compact else None,
        num_rows=len(pos),
        positions=next(tensors),
        valid=meta.valid[rows_T],
        image_mask=None if meta.image_mask is None else meta.image_mask[rows_T],
        seq_of_row=next(tensors),
        cu_q=next(tensors),
        last_rows=next(tensors),
        swa_store=next(tensors),
        swa_keys=_expand_pivots(next(tensors), layout.window),
        klen={ratio: next(tensors) for ratio in ks},
        ks={ratio: next(tensors) for ratio in ks},
        sequence_rows=cu.tolist(),
    )


def build_decode(
    layout: CacheLayout,
    ratios: Sequence[int],
    *,
    q: np.ndarray,
    k: np.ndarray,
    state_ids: np.ndarray,
    block_tables: np.ndarray,
    input_ids: np.ndarray,
    ngram_ids: np.ndarray,
    valid: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    staging: Staging | None = None,
    extras: Sequence[np.ndarray] = (),
    fixed_shape: bool = False,
    whole_tables: bool = False,
    expand: bool = True,
) -> StepMetadata:
    """Metadata of a decode or verify step: rows of sequence i sit at positions `[k_i - q_i, k_i)`, q ≥ 1.

    Arguments as in `build_prefill`; `block_tables` needs the blocks of all k_i tokens, and only columns that
    the longest sequence uses are copied. `valid` is False on placeholder rows (state 0, block 0).
    fixed_shape: no shape depends on values: only n, T and the power of two above the table's width count.
    whole_tables: with all columns of `block_tables`.
    expand: False leaves what `StepMetadata.expand` computes to the caller.
    """
    staging = staging or Staging(device)
    n = len(q)
    k = k.astype(np.int64)
    longest = int(k.max())
    columns = layout.blocks_for(longest)
    if fixed_shape:
        columns = min(1 << (columns - 1).bit_length(), block_tables.shape[1])
    if whole_tables:
        columns = block_tables.shape[1]
    cu = load_plan.exclusive_sums(q)
    one_row_each = bool(cu[-1] == n)
    if one_row_each:
        seq, pos = np.arange(n), k - 1
    else:
        seq, j = load_plan.ragged_arange(q, cu)
        pos = (k - q)[seq] + j
    short = None if fixed_shape else np.flatnonzero(pos < layout.window - 1)
    arrays = [input_ids, pos, ngram_ids, seq, cu, state_ids, block_tables[:, :columns]]
    sent = [*arrays, *([] if short is None else [short]), *([] if valid is None else [valid]), *extras]
    tensors = iter(staging.send(sent))
    ids, positions, grams, seq_T, cu_n, state_n, tables_nB = (next(tensors) for _ in arrays)
    meta = StepMetadata(
        is_prefill=False,
        num_seqs=n,
        num_rows=len(pos),
        input_ids=ids,
        positions=positions,
        ngram_ids=grams,
        image_mask=None,
        seq_of_row=seq_T,
        cu_q=cu_n,
        last_rows=cu_n,  # this and the four below: `expand`
        valid=positions,
        swa_store=positions,
        swa_keys=positions,
        ring_positions=positions,
        max_length=longest,
        all_valid=valid is None or (bool(valid.all()) and not fixed_shape),
    )
    for ratio in ratios:
        meta.max_klen[ratio] = (columns * layout.block_tokens if fixed_shape else longest) // ratio
    meta.expansion = DecodeExpansion(
        window=layout.window,
        ring_rows=layout.ring_rows,
        state_rows=layout.state_rows,
        block_tokens=layout.block_tokens,
        ratios=tuple(ratios),
        states=state_n,
        tables=tables_nB,
        one_row_each=one_row_each,
        short=None if short is None else next(tensors),
        valid=None if valid is None else next(tensors),
    )
    meta.extras = list(tensors)
    if expand:
        meta.expand()
    return meta
