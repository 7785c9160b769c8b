"""Runs as one course of time: bins, phases of ranks, what is put together and what is kept apart."""

from __future__ import annotations

import itertools

import pytest

from deepinfer_ray.job.course import mean, rate, read_course, segments
from deepinfer_ray.job.stats_file import Interval, RunStats


def job(t, d=1.0, **sums):
    return Interval("job", t, d, sums, {"in_flight": 4.0})


def rank(t, d=1.0, who="0", prefill=0.0, decode=0.0, **more):
    sums = {"prompt_seconds": prefill, "decode_seconds": decode, "steps": 10, "prompt_steps": 2}
    return Interval(who, t, d, {**sums, **more}, {"kv_cache_usage": 0.5})


def test_rate_spreads_an_interval_over_its_bins():
    curve = rate([job(1.0, rows=10), job(4.0, 3.0, rows=30)], "rows", 4.0, 4)
    assert [x for x, _ in curve] == [
        0.5 * 4 / len(curve) + index * 4 / len(curve) for index in range(len(curve))
    ]
    assert sum(y * 4 / len(curve) for _, y in curve) == pytest.approx(40)
    fine = rate([job(t, rows=t) for t in (1.0, 2.0, 3.0, 4.0)], "rows", 4.0, 100)
    assert [y for _, y in fine] == [1, 2, 3, 4]  # no finer than the intervals
    assert rate([], "rows", 4.0, 4) == []


def test_mean_has_no_point_where_nothing_is_known():
    known = {1.0: 2.0, 4.0: 6.0}
    intervals = [job(t) for t in (1.0, 2.0, 3.0, 4.0)]
    curve = mean(intervals, lambda i: known.get(i.t), 4.0, 4)
    assert curve == [(0.5, 2.0), (3.5, 6.0)]


def test_phases_of_a_rank():
    lane = segments(
        [rank(11.0, prefill=0.25, decode=0.5), rank(12.0, decode=1.0)], begin=0.0, end=20.0, points=10
    )
    assert lane == [
        (0.0, 10.0, "starting"),
        (10.0, 10.25, "prefill"),
        (10.25, 10.75, "decode"),
        (10.75, 11.0, "idle"),
        (11.0, 12.0, "decode"),
        (12.0, 20.0, "idle"),
    ]


def test_a_rank_that_was_built_anew_was_down_in_between():
    lane = segments([rank(1.0, decode=1.0), rank(9.0, decode=1.0)], begin=0.0, end=9.0, points=10)
    assert lane == [(0.0, 1.0, "decode"), (1.0, 8.0, "down"), (8.0, 9.0, "decode")]
    # a pulse that arrives a little late leaves no hole
    lane = segments([rank(1.0, decode=1.0), rank(3.0, decode=1.0)], begin=0.0, end=3.0, points=10)
    assert lane == [(0.0, 1.0, "decode"), (1.0, 2.0, "decode"), (2.0, 3.0, "idle")]


def test_many_intervals_are_put_together_but_not_across_a_pause():
    intervals = [rank(float(t), prefill=0.5, decode=0.25) for t in (*range(1, 101), *range(121, 201))]
    lane = segments(intervals, begin=0.0, end=200.0, points=8)
    assert len(lane) <= 3 * 10 + 1
    assert (100.0, 120.0, "down") in lane
    times = {
        kind: sum(b - a for a, b, own in lane if own == kind)
        for kind in ("prefill", "decode", "idle", "down")
    }
    assert times == {"prefill": 90, "decode": 45, "idle": 45, "down": 20}
    assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(lane))


def test_steps_longer_than_their_interval_do_not_overflow_it():
    lane = segments([rank(1.0, prefill=3.0, decode=1.0)], begin=0.0, end=1.0, points=4)
    assert lane == [(0.0, 0.75, "prefill"), (0.75, 1.0, "decode")]


def test_runs_follow_each_other():
    first = RunStats(
        {"head": {"started": "one"}},
        [
            job(1.0, rows=5, completion_tokens=50),
            job(2.0, rows=5, completion_tokens=70, restarts=1),
            rank(2.0, decode=1.0, decode_sequences=24, accepted_lengths=[1, 2], verified_lengths=[0, 3]),
        ],
    )
    second = RunStats(
        {"head": {"started": "two"}},
        [
            job(1.0, rows=8, completion_tokens=80),
            rank(1.0, decode=0.5, accepted_lengths=[4, 0, 1], verified_lengths=[0, 0, 5]),
            rank(1.0, who="1", decode=0.5),
        ],
    )
    course = read_course([first, RunStats({}, []), second])
    assert course.runs == [
        {"begin": 0.0, "seconds": 2.0, "started": "one", "restarts": 1},
        {"begin": 2.0, "seconds": 1.0, "started": "two", "restarts": 0},
    ]
    assert (course.seconds, course.restarts) == (3.0, 1)
    assert [y for _, y in course.row_speed] == [5, 5, 8]
    assert [y for _, y in course.completion_speed] == [50, 70, 80]
    assert (course.tokens, course.measured) == (200, False)
    assert [r.rank for r in course.ranks] == [0, 1]
    assert course.ranks[0].batch[0][1] == 24 / 8
    assert course.accepted_lengths == [5, 2, 1]
    assert course.verified_lengths == [0, 3, 5]
    assert course.ranks[1].segments == [(2.0, 2.5, "decode"), (2.5, 3.0, "idle")]
    shares = course.ranks[0].shares()
    assert shares["starting"] == pytest.approx(1 / 3)
    assert sum(shares.values()) == pytest.approx(1)
    assert course.as_dict()["ranks"][0]["time_shares"]["decode"] == 0.5


def test_speed_is_what_ranks_computed_where_they_say_so():
    run = RunStats(
        {},
        [
            job(2.0, 2.0, completion_tokens=90),
            rank(1.0, completion_tokens=60),
            rank(2.0, completion_tokens=40),
        ],
    )
    course = read_course([run])
    assert course.measured
    assert [y for _, y in course.completion_speed] == [60, 40]
    assert course.tokens == 90


def test_a_rank_has_no_lane_while_it_was_not_there():
    run = RunStats(
        {"further": {"1": [[2.0, 6.0], [8.0, None]]}},
        [job(10.0, 10.0), rank(4.0, who="1", decode=1.0), rank(9.0, who="1", decode=1.0)],
    )
    lane = read_course([run, run]).ranks[0]
    assert lane.segments[:6] == [
        (2.0, 3.0, "starting"), (3.0, 4.0, "decode"), (4.0, 6.0, "idle"),
        (8.0, 9.0, "decode"), (9.0, 10.0, "idle"), (12.0, 13.0, "starting"),
    ]  # fmt: skip
    assert lane.shares()["idle"] == pytest.approx(0.5)


def test_nothing_gives_an_empty_course():
    course = read_course([])
    assert course.as_dict()["seconds"] == 0
    assert course.ranks == []
