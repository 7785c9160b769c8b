"""Index scores, top-k selection and candidate blocks (attention spec §5.3, §5.4, §6).

Knows: float32 scores, the tie rule (lowest entry id), ascending output. Does not know: caches, pages, layers.

Shape letters: T rows, h index heads, c index head dimension, N entries, K selected, B candidate blocks.
"""

from __future__ import annotations

import torch

from deepinfer_ray.ops import native
from deepinfer_ray.ops.linear import pad_dim

_LARGEST_BF16 = 3.3895313892515355e38


def _head_sum(products_ThN: torch.Tensor) -> torch.Tensor:
    """Sum over heads in ascending order."""
    total = products_ThN[:, 0]
    for head in range(1, products_ThN.shape[1]):
        total = total + products_ThN[:, head]
    return total


def index_scores(q_Thc: torch.Tensor, weights_Th: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [T, N]: `Σ_h w[h] · relu(⟨q[h], k⟩)`, heads added in ascending order, not rounded.

    keys: [N, c], shared by all rows, or [T, N, c], each row its own. N is padded to a multiple of 16 inside,
    because the bits of a product depend on the width of the other operand (model spec §9.4).
    """
    rows, heads, dim = q_Thc.shape
    count = keys.shape[-2]
    keys = pad_dim(keys, keys.dim() - 2)
    if keys.dim() == 2:
        flat = pad_dim(q_Thc.reshape(rows * heads, dim), 0)
        dots = (flat @ keys.t())[: rows * heads].view(rows, heads, -1)
    else:
        dots = torch.bmm(q_Thc, keys.transpose(1, 2))
    if native.ready(dots):
        return native.head_sums(dots, weights_Th.contiguous(), count)
    return _head_sum(dots.relu() * weights_Th.unsqueeze(-1))[:, :count]


def index_scores_rounded(q_Thc: torch.Tensor, weights_Th: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`index_scores` with dot, product and head sum each rounded to bf16 (numeric variant `reference`)."""

    def b(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).to(torch.float32)

    count = keys.shape[-2]
    keys = pad_dim(keys, keys.dim() - 2)
    dots = torch.matmul(q_Thc, keys.transpose(-1, -2))
    return b(_head_sum(b(b(dots).relu() * weights_Th.unsqueeze(-1))))[:, :count]


def select_top(scores_TN: torch.Tensor, valid_TN: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k]: the k best valid columns of each row in ascending order, -1 padded.

    Equal scores at the threshold: the lowest column wins (ours; attention spec §5.4).
    """
    rows, width = scores_TN.shape
    if width == 0:
        return torch.full((rows, k), -1, dtype=torch.int64, device=scores_TN.device)
    if width <= k:
        chosen = valid_TN
    else:
        masked = scores_TN.masked_fill(~valid_TN, float("-inf"))
        threshold = masked.topk(k, dim=-1).values[:, -1:]
        above = masked > threshold
        equal = (masked == threshold) & valid_TN
        room = k - above.sum(-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(-1) <= room))
    # Not nonzero: the host would wait for the device to learn how many there are. Column k is for the rest.
    place = (chosen.cumsum(-1) - 1).masked_fill_(~chosen, k)
    out = torch.full((rows, k + 1), -1, dtype=torch.int64, device=scores_TN.device)
    columns = torch.arange(width, device=scores_TN.device).expand(rows, -1)
    return out.scatter_(1, place, columns)[:, :k]


def select_visible(scores_TN: torch.Tensor, klen_T: torch.Tensor, k: int) -> torch.Tensor:
    """`select_top` where the first `klen` columns of a row are the valid ones."""
    if native.ready(scores_TN) and scores_TN.is_contiguous():
        return native.select_rows(scores_TN, klen_T, k)
    valid = torch.arange(scores_TN.shape[1], device=scores_TN.device) < klen_T.unsqueeze(1)
    return select_top(scores_TN, valid, k)


def block_scores(scores_TN: torch.Tensor, klen_T: torch.Tensor, size: int) -> torch.Tensor:
    """float32 [T, NB]: maximum of each block's visible scores, the newest block +inf, invisible ones -inf."""
    rows, count = scores_TN.shape
    blocks = -(-count // size)
    columns = torch.arange(blocks * size, device=scores_TN.device)
    padded = scores_TN.new_full((rows, blocks * size), float("-inf"))
    padded[:, :count] = scores_TN
    padded = padded.masked_fill(columns >= klen_T.unsqueeze(-1), float("-inf"))
    best = padded.view(rows, blocks, size).amax(-1).clamp_max(_LARGEST_BF16)
    newest = (klen_T + size - 1) // size - 1
    return best.masked_fill(columns[:blocks] == newest.unsqueeze(-1), float("inf"))


def candidate_blocks(scores_TN: torch.Tensor, klen_T: torch.Tensor, k: int, size: int) -> torch.Tensor:
    """int64 [T, k] candidate block ids in ascending order, -1 padded (attention spec §6).

    The newest block is always kept; equal block scores: the lowest id wins.
    """
    if native.ready(scores_TN) and scores_TN.is_contiguous():
        return native.candidate_rows(scores_TN, klen_T, k, size)
    return select_visible(block_scores(scores_TN, klen_T, size), (klen_T + size - 1) // size, k)


def candidate_entries(blocks_TB: torch.Tensor, klen_T: torch.Tensor, size: int) -> torch.Tensor:
    """int64 [T, B·size]: the visible entries of the candidate blocks, dense in ascending order, -1 behind.

    Ids ascend and only the newest block can be partial, so the visible entries come first.
    """
    offsets = torch.arange(size, device=blocks_TB.device)
    entries = (blocks_TB.unsqueeze(-1) * size + offsets).flatten(1)
    hidden = (blocks_TB < 0).repeat_interleave(size, dim=1) | (entries >= klen_T.unsqueeze(-1))
    return entries.masked_fill(hidden, -1)


def candidate_mask(blocks_TB: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """bool [T, count]: entries that lie in a candidate block (whole blocks, visible or not)."""
    blocks = -(-count // size)
    marks = torch.zeros(blocks_TB.shape[0], blocks + 1, dtype=torch.bool, device=blocks_TB.device)
    marks.scatter_(1, blocks_TB.where(blocks_TB >= 0, blocks), True)
    return marks[:, :blocks].repeat_interleave(size, dim=1)[:, :count]
