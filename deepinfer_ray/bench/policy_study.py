"""The questions to the simulated fleet: which policies, on which work, and what counts as better.

Knows: the studies and their reference policies, scores, verdicts. Does not know: how a step runs
(policy_fleet.py), what it costs (policy_cost.py), pictures.

Each study varies one thing; its first policy, the reference, is the value of the recorded traces (parity).
Studies of memory and of the queue run with frequent votes, as rare ones would hide their effect. A policy is
robustly better only if it gains over all workloads together and loses on none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from deepinfer_ray.bench.policy_cost import CostModel
from deepinfer_ray.bench.policy_fleet import ACCEPT_RATE, Fleet, FleetRun, prefill_watermark
from deepinfer_ray.bench.policy_workload import (
    LENGTHS,
    Arrival,
    Arrivals,
    Lengths,
    Order,
    make_workload,
    reorder,
)
from deepinfer_ray.engine.settings import BLOCK_TOKENS, PREFILL_WATERMARK, SchedulerSettings

Variant = Literal["released", "slow prompts", "poor drafts"]
"""Of the cost model: as it is, every prompt step 50 ms longer, three drafts in ten accepted."""
SLOW_PROMPTS_S = 0.05
POOR_ACCEPT_RATE = 0.3

SEATS = 24
PER_RANK = 48
NUM_DRAFTS = 5
MAX_MODEL_LEN = 16384
AMPLE_BLOCKS = 8192
INTERVALS = (32, 16, 8, 4, 1)
WATERMARKS = (PREFILL_WATERMARK, 0.80, 0.85, 0.94, 0.98)
POOL_SHARES = (0.35, 0.6, 1.0)
"""Cache of a rank beside what all its seats need at full length."""
GAIN = 1.02
"""A policy is better if its tokens a second grow by this factor, the geometric mean of all workloads …"""
LOSS = 0.98
"""… and none of them falls below this."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One setting of all that is studied. Defaults: parity, but for the idle fast path and the need-based
    headroom, which mend defects of the original."""

    name: str = "70/100"
    all_interval: int = 70
    any_interval: int = 100
    idle_fast_path: bool = True
    strict_headroom: bool = False
    watermark: float = PREFILL_WATERMARK
    budget: int = 4096
    order: Order = "fifo"


PARITY = Policy("parity", idle_fast_path=False, strict_headroom=True)
RARE = Policy()
FREQUENT = Policy("16/16", 16, 16)
"""What the intervals study recommends."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the fleet and how much cache its ranks have (blocks of 128 tokens)."""

    arrivals: Arrivals
    lengths: Lengths
    blocks: int = AMPLE_BLOCKS
    output_scale: float = 1.0
    load: float = 0.75
    variant: Variant = "released"

    @property
    def name(self) -> str:
        parts = [f"{self.arrivals} {self.lengths}"]
        if self.output_scale != 1:
            parts.append(f"outputs x{self.output_scale:g}")
        if self.load != 0.75:
            parts.append(f"load {self.load:g}")
        if self.variant != "released":
            parts.append(self.variant)
        if self.blocks != AMPLE_BLOCKS:
            parts.append(f"{self.blocks} blocks")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Study:
    """`policies[0]` is the reference."""

    name: str
    question: str
    policies: tuple[Policy, ...]
    workloads: tuple[Workload, ...]


