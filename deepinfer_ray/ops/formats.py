"""Number formats of the checkpoint and the caches: codes, scales, quantizers, dequantizers.

Knows: bf16 rounding, e4m3fn, e2m1 (two codes a byte), ue8m0, and the recipes of attention spec §9 and
model spec §2.3, §4. Does not know: layers, cache records, numeric modes.

Conventions: values are float32 (holding bf16-representable numbers where a recipe says "over the bf16
values"), codes and scale bytes are uint8. Groups run along the last dimension, whose length must be a
multiple of the group. Every function works on any device; casts round to nearest even and saturate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

import torch

from deepinfer_ray.ops import native

FP8_MAX = 448.0
FP8_GROUP = 32
FP8_FLOOR = 1e-4
"""Least amax of an FP8 group (attention spec §9.1): an all-zero group has scale byte 105."""

FP4_MAX = 6.0
INDEX_GROUP = 32
INDEX_FLOOR = 6.0 * 2.0**-126
"""Least amax of an index-key or MXFP4 group (attention spec §9.4): an all-zero group has scale byte 1."""

KV_GROUP = 16
KV_FLOOR = 6.0 * 2.0**-9
"""Least amax of a compressed-KV group (attention spec §9.3): its e4m3 scale is then the smallest, 2^-9."""

WEIGHT_BLOCK = 32


def _f32(value: float) -> torch.Tensor:
    """A constant operand: converting a Python number on every call costs more than the operation itself."""
    return torch.tensor(value, dtype=torch.float32)


def _i32(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


_ONE_SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()
_FP8_MAX_0, _FP8_FLOOR_0 = _f32(FP8_MAX), _f32(FP8_FLOOR)
_INDEX_FLOOR_0, _ONE_SIXTH_0 = _f32(INDEX_FLOOR), _f32(_ONE_SIXTH)
_INFINITY = float("inf")
_EXPONENT_BITS, _MANTISSA_BITS = _i32(0x7F800000), _i32(0x007FFFFF)
_TWO_120, _E4M3_SHIFT = _f32(2.0**120), _i32(1 << 20)
# Adding and subtracting 1.5 · 2^23 · quantum rounds to the nearest multiple of the quantum, ties to even. The
# quantum is a fixed fraction of the power of two below |x|, down to a least one: a fraction of the scale.
_E4M3_MAGIC, _E4M3_LEAST, _E2M1_MAGIC = _f32(1.5 * 2.0**20), _f32(1.5 * 2.0**14), _f32(1.5 * 2.0**22)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# (midpoint above code c, does the midpoint itself round up to c+1): ties go to the even code.
_E2M1_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
_E4M3_BITS = torch.tensor(-0x78000001, dtype=torch.int32)
"""Keeps the sign and the seven value bits of an int8 times 2^20 (sign extension fills the rest)."""
_MAGIC_HALF = 1.5 * 2.0**22
"""Adding and subtracting this rounds a float32 below 2 to the nearest multiple of 0.5, ties to even."""


class _StraightThrough(torch.autograd.Function):
    """The quantized value forward, the identity backward (quantization-aware training of the toy model)."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _straight_through(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return cast(torch.Tensor, _StraightThrough.apply(x, quantized))
    return quantized


