"""`bench eplb`: the skewed trace, what repays a shuffle, the traces and the cost model themselves."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deepinfer_ray.bench import eplb
from deepinfer_ray.bench.eplb import Costs, measured_balance, slot_counts, study
from deepinfer_ray.bench.eplb_traces import Trace, draw_rows, zipf
from deepinfer_ray.cli import main
from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.shuffle import ShufflePlan


@pytest.mark.parametrize("seed", [0, 1])
def test_the_skewed_trace_is_even_after_balancing(seed: int) -> None:
    """384 experts, Zipf 1.2 without replacement, top-6, EP 8, 48 redundant, scored on steps not seen."""
    row = study(Trace("zipf", 2048, window=16, held_out=12, layers=1, seed=seed))
    assert (eplb.RANKS, eplb.EXTRA) == (8, 48)
    assert row["lb_before"] > 1.5
    assert row["lb_after"] <= 1.09
    assert 0 < row["payback_steps"] < 1000


def test_a_second_balancing_of_the_same_traffic_does_not_pay() -> None:
    row = study(Trace("zipf", 1024, window=16, held_out=6, layers=1), again=True)
    assert row["trace"] == "zipf, again"
    assert row["lb_before"] < 1.09
    assert row["payback_steps"] is None or row["payback_steps"] > 100


def test_rows_are_drawn_without_replacement_in_proportion() -> None:
    popularity = zipf(5, 1.0, np.array([3, 0, 1, 2, 4]))
    assert popularity.argmax() == 3
    assert popularity.sum() == pytest.approx(1)
    rows = draw_rows(popularity, 40_000, 2, np.random.default_rng(0))
    assert (rows[:, 0] != rows[:, 1]).all()
    p = popularity
    # P(e is among two draws) = p_e + Σ_f p_f · p_e / (1 - p_f)
    want = [p[e] + sum(p[f] * p[e] / (1 - p[f]) for f in range(5) if f != e) for e in range(5)]
    assert np.bincount(rows.ravel(), minlength=5) / 40_000 == pytest.approx(want, abs=0.012)


def test_a_trace_is_reproducible_and_drifts() -> None:
    trace = Trace("t", 64, drift=1.0, window=3, held_out=2, experts=16, k=2)
    assert (trace.rows(1, 2) == trace.rows(1, 2)).all()
    assert not np.array_equal(trace.rows(0, 2), trace.rows(1, 2))
    first, last = trace.popularity(0, 0), trace.popularity(0, 4)
    assert sorted(first) == pytest.approx(sorted(last))
    assert not np.allclose(first, last)


def test_slots_get_the_rows_of_their_replicas() -> None:
    trace = Trace("t", 80, window=1, held_out=1, experts=6, k=2, layers=1)
    placement = ExpertMap.initial(1, 6, 4, 2)
    counts = slot_counts(trace, range(2), placement)
    assert counts.shape == (2, 1, 8)
    for step in range(2):
        logical = np.bincount(trace.rows(0, step).ravel(), minlength=6)
        slots = placement.physical_to_logical[0]
        assert np.bincount(slots, weights=counts[step, 0], minlength=6).tolist() == logical.tolist()
    assert measured_balance(np.array([[[3, 1, 0, 0]]]), 2) == 2.0
    assert measured_balance(np.zeros((1, 1, 4), np.int64), 2) == 1.0


def test_the_cost_model_by_hand() -> None:
    costs = Costs(layers=2, hidden=64, width=32, compute=1e6, memory=1e6, link=1e5, batch_s=0.5)
    expert = 3 * 64 * 32 * 17 / 32
    assert costs.expert_bytes == expert
    tokens = np.array([[[0, 1, 5, 4]]])  # one layer stands for two; ranks (0, 1) and (5, 4)
    assert costs.moe_seconds(tokens, 2) == pytest.approx([2 * 9 * 6 * 64 * 32 / 1e6])
    few = np.array([[[0, 1, 0, 0]]])
    assert Costs(layers=1, hidden=64, width=32, compute=1e9, memory=1e6).moe_seconds(few, 2) == pytest.approx(
        [expert / 1e6]
    )
    old = ExpertMap.initial(1, 4, 2)
    swapped = ExpertMap.from_physical(np.array([[2, 1, 0, 3]]), 4, 2)
    assert costs.shuffle_seconds(ShufflePlan.between(old, swapped)) == pytest.approx(
        2 * (0.5 + expert / 1e5 + 4 * expert / 1e6)
    )
    local = ExpertMap.from_physical(np.array([[1, 0, 2, 3]]), 4, 2)
    assert costs.shuffle_seconds(ShufflePlan.between(old, local)) == pytest.approx(2 * 8 * expert / 1e6)
    assert costs.shuffle_seconds(ShufflePlan.between(old, old)) == 0


def test_the_command_prints_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Trace("tiny", 32, window=2, held_out=2, layers=1, experts=16, k=2)

    def small(trace: Trace, **options: Any) -> dict[str, Any]:
        return study(tiny, ranks=2, extra=2, **options)

    monkeypatch.setattr(eplb, "study", small)
    result = CliRunner().invoke(main.app, ["bench", "eplb", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["name"] == "eplb"
    assert [row["trace"] for row in printed["rows"]] == ["tiny"] * len(eplb.TRACES) + ["tiny, again"]