class Lab:
    """Runs policies on workloads, each pair once. seats: sequences of a rank. per_rank: requests a rank."""

    def __init__(self, seats: int = SEATS, per_rank: int = PER_RANK, ranks: int = 4, seed: int = 0) -> None:
        self.seats, self.per_rank, self.seed = seats, per_rank, seed
        self.cost = CostModel(ranks=ranks)
        self.costs: dict[Variant, CostModel] = {
            "released": self.cost,
            "slow prompts": replace(self.cost, prompt_overhead_s=SLOW_PROMPTS_S),
            "poor drafts": self.cost,
        }
        self._runs: dict[tuple[Policy, Workload], FleetRun] = {}

    def work(self, workload: Workload, order: Order = "fifo") -> list[Arrival]:
        """The requests of a workload in the order in which they are sent."""
        made = make_workload(
            workload.arrivals,
            workload.lengths,
            self.cost,
            seats=self.seats,
            per_rank=self.per_rank,
            load=workload.load,
            output_scale=workload.output_scale,
            seed=self.seed,
        )
        return reorder(made, order)

    def run(self, policy: Policy, workload: Workload, keep_timeline: bool = False) -> FleetRun:
        """The run of a pair; policies that differ in their name alone share it."""
        key = (replace(policy, name=""), workload)
        known = self._runs.get(key)
        if known is None or (keep_timeline and not known.timeline):
            settings = SchedulerSettings(
                num_blocks=workload.blocks,
                max_model_len=MAX_MODEL_LEN,
                max_batched_tokens=policy.budget,
                max_seqs=self.seats,
                num_drafts=NUM_DRAFTS,
                prefill_all_interval=policy.all_interval,
                prefill_any_interval=policy.any_interval,
                idle_fast_path=policy.idle_fast_path,
                strict_block_headroom=policy.strict_headroom,
            )
            rate = POOR_ACCEPT_RATE if workload.variant == "poor drafts" else ACCEPT_RATE
            fleet = Fleet(settings, self.costs[workload.variant], rate, keep_timeline)
            with prefill_watermark(policy.watermark):
                known = fleet.run(self.work(workload, policy.order))
            self._runs[key] = known
        return known

    def rows(self, study: Study) -> list[dict[str, Any]]:
        """One row for each policy over all workloads, then one for each pair; `gain` is tokens a second
        beside the reference."""
        reference = [self.run(study.policies[0], workload) for workload in study.workloads]
        summaries, details = [], []
        for policy in study.policies:
            runs = [self.run(policy, workload) for workload in study.workloads]
            gains = [r.tokens_per_s / base.tokens_per_s for r, base in zip(runs, reference, strict=True)]
            first = policy is study.policies[0]
            summaries.append(_row(study, policy, "all", runs, gains, first))
            details += [
                _row(study, policy, workload.name, [run], [gain], first)
                for workload, run, gain in zip(study.workloads, runs, gains, strict=True)
            ]
        return summaries + details


def verdict(gains: list[float]) -> str:
    """`better` only if it wins robustly (GAIN, LOSS); `worse` the other way round; `same` within both."""
    mean = float(np.exp(np.mean(np.log(gains))))
    if mean >= GAIN:
        return "better" if min(gains) >= LOSS else "mixed"
    if mean <= LOSS:
        return "worse" if max(gains) <= GAIN else "mixed"
    return "same" if min(gains) >= LOSS and max(gains) <= GAIN else "mixed"


def _row(
    study: Study, policy: Policy, workload: str, runs: list[FleetRun], gains: list[float], reference: bool
) -> dict[str, Any]:
    def mean(value: Callable[[FleetRun], float], digits: int) -> float:
        return round(float(np.mean([value(run) for run in runs])), digits)

    return {
        "study": study.name,
        "policy": policy.name,
        "workload": workload,
        "tokens_per_s": mean(lambda r: r.tokens_per_s, 0),
        "gain": round(float(np.exp(np.mean(np.log(gains)))), 3),
        "worst_gain": round(min(gains), 3),
        "verdict": "reference" if reference else verdict(gains),
        "ttft_mean_s": mean(lambda r: r.ttft_mean_s, 2),
        "ttft_p95_s": mean(lambda r: r.ttft_p95_s, 2),
        "idle_share": mean(lambda r: r.idle_share, 3),
        "idle_time_share": mean(lambda r: r.idle_time_share, 3),
        "recomputed_share": mean(lambda r: r.recomputed_share, 3),
        "blocked_share": mean(lambda r: r.blocked_share, 3),
        "mean_batch": mean(lambda r: r.mean_batch, 1),
        "preemptions": mean(lambda r: r.preemptions, 1),
    }


