"""The head: final norm and logits (model spec §3.8).

Knows: rounding point 25. Does not know: sampling; only the rows that are sampled are multiplied.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.config.hf import TextConfig
from deepinfer_ray.ops.linear import linear
from deepinfer_ray.ops.norm import rounded_rms_norm
from deepinfer_ray.ops.numerics import Numerics


class Head(nn.Module):
    """Norm of the collapsed stream and the vocabulary product."""

    def __init__(self, text: TextConfig, numerics: Numerics) -> None:
        super().__init__()
        self.numerics, self.eps = numerics, text.rms_norm_eps
        self.norm = nn.Parameter(torch.empty(text.hidden_size), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(text.vocab_size, text.hidden_size), requires_grad=False)

    def normed(self, h_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] normed and rounded."""
        return rounded_rms_norm(h_TD, self.norm, self.eps, self.numerics)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """float32 [N, V], never rounded."""
        return linear(hidden_ND, self.weight)
