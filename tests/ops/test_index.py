"""Index scores, selection and candidate blocks: golden vectors, brute force, ties, key padding."""

import numpy as np
import pytest
import torch

from deepinfer_ray.ops import index
from deepinfer_ray.ops.numerics import Numerics


def test_golden_scores(vectors, relative):
    v, nx = vectors("index_score"), Numerics()
    q, k, w = v["q"].float(), v["k"].float(), v["weights"].float()
    assert torch.equal(nx.q4_index(q), v["q_fp4_values"].float())
    assert torch.equal(nx.q4_index(k), v["k_fp4_values"].float())
    visible = v["visible_len"]
    cases = {
        "score_noquant_fp32": index.index_scores(q, w, k),
        "score_fp4_fp32": index.index_scores(nx.q4_index(q), w, nx.q4_index(k)),
    }
    for name, scores in cases.items():
        for row, length in enumerate(visible.tolist()):
            if length:
                got, want = scores[row, :length], v[name][row, :length]
                assert torch.allclose(got, want, rtol=2e-6, atol=1e-6), (name, row)


def test_golden_scores_with_the_released_roundings(vectors, bf16_steps):
    v, nx = vectors("index_score"), Numerics()
    q, k = nx.q4_index(v["q"].float()), nx.q4_index(v["k"].float())
    scores = index.index_scores_rounded(q, v["weights"].float(), k)
    for row, length in enumerate(v["visible_len"].tolist()):
        want = v["score_official_bf16"][row, :length]
        close = bf16_steps(scores[row, :length], want) <= 1
        assert close.float().mean() >= 0.97 or length < 8, row


@pytest.mark.parametrize(("heads", "dim"), [(4, 128), (8, 32), (32, 128)])
def test_scores_do_not_depend_on_other_keys_or_rows(heads, dim):
    torch.manual_seed(0)
    q, w, keys = torch.randn(40, heads, dim), torch.randn(40, heads), torch.randn(200, dim)
    want = index.index_scores(q, w, keys)
    for count in (*range(1, 36), 63, 100, 199):
        assert torch.equal(index.index_scores(q, w, keys[:count]), want[:, :count]), count
    for rows in (1, 2, 3, 5, 7, 16, 33):
        own = keys.expand(rows, -1, -1)
        assert torch.equal(index.index_scores(q[:rows], w[:rows], keys), want[:rows]), rows
        assert torch.equal(index.index_scores(q[:rows], w[:rows], own), want[:rows]), rows
        assert torch.equal(index.index_scores(q[:rows], w[:rows], own[:, :5]), want[:rows, :5]), rows


def _brute_force(scores, valid, k):
    rows = []
    for row, mask in zip(scores.tolist(), valid.tolist(), strict=True):
        order = sorted((j for j in range(len(row)) if mask[j]), key=lambda j: (-row[j], j))[:k]
        rows.append(sorted(order) + [-1] * (k - len(order)))
    return torch.tensor(rows)


@pytest.mark.parametrize("width", [1, 5, 16, 40, 200, 3000])
def test_selection_takes_the_best_and_the_lowest_of_equals(width):
    rng = np.random.default_rng(width)
    scores = torch.from_numpy(rng.integers(-3, 4, (60, width)).astype(np.float32))
    klen = torch.from_numpy(rng.integers(0, width + 1, 60))
    valid = torch.arange(width) < klen[:, None]
    valid[30:] &= torch.from_numpy(rng.random((30, width)) < 0.7)
    for k in (1, 8, 16):
        assert torch.equal(index.select_top(scores, valid, k), _brute_force(scores, valid, k))


def test_short_rows_select_everything():
    scores = torch.randn(3, 10)
    got = index.select_top(scores, torch.arange(10) < torch.tensor([[0], [4], [6]]), 6)
    assert got.tolist() == [[-1] * 6, [0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5]]


TIED = 11  # The file broke an exact tie of this row the other way; our rule takes the lowest block.


def test_golden_candidate_blocks(vectors):
    v = vectors("candidate_blocks")
    logits, klen = v["logits"].float(), v["valid_lens"].long()
    rows = [row for row in range(12) if row != TIED]
    best = index.block_scores(logits, klen, 8)
    assert torch.equal(best, v["block_scores"].float())
    assert torch.equal((klen + 7) // 8, v["valid_blocks"].long())
    blocks = index.candidate_blocks(logits, klen, 6, 8)
    assert torch.equal(blocks[rows], v["candidate_blocks"].long()[rows])
    assert 7 in blocks[TIED].tolist()
    assert 14 not in blocks[TIED].tolist()
    entries = index.candidate_entries(blocks, klen, 8)
    assert torch.equal((entries >= 0).sum(1)[rows], v["compact_lens"].long()[rows])
    # The file restores places of whole blocks and drops those outside the candidate list.
    whole = index.candidate_entries(blocks, torch.full_like(klen, 1 << 20), 8)
    compact = v["compact_indices"].long()
    inside = (compact >= 0) & (compact < whole.shape[1])
    restored = whole.gather(1, compact.clamp(0, whole.shape[1] - 1)).masked_fill(~inside, -1)
    assert torch.equal(restored[rows], v["restored"].long()[rows])
    offset = (restored + v["row_offset"].long()[:, None]).masked_fill(restored < 0, -1)
    assert torch.equal(offset[rows], v["restored_with_offset"].long()[rows])
    mask = index.candidate_mask(blocks, logits.shape[1], 8)
    below = torch.arange(logits.shape[1]) < klen[:, None]
    assert torch.equal((mask & below)[rows], (v["official_mask"] & below)[rows])


def test_candidates_that_cover_everything_change_nothing():
    torch.manual_seed(0)
    scores, klen = torch.randn(20, 32), torch.randint(0, 33, (20,))
    blocks = index.candidate_blocks(scores, klen, 8, 4)
    visible = torch.arange(32) < klen[:, None]
    assert torch.equal(index.candidate_mask(blocks, 32, 4) & visible, visible)
    entries = index.candidate_entries(blocks, klen, 4)
    for row, length in enumerate(klen.tolist()):
        assert entries[row, :length].tolist() == list(range(length))
        assert entries[row, length:].eq(-1).all()


def test_the_newest_block_is_always_a_candidate():
    scores = torch.arange(64, 0, -1).float()[None].repeat(3, 1)
    blocks = index.candidate_blocks(scores, torch.tensor([64, 33, 4]), 2, 4)
    assert blocks.tolist() == [[0, 15], [0, 8], [0, -1]]