def tight_blocks(lengths: Lengths, share: float, seats: int) -> int:
    """Blocks for `share` of what all seats of a rank need when every sequence is at its full length, but
    never fewer than the longest sequence needs below the watermark."""
    mean = {"uniform": 544 + 272, "lognormal": 590 + 300, "bimodal": 535 + 160}[lengths]
    longest = {"uniform": 1536, "lognormal": 6144, "bimodal": 12544}[lengths]
    needed = int(share * seats * mean / BLOCK_TOKENS) + seats // 2
    return max(needed, int(longest / 0.8 / BLOCK_TOKENS) + 2) // 2 * 2


def make_studies(seats: int = SEATS) -> tuple[Study, ...]:
    """All studies, for ranks of so many seats."""
    batches = tuple(Workload("batch", lengths) for lengths in LENGTHS)
    spread = (
        Workload("skewed", "uniform"),
        Workload("bursts", "lognormal"),
        Workload("steady", "uniform"),
        Workload("steady", "bimodal"),
    )
    long_outputs = Workload("batch", "uniform", output_scale=6)

    def tight(lengths: Lengths, share: float) -> Workload:
        return Workload("batch", lengths, tight_blocks(lengths, share, seats))

    short_of_blocks = (
        *(tight("lognormal", share) for share in POOL_SHARES),
        tight("uniform", 0.5),
        tight("bimodal", 0.5),
    )
    frequent = [replace(FREQUENT, name=f"{i}/{i}", all_interval=i, any_interval=i) for i in INTERVALS]
    return (
        Study(
            "intervals",
            "How often should ranks vote on a prefill (ALL/ANY interval, decode steps)?",
            (RARE, *frequent, Policy("16/64", 16, 64)),
            (*batches, *spread, long_outputs),
        ),
        Study(
            "sensitivity",
            "Do the intervals depend on what a prompt step costs, or on how good the drafts are?",
            (RARE, *frequent[:3]),
            (
                replace(batches[0], variant="slow prompts"),
                replace(batches[0], variant="poor drafts"),
                replace(spread[2], variant="slow prompts"),
            ),
        ),
        Study(
            "idle",
            "What does it bring not to wait for a point while nobody can decode?",
            (
                replace(RARE, name="70/100, waits", idle_fast_path=False),
                replace(RARE, name="70/100, fast path"),
                replace(FREQUENT, name="16/16, waits", idle_fast_path=False),
                replace(FREQUENT, name="16/16, fast path"),
            ),
            (batches[0], spread[0], spread[3], spread[1]),
        ),
        Study(
            "watermark",
            "Above which share of used blocks should nothing be admitted?",
            tuple(replace(FREQUENT, name=f"{w:.2f}", watermark=w) for w in WATERMARKS),
            short_of_blocks,
        ),
        Study(
            "headroom",
            "Must a block be free before every sequence of a decode step, or only where one is needed?",
            (
                replace(FREQUENT, name="strict", strict_headroom=True),
                replace(FREQUENT, name="need-based"),
            ),
            short_of_blocks,
        ),
        Study(
            "queue",
            "What does a long prompt at the head of the queue cost, and does the feeder's order help?",
            (
                replace(FREQUENT, name="fifo"),
                replace(FREQUENT, name="shortest first", order="shortest"),
                replace(FREQUENT, name="longest first", order="longest"),
                replace(FREQUENT, name="fifo, 16384 a step", budget=16384),
            ),
            (batches[1], batches[2], tight("bimodal", 0.5), Workload("bursts", "bimodal")),
        ),
        Study(
            "together",
            "All values of the recorded traces, or both defects mended, with rare or frequent votes?",
            (PARITY, replace(RARE, name="mended, 70/100"), replace(FREQUENT, name="mended, 16/16")),
            (*batches, *spread, long_outputs, tight("lognormal", 0.5)),
        ),
    )
