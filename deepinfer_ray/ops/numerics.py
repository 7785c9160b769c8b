"""`Numerics`: where values are rounded in each numeric mode (model spec §9).

Knows: the two modes, the two variants of `released`, which recipe stands at which name.
Does not know: where in the model a rounding point is; the caller names the point by the method it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer_ray.ops import formats

Mode = Literal["exact", "released"]
Variant = Literal["engine", "reference"]


@dataclass(frozen=True, slots=True)
class Numerics:
    """The numeric mode of a process; every method is the identity in mode `exact`.

    mode: `released` (bf16 roundings and fake quantization as the released runtime) or `exact` (float32
    everywhere, caches included). variant: `engine` is the product; `reference` takes the points of the
    checkpoint's own code, for comparison with its outputs only (model spec §9.2).
    """

    mode: Mode = "released"
    variant: Variant = "engine"

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "released"):
            raise ValueError(f"numerics mode is {self.mode!r}; it must be 'exact' or 'released'")
        if self.variant not in ("engine", "reference"):
            raise ValueError(f"numerics variant is {self.variant!r}; it must be 'engine' or 'reference'")

    @property
    def exact(self) -> bool:
        return self.mode == "exact"

    @property
    def reference(self) -> bool:
        """Whether the points of variant `reference` apply (never in mode `exact`)."""
        return self.mode == "released" and self.variant == "reference"

    def b(self, x: torch.Tensor) -> torch.Tensor:
        """`b(x)`: float32 rounded to bf16."""
        return x if self.mode == "exact" else formats.bf16_round(x)

    def q8(self, x: torch.Tensor) -> torch.Tensor:
        """`Q8`: FP8 groups of 32 along the last dimension, quantized and dequantized."""
        return x if self.mode == "exact" else formats.fake_quant_fp8(x)

    def q4_index(self, x: torch.Tensor) -> torch.Tensor:
        """`Q4i`: FP4 groups of 32 with power-of-two scales (index queries and keys)."""
        return x if self.mode == "exact" else formats.fake_quant_index(x)

    def q4_kv(self, x: torch.Tensor) -> torch.Tensor:
        """`Q4k`: FP4 groups of 16 with e4m3 scales (compressed KV); true divisions in variant `reference`."""
        return x if self.mode == "exact" else formats.fake_quant_kv(x, divide=self.reference)
