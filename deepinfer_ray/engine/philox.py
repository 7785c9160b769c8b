"""The random words of sampling: Philox4x32-10 in the cuRAND convention, on int64 arrays of any device.

Knows: the generator and how (seed, position, case) names a stream (spec/speculative.md §5.5).
Does not know: probabilities, requests. A word depends on nothing but seed, position, case and its index,
so a row draws the same words on every device, in every batch and on every rank.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)

CASE_SAMPLE = 0
"""Fresh sample of the target, and every draft sample."""
CASE_RESIDUAL = 1
"""Resample after a rejected draft."""
CASE_ACCEPT = 2
"""Acceptance test of a draft."""

DRAFT_SEED_OFFSET = 1_000_000_007
"""Added (mod 2^64) to the request's seed for draft samples."""
ROW_POSITION_STRIDE = 10_000_019
"""Verification row j samples at `base + j * stride`: a hash separation, not a token position."""

_MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def seed_bits(seeds: np.ndarray | list[int]) -> np.ndarray:
    """int64 [N] with the bit pattern of the unsigned 64-bit seeds (torch has no uint64 arithmetic)."""
    return np.asarray([seed & (2**64 - 1) for seed in map(int, seeds)], dtype=np.uint64).view(np.int64)


def philox_block(
    seed: Array, subsequence: Array, block: Array | int = 0
) -> tuple[Array, Array, Array, Array]:
    """Words 4*block .. 4*block+3 of each stream, as int64 in [0, 2^32).

    seed: int64 [...], bit pattern of the uint64 key. subsequence: int64 [...], `3 * position + case`.
    block: index of the four-word block, < 2^32. The shapes broadcast.
    int64 products wrap mod 2^64, so the high half is an arithmetic shift followed by a mask.
    """
    x = (subsequence ^ subsequence) + block
    y = x ^ x
    z, w = subsequence & _MASK_32, (subsequence >> 32) & _MASK_32
    key_0, key_1 = seed & _MASK_32, (seed >> 32) & _MASK_32
    for _ in range(_ROUNDS):
        product_0, product_1 = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]
        x, y, z, w = (
            ((product_1 >> 32) & _MASK_32) ^ y ^ key_0,
            product_1 & _MASK_32,
            ((product_0 >> 32) & _MASK_32) ^ w ^ key_1,
            product_0 & _MASK_32,
        )
        key_0, key_1 = (key_0 + _WEYL[0]) & _MASK_32, (key_1 + _WEYL[1]) & _MASK_32
    return x, y, z, w


def random_words(seeds: torch.Tensor, positions: torch.Tensor, case: int, count: int) -> torch.Tensor:
    """The first `count` (a multiple of 4) words of each row's stream: int64 [N, count] in [0, 2^32).

    seeds: int64 [N] bit patterns. positions: int64 [N], sample positions. case: one of CASE_*.
    """
    blocks = torch.arange(count // 4, device=seeds.device)
    words = philox_block(seeds[:, None], (positions * 3 + case)[:, None], blocks)
    return torch.stack(words, dim=-1).flatten(1)


def uniform(words: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1]: `fl32(word) * 2^-32 + 2^-33`, rounded in float32."""
    return words.to(torch.float32) * 2.0**-32 + 2.0**-33
