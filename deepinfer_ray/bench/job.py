"""Tokens/s of the whole job beside those of its engines alone.

Knows: the same rows run twice, by bare engines in this process and by the job over ranks on a local Ray.
Does not know: how either does it. The job's time runs from ranks that stand ready to all rows committed: rows
are read, encoded, sent, fetched, written as Parquet meanwhile. Starting Ray and loading weights is no part of
it. Runs alternate; a figure is the median of the pairs.

Two kinds of engine: a tiny checkpoint that keeps one core busy, and engines that only take their time, as a
rank whose accelerator computes while its processor waits.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deepinfer_ray.bench.paced import PacedEngine, paced
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.fleet.backend import Backend, WorkItem, WorkResult

if TYPE_CHECKING:
    from deepinfer_ray.config.engine import EngineConfig
    from deepinfer_ray.fleet.engines import EngineFactory, EngineLike

MAX_LEN = 512
NICENESS = "RAY_worker_niceness"


@dataclass(frozen=True)
class Workload:
    """Rows of `prompt_tokens` ids on `ranks` ranks of `seats` sequences. max_tokens: least and most of a row.

    step_s: of paced engines; None = a tiny checkpoint.
    """

    name: str
    ranks: int
    rows: int
    seats: int
    max_tokens: tuple[int, int]
    prompt_tokens: int = 32
    step_s: float | None = None

    def prompts(self, random: np.random.Generator) -> list[np.ndarray]:
        """int32 token ids of each row."""
        return list(random.integers(3, 256, (self.rows, self.prompt_tokens), dtype=np.int32))

    def lengths(self, random: np.random.Generator) -> list[int]:
        """Completion tokens of each row."""
        least, most = self.max_tokens
        return [int(length) for length in random.integers(least, most + 1, self.rows)]

    def factory(self) -> EngineFactory | str:
        """What builds a rank's engine."""
        from deepinfer_ray.fleet.engines import DEFAULT_FACTORY

        return DEFAULT_FACTORY if self.step_s is None else partial(paced, self.seats, self.step_s)


SLOW, FAST = "paced, 6,400 tokens/s", "paced, 25,600 tokens/s"
WORKLOADS = (
    Workload("tiny checkpoint", ranks=1, rows=192, seats=16, max_tokens=(8, 40)),
    Workload(SLOW, ranks=1, rows=2000, seats=64, max_tokens=(16, 96), step_s=0.01),
    Workload(SLOW, ranks=2, rows=4000, seats=64, max_tokens=(16, 96), step_s=0.01),
    Workload(FAST, ranks=2, rows=8000, seats=256, max_tokens=(64, 256), step_s=0.01),
)
"""Paces are those of one rank with all seats taken."""


