"""Number formats: brute force over every code, the recipes of attention spec §9, golden vectors."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer_ray.ops import formats
from deepinfer_ray.ops.numerics import Numerics

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "ops"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ulp(value: float, steps: int) -> float:
    for _ in range(abs(steps)):
        value = float(np.nextafter(np.float32(value), np.float32(np.inf if steps > 0 else -np.inf)))
    return value


def nearest_even(x: float, grid: list[float]) -> int:
    """Index of the grid value nearest to |x|, ties to the even index, saturating."""
    distance = [abs(float(x) - value) for value in grid]
    best = min(distance)
    ties = [i for i, d in enumerate(distance) if d == best]
    return ties[0] if len(ties) == 1 else next(i for i in ties if i % 2 == 0)


def probes(grid: list[float]) -> list[float]:
    """Grid values, midpoints, and their float32 neighbours."""
    points = grid + [(a + b) / 2 for a, b in itertools.pairwise(grid)] + [grid[-1] * 1.01, grid[-1] * 9]
    return [ulp(p, step) for p in points for step in (-1, 0, 1) if ulp(p, step) >= 0]


def test_e4m3_decode_matches_the_format_definition():
    for code in range(256):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        got = formats.decode_e4m3(torch.tensor([code], dtype=torch.uint8)).item()
        if code & 0x7F == 0x7F:
            assert np.isnan(got)
        else:
            assert got == (-value if sign else value)
            assert np.signbit(got) == bool(sign)


def test_e4m3_encode_rounds_to_even_and_saturates():
    grid = [formats.decode_e4m3(torch.tensor([c], dtype=torch.uint8)).item() for c in range(0x7F)]
    xs = probes(grid)
    codes = formats.encode_e4m3(torch.tensor([*xs, *(-x for x in xs)])).tolist()
    want = [nearest_even(x, grid) for x in xs]
    assert codes == want + [code | 0x80 for code in want]


def test_e4m3_special_values():
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30])
    assert formats.encode_e4m3(x).tolist() == [0, 0x80, 0x7E, 0xFE, 0x7F, 0x7E]


def test_e2m1_rounds_to_the_even_code_and_keeps_signs():
    xs = probes(list(E2M1))
    codes = formats.encode_e2m1(torch.tensor([*xs, *(-x for x in xs)])).tolist()
    want = [nearest_even(x, list(E2M1)) for x in xs]
    assert codes == want + [code | 8 for code in want]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.decode_e2m1(formats.encode_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_e2m1_special_values():
    nan = float("nan")
    x = torch.tensor([nan, -nan, float("inf"), -float("inf"), -0.0, -0.1, 7.0, -1e30])
    assert formats.encode_e2m1(x).tolist() == [7, 7, 7, 15, 8, 8, 7, 15]


def test_round_e2m1_is_encode_then_decode():
    xs = torch.tensor(probes(list(E2M1)))
    xs = torch.cat((xs, -xs, torch.randn(4000) * 3))
    assert torch.equal(formats.round_e2m1(xs), formats.decode_e2m1(formats.encode_e2m1(xs)))


def test_nibbles_even_element_low():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = formats.pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    assert torch.equal(formats.unpack_nibbles(packed), codes)
    assert formats.decode_e2m1_packed(packed.view(torch.int8)).tolist() == [[0.5, 1.0, -6.0, 0.0]]


def test_ue8m0_decode():
    b = torch.tensor([0, 1, 105, 127, 254, 255], dtype=torch.uint8)
    got = formats.decode_ue8m0(b).tolist()
    assert got[:5] == [2.0**-127, 2.0**-126, 2.0**-22, 1.0, 2.0**127]
    assert np.isnan(got[5])


def test_pow2ceil_keeps_powers_of_two():
    s = torch.tensor([1.0, ulp(1.0, 1), ulp(1.0, -1), 2.0**-126, 3.0, float("inf"), float("nan")])
    assert formats.pow2ceil_byte(s).tolist() == [127, 128, 127, 1, 129, 255, 255]


def group_of(amax: float, size: int) -> torch.Tensor:
    x = torch.zeros(1, size)
    x[0, 1] = -amax
    return x


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(0, 105), (1e-4, 105), (0.875, 118), (1, 119), (3.5, 120), (3.515625, 121), (448, 127), (449, 128)],
)
def test_fp8_scale_byte(amax: float, byte: int):
    assert formats.quantize_fp8_groups(group_of(amax, 32))[1].tolist() == [[byte]]


@pytest.mark.parametrize(
    ("amax", "scale", "byte"),
    [
        (0, 2.0**-9, 0x01),
        (6 * 2.0**-9, 2.0**-9, 0x01),
        (1, 0.171875, 0x23),
        (3, 0.5, 0x30),
        (6, 1.0, 0x38),
        (7, 1.125, 0x39),
        (100, 16.0, 0x58),
        (2688, 448.0, 0x7E),
        (1e9, 448.0, 0x7E),
    ],
)
def test_fp4_main_scale(amax: float, scale: float, byte: int):
    for divide in (False, True):
        got = formats.quantize_kv(group_of(amax, 16), divide=divide)[1]
        assert got.tolist() == [[byte]]
        assert formats.decode_e4m3(got).item() == scale


@pytest.mark.parametrize(
    ("amax", "byte"), [(0, 1), (1, 125), (1.5, 125), (6, 127), (6.03125, 128), (12, 128)]
)
def test_fp4_index_scale_byte(amax: float, byte: int):
    assert formats.quantize_index(group_of(amax, 32))[1].tolist() == [[byte]]


def edge_rows(width: int) -> torch.Tensor:
    """bf16-representable rows: ordinary, tiny, subnormal, zero, -0, huge, powers of two, ties."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(60, width, generator=generator)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] *= 1e-5
    rows[3] *= 2.0**-130
    rows[4] *= 1e30
    rows[5] = 2.0 ** torch.randint(-12, 9, (width,), generator=generator)
    rows[6] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    rows[7, 1:] = 0
    return formats.bf16_round(rows)


