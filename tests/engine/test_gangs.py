"""Engines that share experts, tables and prompts over ranks give the bits of one rank, on any grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gangs
import numpy as np
import pytest
import torch

from deepinfer_ray.engine.build import build_rank
from deepinfer_ray.engine.cost_curve import CostCurve
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.errors import RankFailure
from deepinfer_ray.parallel.groups import ProcessGroups

Case = gangs.Case
COMPACT = {"prefill": {"truncation_mode": "compact", "keep_tokens": 24}}
FAST_EPLB = {"eplb": {"interval": 5, "window": 5, "extra_experts": 2, "stat_interval": 5, "verify": True}}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def check(case: Any) -> list[Any]:
    results = gangs.on_threads(case)
    assert gangs.merged(results) == gangs.alone(case)
    assert len({result["steps"] for result in results}) == 1, "every rank makes the same steps"
    return results


def test_expert_parallel_engines_give_the_bits_of_one() -> None:
    """(D, C, E) = (2, 1, 2): tokens, log-probabilities of tokens, alternatives and prompts."""
    check(Case((2, 1, 2, 0)))


def test_in_mode_exact_too() -> None:
    check(Case((2, 1, 2, 0), numerics="exact", seed=1))


def test_an_engine_without_requests_runs_along() -> None:
    """Its placeholders keep the others' exchanges going and leave no trace."""
    check(Case((2, 1, 2, 0), skip=1, count=4, seed=2))


def test_replicas_that_only_share_tables() -> None:
    """N = 2 over D = 1: the second rank is a replica of the model that takes requests of its own."""
    check(Case((1, 1, 1, 2), seed=3))


def test_rebalances_during_the_run_change_no_bit() -> None:
    """Redundant experts, an interval of 5 steps; the hash of every slot is checked right after each."""
    results = check(Case((2, 1, 2, 0), options=FAST_EPLB, max_tokens=24, seed=4))
    assert all(result["rebalances"] >= 3 for result in results)
    assert results[0]["balance"] == results[1]["balance"] > 1.0, "the statistics have the group's figure"


@pytest.mark.parametrize("grid", [(2, 1, 2, 0), (1, 2, 2, 0)], ids=["experts", "prompts"])
def test_drafts_on_several_ranks(grid: tuple[int, int, int, int]) -> None:
    """Verification and drafting behind shared experts, rebalanced too, or shared prompts; greedy requests get
    what they get without drafts."""
    drafts = {"speculative": {"num_drafts": 3}}
    check(Case(grid, options={**drafts, **FAST_EPLB}, max_tokens=12, seed=8))
    plain, drafted = (gangs.alone(Case(grid, options=own, max_tokens=12, seed=8)) for own in ({}, drafts))
    assert [plain[str(index)] for index in range(0, 8, 2)] == [
        drafted[str(index)] for index in range(0, 8, 2)
    ]


