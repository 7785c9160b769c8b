"""Metrics of ranks and driver: what feeds them, what the dashboard asks for, what a real Ray head exports."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepinfer_ray.fleet import metrics
from deepinfer_ray.fleet.backend import ReportsStats, WorkItem
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.messages import RankSpec
from deepinfer_ray.fleet.metrics import (
    JOB_METRICS,
    RANK_METRICS,
    JobMetrics,
    RankMetrics,
    exported_names,
    rank_counters,
)
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.fleet.rank_actor import RankActor

DASHBOARD = Path(__file__).parents[2] / "configs/grafana/deepinfer_ray.json"

PULSE: dict[str, Any] = {
    "seconds": 5.0,
    "steps": 10,
    "prompt_steps": 3,
    "empty_steps": 1,
    "prompt_tokens": 300,
    "completion_tokens": 40,
    "cached_tokens": 7,
    "decode_sequences": 24,
    "prompt_seconds": 1.5,
    "decode_seconds": 2.5,
    "first_tokens": 2,
    "first_token_seconds": 0.5,
    "finished": {"stop": 2},
    "preempted": 1,
    "running": 4,
    "waiting": 2,
    "batched_tokens": 4,
    "kv_cache_usage": 0.25,
    "state_cache_usage": 0.5,
}


class Recorded:
    """Stands in for `MetricSet`."""

    def __init__(self, table: Any, tags: Any) -> None:
        self.names, self.tags = {metric.name for metric in table}, tags
        self.values: dict[Any, float] = {}

    def set(self, name: str, value: float) -> None:
        assert name in self.names
        self.values[name] = value

    def add(self, name: str, amount: float, **tags: str) -> None:
        assert name in self.names
        assert amount >= 0
        key = (name, *tags.values())
        self.values[key] = self.values.get(key, 0) + amount

    observe = set


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "metric_set", Recorded)


@pytest.mark.usefixtures("recorded")
def test_counters_of_a_rank_grow_by_the_difference() -> None:
    rank = RankMetrics(3)
    sink: Any = rank._metrics
    rank.update(PULSE)
    rank.update({**PULSE, "steps": 12, "completion_tokens": 55, "finished": {"stop": 2, "length": 1}})
    assert sink.tags == {"rank": "3"}
    assert sink.values["completion_tokens",] == 55
    assert sink.values["steps", "prefill"] == 3
    assert sink.values["steps", "decode"] == 8
    assert sink.values["finished_sequences", "length"] == 1
    assert sink.values["running_sequences"] == 4
    assert "mfu" not in sink.values
    rank.update(
        {
            **PULSE,
            "steps": 12,
            "completion_tokens": 55,
            "mfu": 0.4,
            "expert_load_balance": 1.25,
            "rebalances": 2,
            "verified_lengths": [0, 1, 4],
            "accepted_lengths": [1, 2, 2],
        }
    )
    assert sink.values["mfu"] == 0.4
    assert (sink.values["expert_load_balance"], sink.values["expert_rebalances",]) == (1.25, 2)
    by_position = {
        position: tuple(sink.values[f"drafts_{what}", position] for what in ("made", "verified", "accepted"))
        for position in "12"
    }
    assert by_position == {"1": (5, 5, 4), "2": (5, 4, 2)}


@pytest.mark.usefixtures("recorded")
def test_metrics_of_the_driver() -> None:
    driver = JobMetrics()
    sink: Any = driver.metrics
    state = {"rows_left": 5, "restarts": 0, "in_flight": 3, "ranks_up": 2}
    driver.update(ok=10, error_codes={"empty_prompt": 2}, parts=1, **state)
    driver.update(ok=12, error_codes={"empty_prompt": 2, "internal": 1}, parts=3, **{**state, "restarts": 1})
    driver.row(0.5, 100, 20)
    assert sink.values["rows", "ok"] == 12
    assert sink.values["rows", "error"] == 3
    assert sink.values["row_errors", "internal"] == 1
    assert (sink.values["parts",], sink.values["rank_restarts",], sink.values["rows_left"]) == (3, 1, 5)
    assert sink.values["row_completion_tokens"] == 20


def test_nothing_happens_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.sys, "modules", {})
    assert RankMetrics(0)._metrics is None
    RankMetrics(0).update(PULSE)
    JobMetrics().row(1.0, 1, 1)
    JobMetrics().update(ok=1, error_codes={}, rows_left=0, parts=0, restarts=0, in_flight=0, ranks_up=0)


def test_names_are_legal_and_have_one_meaning() -> None:
    names = [metric.name for metric in (*RANK_METRICS, *JOB_METRICS)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_]+", name) for name in names)
    assert all(name.startswith("ray_deepinfer_ray_") for name in exported_names())
    rank_names = {metric.name for metric in RANK_METRICS}
    pulse = {**PULSE, "verified_lengths": [0, 1], "accepted_lengths": [1, 0]}
    assert {name for name, _ in rank_counters(pulse)} | set(RankMetrics.GAUGES) == rank_names


# ---- dashboard


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def test_every_query_of_the_dashboard_names_exported_metrics() -> None:
    asked: set[str] = set()
    for panel in panels():
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"ray_[a-z_]+", target["expr"]))
            assert used, f"{panel['title']}: {target['expr']}"
            assert used <= exported_names(), f"{panel['title']}: {used - exported_names()} is not exported"
            asked |= used
    unseen = {metric.name for metric in (*RANK_METRICS, *JOB_METRICS) if not metric.exported & asked}
    assert not unseen, f"no panel shows {unseen}"


def test_dashboard_is_complete_and_says_what_it_shows() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["title"] == "deepinfer_ray"
    assert dashboard["uid"] == "deepinfer-ray"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["description"], panel["title"]
        assert panel["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "rank"}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


# ---- pulses on their way


class PulsingEngine:
    """The stub with numbers of its own; one step gives the oldest row."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.closed = inner, False
        self.steps = 0
        self.profiler: Any
        self.profile: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> Any:
        self.steps += 1
        return self.inner.step()

    def pulse(self) -> dict[str, Any]:
        return {**PULSE, "steps": 3 + self.steps}

    def close(self) -> None:
        self.closed = True


