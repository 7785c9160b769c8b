"""Blocks and slots from a byte budget, and the errors of budgets that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.capacity import Capacity, plan_capacity, useful_blocks
from deepinfer_ray.engine.mock import MockModel, mock_config
from deepinfer_ray.errors import ConfigError

LAYOUT = MockModel(mock_config()).layout()


def config(max_model_len: int = 1000, **cache: Any) -> EngineConfig:
    cache = {"prefix_reuse": False, **cache}
    return EngineConfig(scheduler={"max_seqs": 10, "max_model_len": max_model_len}, cache=cache)  # type: ignore[arg-type]


def test_slots_first_then_an_even_number_of_blocks() -> None:
    options = config()
    assert options.num_state_slots == 13
    budget = 13 * LAYOUT.slot_bytes + 21 * LAYOUT.block_bytes + 5
    assert plan_capacity(LAYOUT, options, budget) == Capacity(20, 13, LAYOUT.block_bytes, LAYOUT.slot_bytes)
    assert plan_capacity(LAYOUT, options, budget).total_bytes <= budget
    assert plan_capacity(LAYOUT, options, budget).tokens == 19 * 128


def test_reserve_and_override_bend_the_division() -> None:
    budget = 13 * LAYOUT.slot_bytes + 24 * LAYOUT.block_bytes
    reserved = config(graph_reserve_bytes=4 * LAYOUT.block_bytes)
    assert plan_capacity(LAYOUT, reserved, budget).num_blocks == 20
    assert plan_capacity(LAYOUT, config(num_blocks_override=31), 0).num_blocks == 31


def test_copies_of_kept_prefixes_take_their_share_before_the_blocks() -> None:
    slot, block = LAYOUT.slot_bytes, LAYOUT.block_bytes
    budget = 13 * slot + 12 * slot + 21 * block
    got = plan_capacity(LAYOUT, config(prefix_reuse=True, prefix_budget_fraction=0.25), budget)
    left = 12 * slot + 21 * block
    assert got.num_snapshots == min(4, int(left * 0.25) // slot) > 0
    assert got.num_blocks == (left - got.num_snapshots * slot) // block // 2 * 2
    assert got.total_bytes <= budget
    poor = plan_capacity(
        LAYOUT, config(prefix_reuse=True, prefix_budget_fraction=0.05), 13 * slot + 21 * block
    )
    assert (poor.num_snapshots, poor.num_blocks) == (2, 20)
    override = config(prefix_reuse=True, num_blocks_override=31)
    assert plan_capacity(LAYOUT, override, 0).num_snapshots == 4
    assert (
        plan_capacity(LAYOUT, config(prefix_reuse=True, prefix_budget_fraction=0), budget).num_snapshots == 0
    )


def test_no_more_blocks_than_can_be_used() -> None:
    options = config()
    got = plan_capacity(LAYOUT, options, 10**12).num_blocks
    assert got == useful_blocks(options) // 2 * 2
    per_sequence = (1000 + 1) // 128 + 1
    assert got >= 10 * per_sequence
    short = EngineConfig(scheduler={"max_seqs": 1, "max_model_len": 4000})  # type: ignore[arg-type]
    short.check_capacity(plan_capacity(LAYOUT, short, 10**12).num_blocks)


@pytest.mark.parametrize(
    ("blocks", "max_model_len", "words"),
    [
        (1, 1000, "13 state slots of"),
        (8, 1000, r"0\.8 of 8 cache blocks hold 819"),
        (4, 600, r"lower scheduler\.max_model_len = 600"),
    ],
)
def test_budgets_that_hold_too_little(blocks: int, max_model_len: int, words: str) -> None:
    budget = 13 * LAYOUT.slot_bytes + blocks * LAYOUT.block_bytes
    with pytest.raises(ConfigError, match=words):
        plan_capacity(LAYOUT, config(max_model_len), budget)
