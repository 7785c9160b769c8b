"""How ranks are run, and which grids a fleet can run.

Knows: limits, resources of a rank, the parallel sizes of an engine config. Does not know: Ray, models.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    progress. max_gangs: up to so many gangs run at once while there are rows for them; None = those that the
    grid asks for. label_selector: node labels of machines that may hold a rank (spec/ray.md §2.3).
    """

    address: str | None = None
    cpus_per_rank: float = 1.0
    gpus_per_rank: float | None = None
    num_threads: int | None = None
    max_restarts: int = 3
    max_gangs: int | None = None
    label_selector: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)
    environment: dict[str, str] = field(default_factory=dict)


def default_options(
    engine_config: Any, *, max_gangs: int | None = None, idle_s: float = Patience.idle
) -> FleetOptions:
    """Options that agree with the engine's: `parallel.step_timeout_s`, `parallel.label_selector`."""
    parallel = getattr(engine_config, "parallel", None)
    patience = Patience(step=getattr(parallel, "step_timeout_s", Patience.step), idle=idle_s)
    selector = getattr(parallel, "labels", {})
    return FleetOptions(max_gangs=max_gangs, label_selector=selector, patience=patience)


def fleet_grid(engine_config: Any, dp: int) -> RankGrid:
    """The grid of a fleet of D engines: `ConfigError` with the equation that fails.

    dp = 1 grows to as many engines as the expert group needs. An automatic Engram size (0) means a table in
    every rank where ranks share nothing else, so that they stay independent.
    """
    parallel = getattr(engine_config, "parallel", None)
    cp, ep, engram = (getattr(parallel, name, 1) for name in ("cp", "ep", "engram"))
    dp = max(1, ep // cp) if dp == 1 else dp
    return RankGrid.build(dp=dp, cp=cp, ep=ep, engram=engram or (1 if cp == ep == 1 else 0))


def most_gangs(grid: RankGrid, max_gangs: int | None) -> int:
    """How many gangs may run at once; `ConfigError` when that is less than the grid asks for."""
    if max_gangs is not None and max_gangs < grid.num_gangs:
        raise ConfigError(
            f"--max-gangs {max_gangs} is less than --dp {grid.dp} asks for, {grid.num_gangs} gangs from the "
            f"start on ({grid}); raise --max-gangs or lower --dp"
        )
    return max_gangs or grid.num_gangs


GANG_ENVIRONMENT = {
    "NCCL_PXN_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_GIN_ERROR_QUERY_SEC": "432000",
    "NCCL_NO_CACHE": "NCCL_WIN_STRIDE,NCCL_GIN_TYPE,NCCL_GIN_GDAKI_MAX_QP_RD_ATOMIC",
    "NCCL_NVLS_ENABLE": "0",
    "EP_AVOID_RECORD_STREAM": "1",
}
"""Of ranks with collectives, before CUDA starts (spec/distributed.md §1.3); NVLink multicast stays off."""


def rank_environment(grid: RankGrid, own: dict[str, str]) -> dict[str, str]:
    """The environment of each rank's process; what a person set goes first."""
    return dict(own) if grid.independent else {**GANG_ENVIRONMENT, **own}