@pytest.mark.parametrize("recipe", ["fp8", "index", "kv", "kv_divide"])
def test_fake_quantization_is_store_then_load(recipe: str):
    x = edge_rows(128)
    if recipe == "fp8":
        stored, fake = formats.dequant_fp8_groups(*formats.quantize_fp8_groups(x)), formats.fake_quant_fp8(x)
    elif recipe == "index":
        stored, fake = formats.dequant_index(*formats.quantize_index(x)), formats.fake_quant_index(x)
    else:
        divide = recipe == "kv_divide"
        stored = formats.dequant_kv(*formats.quantize_kv(x, divide=divide))
        fake = formats.fake_quant_kv(x, divide=divide)
    assert torch.equal(stored, fake)
    if recipe != "kv":  # a kv row beyond 448 * 6 saturates
        assert torch.equal(formats.bf16_round(fake), fake)


@pytest.mark.parametrize(("recipe", "tolerance"), [("fp8", 0.25), ("kv", 0.5), ("index", 0.5)])
def test_error_bounds_of_one_round_trip(recipe: str, tolerance: float):
    x = formats.bf16_round(torch.randn(200, 128, generator=torch.Generator().manual_seed(1)))
    fake = {"fp8": formats.fake_quant_fp8, "kv": formats.fake_quant_kv, "index": formats.fake_quant_index}[
        recipe
    ](x)
    assert torch.allclose(fake, x, atol=tolerance, rtol=tolerance)
    relative = ((fake - x).norm() / x.norm()).item()
    assert relative == pytest.approx({"fp8": 0.027, "kv": 0.095, "index": 0.115}[recipe], rel=0.08)


def test_requantizing_a_round_tripped_fp8_row_keeps_its_values():
    x = formats.fake_quant_fp8(edge_rows(128))
    assert torch.equal(formats.fake_quant_fp8(x), x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_with_a_non_finite_value_loads_as_nan(value: float):
    x = torch.ones(1, 64)
    x[0, 40] = value
    loaded = formats.dequant_fp8_groups(*formats.quantize_fp8_groups(x))
    assert torch.isfinite(loaded[0, :32]).all()
    assert loaded[0, 40].isnan()
    loaded = formats.dequant_index(*formats.quantize_index(x))
    assert torch.isfinite(loaded[0, :32]).all()
    assert loaded[0, 32:].isnan().all()


def test_gradients_pass_straight_through_quantizers():
    for fake in (formats.fake_quant_fp8, formats.fake_quant_index, formats.fake_quant_kv):
        x = torch.randn(3, 64, requires_grad=True)
        weight = torch.randn(3, 64)
        (fake(x) * weight).sum().backward()
        assert torch.equal(x.grad, weight)


def test_width_must_divide_into_groups():
    with pytest.raises(ValueError, match="last dimension 40 is not a multiple of the quantization group 32"):
        formats.fake_quant_fp8(torch.zeros(2, 40))


def test_numerics_exact_is_the_identity():
    x = torch.randn(4, 64)
    exact = Numerics("exact", "reference")
    for method in (exact.b, exact.q8, exact.q4_index, exact.q4_kv):
        assert method(x) is x
    assert not exact.reference


def test_numerics_released_calls_the_recipes():
    x = edge_rows(64)
    engine, reference = Numerics(), Numerics("released", "reference")
    assert torch.equal(engine.b(x), formats.bf16_round(x))
    assert torch.equal(engine.q8(x), formats.fake_quant_fp8(x))
    assert torch.equal(engine.q4_index(x), formats.fake_quant_index(x))
    assert torch.equal(engine.q4_kv(x), formats.fake_quant_kv(x))
    assert torch.equal(reference.q4_kv(x), formats.fake_quant_kv(x, divide=True))


def test_numerics_rejects_unknown_names():
    with pytest.raises(ValueError, match="numerics mode is 'fast'; it must be 'exact' or 'released'"):
        Numerics("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="numerics variant is 'other'"):
        Numerics("exact", "other")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0, 1, 105, 127, 200, 247])
