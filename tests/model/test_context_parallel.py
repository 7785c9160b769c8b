"""Prefill rows shared over ranks: the bits of one rank, in hidden rows, in every cache and in decode."""

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


def steps(harness: Any, model: Any, kind: str, replay: str | None) -> dict[str, torch.Tensor]:
    """Two chunks of three sequences, one decode step of all; what a later step could see of them."""
    driver = harness.Driver(model, token_map=harness.expected_map(kind), seed=3)
    random = np.random.default_rng(0)
    keep, lengths = (20, [44, 3, 31]) if kind == "tinyB" else (140, [152, 3, 31])
    sequences = [driver.add(random.integers(3, 500, length + 2)) for length in lengths]
    first = [17, 1, 30]
    out: dict[str, torch.Tensor] = {}
    for name, counts in (("one", first), ("two", [a - b for a, b in zip(lengths, first, strict=True)])):
        known = None if replay is None else (replay, keep, lengths)
        out[name] = driver.step(sequences, counts, prefill=True, replay=known).hidden
    out["decode"] = driver.decode(sequences).logits
    for number, sequence in enumerate(sequences):
        out |= {f"{number}.{name}": value for name, value in driver.state(sequence).items()}
    return out


def load(harness: Any, kind: str, numerics: str, ranks: ModelRanks) -> Any:
    with Checkpoint.open(harness.root / kind) as checkpoint:
        model = load_text_model(checkpoint, Numerics(numerics), ranks=ranks, dequant_budget_bytes=1 << 30)
    if ranks.ep.size > 1:
        experts = [block.ffn for block in model.blocks]
        count = experts[0].layer.num_experts
        balance_layers(experts, ranks.placement(len(experts), count), ranks.ep.rank, window=4)
    return model


@pytest.mark.parametrize(
    ("kind", "numerics", "size", "experts", "replay"),
    [
        ("tinyB", "exact", 2, False, None),
        ("tinyB", "released", 2, False, None),
        ("tinyB", "exact", 2, True, "compact"),
        ("tinyB", "released", 2, True, "compact"),
        ("tinyB", "released", 2, False, "mask"),
        ("tinyB", "released", 3, True, None),
        ("tinyA", "released", 2, True, "compact"),
    ],
)
def test_ranks_change_no_bit(
    harness: Any, kind: str, numerics: str, size: int, experts: bool, replay: str | None
) -> None:
    """Ratios 1 and 2, candidates, Engram; experts shared by the same ranks or not; replayed prompts."""
    want = steps(harness, harness.load_model(kind, numerics), kind, replay)

    def rank(group: RankGroup) -> dict[str, torch.Tensor]:
        ranks = ModelRanks(ep=group, engram=group, cp=group) if experts else ModelRanks(cp=group)
        return steps(harness, load(harness, kind, numerics, ranks), kind, replay)

    for got in on_ranks(size, rank):
        for name, value in want.items():
            assert torch.equal(got[name], value), name
