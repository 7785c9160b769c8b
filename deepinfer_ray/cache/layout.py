"""Sizes and offsets of the paged pool and of the state slots (attention spec §10).

Knows: record formats, the order of layers inside a block and inside a slot, paddings, ring lengths.
Does not know: tensors, devices, block tables, how many blocks or slots there are.

A *block* holds the compressed entries and index keys of 128 uncompressed tokens for every owning layer.
A *slot* holds one sequence's window rings and compression state. A *record* is one cached vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.formats import FP8_GROUP, INDEX_GROUP, KV_GROUP

if TYPE_CHECKING:
    from deepinfer_ray.config.hf import ModelConfig
    from deepinfer_ray.ops.numerics import Numerics

BLOCK_TOKENS = 128
PART_ALIGN = 32
"""Every part of a block and every ring of a slot starts at a multiple of this many bytes."""
BLOCK_ALIGN = 128

Kind = Literal["fp8", "fp4_kv", "fp4_index", "f32"]


def align_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One cached vector of `width` values: code bytes, then scale bytes (attention spec §9.2-9.4, §10.1)."""

    kind: Kind
    width: int
    data_bytes: int
    scale_bytes: int

    @property
    def bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @classmethod
    def of(cls, kind: Kind, width: int) -> RecordFormat:
        """Format of a vector; `ConfigError` if its width does not divide into quantization groups."""
        if kind == "f32":
            return cls(kind, width, 4 * width, 0)
        group = {"fp8": FP8_GROUP, "fp4_kv": KV_GROUP, "fp4_index": INDEX_GROUP}[kind]
        if width % group:
            raise ConfigError(
                f"a cached vector of {width} values does not divide into groups of {group} ({kind}): "
                f"head_dim and index_head_dim must be multiples of {group}, or numerics must be exact"
            )
        return cls(kind, width, width if kind == "fp8" else width // 2, width // group)


@dataclass(frozen=True, slots=True)
class PagedPart:
    """One layer's share of every block. Main records are interleaved; index keys are segregated:
    all data sections first, all scale sections behind them (attention spec §9.6)."""

    layer: int
    ratio: int
    offset: int
    entries: int
    """Entries a block, `block_tokens / ratio`."""
    record: RecordFormat

    @property
    def bytes(self) -> int:
        return self.entries * self.record.bytes

    @property
    def scale_offset(self) -> int:
        """Where the scale section of a segregated part starts."""
        return self.offset + self.entries * self.record.data_bytes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All byte positions of a model's caches. Build it with `CacheLayout.build`."""

    num_drafts: int
    block_tokens: int
    window: int
    """W: keys a query sees in the window, its own included."""
    max_backtracking: int
    """Positions that a rejected verification may take back; rows a sequence may bring to one step."""
    ring_rows: int
    """S: ring records per layer and slot."""
    state_rows: int
    """C: rows of the ratio-2 compression state ring."""
    head_dim: int
    window_record: RecordFormat
    main_record: RecordFormat
    index_record: RecordFormat
    block_bytes: int
    slot_bytes: int
    ring_stride: int
    """Bytes between the rings of two consecutive layers."""
    state_stride: int
    """Bytes of one layer's compression state `[C, 2, head_dim]` float32."""
    main_parts: Mapping[int, PagedPart]
    """KV source layer → its compressed entries."""
    index_parts: Mapping[int, PagedPart]
    """Index-key source layer → its index keys."""
    ring_offsets: Mapping[int, int]
    """Layer → byte offset of its window ring in a slot; draft layers only if they have rings."""
    state_offsets: Mapping[int, int]
    """Ratio-2 KV source layer → byte offset of its compression state in a slot."""
    divide: bool
    """True divisions in the compressed-KV recipe (numeric variant `reference`, attention spec §9.3)."""
    stored_ring_layers: int
    """Leading rings (producer layers) that a stored prefix keeps (attention spec §10.2)."""

    @property
    def ring_pitch(self) -> int:
        """Window records from one slot to the next, so that a ring can be read as rows of the pool."""
        return self.slot_bytes // self.window_record.bytes

    @property
    def block_payload_bytes(self) -> int:
        """Bytes of a block without paddings."""
        return sum(part.bytes for part in (*self.main_parts.values(), *self.index_parts.values()))

    @property
    def bytes_per_token(self) -> float:
        """Paged bytes that one token costs, paddings included."""
        return self.block_bytes / self.block_tokens

    def entries_per_block(self, ratio: int) -> int:
        return self.block_tokens // ratio

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` uncompressed tokens."""
        return -(-tokens // self.block_tokens)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        numerics: Numerics,
        num_drafts: int,
        block_tokens: int = BLOCK_TOKENS,
        with_draft_rings: bool | None = None,
        *,
        max_backtracking: int = 0,
        extra_ring_rows: int = 0,
    ) -> CacheLayout:
        """The layout of a model for `num_drafts` drafted tokens a step (0 = no speculation).

        with_draft_rings: whether draft layers have window rings; by default iff `num_drafts > 0`.
        max_backtracking: raises the rollback depth above its minimum `num_drafts + 1`.
        extra_ring_rows: further ring rows so that a 128-aligned snapshot exists (attention spec §10.2, §15).
        Raises `ConfigError` if widths or ratios do not fit the record formats or the block.
        """
        text, topology = config.text, config.topology
        if num_drafts < 0 or max_backtracking < 0 or extra_ring_rows < 0:
            raise ConfigError(
                f"num_drafts {num_drafts}, max_backtracking {max_backtracking} and extra_ring_rows "
                f"{extra_ring_rows} must not be negative"
            )
        if with_draft_rings is None:
            with_draft_rings = num_drafts > 0
        for ratio in topology.ratios:
            if block_tokens % ratio:
                raise ConfigError(
                    f"block_tokens {block_tokens} is not a multiple of compression ratio {ratio}"
                )

        backtracking = max(max_backtracking, num_drafts + 1)
        window_record = RecordFormat.of("f32" if numerics.exact else "fp8", text.head_dim)
        main_kind: Kind = "f32" if numerics.exact else "fp4_kv" if text.use_fp4_sparse_kv else "fp8"
        main_record = RecordFormat.of(main_kind, text.head_dim)
        index_record = RecordFormat.of("f32" if numerics.exact else "fp4_index", text.index_head_dim)

        main_parts: dict[int, PagedPart] = {}
        index_parts: dict[int, PagedPart] = {}
        offset = 0
        for layer in topology.layers:
            for owned, parts, record in (
                (layer.is_index_k_source, index_parts, index_record),
                (layer.is_kv_source, main_parts, main_record),
            ):
                if owned:
                    entries = block_tokens // layer.ratio
                    parts[layer.index] = PagedPart(layer.index, layer.ratio, offset, entries, record)
                    offset = align_up(offset + parts[layer.index].bytes, PART_ALIGN)
        # The index sections join the spec's lcm so that they too are rows of the pool at odd widths;
        # for the released widths (64 and 4 bytes) they change nothing.
        row_sizes = (BLOCK_ALIGN, main_record.bytes, index_record.data_bytes, index_record.scale_bytes or 1)
        block_bytes = align_up(offset, math.lcm(*row_sizes))

        ring_rows = text.sliding_window + backtracking + extra_ring_rows
        state_rows = 2 + backtracking - 1
        ring_stride = align_up(ring_rows * window_record.bytes, PART_ALIGN)
        ringed = [layer for layer in topology.layers if with_draft_rings or not layer.is_draft]
        ring_offsets = {layer.index: i * ring_stride for i, layer in enumerate(ringed)}
        state_stride = align_up(state_rows * 2 * text.head_dim * 4, PART_ALIGN)
        states_at = len(ringed) * ring_stride
        pooled = [layer.index for layer in topology.layers if layer.is_kv_source and layer.ratio == 2]
        state_offsets = {index: states_at + i * state_stride for i, index in enumerate(pooled)}
        slot_bytes = align_up(
            states_at + len(pooled) * state_stride, math.lcm(PART_ALIGN, window_record.bytes)
        )
        return cls(
            num_drafts=num_drafts,
            block_tokens=block_tokens,
            window=text.sliding_window,
            max_backtracking=backtracking,
            ring_rows=ring_rows,
            state_rows=state_rows,
            head_dim=text.head_dim,
            window_record=window_record,
            main_record=main_record,
            index_record=index_record,
            block_bytes=block_bytes,
            slot_bytes=slot_bytes,
            ring_stride=ring_stride,
            state_stride=state_stride,
            main_parts=main_parts,
            index_parts=index_parts,
            ring_offsets=ring_offsets,
            state_offsets=state_offsets,
            divide=numerics.reference,
            stored_ring_layers=topology.n_prefill_layer,
        )
