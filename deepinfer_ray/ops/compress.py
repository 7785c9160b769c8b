"""Pooling of token pairs into one compressed latent (attention spec §4.1).

Knows: the per-channel softmax over the two members. Does not know: rings, positions, which rows pair up.
"""

from __future__ import annotations

import torch


def pool_pairs(score_E2d: torch.Tensor, latent_E2d: torch.Tensor) -> torch.Tensor:
    """float32 [E, d]: `Σ_i softmax_i(score) · latent_i` over the two members, separately for each channel."""
    g0, g1 = score_E2d.unbind(1)
    a0, a1 = latent_E2d.unbind(1)
    top = torch.maximum(g0, g1)
    # Not torch.softmax: over a dimension that is not the last its bits depend on the place (spec §9.4).
    e0, e1 = (g0 - top).exp(), (g1 - top).exp()
    total = e0 + e1
    return e0 / total * a0 + e1 / total * a1
