"""Prometheus metrics of ranks and of the driver, through Ray (spec/ray.md §7.1).

Knows: every metric's name, kind and tags, and which figure feeds it. Does not know: who asks for a figure,
rows, prompts. A tag is a rank number, a phase, a reason or an error code: never a text of a user.

Ray puts `ray_` before each name and `_total` behind a counter's; a node serves them at its metrics port.
Without Ray, or where Ray cannot export, nothing happens. The dashboard is configs/grafana/deepinfer_ray.json.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

logger = logging.getLogger(__name__)

PREFIX = "deepinfer_ray_"
Kind = Literal["counter", "gauge", "histogram"]

TOKEN_BOUNDARIES = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
SECONDS_BOUNDARIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. name: without prefix. tags: keys beside `rank`, which every rank metric has."""

    name: str
    kind: Kind
    description: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()

    @property
    def exported(self) -> frozenset[str]:
        """Names under which Prometheus sees it."""
        name = f"ray_{PREFIX}{self.name}"
        if self.kind == "counter":
            return frozenset({f"{name}_total"})
        if self.kind == "histogram":
            return frozenset({f"{name}_bucket", f"{name}_sum", f"{name}_count"})
        return frozenset({name})


RANK_METRICS = (
    Metric("running_sequences", "gauge", "Sequences that decode"),
    Metric("waiting_sequences", "gauge", "Sequences that wait for their prefill or its rest"),
    Metric("batched_tokens", "gauge", "Tokens of the last step"),
    Metric("kv_cache_usage", "gauge", "Share of cache blocks in use"),
    Metric("state_cache_usage", "gauge", "Share of state slots in use"),
    Metric("mfu", "gauge", "Model FLOPs utilization of the last steps; absent on an unknown device"),
    Metric("expert_load_balance", "gauge", "Fullest rank's expert tokens over the mean rank's; 1 is even"),
    Metric("steps", "counter", "Engine steps by phase: prefill, decode, empty", ("phase",)),
    Metric("step_seconds", "counter", "Seconds in steps by phase: prefill, decode", ("phase",)),
    Metric("decode_sequences", "counter", "Sequences of all decode steps together"),
    Metric("prompt_tokens", "counter", "Prompt tokens computed"),
    Metric("completion_tokens", "counter", "Tokens emitted"),
    Metric("cached_tokens", "counter", "Prompt tokens taken from a cached prefix"),
    Metric("finished_sequences", "counter", "Sequences ended, by finish reason", ("reason",)),
    Metric("preemptions", "counter", "Preemptions"),
    Metric("expert_rebalances", "counter", "Rearrangements of experts over the ranks of the gang"),
    Metric("first_token_seconds", "counter", "Sum of seconds to the first token"),
    Metric("first_tokens", "counter", "Sequences in that sum"),
    Metric("drafts_made", "counter", "Draft tokens made, by position in their block", ("position",)),
    Metric("drafts_verified", "counter", "Draft tokens verified, by position", ("position",)),
    Metric("drafts_accepted", "counter", "Draft tokens accepted, by position", ("position",)),
)
"""Of each rank, tag `rank`."""

JOB_METRICS = (
    Metric("rows", "counter", "Rows ended, by outcome: ok, error", ("outcome",)),
    Metric("row_errors", "counter", "Rows ended in an error, by code", ("code",)),
    Metric("rows_left", "gauge", "Rows of the job without a result"),
    Metric("rows_in_flight", "gauge", "Rows that ranks work on"),
    Metric("parts", "counter", "Output parts committed"),
    Metric("ranks_up", "gauge", "Ranks that take rows"),
    Metric("rank_restarts", "counter", "Gangs that were built anew after a death"),
    Metric("row_seconds", "histogram", "Seconds from handing over to result", (), SECONDS_BOUNDARIES),
    Metric("row_prompt_tokens", "histogram", "Prompt tokens of a result", (), TOKEN_BOUNDARIES),
    Metric("row_completion_tokens", "histogram", "Completion tokens of a result", (), TOKEN_BOUNDARIES),
)
"""Of the driver."""


def exported_names() -> frozenset[str]:
    """All names under which Prometheus can see a metric of this project."""
    return frozenset(name for metric in (*RANK_METRICS, *JOB_METRICS) for name in metric.exported)


class MetricSet:
    """The metrics of a table as Ray's objects, in this process."""

    def __init__(self, table: tuple[Metric, ...], tags: Mapping[str, str]) -> None:
        from ray.util import metrics

        classes = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._made: dict[str, Any] = {}
        for metric in table:
            name, keys = PREFIX + metric.name, (*tags, *metric.tags)
            if metric.kind == "histogram":
                made = metrics.Histogram(
                    name, description=metric.description, boundaries=list(metric.boundaries), tag_keys=keys
                )
            else:
                made = classes[metric.kind](name, description=metric.description, tag_keys=keys)
            made.set_default_tags(dict(tags))
            self._made[metric.name] = made

    def set(self, name: str, value: float) -> None:
        self._made[name].set(value)

    def add(self, name: str, amount: float, **tags: str) -> None:
        if amount > 0:  # Ray refuses 0
            self._made[name].inc(amount, tags=tags or None)

    def observe(self, name: str, value: float) -> None:
        self._made[name].observe(value)


