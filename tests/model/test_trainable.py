"""The tensor functions carry gradients, through fake quantization too: a toy model can be trained by them."""

import pytest
import torch

from deepinfer_ray.ops import attention, compress, engram, hyper_connections, moe
from deepinfer_ray.ops.linear import grouped_linear, linear
from deepinfer_ray.ops.norm import rms_norm
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import rotate


def _leaf(*shape):
    """Scaled as a trained weight would be: by its input width."""
    return (torch.randn(*shape) * shape[-1] ** -0.5).requires_grad_()


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_gradients_reach_every_weight_of_a_layer(mode):
    """One layer built of the pure functions: hyper-connection, attention, experts, residual updates."""
    torch.manual_seed(0)
    nx, T, m, D, H, d = Numerics(mode), 6, 4, 64, 2, 32
    leaves = {
        "x": _leaf(T, m, D),
        "fn": _leaf(24, m * D),
        "norm": _leaf(D),
        "wq": _leaf(H * d, D),
        "wkv": _leaf(d, D),
        "wo_a": _leaf(2, d, 32),
        "wo_b": _leaf(D, 64),
        "gate": _leaf(4, D),
        "w13": _leaf(128, D),
        "w2": _leaf(D, 64),
        "sink": _leaf(H),
        "engram": _leaf(m, D),
    }
    p = leaves
    x = engram.gated_update(p["x"], torch.randn(T, m, D), torch.randn(T, D), p["engram"], 1e-20)
    pre, post, comb = hyper_connections.mix(x, p["fn"], torch.rand(24), torch.zeros(24), 1e-20, 1e-6, 20)
    v = nx.b(rms_norm(nx.b(hyper_connections.collapse(pre, x)), p["norm"], 1e-20))
    q = nx.b(linear(nx.q8(v), p["wq"])).view(T, H, d)
    q = nx.b(rotate(q, torch.rand(T, 1, d), torch.rand(T, 1, d)))
    latent = nx.q8(nx.b(linear(nx.q8(v), p["wkv"])))
    pooled = compress.pool_pairs(latent.view(T // 2, 2, d), latent.view(T // 2, 2, d))
    keys = latent.expand(T, -1, -1)
    entries = nx.q4_kv(pooled).expand(T, -1, -1)
    causal = attention.validity_bias(torch.tril(torch.ones(T, T)).bool())
    visible = attention.validity_bias(torch.arange(T // 2) < (torch.arange(T)[:, None] + 1) // 2)
    o = nx.b(attention.sparse_attention(q, keys, causal, entries, visible, p["sink"], d**-0.5))
    z = nx.b(grouped_linear(nx.q8(o), p["wo_a"])).reshape(T, -1)
    x = hyper_connections.update(x, nx.b(linear(nx.q8(z), p["wo_b"])), post, comb)
    v = nx.b(rms_norm(x.mean(1), p["norm"], 1e-20))
    _, weights = moe.route(linear(v, p["gate"]), torch.zeros(4), 2, 1.5)
    inner = nx.q8(moe.swiglu(nx.b(linear(nx.q8(v), p["w13"])), weights[:, :1], 10.0))
    x = hyper_connections.update(x, nx.b(linear(inner, p["w2"])), post, comb)
    x.square().mean().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.isfinite().all(), name
        assert leaf.grad.abs().sum() > 0, name


def test_forward_values_are_the_same_with_and_without_a_graph():
    torch.manual_seed(0)
    x, fn = torch.randn(9, 4, 32), torch.randn(24, 128)
    arguments = (torch.rand(24), torch.randn(24), 1e-20, 1e-6, 20)
    with torch.inference_mode():
        without = hyper_connections.mix(x, fn, *arguments)
    traced = hyper_connections.mix(x.clone().requires_grad_(), fn, *arguments)
    for a, b in zip(without, traced, strict=True):
        assert torch.equal(a, b)
