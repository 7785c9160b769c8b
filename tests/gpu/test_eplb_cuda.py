"""Expert balancing on a device: routing and counting never wait for it, moved slots hold the right bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.expert_slots import SlotLedger, TensorSlots
from deepinfer_ray.parallel.rank_group import ThreadGroup
from deepinfer_ray.parallel.rebalance import LayerGroup, Rebalancer, Trigger

pytestmark = pytest.mark.gpu

EXPERTS, ROWS, TOP = 24, 500, 4


def _group(ranks: int, rank: int, device: str) -> LayerGroup:
    placement = ExpertMap.initial(2, EXPERTS, ranks, 8)
    weights = []
    for layer in range(2):
        experts = placement.local_experts(layer, rank)
        values = torch.tensor(experts, dtype=torch.float32).view(-1, 1, 1) + 100 * layer
        codes = values.expand(-1, 6, 10).to(torch.uint8).contiguous().to(device)
        weights.append([codes, values.expand(-1, 3, 4).contiguous().to(device).transpose(1, 2)])
    return LayerGroup(placement, TensorSlots(weights), rank, 4, device)


def _routed(step: int, layer: int, source: int) -> torch.Tensor:
    random = np.random.default_rng([step, layer, source])
    scores = random.exponential(size=(ROWS, EXPERTS)) * np.arange(1, EXPERTS + 1) ** 1.2
    return torch.from_numpy(np.argsort(scores, axis=1)[:, :TOP].astype(np.int64))


def test_routing_and_counting_never_wait_and_agree_with_the_cpu() -> None:
    cpu, cuda = _group(4, 2, "cpu"), _group(4, 2, "cuda")
    experts = [_routed(0, layer, 0).masked_fill(torch.rand(ROWS, TOP) < 0.1, -1) for layer in range(2)]
    on_device = [e.cuda() for e in experts]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = [cuda.routing(layer).to_physical(e) for layer, e in enumerate(on_device)]
        for layer, s in enumerate(slots):
            cuda.routing(layer).count(torch.where(s // 8 == 2, s % 8, -1))
        cuda.window.record(cuda.counters.counts, cuda.tables.local_experts)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for layer, e in enumerate(experts):
        want = cpu.routing(layer).to_physical(e)
        assert torch.equal(slots[layer].cpu(), want)
        cpu.routing(layer).count(torch.where(want // 8 == 2, want % 8, -1))
    cpu.window.record(cpu.counters.counts, cpu.tables.local_experts)
    assert torch.equal(cuda.window.counts.cpu(), cpu.window.counts)
    assert cpu.counters.counts.sum() > 0


def test_rebalances_of_ranks_that_share_a_device() -> None:
    ranks, errors = ThreadGroup.of(4), []
    ends: list[list[int]] = [[] for _ in ranks]

    def body(group: ThreadGroup) -> None:
        try:
            layers = _group(4, group.rank, "cuda")
            ledger = SlotLedger(layers.slots, layers.placement, group)
            rebalancer = Rebalancer([layers], group, Trigger(3, 3), stat_interval=4, verify=True)
            for step in range(8):
                n = layers.placement.num_local
                for layer in range(2):
                    for source in range(4):
                        layers.tables.ep_rank = source
                        slots = layers.routing(layer).to_physical(_routed(step, layer, source).cuda())
                        layers.routing(layer).count(torch.where(slots // n == group.rank, slots % n, -1))
                    layers.tables.ep_rank = group.rank
                rebalancer.after_step(is_prefill=False)
            ledger.check(layers.slots, layers.placement, group)
            assert rebalancer.rebalances == 3
            assert 1 <= rebalancer.take_load().ratio < 4
            for layer in range(2):
                codes, floats = layers.slots.layer_tensors(layer)
                want = layers.placement.local_experts(layer, group.rank)
                assert (codes[:, 5, 9].int() - 100 * layer).tolist() == want
                assert (floats[:, 3, 2] - 100 * layer).tolist() == want
            ends[group.rank] = layers.placement.flat().tolist()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(group,)) for group in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert ends[0]
    assert all(end == ends[0] for end in ends)
