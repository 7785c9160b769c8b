"""A model whose experts and tables are spread over ranks gives the bits of one that has them all."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.expert_slots import balance_layers
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.parallel.model_ranks import ModelRanks
from deepinfer_ray.parallel.rank_group import RankGroup, ThreadGroup

KIND = "tinyB"


def on_ranks(size: int, work: Any) -> list[Any]:
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(group: RankGroup) -> None:
        try:
            results[group.rank] = work(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(group,)) for group in ThreadGroup.of(size, 60.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def steps(harness: Any, model: Any, rank: int) -> list[torch.Tensor]:
    """Logits of three chunks and four decode steps; ranks have other tokens and other numbers of rows."""
    driver = harness.Driver(model, token_map=harness.expected_map(KIND), seed=rank)
    tokens = np.random.default_rng(rank).integers(3, 500, 40)
    sequence = driver.add(tokens)
    out = [driver.step([sequence], [10 - rank], prefill=True).logits for _ in range(3)]
    return out + [driver.decode([sequence]).logits for _ in range(4)]


@pytest.mark.parametrize("mode", ["exact", "released"])
@pytest.mark.parametrize(("size", "extra", "packed"), [(2, 0, False), (2, 2, True), (3, 3, False)])
def test_ranks_change_no_bit(harness: Any, mode: str, size: int, extra: int, packed: bool) -> None:
    budget = 0 if packed else 1 << 30
    single = harness.load_model(KIND, mode, budget=budget)

    def rank(group: RankGroup) -> list[torch.Tensor]:
        ranks = ModelRanks(ep=group, engram=group, extra_experts=extra)
        with Checkpoint.open(harness.root / KIND) as checkpoint:
            model = load_text_model(checkpoint, Numerics(mode), ranks=ranks, dequant_budget_bytes=budget)
        experts = [block.ffn for block in model.blocks]
        balance_layers(experts, ranks.placement(len(experts), 6), group.rank, window=4)
        assert experts[0].experts.experts == (6 + extra) // size, "only its own slots are loaded"
        return steps(harness, model, group.rank)

    for number, got in enumerate(on_ranks(size, rank)):
        for a, b in zip(got, steps(harness, single, number), strict=True):
            assert torch.equal(a, b)