class Timed:
    """A backend that notes when it stood ready and when it was closed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.ready = self.done = 0.0

    def start(self) -> None:
        self._backend.start()
        self.ready = time.perf_counter()

    def close(self, graceful: bool) -> None:
        self.done = self.done or time.perf_counter()
        self._backend.close(graceful)

    def wanted(self) -> int:
        return self._backend.wanted()

    def submit(self, items: Sequence[WorkItem]) -> None:
        self._backend.submit(items)

    def poll(self, timeout_s: float) -> list[WorkResult]:
        return self._backend.poll(timeout_s)

    def status(self) -> dict[str, Any]:
        return self._backend.status()

    def take_stats(self) -> Any:
        return self._backend.take_stats()  # type: ignore[attr-defined]


def run_bare(engine: EngineLike, requests: list[Request]) -> float:
    """Seconds for all requests on one engine that always has as many as it wants."""
    todo = list(reversed(requests))
    began = time.perf_counter()
    while todo or engine.has_unfinished():
        for _ in range(min(engine.wanted(), len(todo))):
            engine.add(todo.pop())
        engine.step()
    return time.perf_counter() - began


class Comparison:
    """One workload, bare and as a job, on the Ray cluster of this process."""

    def __init__(self, workload: Workload, model: Path, folder: Path) -> None:
        self.workload, self._model, self._folder = workload, model, folder
        random = np.random.default_rng(0)
        self._prompts, self._lengths = workload.prompts(random), workload.lengths(random)
        self.tokens = sum(self._lengths)
        own = [{"max_tokens": length, "ignore_eos": True} for length in self._lengths]
        table = pa.table({"ids": [prompt.tolist() for prompt in self._prompts], "sampling": own})
        pq.write_table(table, folder / "in.parquet", row_group_size=1024)
        self._runs = 0

    def bare(self) -> float:
        """Tokens/s of the engines alone: of the first rank's share of the rows, times the ranks."""
        share = range(0, self.workload.rows, self.workload.ranks)
        requests = [
            Request(
                self._prompts[row],
                SamplingParams(max_tokens=self._lengths[row], ignore_eos=True),
                seed=row,
                request_id=row,
            )
            for row in share
        ]
        engine = self._engine()
        collector = getattr(engine, "gc", None)
        if collector is not None:
            collector.own_process()  # as in a rank
        try:
            seconds = run_bare(engine, requests)
        finally:
            if collector is not None:
                collector.release_process()
        return self.workload.ranks * sum(self._lengths[row] for row in share) / seconds

    def _engine(self) -> EngineLike:
        from deepinfer_ray.engine.build import build_engine

        workload = self.workload
        if workload.step_s is not None:
            return PacedEngine(workload.seats, workload.step_s)
        return build_engine(self._model, self._config().engine, "cpu")

    def job(self) -> float:
        """Tokens/s of the job."""
        from deepinfer_ray.fleet.fleet import RayFleet
        from deepinfer_ray.fleet.options import FleetOptions
        from deepinfer_ray.job.generate import generate
        from deepinfer_ray.job.signals import StopSignals

        self._runs += 1
        backends: list[Timed] = []

        def make(engine: EngineConfig, model: Any) -> Backend:
            ranks = self.workload.ranks
            options = FleetOptions(cpus_per_rank=1.0)
            factory = self.workload.factory()
            fleet = RayFleet(
                self._model, engine, ranks, device="cpu", engine_factory=factory, options=options
            )
            backends.append(Timed(fleet))
            return backends[0]

        with StopSignals() as signals, contextlib.redirect_stderr(sys.stdout):
            outcome = generate(self._config(), make, lambda line: None, signals)
        if outcome.exit_code or outcome.summary.counts.ok != self.workload.rows:
            raise RuntimeError(f"the job did not end well: {outcome.summary.counts}")
        return outcome.summary.counts.completion_tokens / (backends[0].done - backends[0].ready)

    def _config(self) -> Any:
        from deepinfer_ray.config.load import load_config

        flags = {
            "--model": str(self._model),
            "--input": [str(self._folder / "in.parquet")],
            "--output": str(self._folder / f"out{self._runs}"),
            "--token-ids-column": "ids",
            "--sampling-column": "sampling",
            "--max-num-seqs": self.workload.seats,
            "--max-model-len": MAX_LEN,
            "--dp": self.workload.ranks,
            "--device": "cpu",
        }
        return load_config((), (), flags, {})


@contextlib.contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """A Ray of this process, which every job joins. Its workers are not nicer than the bare engine is."""
    from deepinfer_ray.fleet.cluster import connect

    os.environ.setdefault(NICENESS, "0")
    connection = connect("local", num_cpus=cpus, num_gpus=0)
    try:
        yield
    finally:
        connection.close()


def run(workloads: tuple[Workload, ...] = WORKLOADS, repetitions: int = 3) -> list[dict[str, Any]]:
    """One row a workload: median tokens/s of engines and job, and the median of their ratios."""
    import torch

    from deepinfer_ray.model.synthetic import make_checkpoint

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank
    try:
        with tempfile.TemporaryDirectory() as name, local_ray(max(each.ranks for each in workloads)):
            model = make_checkpoint(Path(name) / "model", "tiny")
            rows = []
            for index, workload in enumerate(workloads):
                folder = Path(name) / str(index)
                folder.mkdir()
                rows.append(_compare(Comparison(workload, model, folder), repetitions))
            return rows
    finally:
        torch.set_num_threads(threads)


def _compare(comparison: Comparison, repetitions: int) -> dict[str, Any]:
    pairs = [(comparison.bare(), comparison.job()) for _ in range(repetitions)]
    bare, job = (statistics.median(column) for column in zip(*pairs, strict=True))
    workload = comparison.workload
    return {
        "engine": workload.name,
        "ranks": workload.ranks,
        "rows": workload.rows,
        "tokens": comparison.tokens,
        "bare_tokens_per_second": round(bare, 1),
        "job_tokens_per_second": round(job, 1),
        "ratio": round(statistics.median(job / bare for bare, job in pairs), 3),
    }