def test_group_dequantization_decodes_every_finite_code(scale: int):
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    scales = torch.full((8,), scale, dtype=torch.uint8)
    want = formats.decode_e4m3(codes) * formats.decode_ue8m0(scales[:1])
    got = formats.dequant_fp8_groups(codes, scales)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


def test_packed_decoding_reads_every_byte():
    packed = torch.arange(256, dtype=torch.uint8)
    want = formats.decode_e2m1(formats.unpack_nibbles(packed))
    got = formats.decode_e2m1_packed(packed)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


# Weights -------------------------------------------------------------------------------------------------


def test_fp8_weight_round_trip_of_a_ragged_shape():
    weight = torch.randn(80, 72) * torch.logspace(-8, 3, 80)[:, None]
    codes, scales = formats.quantize_fp8_weight(weight)
    assert (codes.shape, scales.shape) == ((80, 72), (3, 3))
    back = formats.dequant_fp8_weight(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))
    for r in range(3):
        for c in range(3):
            tile = slice(32 * r, 32 * r + 32), slice(32 * c, 32 * c + 32)
            step = 2.0 ** (int(scales[r, c]) - 127)
            assert (back[tile] - weight[tile]).abs().max() <= 16 * step
            assert weight[tile].abs().max() <= 448 * step
    again = formats.quantize_fp8_weight(back)
    assert torch.equal(formats.dequant_fp8_weight(*again), back)


def test_fp8_weight_with_wrong_scales_is_refused():
    with pytest.raises(ValueError, match=r"have shape \(2, 3\), not \(3, 2\)"):
        formats.dequant_fp8_weight(
            torch.zeros(80, 64, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
        )


def test_mxfp4_weight_on_its_grid_survives():
    values = formats.dequant_mxfp4_weight(
        torch.randint(0, 256, (5, 8, 32), dtype=torch.uint8),
        torch.randint(100, 140, (5, 8, 2), dtype=torch.uint8),
    )
    packed, scales = formats.quantize_mxfp4_weight(values)
    assert torch.equal(formats.dequant_mxfp4_weight(packed.view(torch.int8), scales), values)


# Golden vectors ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kv() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "kv_quant.safetensors")


@pytest.fixture(scope="module")
def linear() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "linear.safetensors")


def test_golden_fake_quantization(kv: dict[str, torch.Tensor]):
    x = kv["x"].float()
    assert torch.equal(formats.fake_quant_fp8(x), kv["fp8_528.official_fake_quant"].float())
    official = kv["fp4_288.official_fake_quant"].float()
    assert torch.equal(formats.fake_quant_kv(x, divide=True), official)
    differing = formats.fake_quant_kv(x) != official
    assert int(differing.sum()) == 15  # values halfway between two codes (attention spec §9.3)
    assert torch.equal(formats.quantize_kv(x)[1], formats.quantize_kv(x, divide=True)[1])


def test_golden_index_rows(kv: dict[str, torch.Tensor]):
    x = kv["index_fp4.x"].float()
    codes, scales = formats.quantize_index(x)
    assert torch.equal(codes, kv["index_fp4.row_codes"])
    assert torch.equal(scales, kv["index_fp4.row_scales"])
    assert torch.equal(formats.fake_quant_index(x), kv["index_fp4.official_fake_quant"].float())


@pytest.mark.parametrize(
    ("x", "codes", "scales"),
    [("act_quant.x", "act_quant.codes", "act_quant.scale"), ("fp8.x", "fp8.x_fp8", "fp8.x_scale")],
)
def test_golden_activation_quantization(linear: dict[str, torch.Tensor], x: str, codes: str, scales: str):
    got_codes, got_scales = formats.quantize_fp8_groups(linear[x].float())
    assert torch.equal(got_codes, linear[codes].view(torch.uint8))
    assert torch.equal(got_scales, linear[scales].view(torch.uint8))


def test_golden_weight_dequantization(linear: dict[str, torch.Tensor]):
    for name in ("fp8", "fp8_ragged"):
        got = formats.dequant_fp8_weight(linear[f"{name}.weight"], linear[f"{name}.scale"])
        assert torch.equal(got, linear[f"{name}.dequantized"])
    got = formats.dequant_mxfp4_weight(linear["fp4.weight"], linear["fp4.scale"])
    assert torch.equal(got, linear["fp4.dequantized"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_among_many_rows_spoils_its_group_alone(value: float):
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(0))
    x[123, 40] = value
    spoiled = torch.zeros(300, 4, dtype=torch.bool)
    spoiled[123, 1] = True
    for got in (formats.fake_quant_fp8(x), formats.dequant_fp8_groups(*formats.quantize_fp8_groups(x))):
        assert torch.equal(got.view(300, 4, 32).isnan().any(-1), spoiled)
