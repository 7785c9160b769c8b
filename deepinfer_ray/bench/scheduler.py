"""Host time of a decode step of the overlapped loop: schedule, input preparation, commit.

Knows: an engine full of synthetic sequences with random acceptance, both compression ratios, a window of 128.
Does not know: weights; nothing is computed. Input preparation is what the step loop does before the forward
is launched: tokens, n-gram windows, and the arrays of sequences and rows that go up. What follows from those
by arithmetic (`StepMetadata.expand`) is the first part of the device's step; its time on one core of this CPU
is the column `expand_ms`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepinfer_ray.cache.metadata import StepMetadata, build_decode
from deepinfer_ray.engine.inputs import HistoryReader, StepRows
from deepinfer_ray.engine.mock import MockModel, mock_config
from deepinfer_ray.engine.plan import StepOutputs, StepPlan
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.simulation import Loop

SIZES = (32, 64, 128, 256, 512)
NUM_DRAFTS = 5
NGRAM_ORDER = 4
LONGEST_PROMPT = 5000


class Bench:
    """A full batch of `sequences`, prompts of 100 to 5000 tokens, drafts accepted at random."""

    def __init__(self, sequences: int, num_drafts: int = NUM_DRAFTS, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        settings = SchedulerSettings(
            num_blocks=sequences * 72,
            max_model_len=LONGEST_PROMPT + 4000,
            max_batched_tokens=sequences * LONGEST_PROMPT,
            max_seqs=sequences,
            num_drafts=num_drafts,
        )
        self.scheduler = Scheduler(settings, compress=np.arange(settings.vocab_size, dtype=np.int32) // 2)
        self.reader = HistoryReader(self.scheduler.table, NGRAM_ORDER, pad=1)
        self.layout = MockModel(mock_config(window=128)).layout(num_drafts)
        loop = Loop(self.scheduler, lambda ids: random.integers(0, num_drafts + 1, len(ids)).astype(np.int32))
        for _ in range(sequences):
            loop.add(int(random.integers(100, LONGEST_PROMPT)), 1_000_000)
        loop.turn()
        self.model = loop.model

    def prepare(self, plan: StepPlan) -> tuple[StepMetadata, tuple[np.ndarray, ...]]:
        """The host's part of the inputs of a step, as the overlapped loop makes them."""
        rows = StepRows.of(plan)
        count = len(rows.positions)
        meta = build_decode(
            self.layout,
            (1, 2),
            q=plan.q,
            k=plan.k,
            state_ids=plan.rows,
            block_tables=self.scheduler.table.block_table[plan.rows],
            input_ids=np.zeros(count, np.int64),
            ngram_ids=np.zeros((count, NGRAM_ORDER), np.int64),
            expand=False,
        )
        return meta, self.reader.overlapped(plan)

    def measure(self, steps: int) -> dict[str, Any]:
        """Medians in milliseconds over `steps` decode steps; the garbage collector rests, as in the
        engine."""
        scheduler = self.scheduler
        previous: tuple[StepPlan, StepOutputs] | None = None
        times: list[tuple[float, float, float]] = []
        clock = time.perf_counter
        enabled = gc.isenabled()
        gc.disable()
        try:
            for _ in range(steps + 3):
                start = clock()
                plan = scheduler.schedule(scheduler.agree())
                scheduled = clock()
                meta, _ = self.prepare(plan)
                prepared = clock()
                if previous is not None:
                    scheduler.commit(*previous)
                    scheduler.refresh(plan)
                scheduler.reclaim()
                times.append((scheduled - start, prepared - scheduled, clock() - prepared))
                previous = (plan, self.model.run(plan))
        finally:
            if enabled:
                gc.enable()
        if previous is not None:
            scheduler.commit(*previous)
        columns = list(zip(*times[3:], strict=True))
        total = statistics.median(sum(one) for one in times[3:])
        schedule, inputs, commit = (statistics.median(column) for column in columns)
        return {
            "sequences": scheduler.num_running,
            "median_ms": round(1e3 * total, 4),
            "schedule_ms": round(1e3 * schedule, 4),
            "inputs_ms": round(1e3 * inputs, 4),
            "commit_ms": round(1e3 * commit, 4),
            "expand_ms": round(1e3 * _median_seconds(meta.expand), 4),
        }


def _median_seconds(work: Callable[[], object], times: int = 50) -> float:
    clock, taken = time.perf_counter, []
    for _ in range(times):
        start = clock()
        work()
        taken.append(clock() - start)
    return statistics.median(taken)


def run(sizes: tuple[int, ...] = SIZES, steps: int = 200) -> list[dict[str, Any]]:
    """One row per batch size: medians in milliseconds of one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [Bench(size).measure(steps) for size in sizes]
    finally:
        torch.set_num_threads(threads)
