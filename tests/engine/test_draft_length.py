"""Draft lengths: golden allocations, the search against brute force, costs, why a budget is two steps old."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from safetensors.torch import load_file

from deepinfer_ray.engine.cost_curve import CostCurve, CurveStore, StepCosts, announced, averaged, ladder
from deepinfer_ray.engine.draft_length import ScheduledLengths, best_rows, give_out, give_out_on_device
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.simulation import Loop, create_scheduler
from deepinfer_ray.engine.table import SequenceTable
from deepinfer_ray.parallel.rank_group import ThreadGroup

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "ops" / "spec_schedule.safetensors"
CRITICAL_Z = 3.719


# ------------------------------------------------------------------ golden and brute force


@pytest.mark.parametrize("case", range(5))
def test_golden_allocation(case: int) -> None:
    golden = {
        name.removeprefix(f"varlen{case}."): value
        for name, value in load_file(GOLDEN).items()
        if name.startswith(f"varlen{case}.")
    }
    remap, total = golden["remap"].long(), int(golden["total_q"])
    got = give_out_on_device(golden["confidence"], remap, total)
    assert got.tolist() == golden["seqlens_q"].tolist()
    rates = golden["confidence"][remap.clamp_min(0)].cumprod(1).masked_fill((remap < 0)[:, None], 0.0)
    assert give_out(rates.numpy(), total).tolist() == got.tolist()


class Curve:
    """Cost by row number alone."""

    def __init__(self, by_rows: np.ndarray) -> None:
        self.by_rows = by_rows

    def milliseconds(self, rows: np.ndarray, sequences: int) -> np.ndarray:
        return np.where(
            rows < len(self.by_rows), self.by_rows[np.minimum(rows, len(self.by_rows) - 1)], np.inf
        )


def test_search_equals_brute_force() -> None:
    """1,000 random confidences and jagged curves, ties and zeros among them."""
    random = np.random.default_rng(8)
    chosen = []
    for _ in range(1000):
        n, drafts = int(random.integers(1, 6)), int(random.integers(1, 6))
        confidence = random.random((n, drafts)).astype(np.float32)
        if random.random() < 0.3:
            confidence = np.round(confidence * 4) / np.float32(4)
        rates = np.cumprod(confidence, axis=1, dtype=np.float32)
        most = n * (drafts + 1)
        sizes = np.unique(np.append(random.integers(1, most + 1, 4), most if random.random() < 0.8 else n))
        sizes = sizes[sizes >= n] if (sizes >= n).any() else np.array([n])
        base = np.sort(random.random(len(sizes)) * 3 + 0.5)
        costs = StepCosts(CostCurve(tuple(sizes.tolist()), tuple(base.tolist())))
        best, best_theta = n, -1.0
        for rows in range(n, most + 1):
            size = next((index for index, size in enumerate(sizes) if size >= rows), None)
            if size is None:
                continue
            lengths = (
                [
                    length
                    for length in itertools.product(range(1, drafts + 2), repeat=n)
                    if sum(length) == rows
                ]
                if n <= 2
                else [tuple(give_out(rates, rows).tolist())]
            )
            value = max(
                n + sum(float(rates[i, : q - 1].sum()) for i, q in enumerate(length)) for length in lengths
            )
            if value / base[size] > best_theta * (1 + 1e-6):
                best, best_theta = rows, value / base[size]
        got = best_rows(rates, costs)
        assert got == best, (rates, sizes, base)
        chosen.append((got - n) / (most - n))
    assert np.mean(np.array(chosen) == 0) > 0.05
    assert np.mean(np.array(chosen) > 0.3) > 0.05


def test_lengths_are_prefixes_of_the_best_survivals() -> None:
    random = np.random.default_rng(2)
    for _ in range(100):
        rates = np.cumprod(random.random((4, 5), np.float32), axis=1)
        total = int(random.integers(4, 25))
        q = give_out(rates, total)
        assert q.sum() == total
        inside = [rates[i, j] for i in range(4) for j in range(q[i] - 1)]
        outside = [rates[i, j] for i in range(4) for j in range(q[i] - 1, 5)]
        assert not inside or not outside or min(inside) >= max(outside)


def test_a_recorded_course_of_three_sequences() -> None:
    """Curve and confidences of spec/engine.md §5.4: lengths (1,1,1), then 16 rows as (6,4,6), then 8 rows."""
    costs = StepCosts(CostCurve((1, 2, 4, 8, 16, 24), (1.0, 1.0, 1.1, 1.3, 1.9, 2.8)))
    settings = create_scheduler(zos=False, varlen=True).settings
    scheduler = Scheduler(settings, draft_lengths=ScheduledLengths(costs))
    loop = Loop(scheduler)
    confidence = np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.5] * 5, [0.99, 0.99, 0.95, 0.9, 0.2]], np.float32)
    run = loop.model.run

    def with_confidence(plan):  # type: ignore[no-untyped-def]
        outputs = run(plan)
        if not plan.is_prompt:
            outputs.confidence = confidence.copy()
        return outputs

    loop.model.run = with_confidence  # type: ignore[method-assign]
    for length in (40, 30, 20):
        loop.add(length, 64)
    seen = []
    while len(seen) < 3:
        plan = loop.turn().plan
        if not plan.is_prompt:
            seen.append(plan.q.tolist())
    assert seen[0] == [1, 1, 1]
    assert seen[1] == [6, 4, 6]
    assert sum(seen[2]) == 8


# ------------------------------------------------------------------ the lag


def survivals(newest: np.ndarray, older: np.ndarray) -> SequenceTable:
    """What `ScheduledLengths` reads of a table whose last step is committed."""
    n = len(newest)
    columns = {"n_rates": np.full(n, 2), "sched_cnt": np.full(n, 7), "proc_cnt": np.full(n, 7)}
    columns |= {"has_draft": np.full(n, True), "rate": newest, "prev_rate": older}
    return cast(SequenceTable, SimpleNamespace(**columns))


def transitions(sequences: int, lagged: bool, steps: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(transition counts, their probabilities) of first-order chains that are decoded with two drafts a step.

    A token says how confident the drafter is behind it, so the survival of the second draft tells what the
    first one is. All drafts of a good block are worth their time, those of a bad one are not.
    """
    random = np.random.default_rng(12)
    q = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.35, 0.25]])
    p = np.array([[0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [0.3, 0.2, 0.5]])
    confidence = np.array([0.9, 0.2, 0.9], np.float32)
    curve = Curve(
        np.array([np.inf, 1.0, 2.3, 2.4, 3.6, 3.7, 3.8])
        if sequences == 1
        else np.array([np.inf, np.inf, 1.0, 1.9, 1.95, 2.0, 2.05])
    )
    counts = np.zeros((3, 3))
    for _ in range(steps):
        outputs: list[list[int]] = [[i] for i in range(sequences)]
        blocks: list[list[int]] = [[] for _ in outputs]
        newest, older = np.zeros((2, sequences, 2), np.float32)
        while min(map(len, outputs)) <= tokens:
            table = survivals(newest, older if lagged else newest)
            lengths = ScheduledLengths(curve).choose(table, np.arange(sequences))
            older = newest.copy()
            for i, length in enumerate(lengths):
                output = outputs[i]
                for draft in blocks[i][: length - 1]:
                    last = output[-1]
                    if random.random() < q[last, draft] / p[last, draft]:
                        output.append(draft)
                        continue
                    rest = np.maximum(q[last] - p[last], 0)
                    output.append(int(random.choice(3, p=rest / rest.sum())))
                    break
                else:
                    output.append(int(random.choice(3, p=q[output[-1]])))
                first = int(random.choice(3, p=p[output[-1]]))
                blocks[i] = [first, int(random.choice(3, p=p[first]))]
                newest[i] = confidence[output[-1]], confidence[output[-1]] * confidence[first]
        for output in outputs:
            np.add.at(counts, (output[:tokens], output[1 : tokens + 1]), 1)
    return counts, q


@pytest.mark.parametrize(
    ("sequences", "lagged", "exact"), [(1, True, True), (2, True, True), (1, False, False)]
)
def test_a_budget_of_two_steps_ago_is_exact_and_a_newer_one_is_not(
    sequences: int, lagged: bool, exact: bool
) -> None:
    counts, q = transitions(sequences, lagged, steps=1400 // sequences, tokens=12)
    expected = q * counts.sum(1, keepdims=True)
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), 6
    critical = freedom * (1 - 2 / (9 * freedom) + CRITICAL_Z * (2 / (9 * freedom)) ** 0.5) ** 3
    assert (statistic < critical) == exact, statistic


def test_a_step_in_flight_leaves_its_predecessors_survivals_for_both_choices() -> None:
    """The host then knows those of two steps ago at best, and the device gives the rows out again."""
    newest, older = np.array([[0.9, 0.8]], np.float32), np.array([[0.1, 0.05]], np.float32)
    curve = Curve(np.array([np.inf, 1.0, 1.2, 1.4]))
    table = survivals(newest, older)
    assert ScheduledLengths(curve).choose(table, np.arange(1)).tolist() == [1], "nothing was sure then"
    table.sched_cnt = table.proc_cnt + 1
    assert ScheduledLengths(curve).choose(table, np.arange(1)).tolist() == [3]
    table.n_rates[:] = 0
    assert ScheduledLengths(curve).choose(table, np.arange(1)).tolist() == [3], "pending drafts are good"
    table.sched_cnt, table.has_draft = table.proc_cnt, np.array([False])
    assert ScheduledLengths(curve).choose(table, np.arange(1)).tolist() == [1], "there are none"


# ------------------------------------------------------------------ costs


def test_ladder() -> None:
    assert ladder(48, 8) == [1, 2, 4, 8, 16, 24, 32, 40, 48]
    assert ladder(50, 8)[-2:] == [48, 50]
    assert ladder(6, 8) == [1, 2, 4, 6]
    assert ladder(1, 8) == [1]


def test_a_size_costs_what_the_size_above_costs() -> None:
    costs = StepCosts(CostCurve((2, 8), (1.0, 3.0)))
    assert costs.milliseconds(np.array([1, 2, 3, 8, 9]), 1).tolist() == [1.0, 1.0, 3.0, 3.0, np.inf]


def test_slope_and_sampler_are_medians_of_enough_samples() -> None:
    costs = StepCosts(CostCurve((2, 8), (1.0, 3.0)))
    for _ in range(9):
        costs.record_forward(2, 2.0)
    assert costs.slope == 0.0
    costs.record_forward(2, 2.0)
    assert costs.slope == pytest.approx(0.5)
    for _ in range(10):
        costs.record_forward(7, 3.8)
    assert costs.slope == pytest.approx((0.5 + 0.1) / 2)
    for _ in range(40):
        costs.record_forward(2, 0.1)
        costs.record_forward(8, 0.1)
    assert costs.slope == 0.0
    costs.record_forward(9, 100.0)  # beyond the curve: of no use

    for value in (5.0, 1.0, 2.0, 3.0):
        costs.record_sampling(3, value)
    assert costs.sampler(3) == 0.0
    costs.record_sampling(4, 4.0)
    assert costs.sampler(3) == costs.sampler(4) == 3.0
    for value in (9.0,) * 4:
        costs.record_sampling(3, value)
    assert costs.sampler(3) == 7.0
    assert costs.milliseconds(np.array([1]), 3).tolist() == [8.0]


def test_a_curve_is_the_trimmed_mean_of_five_runs() -> None:
    now, runs = [0.0], []

    def run(rows: int) -> None:
        runs.append(rows)
        now[0] += [9.0, 0.5, 0.001, 0.002, 0.003, 0.004][(len(runs) - 1) % 6] * rows

    curve = CostCurve.measure([1, 4], run, lambda: now[0])
    assert runs == [4] * 6 + [1] * 6
    assert curve.sizes == (1, 4)
    assert curve.base == (pytest.approx(3.0), pytest.approx(12.0))


def test_ranks_agree_on_the_mean_of_what_they_measured() -> None:
    groups = ThreadGroup.of(3)
    curves = [CostCurve((1, 4), (1.0 + rank, 2.0 * rank)) for rank in range(3)]
    with ThreadPoolExecutor(3) as ranks:
        agreed = list(ranks.map(averaged, curves, groups))
        told = list(ranks.map(announced, [curves[0], None, None], [(1, 4)] * 3, groups))
        nothing = list(ranks.map(announced, [None, curves[1], None], [(1, 4)] * 3, groups))
    assert agreed == [CostCurve((1, 4), (2.0, 2.0))] * 3
    assert told == [curves[0]] * 3
    assert nothing == [None] * 3, "what rank 0 does not have, nobody uses"


def test_curves_on_disk(tmp_path: Path) -> None:
    now = [1000.0]
    store = CurveStore(tmp_path, {"model": "tiny", "rows": 8}, 100.0, lambda: now[0])
    curve = CostCurve((1, 2), (0.5, 0.75))
    assert store.load((1, 2)) is None
    store.save(curve)
    now[0] += 50
    store.save(CostCurve((1, 2), (0.6, 0.7)))
    assert store.load((1, 2)) == CostCurve((1, 2), (0.6, 0.7))
    assert store.load((1, 2, 4)) is None
    assert CurveStore(tmp_path, {"model": "other"}, 100.0, lambda: now[0]).load((1, 2)) is None
    broken = next(tmp_path.iterdir())
    broken.write_text("[[1")
    now[0] += 90
    assert store.load((1, 2)) in (None, CostCurve((1, 2), (0.6, 0.7)))
    assert not broken.exists()
    now[0] += 1e5
    assert store.load((1, 2)) is None
    assert list(tmp_path.iterdir()) == []
