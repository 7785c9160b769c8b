"""Hyper-connections: the coefficients of a sub-layer and the two mixes around it (model spec §3.1–3.2).

Knows: the formulas on float32 tensors. Does not know: weights' names, rounding, which sub-layer is next.

Shape letters: T rows, m copies of the residual stream, D hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepinfer_ray.ops import native
from deepinfer_ray.ops.constants import constant
from deepinfer_ray.ops.linear import linear
from deepinfer_ray.ops.norm import inverse_rms, squares
from deepinfer_ray.ops.numerics import Numerics


def _sequential_sum(x: torch.Tensor, dim: int, start: float) -> torch.Tensor:
    """start + x[0] + x[1] + … along dim, in this order, dimension kept; on a device in any order."""
    if x.device.type != "cpu":
        return x.sum(dim, keepdim=True) + start  # 2 launches instead of 4, 78 times a sub-layer
    total = x.select(dim, 0) + start
    for i in range(1, x.shape[dim]):
        total = total + x.select(dim, i)
    return total.unsqueeze(dim)


def sinkhorn_plain(logits_Tmm: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """`sinkhorn` as differentiable tensor operations."""
    shifted = (logits_Tmm - logits_Tmm.amax(-1, keepdim=True)).exp()
    c = shifted / _sequential_sum(shifted, 2, 0.0) + eps
    c = c / _sequential_sum(c, 1, eps)
    for _ in range(iterations - 1):
        c = c / _sequential_sum(c, 2, eps)
        c = c / _sequential_sum(c, 1, eps)
    return c


def _sinkhorn_in_place(logits_Tmm: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """`sinkhorn` on CPU without a graph: the same additions and divisions, bit for bit, on numpy buffers.

    76 tiny dependent operations a sub-layer are the largest overhead of a decode step; numpy runs them with
    a third of the cost of a tensor operation. Rows lie last, so that no reduction runs along them; a single
    row is doubled, because numpy drops a dimension of length 1 and would then add in another order.
    """
    rows = logits_Tmm.shape[0]
    shifted = (logits_Tmm - logits_Tmm.amax(-1, keepdim=True)).exp_()
    if rows == 1:
        shifted = shifted.expand(2, -1, -1)  # Two rows, so that the rows' dimension is not dropped.
    c = shifted.permute(1, 2, 0).contiguous().numpy()
    over_columns = np.empty((c.shape[0], 1, c.shape[2]), np.float32)
    over_rows = np.empty((1, c.shape[1], c.shape[2]), np.float32)
    # Positional arguments of reduce: axis, dtype, out, keepdims, initial; keywords cost as much as the sum.
    start, divide = np.float32(eps), np.divide
    add: Any = np.add.reduce
    add(c, 1, None, over_columns, True, np.float32(0))
    divide(c, over_columns, c)
    np.add(c, start, c)
    add(c, 0, None, over_rows, True, start)
    divide(c, over_rows, c)
    for _ in range(iterations - 1):
        add(c, 1, None, over_columns, True, start)
        divide(c, over_columns, c)
        add(c, 0, None, over_rows, True, start)
        divide(c, over_rows, c)
    # Laid out for `update`, which contracts over the first index.
    transposed = torch.from_numpy(c.transpose(2, 1, 0).copy()).transpose(1, 2)
    return transposed if rows > 1 else transposed[:1]


def sinkhorn(logits_Tmm: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """Doubly stochastic [T, m, m]: row softmax + eps, then alternating column and row normalizations.

    `eps` is in every denominator and the last step normalizes columns (model spec §3.2).
    """
    if logits_Tmm.device.type == "cpu" and not (logits_Tmm.requires_grad and torch.is_grad_enabled()):
        return _sinkhorn_in_place(logits_Tmm, eps, iterations)
    return sinkhorn_plain(logits_Tmm, eps, iterations)


def mix(
    x_TmD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [T, m], post [T, m], comb [T, m, m]) of residual copies X, float32.

    fn: [(2+m)m, mD]. scale: [(2+m)m], the three stored factors spread over their rows. base: [(2+m)m].
    `pre` mixes the input of the *next* sub-layer, `post` and `comb` belong to this one; the first index of
    `comb` is the source copy.
    """
    rows, m, _ = x_TmD.shape
    z = x_TmD.view(rows, -1)
    if native.ready(z) and m <= 4:
        product = linear(z, fn)
        return native.mix_coefficients(
            product, squares(z), scale, base, m, z.shape[1], norm_eps, hc_eps, iterations
        )
    q = linear(z, fn) * inverse_rms(z, norm_eps) * scale + base
    # Not torch.sigmoid: its vector body and scalar tail differ in low bits (model spec §9.4).
    gates = (q[:, : 2 * m].neg().exp() + constant(1.0)).reciprocal()
    comb = sinkhorn(q[:, 2 * m :].view(rows, m, m), hc_eps, iterations)
    return gates[:, :m] + constant(hc_eps), gates[:, m:] * constant(2.0), comb


def collapse(a_Tm: torch.Tensor, x_TmD: torch.Tensor) -> torch.Tensor:
    """[T, D] = Σ_c a[c] · X[c], added in this order, not rounded."""
    total = a_Tm[:, :1] * x_TmD[:, 0]
    for c in range(1, x_TmD.shape[1]):
        total = total + a_Tm[:, c : c + 1] * x_TmD[:, c]
    return total


def rounded_collapse(a_Tm: torch.Tensor, x_TmD: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """`b(collapse(a, X))`."""
    if native.ready(x_TmD) and x_TmD.is_contiguous() and a_Tm.is_contiguous():
        return native.collapse_rows(a_Tm, x_TmD, not numerics.exact)
    return numerics.b(collapse(a_Tm, x_TmD))


def update(
    x_TmD: torch.Tensor, y_TD: torch.Tensor, post_Tm: torch.Tensor, comb_Tmm: torch.Tensor
) -> torch.Tensor:
    """[T, m, D]: `X'[n] = post[n] · y + Σ_c comb[c, n] · X[c]`, not rounded."""
    scaled = post_Tm.unsqueeze(-1) * y_TD.unsqueeze(1)
    return scaled.baddbmm_(comb_Tmm.transpose(1, 2), x_TmD)