def metric_set(table: tuple[Metric, ...], tags: Mapping[str, str]) -> MetricSet | None:
    """The metrics, None where this process is no part of a Ray cluster; never an error."""
    ray = sys.modules.get("ray")
    try:
        return MetricSet(table, tags) if ray is not None and ray.is_initialized() else None
    except Exception as error:
        logger.warning("no metrics from this process: %s", error)
        return None


class RankMetrics:
    """Feeds the metrics of one rank from the engine's pulses (`Engine.pulse`)."""

    GAUGES: Mapping[str, str] = {
        "running_sequences": "running",
        "waiting_sequences": "waiting",
        "batched_tokens": "batched_tokens",
        "kv_cache_usage": "kv_cache_usage",
        "state_cache_usage": "state_cache_usage",
        "mfu": "mfu",
        "expert_load_balance": "expert_load_balance",
    }

    def __init__(self, rank: int) -> None:
        self._metrics = metric_set(RANK_METRICS, {"rank": str(rank)})
        self._before: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, pulse: Mapping[str, Any]) -> None:
        """A new pulse: gauges are set, counters grow by what was added since the last one."""
        if self._metrics is None:
            return
        for name, key in self.GAUGES.items():
            if pulse.get(key) is not None:
                self._metrics.set(name, float(pulse[key]))
        now = rank_counters(pulse)
        for (name, tags), value in now.items():
            self._metrics.add(name, value - self._before.get((name, tags), 0.0), **dict(tags))
        self._before = now


def rank_counters(pulse: Mapping[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(metric, tags) → total since the rank's start."""
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("steps", (("phase", "prefill"),)): pulse["prompt_steps"],
        ("steps", (("phase", "decode"),)): pulse["steps"] - pulse["prompt_steps"] - pulse["empty_steps"],
        ("steps", (("phase", "empty"),)): pulse["empty_steps"],
        ("step_seconds", (("phase", "prefill"),)): pulse["prompt_seconds"],
        ("step_seconds", (("phase", "decode"),)): pulse["decode_seconds"],
        ("preemptions", ()): pulse["preempted"],
        ("expert_rebalances", ()): pulse.get("rebalances", 0),
    }
    for name in (
        "decode_sequences",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "first_token_seconds",
        "first_tokens",
    ):
        totals[name, ()] = pulse[name]
    for reason, count in pulse["finished"].items():
        totals["finished_sequences", (("reason", reason),)] = count
    verified, accepted = (pulse.get(f"{what}_lengths", ()) for what in ("verified", "accepted"))
    for position in range(1, len(verified)):
        where = (("position", str(position)),)
        totals["drafts_made", where] = sum(verified)  # a step of a sequence makes a whole block
        totals["drafts_verified", where] = sum(verified[position:])
        totals["drafts_accepted", where] = sum(accepted[position:])
    return totals


class JobMetrics:
    """Feeds the driver's metrics. All numbers are totals of this run.

    They are set up at the first number: by then the driver is part of its cluster.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], float] = {}

    @cached_property
    def metrics(self) -> MetricSet | None:
        return metric_set(JOB_METRICS, {})

    def row(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """One result came."""
        if self.metrics is not None:
            self.metrics.observe("row_seconds", seconds)
            self.metrics.observe("row_prompt_tokens", prompt_tokens)
            self.metrics.observe("row_completion_tokens", completion_tokens)

    def update(
        self,
        *,
        ok: int,
        error_codes: Mapping[str, int],
        rows_left: int,
        parts: int,
        restarts: int,
        in_flight: int,
        ranks_up: int,
    ) -> None:
        metrics = self.metrics
        if metrics is None:
            return
        metrics.set("rows_left", rows_left)
        metrics.set("rows_in_flight", in_flight)
        metrics.set("ranks_up", ranks_up)
        self._grow(metrics, "rows", ok, "outcome", "ok")
        self._grow(metrics, "rows", sum(error_codes.values()), "outcome", "error")
        for code, count in error_codes.items():
            self._grow(metrics, "row_errors", count, "code", code)
        self._grow(metrics, "parts", parts)
        self._grow(metrics, "rank_restarts", restarts)

    def _grow(self, metrics: MetricSet, name: str, total: float, key: str = "", value: str = "") -> None:
        metrics.add(name, total - self._before.get((name, value), 0), **({key: value} if key else {}))
        self._before[name, value] = total
