"""Which rank already has a prompt's prefix: rows that begin alike go to the same rank while it keeps up.

Knows: the first block of a prompt and which ranks lately got rows with it. Does not know: what a rank really
keeps, credits, rows. A preference only: no row waits for a rank because of it, and a rank that has fallen
behind the freest one by half is passed over, so that a job whose rows all begin alike still uses every rank.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

HEAD_TOKENS = 128
"""Tokens that decide: the unit in which ranks keep prefixes."""
MIN_TOKENS = 32
"""Shorter prompts are computed faster than they are looked after."""
MAX_HEADS = 4096


def head_of(prompt: np.ndarray) -> bytes:
    """Digest of the first block of a prompt, int32 [N]."""
    head = np.ascontiguousarray(prompt[:HEAD_TOKENS], "<i4").tobytes()
    return hashlib.blake2b(head, digest_size=16).digest()


class PrefixHomes:
    """Heads of prompts and the ranks that got them, the latest `max_heads` of them."""

    def __init__(self, max_heads: int = MAX_HEADS) -> None:
        self._max_heads = max_heads
        self._ranks_of: OrderedDict[bytes, set[int]] = OrderedDict()  # least recently used first

    def choose(self, prompt: np.ndarray, credits: Mapping[int, int]) -> int:
        """The rank for a prompt (int32 [N]); `credits` (rows each rank would take) is not empty.

        The freest rank that had its head, if it takes at least half as many rows as the freest of all."""
        best = max(credits, key=lambda rank: (credits[rank], -rank))
        if len(prompt) < MIN_TOKENS:
            return best
        key = head_of(prompt)
        homes = self._ranks_of.setdefault(key, set())
        self._ranks_of.move_to_end(key)
        if len(self._ranks_of) > self._max_heads:
            self._ranks_of.popitem(last=False)
        near = [rank for rank in homes if 2 * credits.get(rank, 0) >= max(credits[best], 1)]
        rank = max(near, key=lambda rank: (credits[rank], -rank)) if near else best
        homes.add(rank)
        return rank

    def forget(self, rank: int) -> None:
        """The rank is gone, and with it what it kept."""
        for homes in self._ranks_of.values():
            homes.discard(rank)
