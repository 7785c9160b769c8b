"""How the gangs of one fleet are built: shape, engine, environment, and what to ask the cluster for.

Knows: the grid, the engine's factory, machines. Does not know: which gangs there are, rows, deaths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_ray.fleet.engines import EngineFactory
from deepinfer_ray.fleet.gang import Gang
from deepinfer_ray.fleet.messages import RankSpec
from deepinfer_ray.fleet.options import FleetOptions, rank_environment
from deepinfer_ray.fleet.topology import Bundle, Node, PlacementPlan, plan_placement, rank_bundle
from deepinfer_ray.parallel.grid import RankGrid


@dataclass
class Launcher:
    """Every gang of a fleet is like the others. name: of the fleet; placement groups are named after it."""

    grid: RankGrid
    options: FleetOptions
    model_dir: str
    engine_config: Any
    device: str
    factory: EngineFactory | str
    name: str
    clock: Callable[[], float] = time.monotonic
    _bundle: Bundle | None = None

    def bundle(self, nodes: Sequence[Node]) -> Bundle:
        """What one rank holds. Whether a GPU is part of it may depend on the machines: those of the first
        call decide, so that a rank whose GPU machine was lost waits for another one."""
        if self._bundle is None:
            gpus = self.options.gpus_per_rank
            if gpus is None:
                may_hold = [node for node in nodes if node.meets(self.options.label_selector)]
                has_gpu = any(node.total.get("GPU", 0) for node in may_hold)
                gpus = 1.0 if self.device == "cuda" or (self.device == "auto" and has_gpu) else 0.0
            self._bundle = rank_bundle(self.options.cpus_per_rank, gpus)
        return self._bundle

    def plan(self, nodes: Sequence[Node]) -> PlacementPlan:
        """How a gang is packed on these machines."""
        bundle = self.bundle(nodes)
        bundles = [dict(bundle) for _ in range(self.grid.gang_size)]
        return plan_placement(bundles, nodes, self.options.label_selector)

    def launch(self, index: int, ranks: Sequence[int], generation: int, plan: PlacementPlan) -> Gang:
        """Ask for a gang's placement group; `Gang.advance` does the rest. ranks: their global numbers."""
        on_gpu = bool(plan.bundles[0].get("GPU"))
        spec = RankSpec(
            rank=-1,
            world_size=self.grid.world_size,
            gang=index,
            generation=generation,
            model_dir=self.model_dir,
            engine_config=self.engine_config,
            device=self.device if on_gpu else "cpu",  # without a GPU of its own Ray hides none
            num_threads=self.options.num_threads or max(1, int(self.options.cpus_per_rank)),
            engine_factory=self.factory,
            grid=self.grid.gang_grid(),
        )
        return Gang(
            index,
            ranks,
            spec,
            plan,
            name=self.name,
            cp=self.grid.cp,
            environment=rank_environment(self.grid, self.options.environment),
            clock=self.clock,
        )
