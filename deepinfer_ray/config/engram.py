"""Where the rows of the Engram tables are: primes, offsets and multipliers (spec/model.md §3.4).

Knows: the search for primes and the multipliers' random stream. Does not know: token maps, tables, tensors.
Both are frozen by test vectors: another generator would silently rehash a table of 400 million rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_ray.config.hf import TextConfig

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases that make Miller–Rabin exact below 3.3e24."""


@dataclass(frozen=True, slots=True)
class EngramPlan:
    """Hash geometry of all Engram layers, in config order.

    A column is (order, head): `column = (order - 2) * heads + head`; `columns` of them a layer.
    """

    layer_ids: tuple[int, ...]
    max_ngram: int
    heads: int
    head_dim: int
    pad_token_id: int
    """Raw (not compressed) id of the token that fills blocked n-gram positions."""
    compressed_vocab_size: int
    primes: tuple[tuple[tuple[int, ...], ...], ...]
    """[layers][orders][heads] table sizes; order index 0 is the 2-gram."""
    offsets: tuple[tuple[int, ...], ...]
    """[layers][columns] first row of each column: exclusive prefix sums of the primes."""
    multipliers: tuple[tuple[int, ...], ...]
    """[layers][max_ngram] odd int64 multipliers; index 0 is the current token's."""
    rows: tuple[int, ...]
    """[layers] rows of each table: the sum of its primes."""

    @property
    def orders(self) -> int:
        """N-gram orders 2 … max_ngram."""
        return self.max_ngram - 1

    @property
    def columns(self) -> int:
        """Rows fetched per token and layer."""
        return self.orders * self.heads

    @property
    def width(self) -> int:
        """Features per token and layer: the concatenated rows."""
        return self.columns * self.head_dim


def is_prime(n: int) -> bool:
    """Exact for 0 ≤ n < 3.3e24 (deterministic Miller–Rabin)."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    d, s = n - 1, 0
    while d % 2 == 0:
        d, s = d // 2, s + 1
    for base in _WITNESSES:
        x = pow(base, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(s - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=32)
def engram_primes(
    start: int, layers: int, orders: int, heads: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[layers][orders][heads]: the search restarts at `start - 1` for every order, no prime is used twice."""
    used: set[int] = set()
    table: list[tuple[tuple[int, ...], ...]] = []
    for _layer in range(layers):
        rows: list[tuple[int, ...]] = []
        for _order in range(orders):
            last, row = start - 1, []
            for _head in range(heads):
                last += 1
                while last in used or not is_prime(last):
                    last += 1
                used.add(last)
                row.append(last)
            rows.append(tuple(row))
        table.append(tuple(rows))
    return tuple(table)


def engram_multipliers(layer_id: int, compressed_vocab_size: int, max_ngram: int) -> tuple[int, ...]:
    """Odd multipliers of one layer; bounded so that every product with a compressed id fits 63 bits."""
    bound = max(1, ((2**63 - 1) // compressed_vocab_size) // 2)
    words = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(int(word) * 2 + 1 for word in words)


def engram_plan(text: TextConfig) -> EngramPlan:
    """The plan of a text config; all tuples are empty when it has no Engram layers."""
    layers = text.engram_layer_ids
    max_ngram, heads = text.engram_max_ngram_size, text.engram_n_heads
    primes = engram_primes(text.engram_vocab_size, len(layers), max_ngram - 1, heads) if layers else ()
    flat = [[prime for row in layer for prime in row] for layer in primes]
    return EngramPlan(
        layer_ids=layers,
        max_ngram=max_ngram,
        heads=heads,
        head_dim=text.engram_head_dim,
        pad_token_id=text.engram_pad_token_id,
        compressed_vocab_size=text.engram_compressed_vocab_size,
        primes=primes,
        offsets=tuple(tuple(sum(row[:column]) for column in range(len(row))) for row in flat),
        multipliers=tuple(
            engram_multipliers(layer, text.engram_compressed_vocab_size, max_ngram) for layer in layers
        ),
        rows=tuple(sum(row) for row in flat),
    )
