"""Engram: n-gram windows, table rows, and the gated update of the residual copies (model spec §3.4).

Knows: the pad and DEAD rule, the hash, the gate. Does not know: tables, tokenizers, steps.

Shape letters: T rows, G n-gram order, E Engram layers, m copies, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_ray.config.engram import EngramPlan

DEAD = -1
"""Compressed id of image positions and of ids outside the token map: n-grams do not reach across it."""


def ngram_window(
    compressed: np.ndarray, positions: np.ndarray, rows: np.ndarray | None, order: int, pad: int
) -> np.ndarray:
    """int64 [T, order]: compressed ids at p, p-1, … for each query, `pad` from the first blocked one on.

    compressed: [S] ids of one sequence, or [sequences, S] with `rows` [T] naming the sequence of each query.
    pad: the compressed pad id. A look-back is blocked before position 0 and at DEAD; blocking is sticky.
    """
    back = positions[:, None] - np.arange(order)
    source = compressed if rows is None else compressed[rows[:, None], back.clip(0)]
    ids = source[back.clip(0)] if rows is None else source
    blocked = np.logical_or.accumulate((back < 0) | (ids < 0), axis=1)
    return np.where(blocked, pad, ids).astype(np.int64)


class EngramHash:
    """Table rows of n-grams for all Engram layers at once."""

    def __init__(self, plan: EngramPlan, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        self.multipliers = torch.tensor(plan.multipliers, dtype=torch.int64, device=device)
        self.primes = torch.tensor(plan.primes, dtype=torch.int64, device=device)
        self.offsets = torch.tensor(plan.offsets, dtype=torch.int64, device=device)

    def __call__(self, ngram_TG: torch.Tensor, image_mask: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [E, T, columns] table rows, offsets included; -1 on rows inside an image span."""
        products = ngram_TG * self.multipliers.unsqueeze(1)
        mixed = products[..., 0]
        columns = []
        for order in range(1, self.plan.max_ngram):
            mixed = mixed ^ products[..., order]
            columns.append(mixed.unsqueeze(-1) % self.primes[:, order - 1].unsqueeze(1))
        rows = torch.cat(columns, dim=-1) + self.offsets.unsqueeze(1)
        if image_mask is not None:
            rows = rows.masked_fill(image_mask.view(1, -1, 1), -1)
        return rows


def gated_update(
    x_TmD: torch.Tensor,
    key_TmD: torch.Tensor,
    value_TD: torch.Tensor,
    weight_mD: torch.Tensor,
    eps: float,
    image_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, m, D] = X + sigmoid(s) · value, not rounded; image rows pass unchanged.

    weight: q_weight · k_weight. s is the signed square root of the normalized product of X and key, per copy.
    """
    dim = x_TmD.shape[-1]
    dot = (x_TmD * weight_mD * key_TmD).sum(-1)
    rstd_x = (x_TmD.square().mean(-1) + eps).rsqrt()
    rstd_key = (key_TmD.square().mean(-1) + eps).rsqrt()
    dot = dot * rstd_x * rstd_key * dim**-0.5
    s = torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)
    gate = 1.0 / ((-s).exp() + 1.0)
    updated = x_TmD + gate.unsqueeze(-1) * value_TD.unsqueeze(1)
    if image_mask is None:
        return updated
    return torch.where(image_mask.view(-1, 1, 1), x_TmD, updated)
