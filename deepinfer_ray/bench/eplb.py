"""Expert balancing: load balance before and after, and how many steps repay the pause of a shuffle.

Knows: traces, the policy, the plan of the shuffle, a stated cost model of a device. Does not know: a device.
The decision is timed on this machine (CPU time); what a GPU does is computed from `Costs`.

A placement is made from a trace's window and scored on the steps after it, with the replica that each row
really takes. `lb` is Σ of the busiest rank's tokens / Σ of the mean rank's. The old placement is the initial
one; a row named `…, again` starts from one that an earlier window has already balanced.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_ray.bench.eplb_traces import Trace
from deepinfer_ray.parallel.balancer import balance, imbalance, rank_loads
from deepinfer_ray.parallel.expert_map import ExpertMap, choose_replicas
from deepinfer_ray.parallel.shuffle import ShufflePlan

RANKS, EXTRA = 8, 48


@dataclass(frozen=True)
class Costs:
    """A rank of the released model on one H200: dimensions, then rates as this cost model assumes them."""

    layers: int = 40
    hidden: int = 5120
    width: int = 2304
    compute: float = 4e14
    """FLOP/s of grouped BF16 products, 40 % of the dense peak."""
    memory: float = 4e12
    """Bytes/s of reading weights, 83 % of the peak."""
    link: float = 2.5e11
    """Bytes/s out of a rank and into it: NCCL between two H200s at large messages."""
    batch_s: float = 5e-5
    """Latency of one batch of sends and receives, once a layer."""

    @property
    def expert_bytes(self) -> float:
        """MXFP4: half a byte a weight and a scale byte for 32."""
        return 3 * self.hidden * self.width * (1 / 2 + 1 / 32)

    def moe_seconds(self, slot_tokens_HYP: np.ndarray, ranks: int) -> np.ndarray:
        """[H] seconds of the experts of each step: a rank reads the experts that are hit and computes its
        rows, whichever is longer; each layer waits for the slowest rank. Measured layers stand for all."""
        steps, layers, _ = slot_tokens_HYP.shape
        by_rank = slot_tokens_HYP.reshape(steps, layers, ranks, -1)
        read = (by_rank > 0).sum(3) * self.expert_bytes / self.memory
        computed = by_rank.sum(3) * (6 * self.hidden * self.width / self.compute)
        seconds: np.ndarray = np.maximum(read, computed).max(2).sum(1) * (self.layers / layers)
        return seconds

    def shuffle_seconds(self, plan: ShufflePlan) -> float:
        """Seconds of the moves of all layers: the link of the busiest rank, then its copies within memory."""
        total = 0.0
        for layer in plan.layers:
            one = ShufflePlan((layer,), plan.ep_size, plan.num_local)
            arrivals = one.received
            over_link = max(one.sent.max(), arrivals.max()) * self.expert_bytes / self.link
            # Arrivals and old slots pass through the scratch: two copies, each a read and a write.
            in_memory = 4 * (arrivals + one.copied).max() * self.expert_bytes / self.memory
            total += self.batch_s * bool(layer.transfers) + over_link + in_memory
        return total * self.layers / len(plan.layers)


def logical_counts(trace: Trace, steps: range) -> np.ndarray:
    """int32 [W, Y, L]: what the window of a balancer holds after these steps."""
    counts = [
        [np.bincount(trace.rows(y, step).ravel(), minlength=trace.experts) for y in range(trace.layers)]
        for step in steps
    ]
    return np.array(counts, np.int32)


def slot_counts(trace: Trace, steps: range, placement: ExpertMap) -> np.ndarray:
    """int64 [H, Y, P]: tokens of each slot if the rows lie evenly on the ranks and pick replicas as the
    router does."""
    ranks = placement.ep_size
    counts = np.zeros((len(steps), trace.layers, placement.num_physical), np.int64)
    for layer in range(trace.layers):
        to_physical = torch.from_numpy(placement.logical_to_physical[layer])
        count = torch.from_numpy(placement.logical_count[layer])
        for index, step in enumerate(steps):
            for rank, rows in enumerate(np.array_split(trace.rows(layer, step), ranks)):
                slots = choose_replicas(torch.from_numpy(rows), to_physical, count, rank)
                counts[index, layer] += np.bincount(slots.numpy().ravel(), minlength=placement.num_physical)
    return counts


def measured_balance(slot_tokens_HYP: np.ndarray, ranks: int) -> float:
    """Σ over steps and layers of the busiest rank's tokens / Σ of the mean rank's; 1 = perfect."""
    by_rank = slot_tokens_HYP.reshape(*slot_tokens_HYP.shape[:2], ranks, -1).sum(3)
    return imbalance(by_rank.astype(np.float64)) or 1.0


def study(
    trace: Trace, *, again: bool = False, ranks: int = RANKS, extra: int = EXTRA, costs: Costs | None = None
) -> dict[str, Any]:
    """One row: a placement from the window of `trace`, scored on its held-out steps.

    again: the old placement is not the initial one but that of the window's first half.
    """
    costs = costs or Costs()
    window = logical_counts(trace, range(trace.window))
    held_out = range(trace.window, trace.steps)
    old = ExpertMap.initial(trace.layers, trace.experts, ranks, extra)
    if again:
        old = balance(window[: len(window) // 2], ranks, old.num_extra)
        window = window[len(window) // 2 :]
    start = time.thread_time()
    new = balance(window, ranks, old.num_extra)
    decide = (time.thread_time() - start) * costs.layers / trace.layers
    plan = ShufflePlan.between(old, new)
    before, after = (slot_counts(trace, held_out, placement) for placement in (old, new))
    slow, fast = (float(costs.moe_seconds(counts, ranks).mean()) for counts in (before, after))
    pause = decide + costs.shuffle_seconds(plan)
    moved = int(plan.received.sum() + plan.copied.sum())
    sent = int(plan.sent.max()) * costs.expert_bytes * costs.layers / trace.layers
    return {
        "trace": trace.name + (", again" if again else ""),
        "tokens_per_step": trace.tokens,
        "window_steps": len(window),
        "lb_before": round(measured_balance(before, ranks), 3),
        "lb_after": round(measured_balance(after, ranks), 3),
        "lb_in_window": round(imbalance(rank_loads(window, new)) or 1.0, 3),
        "slots_moved": f"{moved / new.physical_to_logical.size:.0%}",
        "sent_gb": round(sent / 1e9, 1),
        "decide_ms": round(1e3 * decide),
        "pause_ms": round(1e3 * pause),
        "moe_ms_before": round(1e3 * slow, 2),
        "moe_ms_after": round(1e3 * fast, 2),
        "payback_steps": int(np.ceil(pause / (slow - fast))) if slow > fast else None,
    }


TRACES = (
    Trace("even", 2048, exponent=0.0),
    Trace("zipf 1.2", 2048),
    Trace("zipf 1.2, drifting", 2048, drift=0.5),
    Trace("zipf 1.2, small steps", 256, window=100, held_out=50),
    Trace("zipf 1.2, prefill", 16384, window=6, held_out=3),
)


def run() -> list[dict[str, Any]]:
    """One row a trace: 384 experts, top-6, 8 ranks, 48 redundant slots (some seconds each)."""
    return [study(trace) for trace in TRACES] + [study(TRACES[1], again=True)]
