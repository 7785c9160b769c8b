"""What is noted while a job runs: for the report, and for Prometheus.

Knows: the moments at which the loop of a job tells it something; which of an engine's figures are kept.
Does not know: how the loop works, where a file is, tables. It never holds a prompt or a completion: row ids,
lengths and times are all it sees.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_ray.fleet.backend import Backend, RankStats, ReportsStats, WorkItem, WorkResult
from deepinfer_ray.fleet.metrics import JobMetrics
from deepinfer_ray.job.sink import Counts
from deepinfer_ray.job.stats_file import Interval, StatsFile

SLOWEST = 20
SLOWEST_S = 30.0
"""How often the slowest rows are noted."""

RANK_SUMS = (
    "steps",
    "prompt_steps",
    "empty_steps",
    "prompt_seconds",
    "decode_seconds",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "decode_sequences",
    "first_tokens",
    "first_token_seconds",
    "preempted",
    "rebalances",
    "verified_lengths",
    "accepted_lengths",
)
RANK_MEANS = (
    "running",
    "waiting",
    "kv_cache_usage",
    "state_cache_usage",
    "mfu",
    "expert_load_balance",
)


class Observer:
    """Told by the job's loop, on its thread. stats: None = nothing is written."""

    def __init__(
        self,
        stats: StatsFile | None,
        *,
        rows_left: int,
        metrics: JobMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._rows = rows_left
        self._metrics = metrics or JobMetrics()
        self._clock = clock
        self._started = self._turned = clock()
        self._noted = 0.0
        self._sent: dict[int, float] = {}
        self._slowest: list[tuple[float, str, int, int]] = []
        self._before: dict[str, float] = {}
        self._ranks: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self._further: dict[int, list[list[float | None]]] = {}

    def sent(self, items: Sequence[WorkItem]) -> None:
        """Items go to the backend."""
        now = self._clock()
        for item in items:
            self._sent[item.key] = now

    def received(self, result: WorkResult, row_id: str) -> None:
        """The result of an item came."""
        sent = self._sent.pop(result.key, None)
        if sent is None:
            return
        seconds, record = self._clock() - sent, result.result
        self._metrics.row(seconds, record.prompt_tokens, len(record.token_ids))
        entry = (seconds, row_id, record.prompt_tokens, len(record.token_ids))
        if len(self._slowest) < SLOWEST:
            heapq.heappush(self._slowest, entry)
        elif entry > self._slowest[0]:
            heapq.heapreplace(self._slowest, entry)

    def turn(
        self, ended: Counts, parts: int, status: Mapping[str, Any], backend: Backend, *, last: bool = False
    ) -> None:
        """Call about once a second. ended: rows of this run with a result. status: the backend's."""
        now = self._clock()
        ranks = status.get("ranks", ())
        up = sum(rank.get("stage") == "up" for rank in ranks)
        restarts, in_flight = int(status.get("restarts", 0)), len(self._sent)
        self._metrics.update(
            ok=ended.ok,
            error_codes=ended.error_codes,
            rows_left=max(0, self._rows - ended.rows),
            parts=parts,
            restarts=restarts,
            in_flight=in_flight,
            ranks_up=up,
        )
        if self._stats is None:
            return
        totals = {
            "rows": ended.rows,
            "errors": ended.errors,
            "prompt_tokens": ended.prompt_tokens,
            "completion_tokens": ended.completion_tokens,
            "cached_tokens": ended.cached_tokens,
            "parts": parts,
            "restarts": restarts,
        }
        sums = {name: value - self._before.get(name, 0) for name, value in totals.items()}
        self._before = {**totals}
        means = {"in_flight": float(in_flight), "ranks_up": float(up)}
        self._stats.add(Interval("job", now - self._started, now - self._turned, sums, means))
        self._turned = now
        self._note_further(status, now - self._started)
        if isinstance(backend, ReportsStats):
            for pulse in backend.take_stats():
                self._rank(pulse, now - self._started)
        if last or now - self._started - self._noted >= SLOWEST_S:
            self._noted = now - self._started
            self._note_slowest()

    def close(self) -> None:
        """Nothing more comes; may be called twice."""
        if self._stats is not None:
            self._note_slowest()
            self._stats.close()

    def _rank(self, pulse: RankStats, t: float) -> None:
        """A rank's totals become an interval. A new generation starts from nothing."""
        assert self._stats is not None
        generation, before = self._ranks.get(pulse.rank, (-1, {}))
        if generation != pulse.generation:
            before = {}
        now = pulse.values
        self._ranks[pulse.rank] = (pulse.generation, now)
        self._stats.add(
            Interval(
                str(pulse.rank),
                t,
                max(0.0, now["seconds"] - before.get("seconds", 0.0)),
                {name: _grown(now[name], before.get(name)) for name in RANK_SUMS if name in now},
                {name: float(now[name]) for name in RANK_MEANS if now.get(name) is not None},
            )
        )

    def _note_further(self, status: Mapping[str, Any], t: float) -> None:
        """From when to when the ranks of further gangs were there; None = still there."""
        assert self._stats is not None
        if "gangs" not in status:
            return
        least = status["gangs"]["least"]
        there = {
            rank["rank"] for rank in status["ranks"] if rank["gang"] >= least and rank["stage"] != "placing"
        }
        before = {number for number, spans in self._further.items() if spans[-1][1] is None}
        for number in there - before:
            self._further.setdefault(number, []).append([round(t, 2), None])
        for number in before - there:
            self._further[number][-1][1] = round(t, 2)
        if there != before:
            self._stats.set("further", {str(number): spans for number, spans in self._further.items()})

    def _note_slowest(self) -> None:
        if self._stats is None or not self._slowest:
            return
        ordered = sorted(self._slowest, reverse=True)
        self._stats.set(
            "slowest",
            [
                {"row_id": row, "seconds": round(s, 3), "prompt_tokens": p, "completion_tokens": c}
                for s, row, p, c in ordered
            ],
        )


def _grown(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        earlier = [*(before or []), *[0] * len(now)]
        return [value - earlier[index] for index, value in enumerate(now)]
    return now - (before or 0)
