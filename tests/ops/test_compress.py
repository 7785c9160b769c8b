"""Ratio-2 pooling against golden: prefill with a state ring, decode with several rows a request."""

import torch

from deepinfer_ray.ops.compress import pool_pairs
from deepinfer_ray.ops.numerics import Numerics

RING = 8


def _members(step, state, slot, first, start, row):
    """(score, latent) [2, 2, d] of positions first, first+1: before `start` from the ring."""
    return torch.stack(
        [
            state[slot, position % RING] if position < start else step[row + position - start]
            for position in (first, first + 1)
        ]
    )


def test_golden_prefill(vectors, bf16_steps):
    v = vectors("compress")
    step = torch.stack((v["prefill.score"], v["prefill.latent"]), dim=1)
    state, b = v["prefill.state_before"].clone(), Numerics().b
    cu_q, cu_k = v["prefill.cu_seqlens_q"].tolist(), v["prefill.cu_seqlens_k"].tolist()
    cu_c, slots = v["prefill.cu_compressed_seqlens_q"].tolist(), v["prefill.state_block_idx"].tolist()
    compared = 0
    for i, slot in enumerate(slots):
        row, q, k = cu_q[i], cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]
        start = k - q
        entries = range(start // 2, k // 2)
        want = v["prefill.kv_compressed"][cu_c[i] : cu_c[i + 1]]
        if len(entries):
            members = torch.stack([_members(step, state, slot, 2 * j, start, row) for j in entries])
            got = b(pool_pairs(members[:, :, 0], members[:, :, 1]))
            assert bf16_steps(got, want).max() <= 1
            compared += len(entries)
        else:
            assert want.eq(0).all()
        for position in range(max(start, k - RING), k):
            state[slot, position % RING] = step[row + position - start]
    assert compared >= 12
    assert torch.equal(state, v["prefill.state_after"])


def test_golden_decode(vectors, bf16_steps):
    v = vectors("compress")
    step = torch.stack((v["decode.score"], v["decode.latent"]), dim=1)
    state, b = v["decode.state_before"].clone(), Numerics().b
    lengths, slots = v["decode.context_lens"].tolist(), v["decode.state_block_idx"].tolist()
    for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if length > 0:
            state[slot, (length - 1) % RING] = step[row]
    assert torch.equal(state, v["decode.state_after"])
    closing = [row for row, length in enumerate(lengths) if length > 0 and length % 2 == 0]
    members = torch.stack(
        [state[slots[row], [(lengths[row] - 2) % RING, (lengths[row] - 1) % RING]] for row in closing]
    )
    got = b(pool_pairs(members[:, :, 0], members[:, :, 1]))
    assert closing
    assert bf16_steps(got, v["decode.kv_compressed"][closing]).max() <= 1
    others = [row for row in range(len(lengths)) if row not in closing]
    assert v["decode.kv_compressed"][others].eq(0).all()


def test_pooling_is_a_softmax_of_each_channel():
    torch.manual_seed(0)
    score, latent = torch.randn(9, 2, 33) * 5, torch.randn(9, 2, 33)
    want = (score.double().softmax(1) * latent.double()).sum(1)
    assert torch.allclose(pool_pairs(score, latent).double(), want, atol=1e-6)
    for rows in range(1, 9):
        assert torch.equal(pool_pairs(score[:rows], latent[:rows]), pool_pairs(score, latent)[:rows])
