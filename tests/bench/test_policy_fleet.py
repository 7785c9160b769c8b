"""The simulated fleet: every request ends once, the clock adds up, votes act as the rules say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepinfer_ray.bench.policy_cost import IDLE, CostModel, RankLoad
from deepinfer_ray.bench.policy_fleet import Fleet, FleetRun, accepted_counts, prefill_watermark
from deepinfer_ray.bench.policy_workload import ARRIVALS, LENGTHS, Arrival, make_workload, reorder
from deepinfer_ray.engine import admission
from deepinfer_ray.engine.sequence import Status
from deepinfer_ray.engine.settings import SchedulerSettings

COST = CostModel(ranks=3)


def settings(**overrides: Any) -> SchedulerSettings:
    values: dict[str, Any] = {
        "num_blocks": 1000,
        "max_model_len": 16384,
        "max_batched_tokens": 4096,
        "max_seqs": 8,
        "num_drafts": 5,
    }
    return SchedulerSettings(**(values | overrides))


def at_once(*ranks: int, prompt: int = 100, output: int = 60) -> list[Arrival]:
    return [Arrival(i, 0.0, rank, prompt, output) for i, rank in enumerate(ranks)]


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_request_ends_exactly_once_at_its_length(arrivals: Any, lengths: Any) -> None:
    """With a pool so small that sequences are preempted."""
    work = make_workload(arrivals, lengths, COST, seats=6, per_rank=9)
    blocks = {"uniform": 24, "lognormal": 56, "bimodal": 124}[lengths]
    run = Fleet(settings(num_blocks=blocks, max_seqs=6), COST).run(work)
    assert sorted(run.endings) == [a.request_id for a in work]
    for arrival in work:
        ending = run.endings[arrival.request_id]
        assert ending.status is Status.LENGTH_CAPPED
        assert len(ending.token_ids) == arrival.output
    assert run.output_tokens >= sum(a.output for a in work)
    assert run.prompt_tokens == sum(a.prompt for a in work)
    assert run.computed_prompt_tokens >= run.prompt_tokens
    assert (run.recomputed_share > 0) == (run.preemptions > 0)
    assert len(run.waits) == len(work)
    assert min(run.waits) > 0


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    def figures(seed: int) -> tuple[float, ...]:
        work = make_workload("bursts", "lognormal", COST, seats=4, per_rank=6, seed=seed)
        run = Fleet(settings(num_blocks=60), COST).run(work)
        return run.seconds, run.ttft_p95_s, run.idle_share, run.mean_batch, run.recomputed_share

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_one_request_costs_one_prompt_step_and_its_decode_steps() -> None:
    """Closed form: no drafts, the plain loop: 1 token from the prompt, then one a step, votes at 0 only."""
    cost = CostModel(ranks=1)
    plain = settings(num_drafts=0, zos=False)
    run = Fleet(plain, cost).run([Arrival(0, 0.0, 0, 200, 5)])
    expected = cost.prompt_s([RankLoad.of(np.array([200]), np.array([200]))]) + 2 * cost.vote_s
    assert run.ttft_mean_s == pytest.approx(expected)
    for length in range(201, 205):
        expected += cost.decode_s([RankLoad(1, length, length)])
    expected += cost.vote_s  # the point behind the prompt step: nobody wants, so one vote
    assert run.output_tokens == 5
    reaping = run.seconds - expected
    assert reaping == pytest.approx(cost.decode_s([IDLE]))  # the empty step that returns the row
    assert run.steps == 6
    assert run.mean_batch == pytest.approx(4 / 5)


def test_overlapped_loop_computes_one_step_more_and_starts_no_later() -> None:
    cost = CostModel(ranks=1)
    work = [Arrival(0, 0.0, 0, 200, 5)]
    plain = Fleet(settings(num_drafts=0, zos=False), cost).run(work)
    overlapped = Fleet(settings(num_drafts=0), cost).run(work)
    assert overlapped.ttft_mean_s == plain.ttft_mean_s
    assert overlapped.decode_sequences == plain.decode_sequences + 1


def test_more_accepted_drafts_need_fewer_steps() -> None:
    work = at_once(0, 1, 2, output=200)
    steps = [Fleet(settings(), COST, accept_rate=rate).run(work).steps for rate in (0.0, 0.5, 1.0)]
    assert steps[0] > 1.5 * steps[1] > 2 * steps[2]
    assert steps[2] == pytest.approx(200 / 6, abs=5)


def test_acceptance_depends_on_request_and_position_alone() -> None:
    ids, first = np.array([3, 9]), np.array([50, 51])
    both = accepted_counts(ids, first, 5, 0.7)
    assert both[1] == accepted_counts(ids[1:], first[1:], 5, 0.7)[0]
    many = accepted_counts(np.arange(20_000), np.full(20_000, 7), 5, 0.7)
    assert many.mean() == pytest.approx(sum(0.7**j for j in range(1, 6)), rel=0.02)
    assert accepted_counts(ids, first, 5, 0.0).tolist() == [0, 0]
    assert accepted_counts(ids, first, 5, 1.0).tolist() == [5, 5]


def test_without_the_fast_path_a_lonely_rank_waits_for_the_any_point() -> None:
    """spec/engine.md §3.4: work on one of several ranks starts after 100 empty decode steps."""
    recorded = {"prefill_all_interval": 70, "prefill_any_interval": 100}
    waits = Fleet(settings(idle_fast_path=False, **recorded), COST, keep_timeline=True).run(at_once(0))
    spun = [kinds for _, _, kinds in waits.timeline].index(("prefill", "idle", "idle"))
    assert spun == 100
    starts = Fleet(settings(), COST, keep_timeline=True).run(at_once(0))
    assert starts.timeline[0][2] == ("prefill", "idle", "idle")
    assert starts.ttft_mean_s < waits.ttft_mean_s / 3
    assert starts.idle_share < waits.idle_share


def first_prefill_after(run: FleetRun) -> int:
    """Decode steps between the first and the second prompt step."""
    kinds = ["prefill" in step[2] for step in run.timeline]
    return kinds[1:].index(True)


@pytest.mark.parametrize(("all_interval", "any_interval", "both", "expected"), [
    (70, 100, True, 70),
    (70, 100, False, 100),
    (16, 16, False, 16),
    (4, 32, True, 4),
    (4, 32, False, 32),
])  # fmt: skip
def test_a_late_request_is_prefilled_at_its_point(
    all_interval: int, any_interval: int, both: bool, expected: int
) -> None:
    """ALL points serve only if every rank has a prompt, ANY points serve one."""
    prompt = RankLoad.of(np.array([100]), np.array([100]))
    moment = COST.prompt_s([prompt] * 3) + 2 * COST.vote_s + 1e-6  # the first decode step is scheduled
    late = [Arrival(3 + rank, moment, rank, 100, 60) for rank in range(3 if both else 1)]
    policy = settings(prefill_all_interval=all_interval, prefill_any_interval=any_interval)
    run = Fleet(policy, COST, keep_timeline=True).run(at_once(0, 1, 2, output=600) + late)
    assert first_prefill_after(run) == expected


def test_rarer_votes_leave_seats_empty_and_requests_waiting() -> None:
    work = make_workload("steady", "uniform", COST, seats=8, per_rank=12)
    rare, often = (
        Fleet(settings(prefill_all_interval=i, prefill_any_interval=i), COST).run(work) for i in (100, 16)
    )
    assert rare.mean_batch < often.mean_batch
    assert rare.ttft_mean_s > 2 * often.ttft_mean_s
    assert rare.tokens_per_s < often.tokens_per_s


def test_votes_at_every_step_spend_the_time_in_prompt_steps() -> None:
    work = make_workload("batch", "uniform", COST, seats=8, per_rank=16)
    eager, often = (
        Fleet(settings(prefill_all_interval=i, prefill_any_interval=i), COST).run(work) for i in (1, 16)
    )
    assert eager.prompt_steps > 1.5 * often.prompt_steps
    assert eager.idle_time_share > often.idle_time_share
    assert eager.tokens_per_s < often.tokens_per_s


def test_watermark_is_bent_only_inside() -> None:
    work = make_workload("batch", "uniform", COST, seats=8, per_rank=12)
    runs = []
    for fraction in (0.5, 1.0):
        with prefill_watermark(fraction):
            assert fraction == admission.PREFILL_WATERMARK
            runs.append(Fleet(settings(num_blocks=40), COST).run(work))
    assert admission.PREFILL_WATERMARK == 0.90
    assert runs[0].preemptions < runs[1].preemptions
    assert runs[0].mean_batch < runs[1].mean_batch


def test_a_long_head_blocks_those_behind_it() -> None:
    work = [Arrival(0, 0.0, 0, 2000, 300), Arrival(1, 0.0, 0, 2000, 50), Arrival(2, 0.0, 0, 100, 50)]
    cost = CostModel(ranks=1)
    tight = settings(num_blocks=28)
    blocked = Fleet(tight, cost).run(work)
    assert blocked.blocked_share > 0.5
    assert Fleet(settings(), cost).run(work).blocked_share == 0
    shortest = Fleet(tight, cost).run(reorder(work, "shortest"))
    assert shortest.ttft_mean_s < blocked.ttft_mean_s


def test_the_clock_jumps_over_gaps() -> None:
    work = [replace(a, time=1000.0 * i) for i, a in enumerate(at_once(0, 1, 2))]
    run = Fleet(settings(), COST).run(work)
    assert 2000 < run.seconds < 2100
    assert max(run.waits) < 1
    assert run.steps < 200


def test_a_run_that_does_not_end_says_how_much_is_left() -> None:
    with pytest.raises(RuntimeError, match="2 requests are unfinished after 10 steps"):
        Fleet(settings(), COST).run(at_once(0, 1, output=500), max_steps=10)
