"""The contract between the job and what runs its rows: `WorkItem` in, `WorkResult` out, `Backend` between.

Knows: the shape of a piece of work and the six calls of a backend. Does not know: Ray, rows, files, tensors.
A backend may be a Ray fleet, one in-process engine or a fake of a test; the job cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from deepinfer_ray.engine.request import RequestResult, SamplingParams


@dataclass(slots=True, eq=False)
class WorkItem:
    """One sequence to complete.

    key: the caller's own number, unique among the items in flight. prompt: int32 [prompt_len].
    seed: final seed of this sequence. attempts: 1 for a first try; a redone item counts up.
    """

    key: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    attempts: int = 1

    def __repr__(self) -> str:  # never the prompt itself
        return f"WorkItem(key={self.key}, prompt_len={len(self.prompt)}, attempts={self.attempts})"


@dataclass(slots=True, eq=False)
class WorkResult:
    """The terminal record of the `WorkItem` with the same key; `attempts` counts the try that gave it."""

    key: int
    result: RequestResult
    attempts: int

    def __repr__(self) -> str:  # never the text itself
        return f"WorkResult(key={self.key}, attempts={self.attempts}, {self.result!r})"


@dataclass(frozen=True, slots=True)
class RankStats:
    """A pulse of one rank's engine (`Engine.pulse`): totals since the engine was built `seconds` ago."""

    rank: int
    generation: int
    values: Mapping[str, Any]


@runtime_checkable
class ReportsStats(Protocol):
    """What a backend may offer beside `Backend`."""

    def take_stats(self) -> list[RankStats]:
        """Pulses that came in since the last call, oldest first; each is given once."""
        ...


@runtime_checkable
class Grows(Protocol):
    """What a backend may offer beside `Backend`: it becomes larger and smaller with the work."""

    def expect(self, items: int) -> None:
        """About how many items will be submitted from now on; said again when that has changed."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Runs work items; every submitted item comes back exactly once through `poll`.

    One thread calls a backend. Errors of the whole (`PlacementError`, `RankFailure`, `ConfigError`,
    `CheckpointError`) are raised by `start` and `poll`; after one of them only `close` may be called.
    """

    def start(self) -> None:
        """Bring up what runs the work; returns when it can take items."""

    def wanted(self) -> int:
        """How many more items would be taken without waiting; 0 when saturated."""

    def submit(self, items: Sequence[WorkItem]) -> None:
        """Hand over items. More than `wanted()` is legal: the surplus waits in the backend's queue."""

    def poll(self, timeout_s: float) -> list[WorkResult]:
        """Results that finished, in completion order; waits at most `timeout_s` for the first one."""

    def status(self) -> dict[str, Any]:
        """A JSON-able picture for progress and reports: ranks, in flight, waiting, restarts."""

    def close(self, graceful: bool) -> None:
        """End everything. graceful: let ranks finish their step loop; else at once. May be called twice."""
