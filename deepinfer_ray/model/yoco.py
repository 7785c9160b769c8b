"""The border between producer and consumer layers (attention spec §13).

Knows: where the layer loop is split. Does not know: layers' insides. Layers from `n_prefill_layer` on share
one set of compressed entries and feed the future only through their window rings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_ray.model.block import Block
from deepinfer_ray.model.step import StepContext


def run_layers(
    blocks: Sequence[Block],
    x_TmD: torch.Tensor,
    a_Tm: torch.Tensor,
    engram_rows: torch.Tensor | None,
    ctx: StepContext,
    taps: list[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run consecutive layers on residual copies X and carried mix a; returns both behind the last.

    engram_rows: [Engram layers, T, width] fetched rows. taps: where the mean of the copies that enter a
    target layer is appended, behind the layer's Engram update and rounded.
    """
    for block in blocks:
        if block.engram is not None and block.layer.engram is not None:
            assert engram_rows is not None
            x_TmD = block.engram(x_TmD, engram_rows[block.layer.engram], ctx.meta.image_mask)
        if taps is not None and block.layer.is_target:
            taps.append(ctx.numerics.b(x_TmD.mean(1)))
        x_TmD, a_Tm = block(x_TmD, a_Tm, ctx)
    return x_TmD, a_Tm
