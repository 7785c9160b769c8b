"""RMS normalization (model spec §3.5).

Knows: the statistic and the order of the products. Does not know: rounding; the caller rounds the result.
"""

from __future__ import annotations

import torch

from deepinfer_ray.ops.constants import constant


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., 1]: `rsqrt(mean(x²) + eps)` over the last dimension."""
    # sum and division: half the cost of mean on CPU.
    total = (x * x).sum(-1, True)
    return total.div_(constant(x.shape[-1])).add_(constant(eps)).rsqrt_()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 `(x · rsqrt(mean(x²) + eps)) · weight` over the last dimension.

    eps is 1e-20 in the text model, so a zero row gives a zero row; it must reach the sum in float32.
    """
    return x * inverse_rms(x, eps) * weight
