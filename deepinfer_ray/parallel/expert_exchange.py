"""How token rows reach the experts that process them, and how the results come home.

Knows: the contract of a transport and the one without communication. Does not know: expert weights, routing.
A transport delivers every token row once to each rank that owns one of its experts, and returns one row per
(token, slot), so that the owner can add them in slot order (model spec §3.7; distributed spec §3.6).

Shape letters: T own rows, R received rows, k slots, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Received:
    """Rows that this rank's experts process."""

    rows: torch.Tensor
    """[R, D]."""
    experts: torch.Tensor
    """int64 [R, k] local expert of each slot, -1 = none of this rank's."""
    weights: torch.Tensor
    """float32 [R, k] routing weight of each slot, 0 where the expert is -1."""
    handle: Any = None
    """What the transport needs to send the results back."""


class ExpertExchange(Protocol):
    """Dispatch and combine of one rank. Every call accepts zero rows (a rank without work takes part)."""

    num_local_experts: int
    is_local: bool
    """True if received rows are the own rows, in order: further work may then be fused with the experts."""

    def dispatch(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> Received:
        """Send rows to the owners of their physical experts (int64, -1 = no expert)."""
        ...

    def combine(self, out_RkD: torch.Tensor, received: Received) -> torch.Tensor:
        """[T, k, D]: the results of the own rows, one per slot, zeros where the expert was -1."""
        ...


class LocalExchange:
    """All experts on this rank: rows stay where they are."""

    is_local = True

    def __init__(self, num_local_experts: int) -> None:
        self.num_local_experts = num_local_experts

    def dispatch(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> Received:
        return Received(x_TD, experts_Tk, weights_Tk)

    def combine(self, out_RkD: torch.Tensor, received: Received) -> torch.Tensor:
        return out_RkD
