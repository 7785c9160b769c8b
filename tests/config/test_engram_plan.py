"""Primes, offsets and multipliers of the released tables (spec/model.md §3.4)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from deepinfer_ray.config.engram import engram_multipliers, is_prime
from deepinfer_ray.config.hf import ModelConfig

ROOT = Path(__file__).parents[2]


def test_released_plan_is_the_golden_one() -> None:
    plan = ModelConfig.load(ROOT / "configs/models/deepseek-v4.1-flash").engram
    golden = load_file(ROOT / "tests/data/golden/ops/engram.safetensors")
    assert plan.rows == (384006168, 384016682)
    assert np.array_equal(np.array(plan.primes), golden["primes"].numpy())
    assert np.array_equal(np.array(plan.offsets), golden["offsets"].numpy())
    assert np.array_equal(np.array(plan.multipliers), golden["multipliers"].numpy())
    assert plan.primes[0][0][:3] == (16000057, 16000079, 16000081)
    assert (plan.columns, plan.width) == (24, 6144)


def test_multipliers_are_frozen() -> None:
    assert engram_multipliers(1, 99092, 4) == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert engram_multipliers(14, 99092, 4)[0] == 67716810739261


def test_products_stay_below_two_to_the_63() -> None:
    for classes in (1, 103, 99092):
        assert max(engram_multipliers(7, classes, 4)) * classes < 2**63


def test_is_prime_agrees_with_a_sieve() -> None:
    composite = {n for p in range(2, 100) for n in range(2 * p, 5000, p)}
    assert [n for n in range(5000) if is_prime(n)] == [n for n in range(2, 5000) if n not in composite]
