"""Products: golden vectors, and rows that do not depend on how many there are."""

import pytest
import torch

from deepinfer_ray.ops import formats
from deepinfer_ray.ops.linear import ROW_TILE, grouped_linear, linear, pad_dim, round_up
from deepinfer_ray.ops.numerics import Numerics


@pytest.mark.parametrize("name", ["fp8", "fp8_ragged", "fp4"])
def test_golden_products(vectors, bf16_steps, relative, name):
    v = vectors("linear")
    dequant = formats.dequant_mxfp4_weight if name == "fp4" else formats.dequant_fp8_weight
    weight = dequant(formats.as_bytes(v[f"{name}.weight"]), formats.as_bytes(v[f"{name}.scale"]))
    assert torch.equal(weight, v[f"{name}.dequantized"])
    x = v[f"{name}.x"].float()
    assert relative(linear(x, weight), v[f"{name}.y_exact_fp32"]) <= 2e-6
    nx = Numerics()
    assert bf16_steps(nx.b(linear(nx.q8(x), weight)), v[f"{name}.y_official_bf16"]).max() <= 1


COUNTS = [*range(1, 71), 96, 128, 333]


@pytest.mark.parametrize("shape", [(64, 24), (64, 6), (128, 256), (768, 640), (512, 64), (1280, 130)])
def test_rows_do_not_depend_on_their_number(shape):
    torch.manual_seed(0)
    inner, outer = shape
    weight, x = torch.randn(outer, inner), torch.randn(512, inner)
    want = linear(x, weight)
    for rows in COUNTS:
        start = rows % 7
        assert torch.equal(linear(x[start : start + rows], weight), want[start : start + rows]), rows


@pytest.mark.parametrize("shape", [(2, 128, 32), (2, 512, 64), (8, 256, 64)])
def test_grouped_rows_do_not_depend_on_their_number(shape):
    torch.manual_seed(0)
    groups, inner, outer = shape
    weight, x = torch.randn(groups, inner, outer), torch.randn(400, groups, inner)
    want = grouped_linear(x, weight)
    assert torch.allclose(want, torch.einsum("tgi,gio->tgo", x, weight), atol=1e-4)
    for rows in COUNTS:
        assert torch.equal(grouped_linear(x[:rows], weight), want[:rows]), rows


def test_padding_is_needed():
    """CPU libraries may give few rows other low bits: products see whole tiles of rows."""
    assert pad_dim(torch.ones(3, 5), 0).shape == (ROW_TILE, 5)
    assert pad_dim(torch.ones(3, 5), 0)[3:].eq(0).all()
    full = torch.ones(ROW_TILE, 5)
    assert pad_dim(full, 0) is full
    assert [round_up(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_no_rows_give_no_rows():
    assert linear(torch.ones(0, 8), torch.ones(4, 8)).shape == (0, 4)
