"""RMS norm and rotary tables against golden and against the printed numbers."""

import pytest
import torch

from deepinfer_ray.ops.norm import rms_norm
from deepinfer_ray.ops.rope import RopeTable, inverse_frequencies, rotate, yarn_frequencies, yarn_range

YARN = {"factor": 16, "original": 65536, "beta_fast": 32, "beta_slow": 1}


def test_golden_rms_norm(vectors, bf16_steps):
    v = vectors("rmsnorm")
    y = rms_norm(v["x"].float(), v["weight"].float(), 1e-20)
    assert bf16_steps(y, v["y_official"]).max() <= 1
    assert (bf16_steps(y, v["y_official"]) == 0).float().mean() >= 0.999


def test_the_eps_is_1e_20():
    """A zero row stays zero; a row of 1e-9 is not flattened by the eps."""
    y = rms_norm(torch.tensor([[0.0] * 64, [1e-9] * 64]), torch.ones(64), 1e-20)
    assert y[0].eq(0).all()
    assert torch.allclose(y[1], torch.full((64,), 0.995037), atol=1e-5)


@pytest.mark.parametrize("kind", ["swa", "compressed"])
def test_golden_tables(vectors, kind):
    v = vectors("rope")
    plain = kind == "swa"
    frequencies = inverse_frequencies(64, 10000.0) if plain else yarn_frequencies(64, 160000.0, **YARN)
    assert torch.allclose(frequencies, v[f"{kind}.inv_freq"], rtol=1.2e-7, atol=0)
    table = RopeTable(frequencies, 1 << 20)
    positions = v["positions"].long()
    table.reserve(int(positions.max()) + 1)
    cos, sin = table.take(positions)
    assert torch.allclose(cos[:, ::2], v[f"{kind}.cos"], rtol=0, atol=6e-8)
    assert torch.allclose(sin[:, 1::2], v[f"{kind}.sin"], rtol=0, atol=6e-8)
    assert torch.equal(cos[:, ::2], cos[:, 1::2])
    assert torch.equal(sin[:, ::2], -sin[:, 1::2])


def test_golden_rotation_and_its_inverse(vectors, bf16_steps):
    v = vectors("rope")
    table = RopeTable(yarn_frequencies(64, 160000.0, **YARN), 1 << 20)
    positions = v["positions"].long()
    table.reserve(int(positions.max()) + 1)
    cos, sin = (x.unsqueeze(1) for x in table.take(positions))
    turned = rotate(v["x"].float(), cos, sin)
    assert bf16_steps(turned, v["x_rotated"]).max() <= 1
    assert bf16_steps(rotate(v["x_rotated"].float(), cos, -sin), v["x_rotated_back"]).max() <= 1


def test_printed_yarn_frequencies():
    f = yarn_frequencies(64, 160000.0, **YARN)
    printed = {0: 1.0, 1: 0.6876560219, 15: 3.635538584e-3, 16: 2.265625e-3, 20: 2.969777783e-4}
    printed |= {24: 1.953125e-5, 25: 5.372312671e-6, 31: 5.680529037e-7}
    for i, value in printed.items():
        assert f[i].item() == pytest.approx(value, rel=2e-7)


@pytest.mark.parametrize(("original", "expected"), [(65536, (15, 25)), (4096, (8, 18)), (256, (0, 10))])
def test_printed_yarn_ranges(original, expected):
    assert yarn_range(64, 160000.0, original, 32, 1) == expected


@pytest.mark.parametrize(("dim", "original", "expected"), [(64, 128, (0, 9)), (16, 32, (0, 2))])
def test_yarn_ranges_of_the_tiny_models(dim, original, expected):
    assert yarn_range(dim, 160000.0, original, 32, 1) == expected


def test_high_is_capped_and_an_empty_ramp_is_a_step():
    assert yarn_range(4, 100.0, 10**9, 1e-3, 1e-4)[1] == 3
    assert yarn_frequencies(8, 160000.0, 16, 1, 1e6, 1e6).isfinite().all()


def test_a_table_grows_and_rows_do_not_change():
    frequencies = inverse_frequencies(16, 10000.0)
    table = RopeTable(frequencies, 5000)
    before = table.take(torch.tensor([3, 700]))
    table.reserve(4000)
    after = table.take(torch.tensor([3, 700]))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_a_position_outside_the_table_is_an_error():
    table = RopeTable(inverse_frequencies(16, 10000.0), 100)
    with pytest.raises(ValueError, match=r"position 100 is outside the RoPE table of 100 positions; shorten"):
        table.reserve(101)
