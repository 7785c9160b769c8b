"""Attention of one query row over its own gathered keys (attention spec §7).

Knows: the softmax with sink over a window set and a compressed set, keys = values. Does not know: where keys
come from, positions, caches. Each row is a batch entry of its own, so rows cannot influence each other.

Shape letters: T rows, H heads, d head dimension, W window columns, K compressed columns.
"""

from __future__ import annotations

import torch

BLOCK_KEYS = 64
"""Keys a block of the released kernel's online softmax (model spec §9.2 #15)."""


def validity_bias(valid_TN: torch.Tensor) -> torch.Tensor:
    """float32 [T, 1, N]: 0 where a column holds a key, -inf where it does not."""
    bias = torch.zeros(valid_TN.shape, dtype=torch.float32, device=valid_TN.device)
    return bias.masked_fill_(~valid_TN, float("-inf")).unsqueeze(1)


def _scores(
    q_THd: torch.Tensor, keys_TNd: torch.Tensor, bias_T1N: torch.Tensor, scale: float
) -> torch.Tensor:
    bias = bias_T1N.expand(-1, q_THd.shape[1], -1)
    return torch.baddbmm(bias, q_THd, keys_TNd.transpose(1, 2), alpha=scale)


def sparse_attention(
    q_THd: torch.Tensor,
    window_TWd: torch.Tensor,
    window_bias: torch.Tensor,
    compressed_TKd: torch.Tensor | None,
    compressed_bias: torch.Tensor | None,
    sink_H: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """float32 [T, H, d]: `Σ e^z x / (Σ e^z + e^sink)` over both key sets, without de-duplication.

    Columns without a key have bias -inf and must hold finite values (zeros), never stale cache bytes.
    A row without any key gives zeros. Probabilities stay float32.
    """
    rows, heads, _ = q_THd.shape
    width = window_TWd.shape[1]
    parts = [_scores(q_THd, window_TWd, window_bias, scale)]
    if compressed_TKd is not None and compressed_bias is not None:
        parts.append(_scores(q_THd, compressed_TKd, compressed_bias, scale))
    parts.append(sink_H.view(1, heads, 1).expand(rows, -1, -1))
    p = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    out = torch.bmm(p[..., :width], window_TWd)
    if compressed_TKd is None:
        return out
    return torch.baddbmm(out, p[..., width:-1], compressed_TKd)


def sparse_attention_blocks(
    q_THd: torch.Tensor,
    window_TWd: torch.Tensor,
    window_bias: torch.Tensor,
    compressed_TKd: torch.Tensor | None,
    compressed_bias: torch.Tensor | None,
    sink_H: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same with the released kernel's roundings (numeric variant `reference`, model spec §9.2 #15).

    Online softmax over blocks of 64 keys of [window, compressed]: running maximum of the keys only, value
    sums with bf16 probabilities, both sums rescaled when the maximum grows, the sink added at the end.
    """
    keys, bias = window_TWd, window_bias
    if compressed_TKd is not None and compressed_bias is not None:
        keys = torch.cat((window_TWd, compressed_TKd), dim=1)
        bias = torch.cat((window_bias, compressed_bias), dim=-1)
    rows, heads, dim = q_THd.shape
    running = q_THd.new_full((rows, heads, 1), float("-inf"))
    total = q_THd.new_zeros(rows, heads, 1)
    out = q_THd.new_zeros(rows, heads, dim)
    for start in range(0, keys.shape[1], BLOCK_KEYS):
        block = keys[:, start : start + BLOCK_KEYS]
        z = torch.bmm(q_THd, block.transpose(1, 2)) * scale + bias[..., start : start + BLOCK_KEYS]
        grown = torch.maximum(running, z.amax(-1, keepdim=True))
        # Rows without a key so far have maximum -inf: their terms are zeros, not exp(-inf + inf).
        safe = grown.masked_fill(grown == float("-inf"), 0.0)
        e = (z - safe).exp()
        rescale = (running - safe).exp()
        total = total * rescale + e.sum(-1, keepdim=True)
        out = out * rescale + torch.bmm(e.to(torch.bfloat16).to(torch.float32), block)
        running = grown
    safe = running.masked_fill(running == float("-inf"), 0.0)
    total = total + (sink_H.view(1, heads, 1) - safe).exp()
    return torch.where(running == float("-inf"), torch.zeros_like(out), out / total)
