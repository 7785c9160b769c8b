"""Rotary position embedding over adjacent pairs, plain and YaRN (model spec §3.6, attention spec §3).

Knows: frequencies, tables of cosines and sines, the rotation. Does not know: which layer uses which table.
Frequencies are evaluated in float32 all the way: taken from float64 and rounded once, 8 of 32 differ by an
ulp, which is 1.7e-3 in the cosine at position 2^20.

Shape letters: N rows, R rotated dimensions.
"""

from __future__ import annotations

import math

import torch

from deepinfer_ray.ops import native
from deepinfer_ray.ops.numerics import Numerics

_FIRST_ROWS = 1024
"""Rows of a fresh table; it doubles as longer positions appear."""


def inverse_frequencies(dim: int, theta: float) -> torch.Tensor:
    """float32 [dim/2]: `1 / theta^(2i/dim)`."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponent)


def yarn_range(dim: int, theta: float, original: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """(low, high): pairs below low keep their frequency, pairs from high on are interpolated."""

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(correction(beta_fast)), 0), min(math.ceil(correction(beta_slow)), dim - 1)


def yarn_frequencies(
    dim: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """float32 [dim/2] blended frequencies; the amplitude factor of YaRN is 1 here."""
    frequencies = inverse_frequencies(dim, theta)
    low, high = yarn_range(dim, theta, original, beta_fast, beta_slow)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


class RopeTable:
    """Cosines and sines of one set of frequencies, spread over pairs; on a CPU grown on demand.

    Elsewhere all positions are there from the start: a table never moves and a step copies none. Values come
    from the CPU, so that they are the same on every device.

    Row p holds `cos` as (c0, c0, c1, c1, …) and `sin` as (-s0, s0, -s1, s1, …), so that a rotation is two
    products and one sum.
    """

    def __init__(
        self, frequencies: torch.Tensor, max_positions: int, device: torch.device | str = "cpu"
    ) -> None:
        """frequencies: float32 [R/2] on the CPU."""
        self.frequencies, self.device = frequencies, torch.device(device)
        self.max_positions = max_positions
        self._build(min(max_positions, _FIRST_ROWS) if self.device.type == "cpu" else max_positions)

    def _build(self, rows: int) -> None:
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * self.frequencies
        self._cos = torch.cos(angles).repeat_interleave(2, dim=-1).to(self.device)
        sin = torch.sin(angles)
        self._sin = torch.stack((-sin, sin), dim=-1).flatten(-2).to(self.device)
        self.rows = rows

    def reserve(self, rows: int) -> None:
        """Make positions below `rows` available; more than `max_positions` is an error."""
        if rows > self.max_positions:
            raise ValueError(
                f"position {rows - 1} is outside the RoPE table of {self.max_positions} positions; "
                "shorten the sequence or raise max_model_len up to max_position_embeddings"
            )
        if rows > self.rows:
            self._build(min(self.max_positions, max(rows, 2 * self.rows)))

    def take(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [N, R] of int positions [N], all below `rows` (see `reserve`)."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., R] rotated by table rows that broadcast against it; float32, not rounded.

    The inverse rotation is the same with the sines negated.
    """
    *lead, width = x.shape
    swapped = x.view(*lead, width // 2, 2).flip(-1).view(x.shape)
    return (x * cos).add_(swapped.mul_(sin))


def rotate_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """x [T, ..., d] with its last R values rotated and rounded in place: x must be nobody else's.

    cos, sin: table rows [T, R], or [T, 1, R] for x [T, heads, d].
    """
    if native.ready(x) and x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]):
        native.rotate_tail(x, cos, sin, not numerics.exact)
        return x
    tail = x[..., -cos.shape[-1] :]
    tail.copy_(numerics.b(rotate(tail, cos, sin)))
    return x
