"""Made-up work for a simulated fleet: who asks for how much, where and when.

Knows: length distributions, arrival patterns, the load that a fleet can bear. Does not know: schedulers.
Everything follows from a seed; the same seed gives the same requests whatever the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from deepinfer_ray.bench.policy_cost import CostModel, RankLoad

Lengths = Literal["uniform", "lognormal", "bimodal"]
Arrivals = Literal["batch", "skewed", "bursts", "steady"]
Order = Literal["fifo", "shortest", "longest"]

LENGTHS: tuple[Lengths, ...] = ("uniform", "lognormal", "bimodal")
ARRIVALS: tuple[Arrivals, ...] = ("batch", "skewed", "bursts", "steady")
LONG_EVERY = 32
"""Bimodal: one long prompt among so many requests."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (seconds), to which rank, and how many tokens it reads and writes."""

    request_id: int
    time: float
    rank: int
    prompt: int
    output: int


def draw_lengths(kind: Lengths, count: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """int64 [count, 2] prompt and output tokens. scale multiplies the outputs.

    uniform: prompts 64…1024, outputs 32…512. lognormal: medians 384 and 192, sigma 1, at most 4096 and 2048.
    bimodal: every 32nd prompt has 12288 tokens, the others 64…256; outputs 64…256.
    """
    if kind == "uniform":
        prompt = rng.integers(64, 1025, count)
        output = rng.integers(32, 513, count).astype(np.float64)
    elif kind == "lognormal":
        prompt = np.clip(rng.lognormal(np.log(384), 1.0, count), 16, 4096)
        output = np.clip(rng.lognormal(np.log(192), 1.0, count), 4, 2048)
    else:
        prompt = rng.integers(64, 257, count)
        prompt[rng.integers(0, LONG_EVERY) :: LONG_EVERY] = 12288
        output = rng.integers(64, 257, count).astype(np.float64)
    return np.stack((prompt.astype(np.int64), np.maximum(output * scale, 1).astype(np.int64)), axis=1)


def bearable_rate(lengths: np.ndarray, cost: CostModel, seats: int, tokens_per_step: float) -> float:
    """Requests a second that a fleet with all seats taken would finish, prompts in full steps.

    lengths: int64 [n, 2]. An upper bound: no policy keeps every seat taken.
    """
    prompt, output = lengths.mean(axis=0)
    width = 6
    context = int(prompt + output / 2)
    load = RankLoad(seats * width, seats * width * context, seats * context)
    decode = output / tokens_per_step * cost.decode_s([load] * cost.ranks) / (seats * cost.ranks)
    budget = 4096
    chunk = RankLoad(budget, budget * int(prompt) // 2, budget)
    prefill = prompt * cost.prompt_s([chunk] * cost.ranks) / (budget * cost.ranks)
    return float(1 / (decode + prefill))


def make_workload(
    arrivals: Arrivals,
    lengths: Lengths,
    cost: CostModel,
    *,
    seats: int,
    per_rank: int,
    load: float = 0.75,
    tokens_per_step: float = 2.94,
    output_scale: float = 1.0,
    seed: int = 0,
) -> list[Arrival]:
    """`per_rank * cost.ranks` requests in order of arrival.

    batch: all at 0, dealt round. skewed: all at 0 on rank 0. bursts: `seats` requests at once to one rank
    after the other. steady: single requests to random ranks, exponential gaps. The last two come at `load`
    times the bearable rate.
    """
    rng = np.random.default_rng((seed, LENGTHS.index(lengths), ARRIVALS.index(arrivals)))
    count = per_rank * cost.ranks
    sizes = draw_lengths(lengths, count, rng, output_scale)
    rate = load * bearable_rate(sizes, cost, seats, tokens_per_step)
    index = np.arange(count)
    times: np.ndarray = np.zeros(count)
    ranks: np.ndarray = index % cost.ranks
    if arrivals == "skewed":
        ranks = np.zeros(count, np.int64)
    elif arrivals == "bursts":
        burst = index // seats
        times, ranks = burst * (seats / rate), burst % cost.ranks
    elif arrivals == "steady":
        times, ranks = np.cumsum(rng.exponential(1 / rate, count)), rng.integers(0, cost.ranks, count)
    return [
        Arrival(i, float(times[i]), int(ranks[i]), int(sizes[i, 0]), int(sizes[i, 1])) for i in range(count)
    ]


def reorder(work: list[Arrival], order: Order) -> list[Arrival]:
    """The requests of one instant and rank by prompt length, as a feeder that sorts its rows would send
    them."""
    if order == "fifo":
        return work
    sign = 1 if order == "shortest" else -1
    slots = sorted(work, key=lambda a: (a.time, a.rank))
    sizes = sorted(work, key=lambda a: (a.time, a.rank, sign * a.prompt, a.request_id))
    moved = [replace(size, time=slot.time, rank=slot.rank) for slot, size in zip(slots, sizes, strict=True)]
    return sorted(moved, key=lambda a: a.time)
