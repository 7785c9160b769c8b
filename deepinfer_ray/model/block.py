"""One backbone layer: Engram, attention and experts inside their hyper-connections (model spec §3.1).

Knows: the order of the sub-layers and which mix feeds which. Does not know: what is inside them.
The pre-mix of a sub-layer feeds the *next* one, across the layer border too; a model that feeds it to the
same sub-layer runs and is wrong.

Shape letters: T rows, m residual copies, D hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.config.hf import LayerSpec, ModelConfig
from deepinfer_ray.model.attention import Attention
from deepinfer_ray.model.engram import Engram
from deepinfer_ray.model.hyper_connections import HyperConnection
from deepinfer_ray.model.moe import MoE
from deepinfer_ray.model.step import StepContext
from deepinfer_ray.ops.hyper_connections import rounded_collapse
from deepinfer_ray.ops.norm import rounded_rms_norm
from deepinfer_ray.ops.numerics import Numerics


class Block(nn.Module):
    """A layer on residual copies X [T, m, D] and the carried input mix a [T, m]."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, numerics: Numerics, columns: int) -> None:
        super().__init__()
        text = config.text
        self.layer, self.numerics, self.eps = layer, numerics, text.rms_norm_eps
        self.engram = Engram(config, numerics) if layer.engram is not None else None
        self.hc_attn, self.hc_ffn = HyperConnection(text, numerics), HyperConnection(text, numerics)
        self.attn_norm = nn.Parameter(torch.empty(text.hidden_size), requires_grad=False)
        self.ffn_norm = nn.Parameter(torch.empty(text.hidden_size), requires_grad=False)
        self.attn = Attention(text, layer, numerics, columns)
        self.ffn = MoE(text, layer, numerics, config.has_vision)

    def attn_input(self, a_Tm: torch.Tensor, x_TmD: torch.Tensor) -> torch.Tensor:
        """[T, D] normed input of the attention."""
        return self._input(a_Tm, x_TmD, self.attn_norm)

    def ffn_input(self, a_Tm: torch.Tensor, x_TmD: torch.Tensor) -> torch.Tensor:
        """[T, D] normed input of the experts."""
        return self._input(a_Tm, x_TmD, self.ffn_norm)

    def _input(self, a_Tm: torch.Tensor, x_TmD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        u = rounded_collapse(a_Tm, x_TmD, self.numerics)
        return rounded_rms_norm(u, weight, self.eps, self.numerics)

    def forward(
        self, x_TmD: torch.Tensor, a_Tm: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(X, a) behind this layer; X comes with the layer's Engram update applied."""
        name = f"layers.{self.layer.index}"
        a_ffn, post, comb = self.hc_attn.mix(x_TmD)
        v = self.attn_input(a_Tm, x_TmD)
        ctx.note(f"{name}.attn_in", v)
        y = self.attn(v, ctx)
        ctx.note(f"{name}.attn_out", y)
        x_TmD = self.hc_attn.update(x_TmD, y, post, comb)

        a_next, post, comb = self.hc_ffn.mix(x_TmD)
        v = self.ffn_input(a_ffn, x_TmD)
        ctx.note(f"{name}.ffn_in", v)
        y = self.ffn(v, ctx)
        ctx.note(f"{name}.ffn_out", y)
        x_TmD = self.hc_ffn.update(x_TmD, y, post, comb)
        ctx.note(f"{name}.h_out", x_TmD)
        ctx.note(f"{name}.pre_mix", a_next)
        return x_TmD, a_next
