"""Router, clamped SwiGLU, and the products of the experts (model spec §3.7).

Knows: the formulas on float32 tensors. Does not know: where experts live, numeric modes.

Shape letters: T rows, E experts, k slots, P pairs (row, slot), M expert width, C buffer rows an expert.
"""

from __future__ import annotations

import torch

from deepinfer_ray.ops import native
from deepinfer_ray.ops.constants import constant
from deepinfer_ray.ops.numerics import Numerics


def router_scores(logits_TE: torch.Tensor) -> torch.Tensor:
    """float32 `sqrt(softplus(logit))`."""
    # Not torch's softplus: its vector body and scalar tail differ in low bits (model spec §9.4). Above 20 the
    # logarithm stays at 20 and the logit itself is the larger one; below, softplus exceeds its argument.
    soft = torch.minimum(logits_TE, constant(20.0)).exp().log1p()
    return torch.maximum(logits_TE, soft).sqrt()


def select_experts(selection_TE: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k] indices of the k largest, descending; equal values: the smaller id first."""
    return torch.sort(selection_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    k: int,
    scaling: float,
    bias_image_E: torch.Tensor | None = None,
    image_mask: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int64 [T, k], weights float32 [T, k]) in top-k slot order.

    The bias (the image bias inside image spans) selects, the weights come from the unbiased scores.
    Rows that are not `valid` get expert -1 and weight 0.
    """
    scores = router_scores(logits_TE)
    if native.ready(scores) and image_mask is None and valid is None:
        return native.route_rows(scores, bias_E, k, scaling)
    bias = bias_E
    if image_mask is not None and bias_image_E is not None:
        bias = torch.where(image_mask.unsqueeze(-1), bias_image_E, bias_E)
    experts = select_experts(scores + bias, k)
    weights = scores.gather(1, experts)
    if k > 1:
        first, *others = weights.unbind(1)
        total = first + constant(1e-20)
        for other in others:
            total = total + other
        weights = weights / total.unsqueeze(1)
    weights = weights * constant(scaling)
    if valid is not None:
        experts = experts.masked_fill(~valid.unsqueeze(-1), -1)
        weights = weights.masked_fill(~valid.unsqueeze(-1), 0.0)
    return experts, weights


def swiglu(gate_up_P2M: torch.Tensor, weight_P1: torch.Tensor | None, limit: float | None) -> torch.Tensor:
    """float32 [P, M]: `silu(gate) · up · weight`; the gate is clamped from above only, up from both sides."""
    gate, up = gate_up_P2M.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    # Below -80 the exponential would overflow, harmless here but NaN in the gradient.
    out = gate / (torch.minimum(gate.neg(), constant(80.0)).exp() + constant(1.0)) * up
    return out if weight_P1 is None else out * weight_P1


def combine_slots(o_TkD: torch.Tensor, first_TD: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [T, D]: first + o[0] + o[1] + … in slot order (model spec §3.7: shared first)."""
    slots = o_TkD.unbind(1)
    total = slots[0] if first_TD is None else first_TD + slots[0]
    for slot in slots[1:]:
        total = total + slot
    return total


def rounded_combine(
    o_TkD: torch.Tensor, numerics: Numerics, first_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """`b(combine_slots(o, first))`."""
    if first_TD is None and native.ready(o_TkD) and o_TkD.is_contiguous():
        return native.combine_rows(o_TkD, not numerics.exact)
    return numerics.b(combine_slots(o_TkD, first_TD))
