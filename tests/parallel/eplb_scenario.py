"""Steps of a synthetic expert group, over any transport; as a script, a gloo group of processes.

python eplb_scenario.py SIZE STORE_FILE       writes STORE_FILE.RANK
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.expert_slots import TensorSlots, slot_digests
from deepinfer_ray.parallel.rank_group import RankGroup, TorchGroup
from deepinfer_ray.parallel.rebalance import LayerGroup, Rebalancer, Trigger

LAYERS, EXPERTS, ROWS, TOP = 2, 9, 40, 3


def expert_tensors(layer: int, experts: list[int]) -> list[torch.Tensor]:
    """The weights of these experts of a layer: bytes, odd sizes, scales, floats in a transposed layout."""
    made: list[list[torch.Tensor]] = []
    for expert in experts:
        random = torch.Generator().manual_seed(1000 * layer + expert)
        codes = torch.randint(0, 256, (3, 5), generator=random, dtype=torch.uint8)
        scales = torch.randint(100, 140, (3, 1), generator=random, dtype=torch.uint8)
        made.append([codes, scales, torch.randn(4, 6, generator=random)])
    codes, scales, floats = (torch.stack(parts) for parts in zip(*made, strict=True))
    return [codes, scales, floats.transpose(1, 2).contiguous().transpose(1, 2)]


def build(ranks: RankGroup, interval: int = 5, requested: int = 4, **options: Any) -> Rebalancer:
    """A rank of a group with two layers whose experts lie as the initial map says."""
    placement = ExpertMap.initial(LAYERS, EXPERTS, ranks.size, requested)
    layers = [expert_tensors(layer, placement.local_experts(layer, ranks.rank)) for layer in range(LAYERS)]
    group = LayerGroup(placement, TensorSlots(layers), ranks.rank, window=min(interval, 4) or 1)
    trigger = Trigger(interval, min(interval, 4))
    return Rebalancer([group], ranks, trigger, stat_interval=4, verify=True, **options)


def routed(step: int, layer: int, rank: int) -> torch.Tensor:
    """int64 [T, k] logical experts of a rank's rows: skewed, drifting; some ranks have no rows at times."""
    random = np.random.default_rng([step, layer, rank])
    rows = 0 if (step + rank) % 4 == 3 else ROWS
    popularity = np.roll(np.arange(1, EXPERTS + 1) ** -1.5, step // 6 + 2 * layer)
    scores = random.exponential(size=(rows, EXPERTS)) / popularity
    experts = np.argsort(scores, axis=1)[:, :TOP].astype(np.int64)
    experts[random.random(rows) < 0.1] = -1
    return torch.from_numpy(experts)


def step(rebalancer: Rebalancer, number: int) -> bool:
    """Route the rows of every rank (all know the traffic), count what arrives here, end the step; True if
    it rebalanced. Every row must meet the bytes of its expert."""
    group, ranks = rebalancer.groups[0], rebalancer.ranks
    n = group.placement.num_local
    for layer in range(LAYERS):
        for source in range(ranks.size):
            experts = routed(number, layer, source)
            tables = group.tables
            mine, tables.ep_rank = tables.ep_rank, source
            slots = tables.to_physical(layer, experts)
            tables.ep_rank = mine
            local = torch.where(slots // n == ranks.rank, slots % n, -1).masked_fill(slots < 0, -1)
            assert (tables.local_experts[layer][local[local >= 0]] == experts[local >= 0]).all()
            group.routing(layer).count(local)
    return rebalancer.after_step(is_prefill=False) is not None


def run(ranks: RankGroup, steps: int = 17) -> dict[str, Any]:
    """What a rank holds after some steps, as JSON-able data."""
    rebalancer = build(ranks)
    rebalanced = [number for number in range(steps) if step(rebalancer, number)]
    group = rebalancer.groups[0]
    return {
        "rebalanced": rebalanced,
        "map": group.placement.flat().tolist(),
        "digests": slot_digests(group.slots, group.placement.num_local).tolist(),
        "balance": list(rebalancer.take_load()),
    }


def gloo_rank(rank: int, size: int, store: str) -> None:
    """One process of a gloo group; the result goes to a file of its own."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    assert dist.group.WORLD is not None
    Path(f"{store}.{rank}").write_text(json.dumps(run(TorchGroup(dist.group.WORLD))))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)  # nothing has started a thread: children may be forked and spare the imports
    fork = multiprocessing.get_context("fork")
    world = int(sys.argv[1])
    children = [fork.Process(target=gloo_rank, args=(rank, world, sys.argv[2])) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode or 0) for child in children))
