"""What a decode step costs by its number of rows: measured once, corrected in use (speculative spec §4.2).

Knows: the ladder of sizes, a curve on disk, one curve for many ranks, running medians. Does not know: models,
who asks.
Times are milliseconds. A size stands for all row numbers down to the size below it: no interpolation.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch

from deepinfer_ray.parallel.rank_group import RankGroup

REPEATS = 5
"""Timed runs a size; the fastest and the slowest are left out."""
SLOPE_WINDOW = 5000
SLOPE_LEAST = 10
"""Samples that a size needs to count for the slope."""
SAMPLER_WINDOW = 9
SAMPLER_LEAST = 5
STALE_SECONDS = 7200
"""Curves on disk are deleted this long after they expired."""


def ladder(most_rows: int, interval: int) -> list[int]:
    """Sizes 1, 2, 4, … below `interval`, its multiples, and `most_rows` as the last."""
    interval = min(interval, most_rows)
    sizes = [1 << power for power in range(interval.bit_length()) if 1 << power < interval]
    sizes += list(range(interval, most_rows, interval))
    return [*sizes, most_rows]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """sizes: ascending row numbers. base: milliseconds of a forward of that many rows, short contexts."""

    sizes: tuple[int, ...]
    base: tuple[float, ...]

    @classmethod
    def measure(
        cls, sizes: Sequence[int], run: Callable[[int], None], clock: Callable[[], float] = time.perf_counter
    ) -> CostCurve:
        """run(rows): one forward, over when it returns. Largest size first, each once to warm up."""
        base = {}
        for size in sorted(sizes, reverse=True):
            run(size)
            times = []
            for _ in range(REPEATS):
                start = clock()
                run(size)
                times.append((clock() - start) * 1e3)
            base[size] = fmean(sorted(times)[1:-1])
        return cls(tuple(sorted(base)), tuple(base[size] for size in sorted(base)))


def averaged(curve: CostCurve, group: RankGroup) -> CostCurve:
    """The mean of the curves that the ranks measured, the same on all of them; collective. All have the same
    sizes."""
    everyone = group.gather(torch.tensor(curve.base, dtype=torch.float64))
    return CostCurve(curve.sizes, tuple(everyone.mean(0).tolist()))


def announced(curve: CostCurve | None, sizes: Sequence[int], group: RankGroup) -> CostCurve | None:
    """The curve that rank 0 has, on every rank, or None on all of them; collective."""
    base = torch.full((len(sizes),), float("nan"), dtype=torch.float64)
    if curve is not None:
        base = torch.tensor(curve.base, dtype=torch.float64)
    group.broadcast(base)
    return None if base.isnan().any() else CostCurve(tuple(sizes), tuple(base.tolist()))


class StepCosts:
    """`draft_length.StepCost`: the curve, what grows with context length, and what follows the forward."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._sizes, self._base = np.array(curve.sizes), np.array(curve.base)
        self._drifts: deque[tuple[int, float]] = deque(maxlen=SLOPE_WINDOW)
        self._sampling: dict[int, deque[float]] = {}
        self._sampling_any: deque[float] = deque(maxlen=SAMPLER_WINDOW)
        self._slope: float | None = 0.0

    def milliseconds(self, rows: np.ndarray, sequences: int) -> np.ndarray:
        """float64 [m]; inf beyond the largest size."""
        place = np.searchsorted(self._sizes, rows)
        inside = np.minimum(place, len(self._sizes) - 1)
        size = self._sizes[inside]
        total = self._base[inside] + self.slope * size + self.sampler(sequences)
        return np.where(place < len(self._sizes), total, np.inf)

    def size_of(self, rows: int) -> int | None:
        """The size that `rows` run as; None beyond the largest."""
        place = int(np.searchsorted(self._sizes, rows))
        return int(self._sizes[place]) if place < len(self._sizes) else None

    def record_forward(self, rows: int, milliseconds: float) -> None:
        """One real decode forward."""
        size = self.size_of(rows)
        if size is not None:
            base = float(self._base[np.searchsorted(self._sizes, size)])
            self._drifts.append((size, (milliseconds - base) / size))
            self._slope = None

    def record_sampling(self, sequences: int, milliseconds: float) -> None:
        """Everything behind one forward: verification and drafting."""
        own = self._sampling.setdefault(sequences, deque(maxlen=SAMPLER_WINDOW))
        own.append(milliseconds)
        self._sampling_any.append(milliseconds)

    @property
    def slope(self) -> float:
        """Milliseconds a row on top of the curve: median over sizes of the sizes' medians, never negative."""
        if self._slope is None:
            by_size: dict[int, list[float]] = {}
            for size, drift in self._drifts:
                by_size.setdefault(size, []).append(drift)
            medians = [median(drifts) for drifts in by_size.values() if len(drifts) >= SLOPE_LEAST]
            self._slope = max(0.0, median(medians)) if medians else 0.0
        return self._slope

    def sampler(self, sequences: int) -> float:
        """Milliseconds behind a forward of that many sequences; of any number until they are known."""
        for known in (self._sampling.get(sequences, ()), self._sampling_any):
            if len(known) >= SAMPLER_LEAST:
                return median(known)
        return 0.0


class CostListener:
    """Takes the times of real decode steps from the step loop's timers (`StepTimers.listener`)."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._expected: dict[int, tuple[int, int]] = {}

    def expect(self, step: int, rows: int, sequences: int) -> None:
        """Step number `step` is a decode step of this size."""
        self._expected[step] = (rows, sequences)

    def __call__(self, name: str, step: int, seconds: float) -> None:
        if step not in self._expected:
            return
        rows, sequences = self._expected[step]
        if name == "forward":
            self.costs.record_forward(rows, seconds * 1e3)
        else:
            self.costs.record_sampling(sequences, seconds * 1e3)
            del self._expected[step]


@dataclass(frozen=True, slots=True)
class CurveStore:
    """Measured curves in a directory, for ranks that start again on the same machine.

    key: what a curve depends on. ttl_s: seconds that one stays valid.
    """

    directory: Path
    key: dict[str, object]
    ttl_s: float
    clock: Callable[[], float] = time.time

    @property
    def _prefix(self) -> str:
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()

    def load(self, sizes: Sequence[int]) -> CostCurve | None:
        """The newest valid curve of exactly these sizes. Files that are unreadable or long expired go."""
        found: list[tuple[int, CostCurve]] = []
        for path in self.directory.glob(f"{self._prefix}.*.*"):
            age = self.clock() - _stamp(path)
            curve = _read(path)
            if curve is None or age > self.ttl_s + STALE_SECONDS:
                path.unlink(missing_ok=True)
            elif age <= self.ttl_s and curve.sizes == tuple(sizes):
                found.append((_stamp(path), curve))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def save(self, curve: CostCurve) -> None:
        """Appears whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{self._prefix}.{uuid.uuid4().hex}.{int(self.clock())}"
        partial = self.directory / f".{name}"
        partial.write_text(json.dumps([list(pair) for pair in zip(curve.sizes, curve.base, strict=True)]))
        os.replace(partial, self.directory / name)


def _stamp(path: Path) -> int:
    suffix = path.name.rpartition(".")[2]
    return int(suffix) if suffix.isdigit() else 0


def _read(path: Path) -> CostCurve | None:
    try:
        pairs = json.loads(path.read_text())
        return CostCurve(tuple(int(size) for size, _ in pairs), tuple(float(ms) for _, ms in pairs))
    except (OSError, ValueError, TypeError):
        return None
