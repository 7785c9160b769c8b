"""Where Engram table rows are kept and how a step gets its rows: one fetch for all layers.

Knows: row ownership, stored bytes (e4m3 codes and ue8m0 scales, model spec §2.3), the fetch without
communication. Does not know: hashes, projections. Rows travel as stored bytes and are decoded afterwards.

Shape letters: E Engram layers, T token rows, c columns (table rows a token and layer), w row width.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from deepinfer_ray.ops import native
from deepinfer_ray.ops.formats import FP8_GROUP, dequant_fp8_groups


def padded_rows(rows: int, ranks: int) -> int:
    """Table rows padded so that they divide over the ranks: a multiple of lcm(256, ranks)."""
    unit = math.lcm(256, ranks)
    return -(-rows // unit) * unit


class EngramStore(Protocol):
    """The tables of all Engram layers as one rank sees them."""

    def fetch(self, rows_ETc: torch.Tensor) -> torch.Tensor:
        """float32 [E, T, c·w]: table rows by global id, concatenated; zeros where the id is -1."""
        ...


class LocalEngramStore:
    """Whole tables in this process's memory."""

    def __init__(self, codes: list[torch.Tensor], scales: list[torch.Tensor]) -> None:
        """codes: uint8 [rows, w] a layer; scales: uint8 [rows, w/32] a layer."""
        for layer, (code, scale) in enumerate(zip(codes, scales, strict=True)):
            if scale.shape != (code.shape[0], code.shape[1] // FP8_GROUP):
                raise ValueError(
                    f"Engram table {layer}: codes {tuple(code.shape)} need scales of one byte a row and "
                    f"{FP8_GROUP} columns, got {tuple(scale.shape)}"
                )
        self.codes = codes
        self.scales = scales

    def fetch(self, rows_ETc: torch.Tensor) -> torch.Tensor:
        layers = []
        for rows_Tc, codes, scales in zip(rows_ETc, self.codes, self.scales, strict=True):
            flat = rows_Tc.reshape(-1)
            if native.ready(codes):
                values = native.load_fp8_parts(codes, scales, flat, codes.shape[1])
                layers.append(values.view(rows_Tc.shape[0], -1))
                continue
            index = flat.clamp_min(0)
            values = dequant_fp8_groups(codes.index_select(0, index), scales.index_select(0, index))
            values = values.masked_fill_((flat < 0).unsqueeze(-1), 0.0)
            layers.append(values.view(rows_Tc.shape[0], -1))
        return torch.stack(layers)
