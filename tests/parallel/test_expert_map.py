"""Expert maps: padding, initial placement, integrity, replica choice."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.expert_map import (
    ExpertMap,
    ExpertMapError,
    RoutingTables,
    choose_replicas,
    extra_experts,
)


@pytest.mark.parametrize(
    ("logical", "ranks", "requested", "extra"),
    [
        (384, 8, 48, 48),
        (384, 8, 0, 0),
        (384, 5, 0, 1),
        (128, 48, 0, 16),
        (4, 6, 0, 2),
        (3, 1, 2, 2),
        (10, 4, 3, 6),
    ],
)
def test_slots_divide_over_the_ranks(logical: int, ranks: int, requested: int, extra: int) -> None:
    assert extra_experts(logical, ranks, requested) == extra
    assert (logical + extra) % ranks == 0
    assert requested <= extra < requested + ranks


def test_rounding_warns_and_a_fit_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deepinfer_ray.eplb"):
        extra_experts(384, 8, 8)
        assert not caplog.records
        extra_experts(384, 8, 3)
    assert "eplb.extra_experts = 3 becomes 8: (384 + 8) experts divide over 8 ranks" in caplog.text
    with pytest.raises(
        ConfigError, match=r"eplb.extra_experts must be >= 0 .*got -1 for 8 experts on 2 ranks"
    ):
        extra_experts(8, 2, -1)


def test_initial_placement() -> None:
    made = ExpertMap.initial(2, 4, ep_size=3, requested=4)
    assert (made.num_logical, made.num_extra, made.num_physical, made.num_local) == (4, 5, 9, 3)
    assert made.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0]] * 2
    assert made.logical_count.tolist() == [[3, 2, 2, 2]] * 2
    assert made.logical_to_physical[0].tolist()[:2] == [[0, 4, 8, -1, -1, -1], [1, 5, -1, -1, -1, -1]]
    assert [made.local_experts(1, rank) for rank in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def test_a_map_travels_as_one_array() -> None:
    made = ExpertMap.from_physical(np.array([[2, 0, 1, 0]]), 3, 2)
    back = ExpertMap.initial(1, 3, 2).like(made.flat())
    assert back.flat().tolist() == made.flat().tolist()
    assert back.physical_to_logical.tolist() == [[2, 0, 1, 0]]
    with pytest.raises(ExpertMapError, match="a map of 13 numbers was expected, got 14"):
        made.like(np.append(made.flat(), 0))


def _with(table: str, at: tuple[int, ...], value: int) -> ExpertMap:
    tables = {
        "slots": np.array([[0, 1, 2, 0]], np.int32),
        "back": np.array([[[0, 3], [1, -1], [2, -1]]], np.int32),
        "counts": np.array([[2, 1, 1]], np.int32),
    }
    tables[table][at] = value
    return ExpertMap(2, tables["slots"], tables["back"], tables["counts"])


@pytest.mark.parametrize(
    ("table", "at", "value", "text"),
    [
        ("slots", (0, 3), 1, "layer 0: slot 3 holds expert 1, but is listed under expert 0"),
        ("back", (0, 0, 1), 2, "layer 0: logical_to_physical must name each of 4 slots once"),
        ("back", (0, 1, 1), 3, "layer 0: logical_to_physical goes on behind logical_count"),
        ("counts", (0, 1), 0, "counts must add up to 4, but expert 1 has 0 and the sum is 3"),
        (
            "counts",
            (0, 1),
            2,
            "counts must add up to 4, but expert 1 has 2 and the sum is 5|expert 2 has 1 and",
        ),
    ],
)
def test_a_wrong_table_is_named(table: str, at: tuple[int, ...], value: int, text: str) -> None:
    _with("counts", (0, 0), 2).check_integrity()
    with pytest.raises(ExpertMapError, match=text):
        _with(table, at, value).check_integrity()


def test_slots_that_cannot_be_a_map() -> None:
    with pytest.raises(ExpertMapError, match="slots must hold experts 0 … 2, found 0 … 3"):
        ExpertMap.from_physical(np.array([[0, 1, 2, 3]]), 3, 2)
    with pytest.raises(ExpertMapError, match="layer 0: some expert has no slot, expert 1 has too many"):
        ExpertMap.from_physical(np.array([[0, 1, 1, 1]]), 3, 2)
    with pytest.raises(ExpertMapError, match="3 slots on 2 ranks cannot have the shapes"):
        ExpertMap.from_physical(np.array([[0, 1, 2]]), 3, 2)


def test_replica_choice_by_the_formula_in_unsigned_arithmetic() -> None:
    made = ExpertMap.from_physical(np.array([[0, 1, 2, 0, 2, 0, 0, 2, 0]]), 3, 3)
    tables = RoutingTables(made, 2)
    random = np.random.default_rng(0)
    rows = 200_000  # 23333·i passes 2³¹ at row 92037 and 2³² at row 184074
    experts = torch.from_numpy(random.integers(-1, 3, (rows, 2)))
    got = tables.to_physical(0, experts)
    at = np.r_[0:50, 92_030:92_045, 184_065:184_080, rows - 1]
    for i in at.tolist():
        for slot in range(2):
            expert = int(experts[i, slot])
            if expert < 0:
                assert got[i, slot] == -1
                continue
            replica = ((2 + 23333 * i) % 2**32) % int(made.logical_count[0, expert])
            assert got[i, slot] == made.logical_to_physical[0, expert, replica]
    assert got.dtype == torch.int64
    # In signed arithmetic row 92037 and later would take other replicas of an expert with 5.
    assert (2 + 23333 * 92_037) % 5 != (2 + 23333 * 92_037 - 2**32) % 5


def test_replicas_follow_the_order_of_the_table_and_share_the_rows() -> None:
    to_physical, count = torch.tensor([[4, 10, 1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    got = choose_replicas(torch.zeros(6, 1, dtype=torch.int64), to_physical, count, ep_rank=0)
    assert got[:, 0].tolist() == [4, 1, 10, 4, 1, 10]
    assert choose_replicas(torch.zeros(1, 1, dtype=torch.int64), to_physical, count, ep_rank=1).item() == 10
    assert choose_replicas(torch.empty(0, 6, dtype=torch.int64), to_physical, count, ep_rank=1).shape == (
        0,
        6,
    )


def test_tables_are_updated_in_place() -> None:
    tables = RoutingTables(ExpertMap.initial(2, 3, 2), 1)
    addresses = [
        t.data_ptr()
        for t in (
            tables.physical_to_logical,
            tables.logical_to_physical,
            tables.logical_count,
            tables.local_experts,
        )
    ]
    tables.update(ExpertMap.from_physical(np.array([[2, 0, 1, 0], [1, 1, 2, 0]]), 3, 2))
    assert tables.local_experts.tolist() == [[1, 0], [2, 0]]
    assert tables.logical_count.tolist() == [[2, 1, 1], [1, 2, 1]]
    assert addresses == [
        t.data_ptr()
        for t in (
            tables.physical_to_logical,
            tables.logical_to_physical,
            tables.logical_count,
            tables.local_experts,
        )
    ]
    with pytest.raises(ExpertMapError, match=r"expert rank 2 is outside \[0, 2\)"):
        RoutingTables(ExpertMap.initial(1, 3, 2), 2)
