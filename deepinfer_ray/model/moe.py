"""Mixture of experts of one layer: router, exchange, experts, combine (model spec §3.7).

Knows: rounding points 20–23, two ways to hold expert weights. Does not know: which rank owns which expert;
the exchange and the physical-expert map do.

Shape letters: T rows, E experts, k slots, P pairs (row, slot), D hidden size, M expert width, C buffer rows.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import nn

from deepinfer_ray.config.hf import LayerSpec, TextConfig
from deepinfer_ray.model.step import StepContext
from deepinfer_ray.ops import moe as ops
from deepinfer_ray.ops import native
from deepinfer_ray.ops.formats import dequant_mxfp4_weight
from deepinfer_ray.ops.linear import ROW_TILE, linear, pad_dim, round_up, rounded_linear
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.parallel.expert_exchange import ExpertExchange, LocalExchange

DEVICE_BYTES = 256 << 20
"""Memory for the products of one group of rows or experts on a device other than a CPU."""


class ExpertProducts(Protocol):
    """Both products of the local experts for (row, slot) pairs."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        act: Activation,
        partial: bool = True,
    ) -> torch.Tensor:
        """[T·k, D] rounded results; pairs with expert -1 give zeros (their weight is 0).

        partial: a row may have an expert here in one slot and none in another, as behind an exchange. False
        spares the extra care: a row has all its routed experts here, or none.
        """
        ...


