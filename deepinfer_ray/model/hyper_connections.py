"""The hyper-connection of one sub-layer as a module: its three stored tensors and their use.

Knows: names and shapes of the tensors, rounding points 4, 6, 18 of model spec §9.2.
Does not know: which sub-layer it wraps; the pre-mix it returns belongs to the next one.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.config.hf import TextConfig
from deepinfer_ray.ops import hyper_connections as ops
from deepinfer_ray.ops.numerics import Numerics


class HyperConnection(nn.Module):
    """Coefficients, input mix and residual update of a sub-layer."""

    def __init__(self, text: TextConfig, numerics: Numerics) -> None:
        super().__init__()
        m = text.hc_mult
        self.numerics = numerics
        self.norm_eps, self.hc_eps, self.iterations = text.rms_norm_eps, text.hc_eps, text.hc_sinkhorn_iters
        self.fn = nn.Parameter(torch.empty((2 + m) * m, m * text.hidden_size), requires_grad=False)
        # The three stored factors, spread over their rows when loaded.
        self.scale = nn.Parameter(torch.empty((2 + m) * m), requires_grad=False)
        self.base = nn.Parameter(torch.empty((2 + m) * m), requires_grad=False)

    def mix(self, x_TmD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(pre for the next sub-layer, post, comb) of the residual copies, float32."""
        return ops.mix(x_TmD, self.fn, self.scale, self.base, self.norm_eps, self.hc_eps, self.iterations)

    def update(
        self, x_TmD: torch.Tensor, y_TD: torch.Tensor, post_Tm: torch.Tensor, comb_Tmm: torch.Tensor
    ) -> torch.Tensor:
        """Residual copies after the sub-layer's output y, rounded."""
        return self.numerics.b(ops.update(x_TmD, y_TD, post_Tm, comb_Tmm))


def spread_scale(scale_3: torch.Tensor, m: int) -> torch.Tensor:
    """[(2+m)m] from the three stored factors: m times pre, m times post, m·m times comb."""
    return scale_3.repeat_interleave(torch.tensor([m, m, m * m], device=scale_3.device))
