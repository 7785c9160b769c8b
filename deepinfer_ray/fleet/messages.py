"""What the driver and a rank say to each other: plain picklable records.

Knows: fields. Does not know: Ray, engines, who sends. No record prints a prompt or a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_ray.fleet.backend import WorkItem, WorkResult
from deepinfer_ray.parallel.grid import RankGrid
from deepinfer_ray.parallel.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything a rank needs to build its engine. The rank number is given after placement, not before.

    engine_factory: called with this spec; an object, or its import path `module:attribute`.
    generation: counts the rebuilds of the gang; a message of another generation is refused.
    grid: the gang's own, in which this rank is number `place`. rendezvous: where the gang meets; None = a
    rank on its own.
    """

    rank: int
    world_size: int
    gang: int
    generation: int
    model_dir: str
    engine_config: Any
    device: str
    num_threads: int
    engine_factory: Callable[[RankSpec], Any] | str
    grid: RankGrid | None = None
    place: int = 0
    rendezvous: Rendezvous | None = None


@dataclass(frozen=True, slots=True)
class RankWhere:
    """Where an actor process really stands."""

    node_id: str
    address: str
    pid: int
    gpu_ids: tuple[str, ...]

    @property
    def device_index(self) -> int:
        """Index of its first GPU on the machine, 0 without one; the order of ranks within a machine."""
        return int(self.gpu_ids[0]) if self.gpu_ids and self.gpu_ids[0].isdigit() else 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's pulse. phase: created, loading, idle, step, stopped or failed.

    step: steps done. age_s: seconds since the phase or the step counter last changed.
    in_flight: rows that were submitted and have no result yet. part: what the engine is doing inside a step.
    """

    rank: int
    generation: int
    phase: str
    step: int
    age_s: float
    in_flight: int
    part: str = ""

    def __str__(self) -> str:
        part = f" ({self.part})" if self.part and self.phase == "step" else ""
        return f"phase {self.phase}{part}, step {self.step}"


@dataclass(frozen=True, slots=True)
class RankFault:
    """Why a rank ended. kind: class name of the exception; trace: its traceback."""

    kind: str
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class RankReport:
    """The answer to `collect` and `start`.

    received: rows ever submitted to this actor. wanted: rows it would take beyond those; together they let
    the driver compute credits although submissions are still on their way. fault: set once the engine is
    gone. stats: the engine's last pulse, None when there was none since the last report.
    """

    heartbeat: Heartbeat
    received: int
    wanted: int
    results: list[WorkResult] = field(default_factory=list)
    fault: RankFault | None = None
    stats: dict[str, Any] | None = None


INLINE_BYTES = 64 * 1024
"""What goes into one call: Ray sends up to 100 KiB along with it and puts more into its object store, which
costs a rank some tenths of a second before its first rows."""

ITEM_BYTES = 400
"""Of a work item besides its prompt, pickled."""


def in_calls(items: Sequence[WorkItem]) -> Iterator[list[WorkItem]]:
    """The items in order, as many together as one call carries; one that is longer goes alone."""
    batch: list[WorkItem] = []
    size = 0
    for item in items:
        item_bytes = ITEM_BYTES + item.prompt.nbytes
        if batch and size + item_bytes > INLINE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item_bytes
    if batch:
        yield batch


def own_arrays(result: WorkResult) -> WorkResult:
    """The result with arrays of its own: large answers arrive as views that pin shared memory."""
    record = result.result
    for name in ("token_ids", "logprobs", "prompt_logprobs"):
        array = getattr(record, name)
        if isinstance(array, np.ndarray) and not array.flags.owndata:
            setattr(record, name, array.copy())
    return result
