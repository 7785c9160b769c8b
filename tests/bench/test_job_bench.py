"""The stand-in for a rank with an accelerator, and the figures of killed jobs."""

from __future__ import annotations

import time

import numpy as np

from deepinfer_ray.bench.job import MAX_LEN, WORKLOADS, run_bare
from deepinfer_ray.bench.kills import ROWS, Kill, figures
from deepinfer_ray.bench.paced import PacedEngine
from deepinfer_ray.engine.request import Request, SamplingParams


def requests(lengths: list[int]) -> list[Request]:
    return [
        Request(np.array([7, row], np.int32), SamplingParams(max_tokens=length), seed=0, request_id=row)
        for row, length in enumerate(lengths)
    ]


def test_a_paced_engine_gives_a_token_a_step_and_keeps_its_pace() -> None:
    engine = PacedEngine(seats=2, step_s=0.01)
    assert engine.wanted() == 2
    for request in requests([2, 3, 1]):
        engine.add(request)
    began = time.perf_counter()
    ended = [[(result.request_id, result.token_ids.tolist()) for result in engine.step()] for _ in range(3)]
    assert time.perf_counter() - began >= 0.03
    assert ended == [[], [(0, [0, 1])], [(1, [1, 2, 3]), (2, [2])]]
    assert not engine.has_unfinished()


def test_bare_engines_are_kept_full() -> None:
    """9 rows of 4 tokens on 4 seats with one in the queue: three rounds of four steps."""
    engine = PacedEngine(seats=4, step_s=0.002)
    assert run_bare(engine, requests([4] * 9)) >= 12 * 0.002


def test_workloads_fit_their_context() -> None:
    for workload in WORKLOADS:
        random = np.random.default_rng(0)
        assert len(workload.prompts(random)) == len(workload.lengths(random)) == workload.rows
        assert workload.prompt_tokens + workload.max_tokens[1] <= MAX_LEN


def test_figures_of_kills_are_sums_and_means_by_victim() -> None:
    def kill(victim: str, **counts: int) -> Kill:
        values = {"lost": 0, "duplicated": 0, "different": 0, "redone": 4, "seconds": 2.0, "left": ()}
        return Kill((victim,), ("",), **{**values, **counts})  # type: ignore[arg-type]

    rows = figures([kill("rank"), kill("driver", lost=1, redone=10), kill("driver")])
    assert [(row["victim"], row["kills"], row["rows"]) for row in rows] == [
        ("driver", 2, 2 * ROWS),
        ("rank", 1, ROWS),
    ]
    assert (rows[0]["lost"], rows[0]["redone_mean"], rows[0]["redone_max"]) == (1, 7.0, 10)
