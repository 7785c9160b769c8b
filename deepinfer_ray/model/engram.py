"""The Engram layer: projection of fetched table rows and the gated update (model spec §3.4).

Knows: rounding points 2 and 3. Does not know: hashes and tables; rows arrive fetched for all layers.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.ops.engram import gated_update
from deepinfer_ray.ops.linear import rounded_linear
from deepinfer_ray.ops.numerics import Numerics


class Engram(nn.Module):
    """Update of the residual copies from n-gram table rows, before the attention of its layer."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        text = config.text
        self.numerics, self.eps, self.m, self.hidden = (
            numerics,
            text.rms_norm_eps,
            text.hc_mult,
            text.hidden_size,
        )
        outputs = (text.hc_mult + 1) * text.hidden_size
        self.wkv = nn.Parameter(torch.empty(outputs, config.engram.width), requires_grad=False)
        # q_weight · k_weight, multiplied in float32 when loaded.
        self.weight = nn.Parameter(torch.empty(text.hc_mult, text.hidden_size), requires_grad=False)

    def forward(
        self, x_TmD: torch.Tensor, rows_Tw: torch.Tensor, image_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Residual copies after the update. rows: concatenated dequantized table rows of each token."""
        nx = self.numerics
        # The product uses stored codes and scales as they are; only the reference requantizes.
        rows_Tw = nx.q8(rows_Tw) if nx.reference else rows_Tw
        kv = rounded_linear(rows_Tw, self.wkv, nx).view(-1, self.m + 1, self.hidden)
        return nx.b(gated_update(x_TmD, kv[:, : self.m], kv[:, self.m], self.weight, self.eps, image_mask))
