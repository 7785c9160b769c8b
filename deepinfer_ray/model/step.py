"""What the layers of one forward pass share: index plans, rotations, published selections.

Knows: how a step's metadata turns into the tensors that every layer needs again, computed once.
Does not know: weights. Lives for one step.

Shape letters: T rows, W window columns, K selected entries, N entries scored, R rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepinfer_ray.cache.metadata import RatioPlan, StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.model.row_share import RowShare
from deepinfer_ray.ops import native
from deepinfer_ray.ops.attention import validity_bias
from deepinfer_ray.ops.linear import round_up
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import RopeTable

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines; the inverse rotation has the sines negated."""


@dataclass(slots=True)
class EntryPlan:
    """Compressed entries that one ratio produces in this step (attention spec §4.3)."""

    slots: torch.Tensor
    """[E] pool slot of each entry row, -1 = not stored."""
    rotation: Rotation
    """cos, sin [E, R] at the entry's first token."""
    rows: torch.Tensor | None
    """[E, r] members in the step's rows, -1 = in the ring; None = all in the ring (decode)."""
    ring: torch.Tensor | None
    """[E, r] members in the state ring, -1 = in the step's rows; None for ratio 1."""


@dataclass(slots=True)
class Selection:
    """The entries that the queries of a segment attend, published by its index source."""

    entries: torch.Tensor
    """[T, K] entry ids of the row's own sequence, ascending, -1 padded."""
    index: torch.Tensor
    """[T, K]. Decode: pool slots. Prefill: rows of the gathered prefix. -1 padded."""
    bias: torch.Tensor
    """[T, 1, K] 0 where an entry is, -inf where none is."""
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    """KV source -> [T, K, d] gathered once for all layers of the segment (when it fits)."""


@dataclass(slots=True)
class StepContext:
    """One step's shared state; see the module docstring."""

    meta: StepMetadata
    pools: CachePools
    numerics: Numerics
    plain: Rotation
    """cos, sin [T, 1, R] of window-only layers."""
    compressed: Rotation
    """cos, sin [T, 1, R] of layers with a ratio."""
    plain_back: Rotation
    compressed_back: Rotation
    """The inverse rotations."""
    window_bias: torch.Tensor
    """[T, 1, W] 0 or -inf."""
    window_index: torch.Tensor
    """[T, W] prefill: rows of [history | chunk | one zero row]; decode: rows of the rings."""
    window_store: torch.Tensor
    """[T] ring row that each row's latent is stored at; rows that are not stored go to nobody's slot."""
    valid: torch.Tensor | None
    """[T] bool, False on placeholder rows; None = all rows are real."""
    entries: dict[int, EntryPlan]
    max_klen: dict[int, int]
    """ratio -> most entries visible to a row."""
    selection: Selection | None = None
    candidates: torch.Tensor | None = None
    """[T, B] candidate blocks of the candidate source; None = every visible entry is a candidate."""
    gathered: dict[int, torch.Tensor] = field(default_factory=dict)
    """Prefill: KV source -> [K + 1, d] entries of all sequences' prefixes, a zero row last."""
    share: RowShare | None = None
    """The rows that this rank computes; None = all of them."""
    entry_input: torch.Tensor | None = None
    """[T, D] what the first consumer layer makes its entries from when it computes fewer rows: its normed
    input of all rows (of `entry_share`)."""
    entry_share: RowShare | None = None
    capture: dict[str, torch.Tensor] | None = None
    """Tests only: inner tensors by golden name."""
    _slots: dict[int, torch.Tensor] = field(default_factory=dict)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows of the step, of which this rank computed its share; they are rounded values."""
        return rows if self.share is None else self.share.gather(rows)

    def note(self, name: str, value: torch.Tensor) -> None:
        """Keep an inner tensor when a test asked for it."""
        if self.capture is not None:
            self.capture[name] = value

    def entry_slots(self, ratio: int, entries: torch.Tensor) -> torch.Tensor:
        """Decode: pool slots of entry ids [T, n] of the rows' own sequences; -1 stays -1."""
        return self.entry_slots_and_bias(ratio, entries)[0]

    def entry_slots_and_bias(self, ratio: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`entry_slots`, and [T, 1, n] 0 where an entry is, -inf where none is."""
        tables = self.meta.block_tables
        assert tables is not None
        size = self.pools.layout.block_tokens // ratio
        if native.ready(entries):
            slots, bias = native.entry_slots(entries.contiguous(), tables.contiguous(), size)
            return slots, bias.unsqueeze(1)
        known = entries.clamp_min(0)
        slots = tables.gather(1, known.div(size, rounding_mode="floor")) * size + known % size
        return slots.masked_fill(entries < 0, -1), validity_bias(entries >= 0)

    def visible_slots(self, ratio: int) -> torch.Tensor:
        """Decode: pool slots [T, N] of every visible entry, -1 behind a row's last; N is a multiple of 16."""
        if ratio not in self._slots:
            klen = self.meta.ratios[ratio].klen
            columns = torch.arange(round_up(max(self.max_klen[ratio], 1)), device=klen.device)
            entries = columns.masked_fill(columns >= klen.unsqueeze(1), -1)
            self._slots[ratio] = self.entry_slots(ratio, entries)
        return self._slots[ratio]


def _per_head(rotation: Rotation) -> Rotation:
    cos, sin = rotation
    return cos.unsqueeze(1), sin.unsqueeze(1)


def _entry_plan(meta: StepMetadata, plan: RatioPlan, table: RopeTable) -> EntryPlan:
    if meta.is_prefill:
        return EntryPlan(plan.entry_slots, table.take(plan.entry_positions), plan.entry_rows, plan.entry_ring)
    if plan.ratio == 1:
        return EntryPlan(plan.entry_slots, table.take(plan.entry_positions), None, None)
    # Rows that close no group would give a zero row with slot -1: they are left out instead.
    closing = plan.closing
    assert closing is not None
    return EntryPlan(
        plan.entry_slots[closing],
        table.take(plan.entry_positions[closing]),
        None,
        plan.entry_ring[closing],
    )


def build_context(
    meta: StepMetadata,
    pools: CachePools,
    numerics: Numerics,
    plain: RopeTable,
    compressed: RopeTable,
    capture: dict[str, torch.Tensor] | None = None,
    share: RowShare | None = None,
) -> StepContext:
    """Everything that layers share in this step. share: of whose rows `meta` speaks, None = of all."""
    plain.reserve(meta.max_length)
    compressed.reserve(meta.max_length)
    present = meta.swa_keys >= 0
    if meta.is_prefill:
        assert meta.swa_history is not None
        index = meta.swa_keys.masked_fill(~present, meta.swa_history.numel() + meta.swa_store.numel())
    else:
        index = pools.window_rows(meta.swa_keys)
    plain_rows, compressed_rows = (_per_head(table.take(meta.positions)) for table in (plain, compressed))
    return StepContext(
        meta=meta,
        pools=pools,
        numerics=numerics,
        plain=plain_rows,
        compressed=compressed_rows,
        plain_back=(plain_rows[0], -plain_rows[1]),
        compressed_back=(compressed_rows[0], -compressed_rows[1]),
        window_bias=validity_bias(present),
        window_index=index,
        window_store=pools.window_rows(meta.swa_store.clamp_min(0)),
        valid=None if meta.all_valid else meta.valid,
        entries={ratio: _entry_plan(meta, plan, compressed) for ratio, plan in meta.ratios.items()},
        max_klen=meta.max_klen,
        share=share,
        capture=capture,
    )
