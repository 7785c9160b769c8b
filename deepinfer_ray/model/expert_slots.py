"""Which tensors of a model's expert layers belong to a slot: what balancing moves.

Knows: every parameter of an expert module has the slot as its leading dimension; a shared expert stacked
behind the routed ones stays. Does not know: placements, transports.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.model.moe import MoE
from deepinfer_ray.parallel.balanced_exchange import BalancedExchange
from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.rebalance import LayerGroup


class MoESlots:
    """`ExpertSlots` of MoE layers. Looked up at each call: a module may replace its parameters."""

    def __init__(self, layers: Sequence[MoE]) -> None:
        self.layers = layers
        self.num_layers = len(layers)

    def layer_tensors(self, layer: int) -> list[torch.Tensor]:
        """[n, …] each: the routed slots of every parameter and buffer of the layer's experts."""
        moe = self.layers[layer]
        n = moe.exchange.num_local_experts
        tensors = [tensor.detach()[:n] for tensor in (*moe.experts.parameters(), *moe.experts.buffers())]
        if not tensors or any(len(tensor) != n for tensor in tensors):
            raise ConfigError(f"layer {moe.layer.index}: expert tensors hold fewer than {n} slots")
        return tensors


def balance_layers(
    layers: Sequence[MoE], placement: ExpertMap, ep_rank: int, window: int, device: torch.device | str = "cpu"
) -> LayerGroup:
    """The state of balancing for loaded layers of one layout, put around their exchanges.

    Each layer holds the experts of `placement.local_experts(i, ep_rank)` in this order.
    """
    group = LayerGroup(placement, MoESlots(layers), ep_rank, window, device)
    for index, layer in enumerate(layers):
        layer.exchange = BalancedExchange(layer.exchange, group.routing(index))
    return group
