"""Experts: two ways to hold them, buffers of any capacity, physical experts, more than one rank."""

from dataclasses import dataclass

import pytest
import torch

from deepinfer_ray.model.moe import StackedExperts
from deepinfer_ray.parallel.expert_exchange import LocalExchange, Received

ROWS = [*range(1, 36), 48, 70, 200]


def _rows(count, width=64):
    torch.manual_seed(count)
    return torch.randn(count, width).bfloat16().float()


@pytest.mark.parametrize("kind", ["tinyB", "tinyA"])
@pytest.mark.parametrize("mode", ["exact", "released"])
def test_packed_experts_have_the_bits_of_stacked_ones(harness, kind, mode):
    stacked = harness.load_model(kind, mode).blocks[3].ffn
    packed = harness.load_model(kind, mode, budget=0).blocks[3].ffn
    assert type(stacked.experts).__name__ == "StackedExperts"
    assert type(packed.experts).__name__ == "PackedExperts"
    for count in (1, 2, 5, 16, 33):
        v = _rows(count)
        assert torch.equal(stacked.compute(v), packed.compute(v)), count


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_rows_do_not_depend_on_their_number_or_on_the_buffers(harness, mode):
    """Up to 16 rows every buffer is the rows themselves; more rows are packed as tightly as they fit."""
    moe = harness.load_model("tinyA", mode).blocks[0].ffn
    v = _rows(256)
    want = moe.compute(v)
    for count in ROWS:
        own = slice(count % 11, count % 11 + count)
        assert torch.equal(moe.compute(v[own]), want[own]), count
    skewed = v[:1].expand(40, -1).clone()
    assert torch.equal(moe.compute(skewed), want[:1].expand(40, -1))


def test_the_number_of_experts_in_the_stack_changes_no_bit(harness):
    """A rank that owns half of the experts computes the same rows."""
    moe = harness.load_model("tinyA", "released").blocks[1].ffn
    full = moe.experts
    half = StackedExperts(4, full.w13.shape[1], full.w13.shape[2] // 2)
    half.w13.data, half.w2.data = full.w13[2:6].clone(), full.w2[2:6].clone()
    for count in (1, 7, 16, 50):
        x, weights = moe.numerics.q8(_rows(count)), torch.rand(count, 2)
        local = torch.stack((torch.arange(count) % 4, (torch.arange(count) + 1) % 4), dim=1)
        want = full(x, local + 2, weights, moe.act)
        assert torch.equal(half(x, local, weights, moe.act), want)


def test_replicas_of_an_expert_give_the_same_rows(harness):
    """The physical map may send rows to any copy; the identity map is the default."""
    moe = harness.load_model("tinyB", "released").blocks[2].ffn
    v = _rows(9)
    want = moe.compute(v)
    swapped = torch.tensor([1, 0, 2, 3, 4, 5])
    full = moe.experts
    order = [*swapped.tolist(), 6]
    moved = StackedExperts(7, full.w13.shape[1], full.w13.shape[2] // 2)
    moved.w13.data, moved.w2.data = full.w13[order].clone(), full.w2[order].clone()
    try:
        moe.experts, moe.physical = moved, swapped
        assert torch.equal(moe.compute(v), want)
    finally:
        moe.experts, moe.physical = full, None


@dataclass
class _TwoHalves:
    """A transport whose received rows are not the own rows: each of two owners sees all rows, reversed."""

    num_local_experts: int = 6
    is_local: bool = False

    def dispatch(self, x, experts, weights):
        low = experts < 3
        rows = torch.cat((x.flip(0), x.flip(0)))
        halves = [(low, experts), (~low, experts)]
        ids = torch.cat([e.masked_fill(~keep, -1).flip(0) for keep, e in halves])
        w = torch.cat([weights.masked_fill(~keep, 0.0).flip(0) for keep, _ in halves])
        return Received(rows, ids, w, low)

    def combine(self, out, received):
        low = received.handle.unsqueeze(-1)
        first, second = out.flip(0).chunk(2)[::-1]
        return torch.where(low, first, second)


@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_a_remote_transport_gives_the_local_bits(harness, count):
    moe = harness.load_model("tinyB", "released").blocks[1].ffn
    v = _rows(count)
    want = moe.compute(v)
    local, fused = moe.exchange, moe.shared_expert
    shared13, shared2 = moe.experts.w13[-1].t(), moe.experts.w2[-1].t()
    try:
        moe.exchange = _TwoHalves()
        moe.shared_w13, moe.shared_w2 = (torch.nn.Parameter(w, False) for w in (shared13, shared2))
        assert torch.equal(moe.compute(v), want)
    finally:
        moe.exchange, moe.shared_w13, moe.shared_w2 = local, None, None
    assert fused == 6
    assert isinstance(local, LocalExchange)


def test_a_rank_without_rows_takes_part(harness):
    moe = harness.load_model("tinyB", "released").blocks[1].ffn
    assert moe.compute(torch.zeros(0, 64)).shape == (0, 64)
