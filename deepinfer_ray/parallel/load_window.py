"""What experts had to do: token counts of a step, the window that the balancer sees, the load-balance figure.

Knows: counting on the device without asking it anything, logical ids, the sums of spec/distributed.md
§4.1–4.3 and §4.8. Does not know: when to rebalance (`rebalance.py`), how placements are made (`balancer.py`).

Counts are turned to logical ids when they are recorded, under the map that the step ran with: a window may
reach back behind a rebalance.

Shape letters: Y layers, n slots of this rank, L logical experts, E ranks, R received rows, k slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.rank_group import RankGroup


class ExpertCounters:
    """Tokens that each local slot received in the current step, from all ranks: int32 [Y, n] on a device."""

    def __init__(self, num_layers: int, num_local: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_layers, num_local, dtype=torch.int32, device=device)

    def add(self, layer: int, experts_Rk: torch.Tensor) -> None:
        """Count received rows by their local slot (int64 [R, k], -1 = none of this rank's)."""
        flat = experts_Rk.reshape(-1)
        self.counts[layer].index_add_(0, flat.clamp_min(0), (flat >= 0).int())

    def reset(self) -> None:
        """Once at the end of every step."""
        self.counts.zero_()


class LoadWindow:
    """Counts of the last `steps` recorded steps by logical expert: int32 [steps, Y, L], this rank's part.

    Steps that have not been yet are zeros.
    """

    def __init__(
        self, steps: int, num_layers: int, num_logical: int, device: torch.device | str = "cpu"
    ) -> None:
        if steps < 1:
            raise ConfigError(f"eplb.window must be at least 1 step, got {steps}")
        self.counts = torch.zeros(steps, num_layers, num_logical, dtype=torch.int32, device=device)
        self.next = 0

    def record(self, counts_Yn: torch.Tensor, local_experts_Yn: torch.Tensor) -> None:
        """Take over a step's counters; `local_experts_Yn` (int64) is the map that the step ran with."""
        row = self.counts[self.next]
        row.zero_()
        row.scatter_add_(1, local_experts_Yn, counts_Yn)
        self.next = (self.next + 1) % len(self.counts)

    def total(self, group: RankGroup) -> np.ndarray:
        """int32 [steps, Y, L] over all ranks; collective."""
        summed = self.counts.clone()
        group.sum(summed)
        result: np.ndarray = summed.cpu().numpy()
        return result


class LoadBalance(NamedTuple):
    """Sums over steps and layers; their ratio is the reported figure, 1 = perfect."""

    most: float
    """Σ of the busiest rank's tokens."""
    mean: float
    """Σ of the mean rank's tokens."""

    def __add__(self, other: object) -> LoadBalance:
        if not isinstance(other, LoadBalance):
            return NotImplemented
        return LoadBalance(self.most + other.most, self.mean + other.mean)

    @property
    def ratio(self) -> float:
        """`moe_lb`: slowest rank over mean, weighted by tokens; 1 without any."""
        return self.most / self.mean if self.mean else 1.0


class LoadMeter:
    """The load-balance figure: tokens of this rank by step and layer, gathered every `interval` steps.

    A gather's result is handed out one step later, when the device has long computed it.
    """

    def __init__(self, interval: int, num_layers: int, device: torch.device | str = "cpu") -> None:
        if interval < 1:
            raise ConfigError(f"eplb.stat_interval must be at least 1 step, got {interval}")
        self.tokens = torch.zeros(interval, num_layers, dtype=torch.int64, device=device)
        self.filled = 0
        self._pending: torch.Tensor | None = None
        self._ranks = 1

    def record(self, counters: Sequence[torch.Tensor], group: RankGroup) -> LoadBalance | None:
        """After a step: int32 [Y, n] of every group of layers. Collective when the interval is full; returns
        the figures that the step before gathered."""
        done = self.take()
        torch.cat([counts.sum(1) for counts in counters], out=self.tokens[self.filled])
        self.filled += 1
        if self.filled == len(self.tokens):
            self.filled = 0
            by_rank = group.gather(self.tokens)  # [E, interval, Y]
            self._pending = torch.stack((by_rank.amax(0).sum(), by_rank.sum()))
        self._ranks = group.size
        return done

    def take(self) -> LoadBalance | None:
        """What was gathered and not yet handed out."""
        if self._pending is None:
            return None
        most, total = self._pending.tolist()
        self._pending = None
        return LoadBalance(float(most), total / self._ranks)
