"""The caches of one rank as byte pools: `[num_blocks, block_bytes]` and `[num_slots, slot_bytes]`.

Knows: how a record id becomes bytes, how vectors are stored and loaded, copies of whole slots and blocks.
Does not know: who owns a block or slot, which tokens a record stands for, layers that own nothing.

Record ids (attention spec §11): window records `slot * S + pos % S`, state rows `slot * C + pos % C`,
entries `block * (128/r) + offset`. The id -1 is legal everywhere: a store drops the vector, a load yields
zeros. Neither needs a mask: each pool has one hidden unit in front of unit 0 that stays zero, where the
arithmetic of id -1 leads by itself, and stores of -1 are sent to unit 0, which belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_ray.cache import quant
from deepinfer_ray.cache.checks import check_layout
from deepinfer_ray.cache.layout import CacheLayout, RecordFormat
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops import native
from deepinfer_ray.ops.formats import INDEX_GROUP, KV_GROUP, e4m3_values

POISON_BYTE = 0xFF
"""Decodes to NaN as e4m3 code, as ue8m0 or e4m3 scale, and as float32."""


@dataclass(slots=True)
class _Rows:
    """Equally long byte rows spread over a pool: `per_unit` of them in each block or slot.

    view: uint8 [rows, row_bytes] over the pool's storage, starting in the hidden unit; `pitch` rows lead
    from one unit to the next.
    """

    view: torch.Tensor
    per_unit: int
    pitch: int

    @classmethod
    def over(cls, storage: torch.Tensor, offset: int, row_bytes: int, per_unit: int) -> _Rows:
        unit_bytes = storage.shape[1]
        assert unit_bytes % row_bytes == 0, (unit_bytes, row_bytes)
        rows = (storage.numel() - offset) // row_bytes
        view = storage.as_strided((rows, row_bytes), (row_bytes, 1), offset)
        return cls(view, per_unit, unit_bytes // row_bytes)

    def load_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """View rows of record ids; -1 floors to the hidden unit."""
        unit = torch.div(ids, self.per_unit, rounding_mode="floor")
        return ids + (unit * (self.pitch - self.per_unit) + self.pitch)

    def store_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """View rows of record ids; -1 goes to the first record of unit 0."""
        return self.load_rows(ids.clamp(min=0))


@dataclass(slots=True)
class _Paged:
    """Rows of one layer's part of the blocks; `scales` is set where they lie apart from the codes."""

    record: RecordFormat
    data: _Rows
    scales: _Rows | None = None


