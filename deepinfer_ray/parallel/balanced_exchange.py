"""`BalancedExchange`: any expert exchange with a movable placement of experts around it.

Knows: the router speaks of logical experts, the transport of slots; what arrives is counted. Does not know:
how rows travel, when the placement changes.
"""

from __future__ import annotations

import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.expert_exchange import ExpertExchange, Received
from deepinfer_ray.parallel.rebalance import LayerRouting


class BalancedExchange:
    """`ExpertExchange` of one layer: logical experts in, replicas chosen by row, received rows counted."""

    def __init__(self, inner: ExpertExchange, routing: LayerRouting) -> None:
        slots = routing.counters.counts.shape[1]
        if inner.num_local_experts != slots:
            raise ConfigError(
                f"an exchange for {inner.num_local_experts} local experts cannot serve {slots} slots a rank"
            )
        self.inner, self.routing = inner, routing
        self.num_local_experts, self.is_local = inner.num_local_experts, inner.is_local

    def dispatch(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> Received:
        """As the transport's, but `experts_Tk` are logical (-1 = no expert); row i picks its replica by i."""
        received = self.inner.dispatch(x_TD, self.routing.to_physical(experts_Tk), weights_Tk)
        self.routing.count(received.experts)
        return received

    def combine(self, out_RkD: torch.Tensor, received: Received) -> torch.Tensor:
        return self.inner.combine(out_RkD, received)
