"""Matrix products whose result rows do not depend on how many rows there are.

Knows: the row tile that makes it so (model spec §9.4), products rounded to bf16. Does not know: storage.
CPU matrix libraries pick another kernel for 1–3 or 7 rows than for the same rows in a larger batch, and the
low bits differ. Every product with a weight therefore goes through here, padded with zero rows to a multiple
of 16; no other module pads rows.

Shape letters: T rows, G groups, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deepinfer_ray.ops import native
from deepinfer_ray.ops.numerics import Numerics

ROW_TILE = 16
"""Rows of every product are padded to a multiple of this (model spec §9.4)."""


def round_up(n: int, multiple: int = ROW_TILE) -> int:
    """The least multiple of `multiple` that is >= n."""
    return -(-n // multiple) * multiple


def pad_dim(x: torch.Tensor, dim: int, multiple: int = ROW_TILE) -> torch.Tensor:
    """x with zeros appended along `dim` up to the next multiple; x itself where nothing is missing."""
    size = x.shape[dim]
    missing = -size % multiple
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """[T, O] = x · weightᵀ in float32, each row independent of the other rows and of T."""
    rows = x_TI.shape[0]
    if rows % ROW_TILE == 0:
        return F.linear(x_TI, weight_OI)
    return F.linear(pad_dim(x_TI, 0), weight_OI)[:rows]


def rounded_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """`b(x · weightᵀ)` for a weight in float32 or bfloat16.

    With bfloat16 weights x must hold bf16-representable values (all quantized inputs do): the products are
    then exact, sums are float32 and the library rounds once, as `linear` and `b` do, from half the memory.
    """
    if weight_OI.dtype != torch.bfloat16:
        return numerics.b(linear(x_TI, weight_OI))
    rows = x_TI.shape[0]
    return F.linear(pad_dim(x_TI.bfloat16(), 0), weight_OI)[:rows].float()


def quantized_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """`b(Q8(x) · weightᵀ)`."""
    if weight_OI.dtype != torch.bfloat16 or not native.ready(x_TI):
        return rounded_linear(numerics.q8(x_TI), weight_OI, numerics)
    rows = x_TI.shape[0]
    y = F.linear(native.fake_quant_fp8_tile(x_TI, round_up(rows)), weight_OI).float()
    return y if y.shape[0] == rows else y[:rows]


def rounded_grouped_linear(x_TGI: torch.Tensor, weight_GIO: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """[T, G, O]: group g of every row times weight[g], rounded as by `rounded_linear`."""
    if weight_GIO.dtype != torch.bfloat16:
        return numerics.b(grouped_linear(x_TGI, weight_GIO))
    return grouped_linear(x_TGI.bfloat16(), weight_GIO).float()


def grouped_linear(x_TGI: torch.Tensor, weight_GIO: torch.Tensor) -> torch.Tensor:
    """[T, G, O]: group g of every row times weight[g], rows independent as in `linear`."""
    rows = x_TGI.shape[0]
    y_GTO = torch.bmm(pad_dim(x_TGI, 0).transpose(0, 1), weight_GIO)
    return y_GTO[:, :rows].transpose(0, 1)


def product_dtype(numerics: Numerics, device: torch.device | str) -> torch.dtype:
    """What weights of rounded products are kept in: bfloat16 where a CPU multiplies it, else float32.

    Mode `exact` does not round, and variant `reference` is compared bit by bit: both stay with float32.
    """
    native = torch.device(device).type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    plain = numerics.exact or numerics.reference
    return torch.bfloat16 if native and not plain else torch.float32
