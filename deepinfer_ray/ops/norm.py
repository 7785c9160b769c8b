"""RMS normalization (model spec §3.5).

Knows: the statistic and the order of the products. Does not know: rounding; the caller rounds the result.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 `(x · rsqrt(mean(x²) + eps)) · weight` over the last dimension.

    eps is 1e-20 in the text model, so a zero row gives a zero row; it must reach the sum in float32.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
