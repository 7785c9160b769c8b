"""Compressed entries of a KV source: pooling, norm, rotation, store (attention spec §4).

Knows: the order of ring reads and writes. Does not know: the projection (the attention fuses it), index keys.
Prefill reads the ring before it writes; decode writes all rows first and then reads both members back.

Shape letters: T rows, E entry rows, d head dimension.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.config.hf import LayerSpec, TextConfig
from deepinfer_ray.model.step import StepContext
from deepinfer_ray.ops.compress import pool_pairs
from deepinfer_ray.ops.norm import rounded_rms_norm
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import rotate_tail


class Compressor(nn.Module):
    """Makes and stores this layer's compressed entries."""

    def __init__(self, text: TextConfig, layer: LayerSpec, numerics: Numerics) -> None:
        super().__init__()
        self.layer, self.ratio, self.numerics, self.eps = (
            layer.index,
            layer.ratio,
            numerics,
            text.rms_norm_eps,
        )
        self.norm = nn.Parameter(torch.empty(text.head_dim), requires_grad=False)

    def forward(self, projected: torch.Tensor, ctx: StepContext) -> torch.Tensor | None:
        """Store the step's entries; returns the normed, un-rotated latents [E, d] (input of the index keys).

        projected: ratio 1 [T, d] latents; ratio 2 [T, 2, d] score and latent, float32 and unrounded.
        None when no entry is produced in this step.
        """
        plan = ctx.entries[self.ratio]
        pooled = self._pool(projected, ctx)
        if pooled is None:
            return None
        normed = rounded_rms_norm(self.numerics.b(pooled), self.norm, self.eps, self.numerics)
        cos, sin = plan.rotation
        ctx.pools.store_entries(self.layer, rotate_tail(normed.clone(), cos, sin, self.numerics), plan.slots)
        return normed

    def _pool(self, projected: torch.Tensor, ctx: StepContext) -> torch.Tensor | None:
        if self.ratio == 1:
            return projected
        plan, pools, ring = ctx.entries[self.ratio], ctx.pools, ctx.meta.ring_positions
        assert plan.ring is not None
        if plan.rows is None:
            pools.store_state(self.layer, projected, ring)
            if plan.slots.numel() == 0:
                return None
            members = pools.load_state(self.layer, plan.ring)
        else:
            from_step = projected[plan.rows.clamp_min(0)]
            from_ring = pools.load_state(self.layer, plan.ring)
            members = torch.where((plan.rows >= 0)[..., None, None], from_step, from_ring)
            pools.store_state(self.layer, projected, ring)
        return pool_pairs(members[:, :, 0], members[:, :, 1])