class CachePools:
    """Typed reads and writes over the byte pools of one rank.

    layout: byte positions. num_blocks, num_slots: pool sizes, block 0 and slot 0 (for padding) included.
    Both pools are zeroed at allocation. Stores take float32 vectors, loads give float32.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 2 or num_slots < 2:
            raise ConfigError(
                f"a cache of {num_blocks} blocks and {num_slots} slots holds no sequence: block 0 and slot 0 "
                "are padding, so at least 2 of each are needed"
            )
        check_layout(layout)
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.device = torch.device(device)
        blocks = torch.zeros(num_blocks + 1, layout.block_bytes, dtype=torch.uint8, device=device)
        slots = torch.zeros(num_slots + 1, layout.slot_bytes, dtype=torch.uint8, device=device)
        self._block_storage, self._slot_storage = blocks, slots
        ring = layout.window_record.bytes
        self._rings = {
            layer: _Rows.over(slots, offset, ring, layout.ring_rows)
            for layer, offset in layout.ring_offsets.items()
        }
        self._main = {
            layer: _Paged(part.record, _Rows.over(blocks, part.offset, part.record.bytes, part.entries))
            for layer, part in layout.main_parts.items()
        }
        self._index = {
            layer: _Paged(
                part.record,
                _Rows.over(blocks, part.offset, part.record.data_bytes, part.entries),
                _Rows.over(blocks, part.scale_offset, part.record.scale_bytes, part.entries)
                if part.record.scale_bytes
                else None,
            )
            for layer, part in layout.index_parts.items()
        }
        floats = slots.view(torch.float32)
        shape = (num_slots + 1, layout.state_rows, 2, layout.head_dim)
        stride = (layout.slot_bytes // 4, 2 * layout.head_dim, layout.head_dim, 1)
        self._states = {
            layer: floats.as_strided(shape, stride, offset // 4)
            for layer, offset in layout.state_offsets.items()
        }

    @property
    def blocks(self) -> torch.Tensor:
        """uint8 [num_blocks, block_bytes], the paged pool."""
        return self._block_storage[1:]

    @property
    def slots(self) -> torch.Tensor:
        """uint8 [num_slots, slot_bytes], the state pool."""
        return self._slot_storage[1:]

    @property
    def nbytes(self) -> int:
        """Bytes of both pools, the hidden units included."""
        return self._block_storage.numel() + self._slot_storage.numel()

    # Window rings ---------------------------------------------------------------------------------------

    def store_window(self, layer: int, x_Nd: torch.Tensor, records_N: torch.Tensor) -> None:
        """Write latents float32 [N, d] to the ring of `layer` at records [N]; valid records are unique."""
        self.store_window_rows(layer, x_Nd, self.window_rows(records_N.clamp(min=0)))

    def load_window(self, layer: int, records: torch.Tensor) -> torch.Tensor:
        """float32 [..., d] latents of the ring of `layer` at records [...]."""
        return self.load_window_rows(layer, self.window_rows(records))

    def window_rows(self, records: torch.Tensor) -> torch.Tensor:
        """Ring rows of record ids, the same for every layer: a step converts its ids once.

        For loads -1 is legal; for stores the caller clamps it to 0, the record that belongs to nobody.
        """
        return next(iter(self._rings.values())).load_rows(records)

    def store_window_rows(self, layer: int, x_Nd: torch.Tensor, rows_N: torch.Tensor) -> None:
        """`store_window` at rows of `window_rows`."""
        record, view = self.layout.window_record, self._rings[layer].view
        if record.kind == "fp8" and native.ready(x_Nd) and x_Nd.stride(1) == 1:
            native.store_fp8(x_Nd, view, rows_N)
        else:
            view.index_copy_(0, rows_N, quant.encode_record(record, x_Nd))

    def load_window_rows(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """`load_window` at rows of `window_rows`."""
        record, view = self.layout.window_record, self._rings[layer].view
        if record.kind == "fp8" and native.ready(view):
            return native.load_fp8(view, rows, record.width).view(*rows.shape, record.width)
        flat = view.index_select(0, rows.view(-1))
        return quant.decode_record(record, flat).view(*rows.shape, record.width)

    # Compressed entries and index keys ------------------------------------------------------------------

    def store_entries(self, layer: int, x_Ed: torch.Tensor, slots_E: torch.Tensor) -> None:
        """Write rotated compressed latents float32 [E, d] of KV source `layer` to entry slots [E]."""
        paged = self._main[layer]
        record, view, rows = paged.record, paged.data.view, paged.data.store_rows(slots_E)
        if record.kind == "fp4_kv" and native.ready(view):
            codes, scales = view[:, : record.data_bytes], view[:, record.data_bytes :]
            table = e4m3_values(view.device)
            native.store_fp4(x_Ed, codes, rows, scales, rows, KV_GROUP, table, self.layout.divide)
            return
        data = quant.encode_record(record, x_Ed, divide=self.layout.divide)
        view.index_copy_(0, rows, data)

    def load_entries(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """float32 [..., d] compressed latents of KV source `layer` at entry slots [...]."""
        paged = self._main[layer]
        record, view, rows = paged.record, paged.data.view, paged.data.load_rows(slots)
        if record.kind == "fp4_kv" and native.ready(view):
            codes, scales = view[:, : record.data_bytes], view[:, record.data_bytes :]
            table = e4m3_values(view.device)
            out = native.load_fp4(codes, rows, scales, rows, record.width, KV_GROUP, table)
            return out.view(*slots.shape, record.width)
        flat = view.index_select(0, rows.reshape(-1))
        return quant.decode_record(record, flat).view(*slots.shape, record.width)

    def store_index_keys(self, layer: int, x_Ed: torch.Tensor, slots_E: torch.Tensor) -> None:
        """Write index keys float32 [E, di] of index-key source `layer` to entry slots [E]."""
        paged = self._index[layer]
        if paged.scales is not None and native.ready(paged.data.view):
            rows, scale_rows = paged.data.store_rows(slots_E), paged.scales.store_rows(slots_E)
            native.store_fp4(x_Ed, paged.data.view, rows, paged.scales.view, scale_rows, INDEX_GROUP, None)
            return
        codes, scales = quant.encode(paged.record, x_Ed)
        paged.data.view.index_copy_(0, paged.data.store_rows(slots_E), codes)
        if paged.scales is not None:
            paged.scales.view.index_copy_(0, paged.scales.store_rows(slots_E), scales)

    def load_index_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """float32 [..., di] index keys of index-key source `layer` at entry slots [...]."""
        paged = self._index[layer]
        if paged.scales is not None and native.ready(paged.data.view):
            rows, scale_rows = paged.data.load_rows(slots), paged.scales.load_rows(slots)
            width = paged.record.width
            out = native.load_fp4(
                paged.data.view, rows, paged.scales.view, scale_rows, width, INDEX_GROUP, None
            )
            return out.view(*slots.shape, width)
        codes = paged.data.view.index_select(0, paged.data.load_rows(slots).reshape(-1))
        if paged.scales is None:
            scales = codes[:, :0]
        else:
            scales = paged.scales.view.index_select(0, paged.scales.load_rows(slots).reshape(-1))
        return quant.decode(paged.record, codes, scales).view(*slots.shape, paged.record.width)

    # Compression state ----------------------------------------------------------------------------------

    def _state_index(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot (counted from the hidden one) and ring row of flat state rows."""
        ring = self.layout.state_rows
        slot = torch.div(rows, ring, rounding_mode="floor")
        return slot + 1, rows - slot * ring

    def store_state(self, layer: int, score_latent_N2d: torch.Tensor, rows_N: torch.Tensor) -> None:
        """Write (score, latent) float32 [N, 2, d] of ratio-2 source `layer` to state rows [N]."""
        self._states[layer].index_put_(self._state_index(rows_N.clamp(min=0)), score_latent_N2d.detach())

    def load_state(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., 2, d] (score, latent) of ratio-2 source `layer` at state rows [...]."""
        return self._states[layer][self._state_index(rows)]

    # Whole units ----------------------------------------------------------------------------------------

    def clone_slots(self, src: Sequence[int] | torch.Tensor, dst: Sequence[int] | torch.Tensor) -> None:
        """Copy whole state slots `src[i]` → `dst[i]` (a fork's state)."""
        self.slots[self._ids(dst, self.num_slots, "slot")] = self.slots[
            self._ids(src, self.num_slots, "slot")
        ]

    def clone_blocks(self, src: Sequence[int] | torch.Tensor, dst: Sequence[int] | torch.Tensor) -> None:
        """Copy whole blocks `src[i]` → `dst[i]` (a fork's last partial block)."""
        self.blocks[self._ids(dst, self.num_blocks, "block")] = self.blocks[
            self._ids(src, self.num_blocks, "block")
        ]

    def export_slot(self, slot: int) -> torch.Tensor:
        """uint8 [slot_bytes] copy of a state slot on the host."""
        return self.slots[self._ids([slot], self.num_slots, "slot")[0]].clone().cpu()

    def import_slot(self, slot: int, data: torch.Tensor) -> None:
        """Write bytes of `export_slot` from a pool of the same layout."""
        self._check_bytes(data, (self.layout.slot_bytes,), "slot")
        self.slots[self._ids([slot], self.num_slots, "slot")[0]] = data.to(self.device)

    def export_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """uint8 [len(blocks), block_bytes] copy of blocks on the host."""
        return self.blocks[self._ids(blocks, self.num_blocks, "block")].cpu()

    def import_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        """Write bytes of `export_blocks` from a pool of the same layout."""
        self._check_bytes(data, (len(blocks), self.layout.block_bytes), "block")
        self.blocks[self._ids(blocks, self.num_blocks, "block")] = data.to(self.device)

    def poison(self, slots: Sequence[int] = (), blocks: Sequence[int] = ()) -> None:
        """Debug: fill freed slots and blocks with bytes that decode to NaN, so that a stale read shows."""
        if len(slots):
            self.slots[self._ids(slots, self.num_slots, "slot")] = POISON_BYTE
        if len(blocks):
            self.blocks[self._ids(blocks, self.num_blocks, "block")] = POISON_BYTE

    def _ids(self, ids: Sequence[int] | torch.Tensor, limit: int, what: str) -> torch.Tensor:
        tensor = torch.as_tensor(ids, dtype=torch.int64)
        if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < limit):
            raise ValueError(f"{what} ids {tensor.tolist()} are outside [0, {limit})")
        if self.device.type == "cuda":  # from ordinary memory the copy would wait for the device
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def _check_bytes(self, data: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
        if data.dtype != torch.uint8 or tuple(data.shape) != shape:
            raise ValueError(
                f"{what} bytes are {data.dtype} {tuple(data.shape)}; this layout needs uint8 {shape}"
            )