def make_pulsing(spec: Any) -> PulsingEngine:
    """A factory for ranks; the stub's own factory is found through the config."""
    return PulsingEngine(spec.engine_config["make"](spec))


def work(stub: ModuleType, count: int) -> list[WorkItem]:
    from deepinfer_ray.engine.request import SamplingParams

    return [WorkItem(key, stub.prompt(stub.ECHO, key), SamplingParams(), 0) for key in range(count)]


def test_last_result_of_a_rank_brings_its_numbers(stub: ModuleType) -> None:
    rank, engine = RankActor(), PulsingEngine(stub.StubEngine())
    rank.start(RankSpec(0, 1, 0, 0, "m", {}, "cpu", 1, lambda spec: engine))
    rank.submit(work(stub, 3))
    results, pulses = 0, []
    deadline = time.monotonic() + 10
    while results < 3 and time.monotonic() < deadline:
        report = rank.collect(1.0)
        results += len(report.results)
        if report.stats is not None:
            pulses.append(report.stats)
    assert results == 3
    assert pulses
    assert len(pulses) < 3  # not with every report
    assert rank.stop(5.0)
    assert engine.closed
    with pytest.raises(ValueError, match="cannot be profiled"):
        rank.profile(3)


def test_a_rank_can_be_profiled_from_the_driver(stub: ModuleType) -> None:
    class Profiler:
        def wait(self, future: Any) -> Path:
            return Path("/tmp") / f"{future}.json"

    engine = PulsingEngine(stub.StubEngine())
    engine.profiler = Profiler()
    engine.profile = lambda steps, output_dir: f"{steps} steps in {output_dir}"
    rank = RankActor()
    rank.start(RankSpec(0, 1, 0, 0, "m", {}, "cpu", 1, lambda spec: engine))
    assert rank.profile(3, "d") == "/tmp/3 steps in d.json"
    assert rank.stop(5.0)


@pytest.mark.ray
def test_metrics_of_ranks_and_driver_at_a_real_metrics_port(
    cluster: Any, stub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    driver = JobMetrics()
    driver.row(0.5, 100, 20)
    driver.update(
        ok=3,
        error_codes={"schema_timeout": 1},  # counters are the process's: a code that no other test has
        rows_left=0,
        parts=1,
        restarts=1,
        in_flight=0,
        ranks_up=1,
    )
    fleet = RayFleet(
        "m",
        {"make": stub.make},
        1,
        device="cpu",
        engine_factory=make_pulsing,
        options=FleetOptions(cpus_per_rank=0.5),
    )
    with fleet:
        fleet.submit(work(stub, 4))
        done = 0
        while done < 4:
            done += len(fleet.poll(1.0))
        assert isinstance(fleet, ReportsStats)
        taken = fleet.take_stats()
        assert [(stats.rank, stats.generation) for stats in taken] == [(0, 0)] * len(taken)
        assert taken[-1].values["steps"] >= 4
        assert fleet.take_stats() == []
        text = scrape(cluster, lambda text: seen(text) >= wanted())
    assert wanted() - seen(text) == set()
    assert re.search(r'ray_deepinfer_ray_running_sequences\{[^}]*rank="0"[^}]*\} 4', text)
    assert re.search(r'ray_deepinfer_ray_row_errors_total\{[^}]*code="schema_timeout"[^}]*\} 1', text)
    assert re.search(r'ray_deepinfer_ray_step_seconds_total\{[^}]*phase="decode"[^}]*\} 2.5', text)


def wanted() -> set[str]:
    """Everything but what has no data here."""
    absent = {"mfu", "expert_load_balance", "expert_rebalances"}
    absent |= {"drafts_made", "drafts_verified", "drafts_accepted"}
    return {
        name
        for metric in (*RANK_METRICS, *JOB_METRICS)
        if metric.name not in absent
        for name in metric.exported
    }


def seen(text: str) -> set[str]:
    return set(re.findall(r"^(ray_deepinfer_ray_[a-z_]+)", text, re.MULTILINE))


def scrape(ray: Any, enough: Callable[[str], bool], timeout_s: float = 35.0) -> str:
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline, text = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            text = ""
        if enough(text):
            break
        time.sleep(0.5)
    return text