def _table(values: Iterable[int] | Iterable[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cached table, usable everywhere; made without waiting for the device: the first use is in a step."""
    with torch.inference_mode(False):
        return torch.tensor(list(values), dtype=dtype).to(device, non_blocking=True)


@functools.cache
def _divisor(value: float, device: torch.device) -> torch.Tensor:
    """A float32 constant to divide by. CUDA divides by a number of the host as by a product with its
    reciprocal, which is another result where that is not a power of two."""
    return _f32(value) if device.type == "cpu" else _table([value], torch.float32, device)


@functools.cache
def _e2m1_bounds(device: torch.device) -> torch.Tensor:
    """Ascending int32 bounds between e2m1 codes on raw float32 bits.

    As integers the negative floats come first (from -0 to -NaN), then the positive ones, so one search
    keeps the sign of zero and tells NaN apart.
    """

    def bits(value: float) -> int:
        return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())

    # bucketize(right=False) puts v <= bound below it, so an upward tie has its bound one bit lower.
    positive = [bits(value) - up for value, up in _E2M1_MIDPOINTS]
    infinity = bits(float("inf"))
    negative = [bound - 2**31 for bound in (*positive, infinity)]
    return _table([*negative, -1, *positive], torch.int32, device)


@functools.cache
def _e2m1_codes(device: torch.device) -> torch.Tensor:
    """Code of each interval of `_e2m1_bounds`: -0 … -6, negative NaN (as 6), +0 … +6 and NaN."""
    return _table([*range(8, 16), 7, *range(8)], torch.uint8, device)


@functools.cache
def _e2m1_values(device: torch.device) -> torch.Tensor:
    """float32 [16]: the value of every e2m1 code."""
    return _table([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], torch.float32, device)


@functools.cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """int64 [256]: both values of a packed byte as the bits of two float32, low nibble first.

    One 8-byte element a byte: gathering rows of two floats instead is four times slower on CPU.
    """
    byte = torch.arange(256, device=device)
    values = _e2m1_values(device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.int64).squeeze(-1)


@functools.cache
def e4m3_values(device: torch.device) -> torch.Tensor:
    """float32 [256]: the value of every e4m3fn code (0x7f and 0xff are NaN)."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return _table(values.tolist(), torch.float32, device)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same storage as uint8, for tensors of any one-byte dtype (e4m3, e8m0, int8, uint8)."""
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of the quantization group {size}")
    return x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


# Elements -------------------------------------------------------------------------------------------------


def bf16_round(x: torch.Tensor) -> torch.Tensor:
    """float32 of the same shape, each value rounded to the nearest bf16 (ties to even)."""
    if native.ready(x):
        return native.round_values(x)
    return x.bfloat16().float()


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3fn codes (uint8 or float8_e4m3fn), same shape."""
    codes = as_bytes(codes)
    flat = codes.to(torch.int32).reshape(-1)
    return e4m3_values(codes.device).index_select(0, flat).view(codes.shape)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """uint8 e4m3fn codes: nearest, ties to even, saturating at ±448; NaN stays NaN, -0 keeps its sign."""
    # The clamp is ours: torch releases differ in what a cast does with values past 464.
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 e2m1 codes 0…15, one a byte: ties to the even code, saturating at ±6.

    NaN of either sign becomes 6 (code 7); -0 and negative values that round to zero keep the sign (code 8).
    """
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    interval = torch.bucketize(bits, _e2m1_bounds(x.device), out_int32=True)
    return _e2m1_codes(x.device).index_select(0, interval.reshape(-1)).view(x.shape)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of unpacked e2m1 codes 0…15, same shape."""
    flat = codes.to(torch.int32).reshape(-1)
    return _e2m1_values(codes.device).index_select(0, flat).view(codes.shape)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n/2] from codes [..., n]: the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., 2n] from bytes [..., n], low nibble first."""
    packed = as_bytes(packed)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_e2m1_packed(packed: torch.Tensor) -> torch.Tensor:
    """float32 values [..., 2n] of packed bytes [..., n] (uint8, or int8 as stored), low nibble first."""
    packed = as_bytes(packed)
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.to(torch.int32).reshape(-1))
    return pairs.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 value of the nearest e2m1 number, as `decode_e2m1(encode_e2m1(x))` for finite x.

    The sign of a zero is not kept; NaN stays NaN.
    """
    y = x.clamp(-FP4_MAX, FP4_MAX)
    # The spacing is 0.5 below 2, 1 below 4, 2 above: the power of two below |y|, at least 1, halved.
    magic = y.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_min_(1.0).mul_(_MAGIC_HALF)
    return y.add_(magic).sub_(magic)


def decode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """float32 `2^(byte - 127)` of ue8m0 bytes; byte 0 is 2^-127, byte 255 is NaN."""
    return as_bytes(scales).view(torch.float8_e8m0fnu).to(torch.float32)


def pow2ceil_byte(s: torch.Tensor) -> torch.Tensor:
    """int32 biased exponent of the smallest power of two >= s (s positive float32): `2^(byte-127)`.

    Attention spec §9: `((bits(s) - 1) >> 23) + 1`. Infinity and NaN give 255, which decodes to NaN.
    """
    return s.view(torch.int32).sub(1).bitwise_right_shift_(23).add_(1).clamp_max_(255)


def _pow2_inverse(byte: torch.Tensor) -> torch.Tensor:
    """float32 `2^(127 - byte)` of an int32 exponent byte in 1…253."""
    return byte.neg().add_(254).bitwise_left_shift_(23).view(torch.float32)


# FP8 groups (Q8): activations, window records, Engram rows ------------------------------------------------


def _pow2ceil_(s: torch.Tensor) -> torch.Tensor:
    """`pow2ceil_byte` as the power of two itself, in place: float32 2^e >= s."""
    return s.view(torch.int32).add_(_MANTISSA_BITS).bitwise_and_(_EXPONENT_BITS).view(torch.float32)


def _pow2floor(x: torch.Tensor) -> torch.Tensor:
    """float32 power of two at or below |x|; 0 for zeros and subnormal numbers."""
    return x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)


def _fp8_scales(grouped: torch.Tensor) -> torch.Tensor:
    """float32 [..., n/group, 1] scales of FP8 groups; infinite where a group holds NaN or infinity."""
    largest = _FP8_MAX_0 if grouped.is_cpu else _divisor(FP8_MAX, grouped.device)
    amax = torch.maximum(grouped.abs().amax(-1, True), _FP8_FLOOR_0).div_(largest)
    # A NaN may have its sign set (AVX-512's maximum gives all ones) and would end as a scale of 0.
    return _pow2ceil_(amax.nan_to_num_(_INFINITY, _INFINITY))


def quantize_fp8_groups(x: torch.Tensor, group: int = FP8_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8 (attention spec §9.1): float32 [..., n] → e4m3 codes [..., n], ue8m0 bytes [..., n/group], uint8."""
    grouped = _groups(x.detach(), group)
    scales = _fp8_scales(grouped)
    # |x / scale| <= 448 by construction: no clamp needed.
    codes = (grouped / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = scales.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)
    return codes.view(x.shape), exponents.squeeze(-1)


def dequant_fp8_groups(codes: torch.Tensor, scales: torch.Tensor, group: int = FP8_GROUP) -> torch.Tensor:
    """float32 [..., n] from e4m3 codes [..., n] and ue8m0 bytes [..., n/group]; exact in bf16.

    NaN is read from the scale byte alone, where the quantizer puts it: a NaN code under a finite scale
    (no quantizer writes one) reads as 480.
    """
    # Twice as fast as the table: the code's exponent and mantissa moved into a float32, 2^120 too small.
    bits = as_bytes(codes).view(torch.int8).int().mul_(_E4M3_SHIFT).bitwise_and_(_E4M3_BITS)
    values = _groups(bits.view(torch.float32).mul_(_TWO_120), group)
    return values.mul_(decode_ue8m0(scales).unsqueeze(-1)).view(codes.shape)


def fake_quant_fp8(x: torch.Tensor, group: int = FP8_GROUP) -> torch.Tensor:
    """float32 [..., n]: `dequant_fp8_groups(*quantize_fp8_groups(x))` without the bytes in between.

    The sign of a zero is not kept.
    """
    if native.ready(x) and group == FP8_GROUP and x.shape[-1] % group == 0:
        return native.fake_quant_fp8(x)
    grouped = _groups(x.detach(), group)
    least = _fp8_scales(grouped).mul_(_E4M3_LEAST)
    magic = torch.maximum(_pow2floor(grouped).mul_(_E4M3_MAGIC), least)
    return _straight_through(x, (grouped + magic).sub_(magic).view(x.shape))


# FP4 with ue8m0 scales (Q4i): index keys and queries, expert weights --------------------------------------


def _index_exponents(grouped: torch.Tensor) -> torch.Tensor:
    return pow2ceil_byte(grouped.abs().amax(-1).clamp_min_(INDEX_FLOOR).mul_(_ONE_SIXTH))


def quantize_index(x: torch.Tensor, group: int = INDEX_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4i (attention spec §9.4): float32 [..., n] → packed e2m1 [..., n/2], ue8m0 [..., n/group], uint8."""
    grouped = _groups(x.detach(), group)
    byte = _index_exponents(grouped)
    codes = encode_e2m1(grouped * _pow2_inverse(byte).unsqueeze(-1))
    return pack_nibbles(codes.view(x.shape)), byte.to(torch.uint8)


def dequant_index(packed: torch.Tensor, scales: torch.Tensor, group: int = INDEX_GROUP) -> torch.Tensor:
    """float32 [..., n] from packed e2m1 [..., n/2] and ue8m0 bytes [..., n/group]; exact in bf16."""
    values = decode_e2m1_packed(packed)
    return _groups(values, group).mul_(decode_ue8m0(scales).unsqueeze(-1)).view(values.shape)


def fake_quant_index(x: torch.Tensor, group: int = INDEX_GROUP) -> torch.Tensor:
    """float32 [..., n]: `dequant_index(*quantize_index(x))` without the bytes in between."""
    if native.ready(x) and group == INDEX_GROUP and x.shape[-1] % group == 0:
        return native.fake_quant_index(x)
    grouped = _groups(x.detach(), group)
    amax = grouped.abs().amax(-1, True)
    scales = _pow2ceil_(torch.maximum(amax, _INDEX_FLOOR_0).mul_(_ONE_SIXTH_0))
    magic = torch.maximum(_pow2floor(grouped), scales).mul_(_E2M1_MAGIC)
    return _straight_through(x, (grouped + magic).sub_(magic).view(x.shape))


# FP4 with e4m3 scales (Q4k): compressed KV records --------------------------------------------------------


def _kv_codes(x: torch.Tensor, group: int, divide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled values [..., n/group, group] before e2m1 rounding, e4m3 scale codes uint8 [..., n/group]."""
    grouped = _groups(x.detach(), group)
    amax = grouped.abs().amax(-1).clamp_min_(KV_FLOOR)
    scales = encode_e4m3(amax.div_(_divisor(FP4_MAX, x.device)) if divide else amax.mul_(_ONE_SIXTH))
    s = decode_e4m3(scales).unsqueeze(-1)
    return (grouped / s if divide else grouped * s.reciprocal()), scales


def quantize_kv(
    x: torch.Tensor, group: int = KV_GROUP, *, divide: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4k (attention spec §9.3): float32 [..., n] → packed e2m1 [..., n/2], e4m3 [..., n/group], uint8.

    The product multiplies by fp32(1/6) and by the fp32 reciprocal of the scale. `divide` takes two true
    divisions instead (numeric variant `reference`): values halfway between two codes may go another way.
    """
    scaled, scales = _kv_codes(x, group, divide)
    return pack_nibbles(encode_e2m1(scaled).view(x.shape)), scales


def dequant_kv(packed: torch.Tensor, scales: torch.Tensor, group: int = KV_GROUP) -> torch.Tensor:
    """float32 [..., n] from packed e2m1 [..., n/2] and e4m3 scales [..., n/group]; exact in bf16."""
    values = decode_e2m1_packed(packed)
    return _groups(values, group).mul_(decode_e4m3(scales).unsqueeze(-1)).view(values.shape)


def fake_quant_kv(x: torch.Tensor, group: int = KV_GROUP, *, divide: bool = False) -> torch.Tensor:
    """float32 [..., n]: `dequant_kv(*quantize_kv(x))` without the bytes in between."""
    scaled, scales = _kv_codes(x, group, divide)
    return _straight_through(x, round_e2m1(scaled).mul_(decode_e4m3(scales).unsqueeze(-1)).view(x.shape))


# Stored weights -------------------------------------------------------------------------------------------


def dequant_fp8_weight(weight: torch.Tensor, scale: torch.Tensor, block: int = WEIGHT_BLOCK) -> torch.Tensor:
    """float32 [o, i] of an FP8 weight with ue8m0 scales [ceil(o/block), ceil(i/block)] (model spec §2.3)."""
    out_features, in_features = weight.shape
    expected = (-(-out_features // block), -(-in_features // block))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scales of a {tuple(weight.shape)} FP8 weight have shape {tuple(scale.shape)}, not {expected}"
        )
    spread = decode_ue8m0(scale).repeat_interleave(block, 0)[:out_features]
    spread = spread.repeat_interleave(block, 1)[:, :in_features]
    return decode_e4m3(weight).mul_(spread)


def dequant_mxfp4_weight(weight: torch.Tensor, scale: torch.Tensor, group: int = INDEX_GROUP) -> torch.Tensor:
    """float32 [..., o, i] of an MXFP4 weight [..., o, i/2], scales [..., o, i/group] (model spec §2.3)."""
    return dequant_index(weight, scale, group)


def quantize_fp8_weight(weight: torch.Tensor, block: int = WEIGHT_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [o, i] → e4m3 codes [o, i], ue8m0 bytes [ceil(o/block), ceil(i/block)] (model spec §4.4)."""
    out_features, in_features = weight.shape
    rows, cols = -(-out_features // block), -(-in_features // block)
    padded = weight.new_zeros(rows * block, cols * block)
    padded[:out_features, :in_features] = weight
    tiles = padded.view(rows, block, cols, block)
    largest = _divisor(FP8_MAX, weight.device)
    byte = pow2ceil_byte(tiles.abs().amax((1, 3)).clamp_min_(FP8_FLOOR).div_(largest))
    codes = encode_e4m3(tiles * _pow2_inverse(byte)[:, None, :, None]).view(padded.shape)
    return codes[:out_features, :in_features].contiguous(), byte.to(torch.uint8)


def quantize_mxfp4_weight(
    weight: torch.Tensor, group: int = INDEX_GROUP
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., o, i] → packed e2m1 uint8 [..., o, i/2], ue8m0 bytes [..., o, i/group] (model spec §4.4).

    The exponent is `ceil(log2(amax / 6))`, the same bin as the index recipe's product with fp32(1/6).
    """
    return quantize_index(weight, group)
