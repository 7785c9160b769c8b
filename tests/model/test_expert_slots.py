"""Expert modules whose slots move: the layer computes the same bits under every placement."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.model.expert_slots import MoESlots, balance_layers
from deepinfer_ray.parallel.balancer import balance
from deepinfer_ray.parallel.expert_exchange import LocalExchange
from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.expert_slots import SlotLedger
from deepinfer_ray.parallel.rank_group import SingleRank
from deepinfer_ray.parallel.shuffle import ShufflePlan, WeightShuffle


def redundant(moe, placement: ExpertMap, layer: int):
    """A copy of a layer whose experts lie as the map says; a stacked shared expert stays last."""
    moved = copy.copy(moe)
    moved._modules, moved._parameters = dict(moe._modules), dict(moe._parameters)
    order = placement.local_experts(layer, 0)
    if moe.shared_expert is not None:
        order = [*order, moe.shared_expert]
        moved.shared_expert = len(order) - 1
    moved.experts = copy.copy(moe.experts)
    moved.experts._parameters = {
        name: nn.Parameter(value.detach()[order].clone(), requires_grad=False)
        for name, value in moe.experts.named_parameters()
    }
    moved.experts.experts = len(order)
    moved.exchange = LocalExchange(placement.num_physical)
    return moved


@pytest.mark.parametrize("budget", [1 << 30, 0], ids=["stacked", "packed"])
def test_rows_are_the_same_bits_before_and_after_a_shuffle(harness, budget):
    model = harness.load_model("tinyB", "released", budget=budget)
    originals = [model.blocks[layer].ffn for layer in (1, 2)]
    experts = originals[0].layer.num_experts
    placement = ExpertMap.initial(2, experts, 1, 3)
    layers = [redundant(moe, placement, index) for index, moe in enumerate(originals)]
    group = balance_layers(layers, placement, 0, window=1)
    ledger = SlotLedger(group.slots, placement, SingleRank())
    shuffle = WeightShuffle(group.slots, placement.num_local, SingleRank())
    torch.manual_seed(0)
    v = torch.randn(37, originals[0].gate.shape[1]).bfloat16().float()
    want = [moe.compute(v) for moe in originals]
    for _ in range(3):
        for moe, rows in zip(layers, want, strict=True):
            assert torch.equal(moe.compute(v), rows)
        counts = group.counters.counts
        assert counts.sum(1).tolist() == [37 * moe.k for moe in originals]
        group.window.record(counts, group.tables.local_experts)
        group.counters.reset()
        new = balance(group.window.total(SingleRank()) ** 2, 1, placement.num_extra)
        moved = shuffle.run(ShufflePlan.between(group.placement, new))
        assert moved.slots > 0 or new.flat().tolist() == group.placement.flat().tolist()
        group.placement = new
        group.tables.update(new)
        ledger.check(group.slots, new, SingleRank())
    assert new.flat().tolist() != placement.flat().tolist()


def test_experts_without_enough_slots_are_named(harness):
    moe = copy.copy(harness.load_model("tinyB", "released").blocks[1].ffn)
    moe.exchange = LocalExchange(99)
    with pytest.raises(ConfigError, match="layer 1: expert tensors hold fewer than 99 slots"):
        MoESlots([moe]).layer_tensors(0)
