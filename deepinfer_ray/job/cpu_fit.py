"""Whether ranks without a GPU would fit: weights, Engram share and caches against a machine's memory.

Knows: sizes from a config, the option that caps a CPU rank's caches. Does not know: GPUs, placement, a rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine.capacity import plan_capacity
from deepinfer_ray.engine.fit import GIB, Fit
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.parallel.grid import RankGrid


@dataclass(frozen=True)
class CpuFit:
    """One rank without a GPU. rank_bytes: weights in their stored formats, Engram share and caches; None for
    an EP size that the fit table has no row for. machine_bytes: memory of this machine. blocks, slots,
    cache_tokens: 0 when it does not fit. problem: why it does not.
    """

    rank_bytes: int | None
    machine_bytes: int
    blocks: int = 0
    slots: int = 0
    cache_tokens: int = 0
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_fit(
    model: ModelConfig,
    engine: EngineConfig,
    grid: RankGrid,
    fits: Sequence[Fit],
    *,
    local: bool,
    machine_bytes: int | None = None,
) -> CpuFit:
    """One rank of `grid` on a machine like this one; local: all its ranks are on this machine.

    engine: resolved against the model. fits: the table of `fit_table`, which knows the weights.
    """
    memory = machine_memory() if machine_bytes is None else machine_bytes
    budget = engine.cache.cpu_budget_bytes
    layout = CacheLayout.build(
        model, Numerics(engine.numerics), engine.num_drafts, max_backtracking=engine.max_backtracking
    )
    by_ep = {fit.ep: fit for fit in fits}
    asked, tables = by_ep.get(grid.ep), by_ep[1].engram_bytes // grid.engram
    weights = None if asked is None else asked.weights_bytes - asked.engram_bytes * engine.model.engram_on_gpu
    size = None if weights is None else weights + tables + budget
    try:
        capacity = plan_capacity(layout, engine, budget)
    except ConfigError as error:
        return CpuFit(size, memory, problem=str(error))
    ranks = grid.world_size if local else 1
    if weights is not None and size is not None and ranks * size > memory:
        each = f"{size / GIB:,.1f} GiB (weights {weights / GIB:,.1f}, Engram {tables / GIB:,.1f}, caches "
        each += f"{budget / GIB:,.1f})"
        what = f"a rank takes {each}" if ranks == 1 else f"each of {ranks} ranks takes {each}"
        return CpuFit(size, memory, problem=f"{what}, this machine has {memory / GIB:,.1f} GiB of memory")
    return CpuFit(size, memory, capacity.num_blocks, capacity.num_slots, capacity.tokens)
