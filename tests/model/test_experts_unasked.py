"""Experts without asking the device which are hit: the same bits as counting and as packed weights."""

from __future__ import annotations

import pytest
import torch

from deepinfer_ray.model import moe
from deepinfer_ray.model.moe import Activation, PackedExperts, StackedExperts
from deepinfer_ray.ops.formats import dequant_mxfp4_weight, quantize_mxfp4_weight
from deepinfer_ray.ops.numerics import Numerics

EXPERTS, HIDDEN, WIDTH, ROWS, SLOTS = 7, 64, 32, 50, 3


@pytest.fixture
def holders() -> tuple[PackedExperts, StackedExperts]:
    generator = torch.Generator().manual_seed(0)
    packed = PackedExperts(EXPERTS, HIDDEN, WIDTH)
    stacked = StackedExperts(EXPERTS, HIDDEN, WIDTH)
    with torch.no_grad():
        for name, shape in (("w13", (2 * WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH))):
            codes, scales = quantize_mxfp4_weight(torch.randn(EXPERTS, *shape, generator=generator))
            getattr(packed, name).copy_(codes)
            getattr(packed, f"{name}_scale").copy_(scales)
            getattr(stacked, name).copy_(dequant_mxfp4_weight(codes, scales).transpose(1, 2))
    return packed, stacked


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, experts (some slots and a whole row without one), weights."""
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(ROWS, HIDDEN, generator=generator)
    experts_Tk = torch.stack([torch.randperm(EXPERTS, generator=generator)[:SLOTS] for _ in range(ROWS)])
    experts_Tk[3], experts_Tk[5, 1] = -1, -1
    weights_Tk = torch.rand(ROWS, SLOTS, generator=generator).masked_fill(experts_Tk < 0, 0.0)
    return x_TD, experts_Tk, weights_Tk


@pytest.mark.parametrize("group", [1, 3, EXPERTS])
def test_all_packed_experts_in_groups(
    holders: tuple[PackedExperts, StackedExperts], monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    packed, _ = holders
    act = Activation(Numerics("released"), 10.0)
    monkeypatch.setattr(moe, "DEVICE_BYTES", 4 * WIDTH * 3 * HIDDEN * group)
    want = packed(*routed(), act)
    assert want.abs().max() > 1
    assert torch.equal(packed.all_experts(*routed(), act), want)


def test_whole_tiles_of_stacked_experts(holders: tuple[PackedExperts, StackedExperts]) -> None:
    packed, stacked = holders
    act = Activation(Numerics("released"), 10.0)
    real = (routed()[1] >= 0).view(-1)
    want = packed(*routed(), act)[real]
    assert torch.equal(stacked(*routed(), act)[real], want)
    assert torch.equal(stacked.tile(*routed(), act, count=False)[real], want)
