"""Router and SwiGLU against golden and against the printed vector."""

import pytest
import torch

from deepinfer_ray.ops import moe
from deepinfer_ray.ops.linear import linear


@pytest.mark.parametrize("images", [False, True])
def test_golden_router(vectors, images):
    v = vectors("moe_gate")
    logits = linear(v["x"].float(), v["gate_weight"].float())
    assert torch.allclose(logits, v["logits"], rtol=2e-6, atol=1e-6)
    mask = v["image_mask"] if images else None
    experts, weights = moe.route(v["logits"], v["bias"], 4, 1.5, v["bias_vl"], mask)
    rows = slice(None) if images else ~v["image_mask"]
    assert torch.equal(experts[rows], v["expert_ids"].long()[rows])
    assert torch.allclose(weights[rows], v["weights"][rows], rtol=2e-6, atol=0)
    if images:
        text, _ = moe.route(v["logits"], v["bias"], 4, 1.5)
        assert not torch.equal(text, experts)


def test_printed_router_vector():
    logits = torch.tensor([[0.5, -1, 2, 25, 0, -30, 1, 0.25]])
    bias = torch.tensor([0, 0, 0, -10, 0, 0, 0, 0.5])
    scores = [0.986953, 0.559698, 1.458399, 5.0, 0.832555, 3.059e-7, 1.145976, 0.908812]
    assert torch.allclose(moe.router_scores(logits)[0], torch.tensor(scores), rtol=1e-5, atol=1e-10)
    experts, weights = moe.route(logits, bias, 3, 1.5)
    assert experts.tolist() == [[2, 7, 6]]
    assert torch.allclose(weights[0], torch.tensor([0.622682, 0.388029, 0.489289]), atol=1e-6)


def test_equal_scores_take_the_smaller_expert():
    experts = moe.select_experts(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0] * 5]), 3)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2]]


def test_invalid_rows_route_nowhere():
    logits = torch.randn(4, 6)
    experts, weights = moe.route(logits, torch.zeros(6), 2, 1.5, valid=torch.tensor([1, 0, 1, 0]).bool())
    assert experts[[1, 3]].eq(-1).all()
    assert weights[[1, 3]].eq(0).all()
    assert experts[[0, 2]].ge(0).all()


def test_one_expert_is_not_normalized():
    logits = torch.randn(5, 4)
    experts, weights = moe.route(logits, torch.zeros(4), 1, 1.0)
    assert torch.equal(weights, moe.router_scores(logits).gather(1, experts))


def test_golden_swiglu(vectors):
    v = vectors("moe_gate")
    out = moe.swiglu(v["swiglu.gate_up"], v["swiglu.row_weight"][:, None], 10.0)
    assert torch.allclose(out, v["swiglu.out"], rtol=2e-6, atol=1e-7)


def test_the_gate_is_clamped_from_above_only():
    gate_up = torch.tensor([[-50.0, 50.0, 1.0, 1.0, 50.0, -50.0]])
    out = moe.swiglu(gate_up, None, 10.0)
    silu = torch.nn.functional.silu(torch.tensor([-50.0, 10.0, 1.0]))
    assert torch.allclose(out[0], silu * torch.tensor([1.0, 10.0, -10.0]), rtol=1e-6)
    unlimited = moe.swiglu(gate_up, None, None)
    assert torch.allclose(unlimited[0, 1], torch.tensor(50.0 * 50.0))


def test_rows_do_not_depend_on_their_number():
    torch.manual_seed(0)
    logits, gate_up, weight = torch.randn(80, 13) * 8, torch.randn(80, 62), torch.rand(80, 1)
    scores, out = moe.router_scores(logits), moe.swiglu(gate_up, weight, 10.0)
    want = moe.route(logits, torch.zeros(13), 3, 1.5)
    for rows in range(1, 71):
        own = slice(rows % 9, rows % 9 + rows)
        assert torch.equal(moe.router_scores(logits[own]), scores[own])
        assert torch.equal(moe.swiglu(gate_up[own], weight[own], 10.0), out[own])
        for a, b in zip(moe.route(logits[own], torch.zeros(13), 3, 1.5), want, strict=True):
            assert torch.equal(a, b[own])


def test_slots_are_added_in_order_behind_the_shared_expert():
    o = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert moe.combine_slots(o).item() == 0.0
    assert moe.combine_slots(o[:, [0, 2, 1]]).item() == 1.0
    assert moe.combine_slots(o[:, 1:], o[:, 0]).item() == 0.0
