"""Formats, pools and step metadata on a CUDA device give the bits of the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.metadata import build_decode, build_prefill
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.ops import formats
from deepinfer_ray.ops.numerics import Numerics

pytestmark = pytest.mark.gpu


def layer(index: int, ratio: int = 0, source: bool = False, draft: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        index=index, ratio=ratio, is_kv_source=source, is_index_k_source=source, is_draft=draft
    )


def layout_of(mode: Any) -> CacheLayout:
    layers = (layer(0), layer(1, 2, True), layer(2, 2), layer(3, 1, True), layer(4, draft=True))
    text = SimpleNamespace(head_dim=512, index_head_dim=128, sliding_window=128, use_fp4_sparse_kv=True)
    topology = SimpleNamespace(layers=layers, ratios=(1, 2), n_prefill_layer=3)
    return CacheLayout.build(cast(Any, SimpleNamespace(text=text, topology=topology)), Numerics(mode), 5)


def edge_rows() -> torch.Tensor:
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(3))
    x[:100] *= torch.logspace(-38, 38, 100)[:, None]
    x[0], x[1] = 0.0, -0.0
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64)
    x[3, 7], x[4, 9] = float("inf"), float("nan")
    return formats.bf16_round(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values and signs of zero; NaN equals NaN."""
    a, b = a.cpu(), b.cpu()
    if a.dtype != torch.float32:
        return torch.equal(a, b)
    both_nan = a.isnan() & b.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.view(torch.int32)[~both_nan], b.view(torch.int32)[~both_nan]
    )


def test_recipes_give_the_same_bytes_and_values():
    x = edge_rows()
    finite = torch.arange(300) > 4
    for quantize, dequantize in (
        (formats.quantize_fp8_groups, formats.dequant_fp8_groups),
        (formats.quantize_index, formats.dequant_index),
        (formats.quantize_kv, formats.dequant_kv),
    ):
        cpu, cuda = quantize(x), quantize(x.cuda())
        for a, b in zip(cpu, cuda, strict=True):
            assert torch.equal(a[finite], b.cpu()[finite])
        assert same_bits(dequantize(*cpu), dequantize(*(t.cuda() for t in cpu)))
    for fake in (formats.bf16_round, formats.fake_quant_fp8, formats.fake_quant_index, formats.fake_quant_kv):
        assert same_bits(fake(x), fake(x.cuda()))
    assert same_bits(formats.fake_quant_kv(x, divide=True), formats.fake_quant_kv(x.cuda(), divide=True))


def test_every_code_decodes_alike():
    codes = torch.arange(256, dtype=torch.uint8)
    for decode in (formats.decode_e4m3, formats.decode_ue8m0, formats.decode_e2m1_packed):
        assert same_bits(decode(codes), decode(codes.cuda()))
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 1e30, 465.0, -0.1])
    for encode in (formats.encode_e4m3, formats.encode_e2m1):
        assert torch.equal(encode(x) & 0x7F, encode(x.cuda()).cpu() & 0x7F)


@pytest.mark.parametrize("mode", ["released", "exact"])
def test_pools_hold_the_same_bytes(mode: str):
    layout = layout_of(mode)
    pools = {device: CachePools(layout, 8, 4, device) for device in ("cpu", "cuda")}
    x = edge_rows()[5:69]
    ring = torch.randperm(2 * layout.ring_rows)[:64] + layout.ring_rows
    ring[10] = -1
    for device, pool in pools.items():
        values, ids = x.to(device), ring.to(device)
        pool.store_window(2, values, ids)
        for owner in (1, 3):
            pool.store_entries(owner, values, ids)
            pool.store_index_keys(owner, values[:, :128].contiguous(), ids)
        pool.store_state(1, values[:28].view(14, 2, 512), torch.arange(7, 21, device=device))
    assert torch.equal(pools["cpu"].blocks[1:], pools["cuda"].blocks[1:].cpu())
    assert torch.equal(pools["cpu"].slots[1:], pools["cuda"].slots[1:].cpu())
    for name, owner in (("load_window", 2), ("load_entries", 1), ("load_entries", 3), ("load_index_keys", 3)):
        cpu, cuda = (getattr(pools[d], name)(owner, ring.to(d).view(8, 8)) for d in ("cpu", "cuda"))
        assert same_bits(cpu, cuda)
        assert not cuda[1, 2].any()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_metadata_arrives_unchanged(kind: str):
    layout = layout_of("released")
    arguments: dict[str, Any] = {
        "q": np.array([3, 1, 5]),
        "k": np.array([200, 9, 131]),
        "state_ids": np.array([1, 2, 3]),
        "block_tables": np.arange(1, 7).reshape(3, 2),
        "input_ids": np.arange(9),
        "ngram_ids": np.arange(36).reshape(9, 4),
    }
    build = build_prefill if kind == "prefill" else build_decode
    cpu, cuda = (build(layout, (1, 2), **arguments, device=device) for device in ("cpu", "cuda"))
    for owner, other in ((cpu, cuda), *((cpu.ratios[r], cuda.ratios[r]) for r in (1, 2))):
        for name in owner.__dataclass_fields__:
            a, b = getattr(owner, name), getattr(other, name)
            if isinstance(a, torch.Tensor):
                assert b.device.type == "cuda"
                assert torch.equal(a, b.cpu()), name