def test_draft_lengths_come_from_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank measures, all take the mean; a gang that starts again takes it from the disk."""
    speculative = {"num_drafts": 3, "varlen": True, "perf_cache_dir": str(tmp_path)}
    case = Case((2, 1, 2, 0), options={"speculative": speculative}, count=4, max_tokens=6, seed=12)
    measured: list[CostCurve] = []

    def body(case: Any, groups: ProcessGroups, rank: int) -> Any:
        engine = build_rank(gangs.GOLDEN / case.model, case.config(), "cpu", groups, rank=rank)
        assert isinstance(engine, Engine)
        curve = engine.scheduler.draft_lengths.cost.curve  # type: ignore[attr-defined]
        answers = gangs.run_engine(engine, case.share(rank, 2))
        engine.ranks.leaving = True  # type: ignore[union-attr]
        while not engine.ranks.left:  # type: ignore[union-attr]
            engine.step()
        engine.close()
        return curve, answers

    measure = CostCurve.measure.__func__  # type: ignore[attr-defined]

    def remembered(cls: Any, *args: Any) -> CostCurve:
        measured.append(measure(cls, *args))
        return measured[-1]

    monkeypatch.setattr(CostCurve, "measure", classmethod(remembered))
    one, other = gangs.on_threads(case, body)
    assert one[0] == other[0]
    assert len(measured) == 2
    assert measured[0].base != measured[1].base
    assert one[0].base == pytest.approx(np.mean([curve.base for curve in measured], axis=0))
    plain = gangs.alone(Case(case.grid, count=4, max_tokens=6, seed=12))
    for index in ("0", "2"):  # the greedy ones
        assert {**one[1], **other[1]}[index] == plain[index]
    again = gangs.on_threads(case, body)
    assert [curve for curve, _ in again] == [one[0]] * 2
    assert len(measured) == 2


def test_the_smallest_memory_sets_the_blocks_of_all() -> None:
    """Ranks with unequal memory agree on the minimum."""
    case = Case((2, 1, 2, 0), count=4, seed=5)

    def body(case: Any, groups: ProcessGroups, rank: int) -> Any:
        own = type(case)(**{**vars(case), "options": {"cache.num_blocks_override": 13 - 4 * rank}})
        groups.check_alike = lambda settings: None  # type: ignore[method-assign]
        return gangs.work(own, groups, rank)

    results = gangs.on_threads(case, body)
    assert gangs.merged(results) == gangs.alone(case)
    assert [result["blocks"] for result in results] == [8, 8], "9, down to an even number"


def test_prompts_shared_by_context_parallel_ranks() -> None:
    """(1, 2, 2): a driver and its follower; the follower keeps the same caches and answers nobody."""
    results = check(Case((1, 2, 2, 0), seed=8))
    assert not results[1]["answers"]


def test_everything_at_once() -> None:
    """(2, 2, 4) with drafts, replayed prompts, redundant experts and a rebalance every 5 steps."""
    options = {**FAST_EPLB, **COMPACT, "speculative": {"num_drafts": 3}}
    results = check(Case((2, 2, 4, 0), options=options, max_tokens=16, seed=9))
    assert all(result["rebalances"] >= 3 for result in results)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_replayed_prompts_on_context_parallel_ranks(mode: str) -> None:
    check(Case((1, 2, 1, 0), options={"prefill": {"truncation_mode": mode, "keep_tokens": 20}}, seed=10))


def test_ranks_with_other_settings_refuse_to_start() -> None:
    def body(case: Any, groups: ProcessGroups, rank: int) -> Any:
        return gangs.work(Case((2, 1, 2, 0), numerics="exact" if rank else "released"), groups, rank)

    with pytest.raises(RankFailure, match="rank 1 of this gang was started with other settings than rank 0"):
        gangs.on_threads(Case((2, 1, 2, 0)), body)


PROCESS_CASES = [
    Case((2, 1, 2, 0), options=FAST_EPLB, max_tokens=12, seed=7),
    Case((1, 2, 2, 0), options=COMPACT, seed=6),
]
SOAK_GRIDS = [
    (1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 4, 0), (3, 1, 3, 0), (1, 1, 1, 2), (4, 1, 2, 2),
    (1, 2, 1, 0), (2, 2, 2, 0), (1, 2, 2, 0), (2, 2, 4, 0),
]  # fmt: skip


def on_processes(cases: list[Any], tmp_path: Path) -> None:
    for case, results in zip(cases, gangs.on_processes(cases, tmp_path / "out"), strict=True):
        assert gangs.merged(results) == gangs.alone(case), case
        if "eplb" in case.options:
            assert all(result["rebalances"] for result in results)


def test_over_gloo_processes(tmp_path: Path) -> None:
    on_processes(PROCESS_CASES, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("numerics", ["released", "exact"])
def test_all_grids_over_gloo_processes(tmp_path: Path, numerics: str) -> None:
    cases = []
    for seed, grid in enumerate(SOAK_GRIDS):
        options = (
            {**FAST_EPLB, "eplb": {**FAST_EPLB["eplb"], "extra_experts": grid[2]}} if grid[2] > 1 else {}
        )
        for own in ({}, options):
            cases.append(Case(grid, numerics=numerics, count=16, max_tokens=20, seed=seed, options=own))
    on_processes(cases, tmp_path)
