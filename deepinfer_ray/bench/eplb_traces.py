"""Synthetic routing traces for expert balancing: how often each expert is asked, and rows drawn accordingly.

Knows: popularity by rank (Zipf), drawing without replacement, drift. Does not know: placements, costs.

Shape letters: Y layers, L experts, T rows of a step over all ranks, k experts a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def zipf(experts: int, exponent: float, order: np.ndarray) -> np.ndarray:
    """float64 [L], sum 1: the expert `order[r]` has weight (r + 1)^-exponent."""
    weights = np.empty(experts)
    weights[order] = np.arange(1, experts + 1) ** -exponent
    return weights / weights.sum()


def draw_rows(popularity: np.ndarray, rows: int, k: int, random: np.random.Generator) -> np.ndarray:
    """int64 [T, k]: for each row k different experts, drawn one after the other without replacement.

    The k least of Exp(1) / p are distributed as such draws.
    """
    keys = random.standard_exponential((rows, len(popularity)), dtype=np.float32)
    keys /= popularity.astype(np.float32)
    chosen: np.ndarray = np.argpartition(keys, k - 1, axis=1)[:, :k]
    return chosen


@dataclass(frozen=True)
class Trace:
    """Steps of routing decisions; step s of layer y is drawn from (seed, y, s), in any order of calls.

    drift: share of the popularity that by the last step has gone over to another ranking of the experts,
    evenly over the steps.
    """

    name: str
    tokens: int
    exponent: float = 1.2
    drift: float = 0.0
    window: int = 50
    held_out: int = 25
    layers: int = 2
    experts: int = 384
    k: int = 6
    seed: int = 0

    @property
    def steps(self) -> int:
        """The window first, then the held-out steps that score a placement."""
        return self.window + self.held_out

    def popularity(self, layer: int, step: int) -> np.ndarray:
        """float64 [L] of one step."""
        random = np.random.default_rng([self.seed, layer])
        here, there = (zipf(self.experts, self.exponent, random.permutation(self.experts)) for _ in range(2))
        gone = self.drift * step / max(1, self.steps - 1)
        mixed: np.ndarray = (1 - gone) * here + gone * there
        return mixed

    def rows(self, layer: int, step: int) -> np.ndarray:
        """int64 [T, k] logical experts of a step."""
        random = np.random.default_rng([self.seed, layer, step])
        return draw_rows(self.popularity(layer, step), self.tokens, self.k, random)
