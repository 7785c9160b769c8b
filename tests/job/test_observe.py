"""What the loop of a job notes: rows by time, ranks by generation, metrics once the cluster is there."""

from __future__ import annotations

import numpy as np
import pytest
from stub_backend import StubBackend

from deepinfer_ray.engine.request import RequestResult, SamplingParams
from deepinfer_ray.fleet import metrics
from deepinfer_ray.fleet.backend import RankStats, WorkItem, WorkResult
from deepinfer_ray.job.observe import SLOWEST, Observer
from deepinfer_ray.job.sink import Counts
from deepinfer_ray.job.stats_file import StatsFile, read_stats
from deepinfer_ray.job.store import Store

PULSE = {
    "seconds": 10.0,
    "steps": 5,
    "prompt_steps": 1,
    "empty_steps": 0,
    "prompt_seconds": 2.0,
    "decode_seconds": 3.0,
    "prompt_tokens": 100,
    "completion_tokens": 40,
    "cached_tokens": 0,
    "decode_sequences": 12,
    "first_tokens": 1,
    "first_token_seconds": 0.5,
    "preempted": 0,
    "running": 2,
    "waiting": 0,
    "kv_cache_usage": 0.5,
    "state_cache_usage": 0.5,
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Reporting(StubBackend):
    def __init__(self, *pulses):
        super().__init__()
        self.pulses = list(pulses)

    def take_stats(self):
        taken, self.pulses = self.pulses, []
        return taken


@pytest.fixture
def store(tmp_path):
    made = Store(str(tmp_path / "out"))
    made.make()
    return made


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def observer(store, clock):
    return Observer(StatsFile(store, "a", {}), rows_left=100, clock=clock)


def item(key):
    return WorkItem(key, np.ones(3, np.int32), SamplingParams(), 0)


def result(key, tokens=2):
    return WorkResult(key, RequestResult(key, np.zeros(tokens, np.int32), "text", "stop", 3), 1)


def test_slowest_rows_are_kept_and_nothing_else(store, clock, observer):
    for key in range(100):
        observer.sent([item(key)])
        clock.now += key / 10
        observer.received(result(key), f"row {key}")
        observer.received(result(key), f"row {key}")  # a second result of a redone row
        clock.now = 0.0
    assert observer._sent == {}
    observer.close()
    observer.close()
    (run,) = read_stats(store)
    slowest = run.extra["slowest"]
    assert [entry["row_id"] for entry in slowest] == [f"row {99 - place}" for place in range(SLOWEST)]
    assert slowest[0] == {"row_id": "row 99", "seconds": 9.9, "prompt_tokens": 3, "completion_tokens": 2}


def test_counts_become_differences(store, clock, observer):
    for second, rows in ((1.0, 10), (2.0, 25)):
        clock.now = second
        ended = Counts(rows=rows, ok=rows, prompt_tokens=3 * rows)
        observer.turn(ended, 2, {"restarts": 1, "ranks": [{"stage": "up"}]}, StubBackend())
    observer.close()
    (run,) = read_stats(store)
    assert [i.sums.get("rows") for i in run.intervals] == [10, 15]
    assert [i.sums.get("restarts", 0) for i in run.intervals] == [1, 0]
    assert [i.means["ranks_up"] for i in run.intervals] == [1, 1]
    assert {i.who for i in run.intervals} == {"job"}


def test_a_rank_that_was_built_anew_starts_from_nothing(store, clock, observer):
    more = {**PULSE, "seconds": 11.0, "completion_tokens": 60, "mfu": 0.25, "accepted_lengths": [1, 2]}
    again = {**PULSE, "seconds": 1.5, "completion_tokens": 7, "accepted_lengths": [4]}
    pulses = [RankStats(3, 0, PULSE), RankStats(3, 0, more), RankStats(3, 1, again)]
    clock.now = 20.0
    observer.turn(Counts(), 0, {}, Reporting(*pulses))
    observer.close()
    (run,) = read_stats(store)
    ranks = [i for i in run.intervals if i.who == "3"]
    assert [i.d for i in ranks] == [10.0, 1.0, 1.5]
    assert [i.sums["completion_tokens"] for i in ranks] == [40, 20, 7]
    assert [i.sums.get("accepted_lengths") for i in ranks] == [None, [1, 2], [4]]
    assert [i.means.get("mfu") for i in ranks] == [None, 0.25, None]


def test_metrics_are_set_up_once_the_driver_is_part_of_a_cluster(clock, monkeypatch):
    """The observer is made before the backend starts Ray."""
    made = []

    class Sink:
        def __init__(self, table, tags):
            made.append(self)
            self.values = {}

        def set(self, name, value):
            self.values[name] = value

        observe = set

        def add(self, name, amount, **tags):
            self.values[name, *tags.values()] = amount

    observer = Observer(None, rows_left=7, clock=clock)
    monkeypatch.setattr(metrics, "metric_set", Sink)
    observer.sent([item(1)])
    clock.now = 0.5
    observer.received(result(1), "row")
    observer.turn(Counts(rows=2, ok=2), 1, {"ranks": [{"stage": "up"}, {"stage": "loading"}]}, StubBackend())
    (sink,) = made
    assert sink.values["row_seconds"] == 0.5
    assert sink.values["rows", "ok"] == 2
    assert (sink.values["rows_left"], sink.values["ranks_up"]) == (5, 1)


def test_ranks_that_join_and_leave_are_noted_with_their_times(store, clock, observer):
    def ranks(*stages):
        return [{"rank": rank, "gang": rank, "stage": stage} for rank, stage in enumerate(stages) if stage]

    turns = [
        ("up",), ("up", "placing"), ("up", "loading"), ("up", "up"), ("loading", "up"), ("up",), ("up", "up")
    ]  # fmt: skip
    for second, stages in enumerate(turns):
        clock.now = float(second)
        status = {"ranks": ranks(*stages), "gangs": {"least": 1}}
        observer.turn(Counts(), 0, status, StubBackend())
    observer.close()
    (run,) = read_stats(store)
    assert run.extra["further"] == {"1": [[2.0, 5.0], [6.0, None]]}
