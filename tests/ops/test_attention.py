"""Sparse attention: golden vectors in both variants, empty rows, independence of rows and padding."""

import pytest
import torch

from deepinfer_ray.ops.attention import sparse_attention, sparse_attention_blocks, validity_bias

SCALE = 512**-0.5


def _gather(v, columns):
    index = v["indices"][:, columns].long()
    keys = v["kv"].float()[index.clamp_min(0)].masked_fill((index < 0).unsqueeze(-1), 0.0)
    return keys, validity_bias(index >= 0)


@pytest.mark.parametrize("split", [110, 64, 40])
def test_golden_attention_in_float32(vectors, relative, split):
    v = vectors("sparse_attention")
    window, compressed = _gather(v, slice(0, split)), _gather(v, slice(split, None))
    parts = compressed if split < 110 else (None, None)
    out = sparse_attention(v["q"].float(), *window, *parts, v["sink"], SCALE)
    want = v["out_fp32"]
    for row in range(want.shape[0]):
        if want[row].abs().sum() == 0:
            assert out[row].eq(0).all()
        else:
            assert relative(out[row], want[row]) <= 2e-6


def test_golden_attention_with_the_released_roundings(vectors, bf16_steps):
    v = vectors("sparse_attention")
    window, compressed = _gather(v, slice(0, 64)), _gather(v, slice(64, None))
    out = sparse_attention_blocks(v["q"].float(), *window, *compressed, v["sink"], SCALE)
    distance = bf16_steps(out, v["out_official"])
    assert distance.max() <= 1
    assert (distance == 0).float().mean() >= 0.99


def test_one_golden_row_has_no_key(vectors):
    v = vectors("sparse_attention")
    empty = (v["indices"] < 0).all(1)
    assert empty.sum() == 1
    for attend in (sparse_attention, sparse_attention_blocks):
        out = attend(v["q"].float(), *_gather(v, slice(0, 110)), None, None, v["sink"], SCALE)
        assert out[empty].eq(0).all()
        assert not out.isnan().any()


def test_a_key_in_both_sets_counts_twice():
    q, key = torch.zeros(1, 1, 32), torch.ones(1, 1, 32)
    bias = torch.zeros(1, 1, 1)
    out = sparse_attention(q, key, bias, key, bias, torch.zeros(1), 1.0)
    assert torch.allclose(out, torch.full_like(out, 2 / 3))


def test_the_sink_only_adds_mass():
    q, key = torch.zeros(1, 2, 32), torch.ones(1, 1, 32)
    sink = torch.tensor([float("-inf"), 0.0])
    out = sparse_attention(q, key, torch.zeros(1, 1, 1), None, None, sink, 1.0)
    assert torch.allclose(out[0, :, 0], torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("attend", [sparse_attention, sparse_attention_blocks])
def test_rows_and_padding_columns_change_no_bit(attend):
    torch.manual_seed(1)
    q, window, entries = torch.randn(80, 8, 64), torch.randn(80, 16, 64), torch.randn(80, 8, 64)
    present = torch.rand(80, 16) > 0.3
    window.masked_fill_(~present.unsqueeze(-1), 0.0)
    w_bias, e_bias = validity_bias(present), validity_bias(torch.rand(80, 8) > 0.5)
    sink = torch.randn(8)
    want = attend(q, window, w_bias, entries, e_bias, sink, 0.1)
    for rows in range(1, 71):
        own = slice(rows % 9, rows % 9 + rows)
        got = attend(q[own], window[own], w_bias[own], entries[own], e_bias[own], sink, 0.1)
        assert torch.equal(got, want[own]), rows
