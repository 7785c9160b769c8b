"""Hyper-connections: golden sub-layer step, printed Sinkhorn values, the numpy loop against the plain one."""

import pytest
import torch

from deepinfer_ray.ops import hyper_connections as hc
from deepinfer_ray.ops.norm import rms_norm
from deepinfer_ray.ops.numerics import Numerics


def _coefficients(v, x):
    scale = v["scale"].repeat_interleave(torch.tensor([4, 4, 16]))
    return hc.mix(x, v["fn"], scale, v["base"], 1e-20, 1e-6, 20)


def test_golden_coefficients(vectors):
    v = vectors("mhc")
    pre, post, comb = _coefficients(v, v["residual"].float())
    for name, got in (("pre", pre), ("post", post), ("comb", comb)):
        assert torch.allclose(got, v[name], rtol=2e-6, atol=1e-7), name


def test_golden_step(vectors, bf16_steps):
    v, b = vectors("mhc"), Numerics().b
    x = v["residual"].float()
    u = b(hc.collapse(v["prev_mix"], x))
    assert bf16_steps(u, v["collapsed_residual_with_prev_mix"]).max() <= 1
    _, post, comb = _coefficients(v, x)
    y = v["sublayer_out"].float()
    assert bf16_steps(b(hc.update(x, y, post, comb)), v["residual_out"]).max() <= 1
    x = b(hc.update(x, y, v["post"], v["comb"]))
    assert torch.equal(x, v["residual_out"].float())
    u = b(hc.collapse(v["prev_mix"], x))
    assert bf16_steps(u, v["next.sublayer_in"]).max() <= 1
    normed = rms_norm(v["next.sublayer_in"].float(), v["norm_weight"].float(), 1e-20)
    assert bf16_steps(normed, v["next.normed_in"]).max() <= 1
    for name, got in zip(("pre", "post", "comb"), _coefficients(v, x), strict=True):
        assert torch.allclose(got, v[f"next.{name}"], rtol=2e-6, atol=1e-7), name


def test_printed_sinkhorn_values():
    diagonal = torch.full((1, 4, 4), -3.0) + 6 * torch.eye(4)
    c = hc.sinkhorn(diagonal, 1e-6, 20)[0]
    want = torch.full((4, 4), 0.00246144) + torch.eye(4) * (0.99261467 - 0.00246144)
    assert torch.allclose(c, want, atol=2e-7)
    i, j = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    t = 0.1 * (4 * i + j) * (-1.0) ** (i + j)
    c = hc.sinkhorn(t[None], 1e-6, 20)[0]
    want = [
        [0.3187198, 0.1933141, 0.3469180, 0.1410472],
        [0.1933136, 0.3187201, 0.1410469, 0.3469184],
        [0.4347291, 0.0532362, 0.4731911, 0.0388426],
        [0.0532365, 0.4347287, 0.0388430, 0.4731908],
    ]
    assert torch.allclose(c, torch.tensor(want), atol=3e-7)
    assert torch.allclose(c.sum(0), torch.full((4,), 0.999999), atol=3e-7)
    assert torch.allclose(c.sum(1), torch.full((4,), 0.999999), atol=3e-7)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33, 70, 512])
def test_the_numpy_loop_has_the_bits_of_the_plain_one(rows):
    torch.manual_seed(rows)
    logits = torch.randn(rows, 4, 4) * 4
    assert torch.equal(hc.sinkhorn(logits, 1e-6, 20), hc.sinkhorn_plain(logits, 1e-6, 20))


def test_rows_do_not_depend_on_their_number():
    torch.manual_seed(0)
    x, fn = torch.randn(80, 4, 64), torch.randn(24, 256)
    scale, base = torch.rand(24), torch.randn(24)
    want = hc.mix(x, fn, scale, base, 1e-20, 1e-6, 20)
    y = torch.randn(80, 64)
    updated, collapsed = hc.update(x, y, want[1], want[2]), hc.collapse(want[0], x)
    for rows in range(1, 71):
        own = slice(rows % 5, rows % 5 + rows)
        got = hc.mix(x[own], fn, scale, base, 1e-20, 1e-6, 20)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b[own]), rows
        assert torch.equal(hc.update(x[own], y[own], got[1], got[2]), updated[own]), rows
        assert torch.equal(hc.collapse(got[0], x[own]), collapsed[own]), rows


def test_comb_contracts_over_its_first_index():
    x = torch.zeros(1, 4, 8)
    x[0, 2] = 1.0
    comb = torch.zeros(1, 4, 4)
    comb[0, 2, 1] = 5.0
    out = hc.update(x, torch.zeros(1, 8), torch.zeros(1, 4), comb)
    assert out[0, 1].eq(5).all()
    assert out[0, [0, 2, 3]].eq(0).all()


def test_everything_is_differentiable():
    x = torch.randn(5, 4, 32, requires_grad=True)
    fn = torch.randn(24, 128, requires_grad=True)
    pre, post, comb = hc.mix(x, fn, torch.rand(24), torch.randn(24), 1e-20, 1e-6, 20)
    y = hc.update(x, hc.collapse(pre, x), post, comb)
    y.square().sum().backward()
    assert fn.grad is not None
    assert fn.grad.isfinite().all()
    assert fn.grad.abs().sum() > 0
