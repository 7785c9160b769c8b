"""How ranks are run, and which grids a fleet can run.

Knows: limits, resources of a rank, the parallel sizes of an engine config. Does not know: Ray, models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.fleet.watch import Patience
from deepinfer_ray.parallel.grid import RankGrid


@dataclass(frozen=True)
class FleetOptions:
    """How ranks are run. None of these changes a result.

    address: cluster to join; None = RAY_ADDRESS, else a new local one. cpus_per_rank: logical CPUs of a
    bundle. gpus_per_rank: None = 1 when the device is `cuda`, or `auto` on a cluster with GPUs. num_threads:
    torch threads of a rank; None = cpus_per_rank rounded down, at least 1. max_restarts: deaths without
    progress.
    """

    address: str | None = None
    cpus_per_rank: float = 1.0
    gpus_per_rank: float | None = None
    num_threads: int | None = None
    max_restarts: int = 3
    patience: Patience = field(default_factory=Patience)
    environment: dict[str, str] = field(default_factory=dict)


def default_options(engine_config: Any) -> FleetOptions:
    """Options that agree with the engine's: `parallel.step_timeout_s`."""
    parallel = getattr(engine_config, "parallel", None)
    return FleetOptions(patience=Patience(step=getattr(parallel, "step_timeout_s", Patience.step)))


def independent_grid(engine_config: Any, dp: int) -> RankGrid:
    """The grid of D ranks without collectives; `ConfigError` when the config asks for ranks that have some.

    An automatic Engram size (0) means a table in every rank here.
    """
    parallel = getattr(engine_config, "parallel", None)
    cp, ep, engram = (getattr(parallel, name, 1) for name in ("cp", "ep", "engram"))
    grid = RankGrid.build(dp=dp, cp=cp, ep=ep, engram=engram or (1 if cp == ep == 1 else 0))
    if not grid.independent:
        raise ConfigError(
            f"{grid}, but a fleet runs independent ranks: lcm(C, E, N) must be 1; "
            "set parallel.cp = parallel.ep = parallel.engram = 1 and use --dp"
        )
    return grid
