"""Stores and loads over the byte pools: exact bytes, skipped ids, copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.load_plan import flat_records
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops import formats
from deepinfer_ray.ops.numerics import Numerics

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "ops" / "kv_quant.safetensors"


@pytest.fixture(params=["released", "exact"])
def pools(request: pytest.FixtureRequest, build: Callable[..., CacheLayout]) -> CachePools:
    return CachePools(build(5, mode=request.param), num_blocks=5, num_slots=4)


def rows(n: int, width: int) -> torch.Tensor:
    return formats.bf16_round(torch.randn(n, width, generator=torch.Generator().manual_seed(n)))


def test_pools_are_zero_and_refuse_to_hold_padding_only(build: Callable[..., CacheLayout]):
    layout = build(0)
    pools = CachePools(layout, 3, 2)
    assert pools.blocks.shape == (3, layout.block_bytes)
    assert pools.slots.shape == (2, layout.slot_bytes)
    assert not pools.blocks.any()
    assert not pools.slots.any()
    with pytest.raises(
        ConfigError, match="1 blocks and 2 slots holds no sequence: block 0 and slot 0 are padding"
    ):
        CachePools(layout, 1, 2)


def test_window_records_lie_where_the_spec_says(build: Callable[..., CacheLayout]):
    layout = build(5)
    pools = CachePools(layout, 2, 4)
    x = rows(2, 64)
    pools.store_window(7, x, torch.tensor([2 * 22 + 21, 3 * 22]))
    codes, scales = formats.quantize_fp8_groups(x)
    expected = torch.cat((codes, scales), -1)
    at = layout.ring_offsets[7]
    assert torch.equal(pools.slots[2, at + 21 * 66 : at + 22 * 66], expected[0])
    assert torch.equal(pools.slots[3, at : at + 66], expected[1])
    pools.slots[2, at + 21 * 66 : at + 22 * 66] = 0
    pools.slots[3, at : at + 66] = 0
    assert not pools.slots.any()


def test_index_keys_are_segregated(build: Callable[..., CacheLayout]):
    layout = build(0)
    pools = CachePools(layout, 4, 2)
    x = rows(1, 32)
    pools.store_index_keys(8, x, torch.tensor([3 * 64 + 5]))
    codes, scales = formats.quantize_index(x)
    part = layout.index_parts[8]
    assert torch.equal(pools.blocks[3, part.offset + 5 * 16 : part.offset + 6 * 16], codes[0])
    assert pools.blocks[3, part.offset + 64 * 16 + 5] == scales[0, 0]
    assert int((pools.blocks != 0).sum()) <= 17


@pytest.mark.parametrize("layer", [0, 20, 42])
def test_window_round_trip(pools: CachePools, layer: int):
    ring, x = pools.layout.ring_rows, rows(6, 64)
    ids = torch.tensor([[ring, 2 * ring - 1, 2 * ring], [3 * ring + 4, 4 * ring - 1, 3 * ring]])
    pools.store_window(layer, x, ids.reshape(-1))
    expected = x if pools.layout.window_record.kind == "f32" else formats.fake_quant_fp8(x)
    assert torch.equal(pools.load_window(layer, ids), expected.view(2, 3, 64))


@pytest.mark.parametrize("layer", [2, 14, 20])
def test_entry_and_index_key_round_trip(pools: CachePools, layer: int):
    per_block = 128 if layer == 20 else 64
    ids = torch.tensor([per_block, 2 * per_block - 1, 3 * per_block, 4 * per_block + 7])
    x, keys = rows(4, 64), rows(4, 32)
    pools.store_entries(layer, x, ids)
    pools.store_index_keys(layer, keys, ids)
    exact = pools.layout.main_record.kind == "f32"
    assert torch.equal(pools.load_entries(layer, ids), x if exact else formats.fake_quant_kv(x))
    assert torch.equal(pools.load_index_keys(layer, ids), keys if exact else formats.fake_quant_index(keys))


def test_fp8_compressed_entries(small: ModelConfig):
    layout = CacheLayout.build(small.with_text(use_fp4_sparse_kv=False), Numerics(), 0)
    pools = CachePools(layout, 3, 2)
    x, ids = rows(3, 64), torch.tensor([64, 100, 191])
    pools.store_entries(2, x, ids)
    assert torch.equal(pools.load_entries(2, ids), formats.fake_quant_fp8(x))


def test_reference_variant_divides(build: Callable[..., CacheLayout]):
    pools = CachePools(build(0, variant="reference"), 3, 2)
    x, ids = load_file(GOLDEN)["x"].float()[:, :64], torch.arange(64, 108)
    pools.store_entries(2, x, ids)
    assert torch.equal(pools.load_entries(2, ids), formats.fake_quant_kv(x, divide=True))


def test_state_is_kept_exactly_and_layers_apart(pools: CachePools):
    ring = pools.layout.state_rows
    ids = torch.tensor([ring, 2 * ring - 1, 3 * ring])
    for layer in (2, 8, 14):
        pools.store_state(layer, torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(layer)), ids)
    for layer in (2, 8, 14):
        want = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(layer))
        assert torch.equal(pools.load_state(layer, ids.view(3, 1)), want.view(3, 1, 2, 64))


def test_every_region_is_its_own(build: Callable[..., CacheLayout]):
    """Fill every record of every layer with its own value, then read all of them back."""
    layout = build(2)
    pools = CachePools(layout, 3, 3)
    window_ids = torch.arange(layout.ring_rows, 3 * layout.ring_rows)
    state_ids = torch.arange(layout.state_rows, 3 * layout.state_rows)
    for layer in layout.ring_offsets:
        pools.store_window(layer, torch.full((len(window_ids), 64), 1.0 + layer), window_ids)
    for layer in layout.state_offsets:
        pools.store_state(layer, torch.full((len(state_ids), 2, 64), 100.0 + layer), state_ids)
    for layer, part in layout.main_parts.items():
        ids = torch.arange(part.entries, 3 * part.entries)
        pools.store_entries(layer, torch.full((len(ids), 64), 1.0 + layer / 2), ids)
        pools.store_index_keys(layer, torch.full((len(ids), 32), 2.0 ** (layer % 5)), ids)
    for layer in layout.ring_offsets:
        want = formats.fake_quant_fp8(torch.full((1, 64), 1.0 + layer))
        assert bool((pools.load_window(layer, window_ids) == want).all())
    for layer in layout.state_offsets:
        assert bool((pools.load_state(layer, state_ids) == 100.0 + layer).all())
    for layer, part in layout.main_parts.items():
        ids = torch.arange(part.entries, 3 * part.entries)
        want = formats.fake_quant_kv(torch.full((1, 64), 1.0 + layer / 2))
        assert bool((pools.load_entries(layer, ids) == want).all())
        assert bool((pools.load_index_keys(layer, ids) == 2.0 ** (layer % 5)).all())


def test_minus_one_loads_zeros_even_from_poisoned_pools(pools: CachePools):
    pools.poison(slots=range(4), blocks=range(5))
    ids = torch.tensor([-1, pools.layout.ring_rows])
    for loaded in (
        pools.load_window(3, ids),
        pools.load_entries(2, ids),
        pools.load_index_keys(20, ids),
        pools.load_state(8, torch.tensor([-1, pools.layout.state_rows])).flatten(1),
    ):
        assert not loaded[0].any()
        assert loaded[1].isnan().all()


def test_minus_one_stores_touch_padding_only(pools: CachePools):
    before_blocks, before_slots = pools.blocks[1:].clone(), pools.slots[1:].clone()
    skip = torch.full((3,), -1)
    pools.store_window(1, rows(3, 64), skip)
    pools.store_entries(2, rows(3, 64), skip)
    pools.store_index_keys(2, rows(3, 32), skip)
    pools.store_state(2, torch.ones(3, 2, 64), skip)
    assert torch.equal(pools.blocks[1:], before_blocks)
    assert torch.equal(pools.slots[1:], before_slots)
    for loaded in (pools.load_window(1, skip), pools.load_entries(2, skip), pools.load_index_keys(2, skip)):
        assert not loaded.any()
    assert not pools.load_state(2, skip).any()


def test_empty_stores_and_loads(pools: CachePools):
    none = torch.empty(0, dtype=torch.int64)
    pools.store_window(0, rows(0, 64), none)
    pools.store_entries(2, rows(0, 64), none)
    pools.store_state(2, torch.empty(0, 2, 64), none)
    assert pools.load_window(0, none).shape == (0, 64)
    assert pools.load_index_keys(2, none.view(0, 4)).shape == (0, 4, 32)


def test_wrong_width_is_refused(pools: CachePools):
    with pytest.raises(ValueError, match="holds 64 values, got a vector of 32"):
        pools.store_window(0, rows(1, 32), torch.tensor([40]))


def test_clone_export_import(pools: CachePools):
    ring = pools.layout.ring_rows
    pools.store_window(5, rows(1, 64), torch.tensor([ring + 3]))
    pools.store_entries(20, rows(1, 64), torch.tensor([128 + 9]))
    pools.clone_slots([1], [3])
    pools.clone_blocks(torch.tensor([1]), torch.tensor([4]))
    assert torch.equal(
        pools.load_window(5, torch.tensor([3 * ring + 3])), pools.load_window(5, torch.tensor([ring + 3]))
    )
    assert torch.equal(pools.blocks[4], pools.blocks[1])

    other = CachePools(pools.layout, 6, 5)
    other.import_slot(2, pools.export_slot(1))
    other.import_blocks([5, 2], pools.export_blocks([1, 0]))
    assert torch.equal(other.slots[2], pools.slots[1])
    assert torch.equal(other.blocks[5], pools.blocks[1])


def test_unit_ids_and_bytes_are_checked(pools: CachePools):
    with pytest.raises(ValueError, match=r"slot ids \[4\] are outside \[0, 4\)"):
        pools.clone_slots([1], [4])
    with pytest.raises(ValueError, match=r"block ids \[-1\] are outside \[0, 5\)"):
        pools.poison(blocks=[-1])
    with pytest.raises(ValueError, match=r"slot bytes are torch\.uint8"):
        pools.import_slot(1, torch.zeros(3, dtype=torch.uint8))


# Golden bytes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN)


@pytest.mark.parametrize(("name", "fp4"), [("fp4_288", True), ("fp8_528", False)])
def test_golden_store_and_load(flash: ModelConfig, golden: dict[str, torch.Tensor], name: str, fp4: bool):
    """Golden blocks 0 and 1 are our blocks 1 and 2: block 0 is padding here. A ratio-2 block holds 64."""
    layout = CacheLayout.build(flash.with_text(use_fp4_sparse_kv=fp4), Numerics(), 0)
    pools = CachePools(layout, 3, 2)
    slots = golden["slot_mapping"].long()
    pools.store_entries(8, golden["x"].float(), torch.where(slots >= 0, slots + 64, slots))
    part = layout.main_parts[8]
    stored = pools.blocks[1:, part.offset : part.offset + part.bytes].reshape(2, 64, part.record.bytes)
    assert torch.equal(stored, golden[f"{name}.cache_bytes"])
    segments = golden["load_segments"].numpy().copy()
    segments[:, 0] += segments[:, 0] >= 0
    loaded = pools.load_entries(8, torch.from_numpy(flat_records(segments, 60, 64)))
    assert torch.equal(loaded, golden[f"{name}.loaded"].float())


def test_golden_window_bytes(flash: ModelConfig, golden: dict[str, torch.Tensor]):
    layout = CacheLayout.build(flash, Numerics(), 0)
    pools = CachePools(layout, 2, 3)
    slots = golden["slot_mapping"].long()
    pools.store_window(30, golden["x"].float(), torch.where(slots >= 0, slots + 129, slots))
    at = layout.ring_offsets[30]
    stored = pools.slots[1, at : at + 128 * 528].reshape(2, 64, 528)
    assert torch.equal(stored, golden["fp8_528.cache_bytes"])


def test_golden_index_blocks(flash: ModelConfig, golden: dict[str, torch.Tensor]):
    layout = CacheLayout.build(flash, Numerics(), 0)
    pools = CachePools(layout, 3, 2)
    slots = golden["index_fp4.slot_mapping"].long() + 64
    pools.store_index_keys(14, golden["index_fp4.x"].float(), slots)
    part = layout.index_parts[14]
    stored = pools.blocks[1:, part.offset : part.offset + part.bytes]
    assert torch.equal(stored, golden["index_fp4.cache_block_bytes"])
    assert torch.equal(pools.load_index_keys(14, slots), golden["index_fp4.official_fake_quant"].float())