class Activation:
    """What happens between the two products of an expert, rounding included."""

    def __init__(self, numerics: Numerics, limit: float | None) -> None:
        self.numerics, self.limit = numerics, limit

    def __call__(self, gate_up: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """gate_up: rounded results of the first product, float32."""
        nx = self.numerics
        out = ops.swiglu(gate_up, weight, self.limit)
        return nx.q8(nx.b(out) if nx.reference else out)

    def fuses(self, product: torch.Tensor) -> bool:
        """Whether `spread` may stand for rounding, `__call__` and placing the rows."""
        return native.ready(product) and not self.numerics.reference and product.shape[-1] % 64 == 0

    def spread(
        self, product: torch.Tensor, index_P: torch.Tensor, weight: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """[rows, M]: the activation of rows `index` of an unrounded product [., 2M], at the same rows."""
        return native.swiglu_spread(
            product, index_P, weight, self.limit or 0.0, not self.numerics.exact, rows
        )


class StackedExperts(nn.Module):
    """Dequantized weights of all local experts in two tensors: one batched product each.

    The last expert may be the shared one: it then takes part in the same two products.
    """

    def __init__(self, experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """dtype: float32 or bfloat16, see `ops.linear.rounded_linear`."""
        super().__init__()
        self.experts = experts
        self.w13 = nn.Parameter(torch.empty(experts, hidden, 2 * width, dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(experts, width, hidden, dtype=dtype), requires_grad=False)

    def forward(
        self,
        x_TD: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        act: Activation,
        partial: bool = True,
    ) -> torch.Tensor:
        """Rows lie in a buffer of equally many rows for each expert; what else lies there changes no bit."""
        if x_TD.shape[0] == 0:
            return x_TD.new_zeros(0, self.w2.shape[2])
        if x_TD.device.type == "cpu":
            return self.tile(x_TD, experts_Tk, weights_Tk, act, count=True, partial=partial)
        # How full the fullest expert is stands on the device: every buffer takes a whole tile of rows.
        width = self.w13.shape[2]
        tile = max(ROW_TILE, DEVICE_BYTES // (4 * self.experts * width) // ROW_TILE * ROW_TILE)
        tiles = zip(x_TD.split(tile), experts_Tk.split(tile), weights_Tk.split(tile), strict=True)
        parts = [self.tile(*part, act, count=False, partial=partial) for part in tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tile(
        self,
        x_TD: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        act: Activation,
        *,
        count: bool,
        partial: bool = True,
    ) -> torch.Tensor:
        """`forward` of all rows at once.

        count: look how many rows the fullest expert has; the host waits. partial: see `ExpertProducts`.
        """
        rows, slots = experts_Tk.shape
        x_TD = x_TD.to(self.w13.dtype)
        capacity = round_up(max(rows, 1))
        if count and rows > ROW_TILE:
            flat = experts_Tk.reshape(-1).clamp_min(0)
            place, fullest = _places(flat, self.experts)
            capacity = min(capacity, round_up(fullest))
        if capacity >= rows:
            # Every expert's buffer is the rows themselves, in place.
            start, row = _buffer_places(self.experts, capacity, rows, x_TD.device)
            index = (start.take(experts_Tk.clamp_min(0)) + row).view(-1)
            buffer = pad_dim(x_TD, 0).expand(self.experts, -1, -1)
        else:
            index = flat * capacity + place
            row_of_pair = torch.arange(rows, device=flat.device).repeat_interleave(slots)
            buffer = x_TD.new_zeros(self.experts * capacity, x_TD.shape[1])
            buffer = buffer.index_copy(0, index, x_TD[row_of_pair]).view(self.experts, capacity, -1)
        hidden = torch.bmm(buffer, self.w13)
        missing = experts_Tk.view(-1) < 0 if partial else None
        end = self.experts * capacity
        if missing is None and act.fuses(hidden):
            spread = act.spread(hidden.view(end, -1), index, weights_Tk, end)
            out = torch.bmm(spread.view(self.experts, capacity, -1), self.w2)
            return _rounded(out.view(end, -1).index_select(0, index), act.numerics)
        pairs = _rounded(hidden.view(end, -1).index_select(0, index), act.numerics)
        inner = act(pairs, weights_Tk.view(-1, 1)).to(self.w2.dtype)
        # A pair without an expert points into the buffer of expert 0, where a real pair of the same row may
        # lie: such pairs are put behind the end.
        put = index if missing is None else index.masked_fill(missing, end)
        spread = inner.new_zeros(end + (missing is not None), inner.shape[1]).index_copy_(0, put, inner)
        out = torch.bmm(spread[:end].view(self.experts, capacity, -1), self.w2)
        out = _rounded(out.view(-1, out.shape[2]).index_select(0, index), act.numerics)
        return out if missing is None else out.masked_fill_(missing.unsqueeze(1), 0.0)


def _rounded(product: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """float32 of a product that bfloat16 operands have rounded already, or rounded now."""
    return product.float() if product.dtype == torch.bfloat16 else numerics.b(product)


@functools.lru_cache(maxsize=64)
def _buffer_places(
    experts: int, capacity: int, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(first buffer row of each expert [E], place of each row in it [T, 1])."""
    with torch.inference_mode(False):
        first = torch.arange(experts, device=device) * capacity
        return first, torch.arange(rows, device=device).unsqueeze(1)


def _places(flat_P: torch.Tensor, experts: int) -> tuple[torch.Tensor, int]:
    """(place of each pair among the pairs of its expert, pairs of the fullest expert)."""
    order = torch.argsort(flat_P, stable=True)
    counts = torch.bincount(flat_P, minlength=experts)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(flat_P)
    place[order] = torch.arange(flat_P.numel(), device=flat_P.device) - starts[flat_P[order]]
    return place, int(counts.max())


class PackedExperts(nn.Module):
    """Expert weights in their stored MXFP4 bytes; an expert is dequantized when rows arrive for it."""

    def __init__(self, experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """dtype: what the dequantized weights of a product are, see `ops.linear.rounded_linear`."""
        super().__init__()
        self.experts, self.dtype = experts, dtype

        def codes(out: int, inner: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, out, inner, dtype=torch.uint8), requires_grad=False)

        self.w13, self.w13_scale = codes(2 * width, hidden // 2), codes(2 * width, hidden // 32)
        self.w2, self.w2_scale = codes(hidden, width // 2), codes(hidden, width // 32)

    def forward(
        self,
        x_TD: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        act: Activation,
        partial: bool = True,
    ) -> torch.Tensor:
        if x_TD.device.type != "cpu":
            return self.all_experts(x_TD, experts_Tk, weights_Tk, act)
        slots = experts_Tk.shape[1]
        flat, weights = experts_Tk.reshape(-1), weights_Tk.reshape(-1, 1)
        out = x_TD.new_zeros(flat.numel(), x_TD.shape[1])
        for expert in torch.unique(flat[flat >= 0]).tolist():
            pairs = (flat == expert).nonzero().view(-1)
            w13 = dequant_mxfp4_weight(self.w13[expert], self.w13_scale[expert]).to(self.dtype)
            inner = act(rounded_linear(x_TD[pairs // slots], w13, act.numerics), weights[pairs])
            w2 = dequant_mxfp4_weight(self.w2[expert], self.w2_scale[expert]).to(self.dtype)
            out = out.index_copy(0, pairs, rounded_linear(inner, w2, act.numerics))
        return out

    def all_experts(
        self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor, act: Activation
    ) -> torch.Tensor:
        """`forward` without asking the device which experts are hit: all take part, a few at a time."""
        rows, slots = experts_Tk.shape
        flat, weights = experts_Tk.reshape(-1), weights_Tk.reshape(-1, 1)
        row = torch.arange(rows, device=flat.device).repeat_interleave(slots)
        x_CD = pad_dim(x_TD, 0)
        capacity, hidden, width = x_CD.shape[0], x_CD.shape[1], self.w2.shape[2] * 2
        out = x_TD.new_zeros(flat.numel(), hidden)
        group = max(1, DEVICE_BYTES // (4 * width * max(3 * hidden, 2 * capacity)))
        for first in range(0, self.experts, group):
            count = min(group, self.experts - first)
            these = slice(first, first + count)
            local = flat - first
            mine = (local >= 0) & (local < count)
            place = torch.where(mine, local * capacity + row, count * capacity)  # the last row is nobody's
            w13 = dequant_mxfp4_weight(self.w13[these], self.w13_scale[these]).transpose(1, 2)
            pairs = torch.bmm(x_CD.expand(count, -1, -1), w13).view(-1, 2 * width)
            pairs = act.numerics.b(pairs.index_select(0, place.clamp_max(count * capacity - 1)))
            inner = act(pairs, weights)
            spread = inner.new_zeros(count * capacity + 1, width).index_copy_(0, place, inner)
            w2 = dequant_mxfp4_weight(self.w2[these], self.w2_scale[these]).transpose(1, 2)
            done = torch.bmm(spread[:-1].view(count, capacity, width), w2).view(-1, hidden)
            done = done.index_select(0, place.clamp_max(count * capacity - 1))
            out = torch.where(mine.unsqueeze(-1), act.numerics.b(done), out)
        return out


@functools.lru_cache(maxsize=64)
def _shared_column(expert: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot and weight column [T, 1] of the shared expert."""
    with torch.inference_mode(False):
        return torch.full((rows, 1), expert, device=device), torch.ones(rows, 1, device=device)


class MoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, text: TextConfig, layer: LayerSpec, numerics: Numerics, has_vision: bool) -> None:
        super().__init__()
        D, E = text.hidden_size, layer.num_experts
        self.layer, self.numerics = layer, numerics
        self.k, self.scaling = layer.experts_per_token, text.routed_scaling_factor
        self.act = Activation(numerics, text.swiglu_limit)
        self.gate = nn.Parameter(torch.empty(E, D), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(E), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.empty(E), requires_grad=False) if has_vision else None
        shared = text.n_shared_experts * text.moe_intermediate_size
        self.shared_w13 = nn.Parameter(torch.empty(2 * shared, D), requires_grad=False) if shared else None
        self.shared_w2 = nn.Parameter(torch.empty(D, shared), requires_grad=False) if shared else None
        # Filled by the loader, which knows this rank's experts and the memory it may take.
        self.experts: StackedExperts | PackedExperts
        self.exchange: ExpertExchange = LocalExchange(E)
        self.physical: torch.Tensor | None = None
        """logical -> physical expert, None = identity."""
        self.shared_expert: int | None = None
        """Index of the shared expert inside `experts` when it is stacked with them."""

    def forward(self, v_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, D] for normed input v."""
        return self.compute(v_TD, ctx.meta.image_mask, ctx.valid, ctx)

    def compute(
        self,
        v_TD: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
        ctx: StepContext | None = None,
    ) -> torch.Tensor:
        """`forward` without a step: rows, their image mask and validity are all it depends on."""
        nx, rows = self.numerics, v_TD.shape[0]
        experts, weights = ops.route(
            linear(v_TD, self.gate), self.bias, self.k, self.scaling, self.bias_vl, image_mask, valid
        )
        if ctx is not None:
            ctx.note(f"layers.{self.layer.index}.gate_indices", experts)
            ctx.note(f"layers.{self.layer.index}.gate_weights", weights)
        v8_TD = nx.q8(v_TD)
        slots = experts if self.physical is None else self._to_physical(experts)
        received = self.exchange.dispatch(v8_TD, slots, weights)
        if self.shared_expert is not None and self.exchange.is_local:
            expert, one = _shared_column(self.shared_expert, rows, v_TD.device)
            slots = torch.cat((expert, received.experts), dim=1)
            weights = torch.cat((one, received.weights), dim=1)
            out = self.experts(v8_TD, slots, weights, self.act, False)
            out = out.view(rows, self.k + 1, v_TD.shape[1])
            if not nx.reference:
                # A local exchange returns the rows as they are: shared first, then the slots in order.
                return ops.rounded_combine(out, nx)
            shared: torch.Tensor | None = out[:, 0]
            routed = self.exchange.combine(out[:, 1:], received)
        else:
            out = self.experts(received.rows, received.experts, received.weights, self.act)
            out = out.view(*received.experts.shape, v_TD.shape[1])
            shared = self._shared(v8_TD)
            routed = self.exchange.combine(out, received)
        if nx.reference:
            ascending = experts.argsort(dim=-1)
            routed = routed.gather(1, ascending.unsqueeze(-1).expand_as(routed))
            total = ops.combine_slots(routed)
            return nx.b(total if shared is None else total + shared)
        return ops.rounded_combine(routed, nx, shared)

    def _to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        assert self.physical is not None
        return self.physical[experts.clamp_min(0)].masked_fill(experts < 0, -1)

    def _shared(self, v8_TD: torch.Tensor) -> torch.Tensor | None:
        if self.shared_w13 is None or self.shared_w2 is None:
            return None
        nx = self.numerics
        inner = self.act(rounded_linear(v8_TD, self.shared_w13, nx), None)
        return rounded_linear(inner, self.shared_w2, nx)
