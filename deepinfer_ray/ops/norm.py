"""RMS normalization (model spec §3.5).

Knows: the statistic, the order of the products, the rounding behind them. Does not know: layers.
"""

from __future__ import annotations

import torch

from deepinfer_ray.ops import native
from deepinfer_ray.ops.constants import constant
from deepinfer_ray.ops.numerics import Numerics


def squares(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]: sum of the squares over the last dimension."""
    return (x * x).sum(-1, True)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., 1]: `rsqrt(mean(x²) + eps)` over the last dimension."""
    return (squares(x) / constant(x.shape[-1]) + constant(eps)).rsqrt()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 `(x · rsqrt(mean(x²) + eps)) · weight` over the last dimension.

    eps is 1e-20 in the text model, so a zero row gives a zero row; it must reach the sum in float32.
    """
    return x * inverse_rms(x, eps) * weight


def rounded_rms_norm(
    x_Tn: torch.Tensor, weight: torch.Tensor, eps: float, numerics: Numerics
) -> torch.Tensor:
    """`b(rms_norm(x))` of rows [T, n]."""
    if native.ready(x_Tn) and x_Tn.stride(1) == 1:
        return native.norm_rows(x_Tn, squares(x_Tn), weight, eps, not numerics.exact)
    return numerics.b(rms_norm(x_Tn, weight, eps))
