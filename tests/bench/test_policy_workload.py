"""Made-up work: shapes, seeds and load of the arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_ray.bench.policy_cost import CostModel
from deepinfer_ray.bench.policy_workload import (
    ARRIVALS,
    LENGTHS,
    LONG_EVERY,
    Arrival,
    bearable_rate,
    draw_lengths,
    make_workload,
    reorder,
)

COST = CostModel()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_stay_in_their_range(lengths: str) -> None:
    sizes = draw_lengths(lengths, 5000, np.random.default_rng(0), 1.0)  # type: ignore[arg-type]
    low, high = {"uniform": (64, 1024), "lognormal": (16, 4096), "bimodal": (64, 12288)}[lengths]
    assert sizes[:, 0].min() >= low
    assert sizes[:, 0].max() <= high
    assert sizes[:, 1].min() >= 1
    if lengths == "bimodal":
        assert (sizes[:, 0] == 12288).sum() == pytest.approx(5000 / LONG_EVERY, abs=1)
    if lengths == "lognormal":
        assert np.median(sizes[:, 0]) == pytest.approx(384, rel=0.1)


def test_scale_multiplies_outputs_only() -> None:
    one, six = (draw_lengths("uniform", 100, np.random.default_rng(0), scale) for scale in (1.0, 6.0))
    assert (one[:, 0] == six[:, 0]).all()
    assert (6 * one[:, 1] == six[:, 1]).all()


def test_arrivals_are_as_named() -> None:
    def ranks_and_times(arrivals: str) -> tuple[np.ndarray, np.ndarray]:
        work = make_workload(arrivals, "uniform", COST, seats=8, per_rank=32)  # type: ignore[arg-type]
        assert [a.request_id for a in work] == list(range(128))
        times = np.array([a.time for a in work])
        assert (np.diff(times) >= 0).all()
        return np.array([a.rank for a in work]), times

    ranks, times = ranks_and_times("batch")
    assert np.bincount(ranks).tolist() == [32] * 4
    assert times.max() == 0
    ranks, times = ranks_and_times("skewed")
    assert ranks.max() == 0
    assert times.max() == 0
    ranks, times = ranks_and_times("bursts")
    assert all(len(set(ranks[times == t])) == 1 and (times == t).sum() == 8 for t in set(times))
    assert len(set(times)) == 16
    ranks, times = ranks_and_times("steady")
    assert len(set(times)) == 128
    assert len(set(ranks)) == 4


@pytest.mark.parametrize("load", [0.25, 0.75])
def test_steady_work_comes_at_the_asked_load(load: float) -> None:
    work = make_workload("steady", "uniform", COST, seats=16, per_rank=500, load=load)
    sizes = np.array([(a.prompt, a.output) for a in work])
    rate = bearable_rate(sizes, COST, 16, 2.94)
    assert len(work) / work[-1].time == pytest.approx(load * rate, rel=0.1)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_seed_decides(arrivals: str) -> None:
    def make(seed: int) -> list[Arrival]:
        return make_workload(arrivals, "lognormal", COST, seats=8, per_rank=8, seed=seed)  # type: ignore[arg-type]

    assert make(3) == make(3)
    assert make(3) != make(4)


@pytest.mark.parametrize("order", ["shortest", "longest"])
def test_reorder_moves_requests_only_within_their_rank_and_instant(order: str) -> None:
    work = make_workload("bursts", "bimodal", COST, seats=8, per_rank=16)
    moved = reorder(work, order)  # type: ignore[arg-type]
    assert [(a.time, a.rank) for a in moved] == [(a.time, a.rank) for a in work]
    key = {a.request_id: (a.time, a.rank, a.prompt, a.output) for a in work}
    assert all(key[a.request_id] == (a.time, a.rank, a.prompt, a.output) for a in moved)
    assert sorted(a.request_id for a in moved) == list(range(64))
    first = [a.prompt for a in moved if a.time == 0]
    assert first == sorted(first, reverse=order == "longest")
    assert reorder(work, "fifo") is work
