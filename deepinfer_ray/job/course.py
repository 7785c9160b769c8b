"""The runs of a job as one course of time: speed, phases of each rank, batch and cache, drafts, experts.

Knows: intervals of `stats_file.py`, how runs follow each other, how many points a curve may have. Does not
know: files, charts. Time is seconds of running: the pauses between runs are left out, a run begins where the
one before it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from deepinfer_ray.job.stats_file import Interval, RunStats

POINTS = 120
"""Of a curve at most."""
PAUSE_S = 3.0
"""A rank says something at least this often while it works; a longer silence before a rank that was built
anew is time in which there was none."""

JOB = "job"
STARTING, PREFILL, DECODE, IDLE, DOWN = "starting", "prefill", "decode", "idle", "down"

Curve = list[tuple[float, float]]
Segment = tuple[float, float, str]


@dataclass(slots=True)
class RankCourse:
    """One rank. batch: sequences in a decode step. Usages are shares of 1."""

    rank: int
    segments: list[Segment] = field(default_factory=list)
    batch: Curve = field(default_factory=list)
    kv_cache: Curve = field(default_factory=list)
    state_cache: Curve = field(default_factory=list)
    mfu: Curve = field(default_factory=list)
    expert_load: Curve = field(default_factory=list)

    def shares(self) -> dict[str, float]:
        """Share of time by kind of segment."""
        total = sum(end - start for start, end, _ in self.segments)
        kinds = dict.fromkeys(kind for _, _, kind in self.segments)
        return {
            kind: sum(end - start for start, end, own in self.segments if own == kind) / total
            for kind in kinds
            if total
        }


@dataclass(slots=True)
class Course:
    """All runs behind each other. runs: (begin, seconds, UTC of the start, restarts of ranks)."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    """Prompt and completion tokens of the rows that got a result in these runs."""
    measured: bool = False
    """Whether the speeds are what ranks computed; else they are those of results as they came in."""
    prompt_speed: Curve = field(default_factory=list)
    completion_speed: Curve = field(default_factory=list)
    row_speed: Curve = field(default_factory=list)
    in_flight: Curve = field(default_factory=list)
    ranks: list[RankCourse] = field(default_factory=list)
    verified_lengths: list[int] = field(default_factory=list)
    """Sequence-steps by number of drafts verified; empty without drafts."""
    accepted_lengths: list[int] = field(default_factory=list)
    restarts: int = 0

    @property
    def seconds(self) -> float:
        return float(sum(run["seconds"] for run in self.runs))

    def as_dict(self) -> dict[str, Any]:
        def curve(points: Curve) -> list[list[float]]:
            return [[round(x, 2), float(f"{y:.5g}")] for x, y in points]

        return {
            "seconds": round(self.seconds, 2),
            "runs": self.runs,
            "restarts": self.restarts,
            "prompt_tokens_per_second": curve(self.prompt_speed),
            "completion_tokens_per_second": curve(self.completion_speed),
            "rows_per_second": curve(self.row_speed),
            "rows_in_flight": curve(self.in_flight),
            "accepted_lengths": self.accepted_lengths,
            "verified_lengths": self.verified_lengths,
            "ranks": [
                {
                    "rank": rank.rank,
                    "time_shares": {kind: round(share, 4) for kind, share in rank.shares().items()},
                    "decode_batch": curve(rank.batch),
                    "kv_cache_usage": curve(rank.kv_cache),
                    "state_cache_usage": curve(rank.state_cache),
                    "mfu": curve(rank.mfu),
                    "expert_load_balance": curve(rank.expert_load),
                }
                for rank in self.ranks
            ],
        }


def read_course(runs: Sequence[RunStats], points: int = POINTS) -> Course:
    """The course of all runs that have a statistic."""
    course = Course()
    shifted: list[Interval] = []
    ranks: dict[int, list[list[Interval]]] = {}
    begin = 0.0
    for run in runs:
        if not run.intervals:
            continue
        own = sorted(
            (Interval(i.who, i.t + begin, i.d, i.sums, i.means) for i in run.intervals), key=lambda i: i.t
        )
        restarts = int(sum(i.sums.get("restarts", 0) for i in own if i.who == JOB))
        course.runs.append(
            {
                "begin": round(begin, 2),
                "seconds": round(run.seconds, 2),
                "started": run.head.get("started"),
                "restarts": restarts,
            }
        )
        course.restarts += restarts
        shifted += own
        end = begin + run.seconds
        for number in sorted({int(i.who) for i in own if i.who.isdigit()}):
            mine = [i for i in own if i.who == str(number)]
            rank = ranks.setdefault(number, [])
            rank.append(mine)
            lane = _rank(course, number)
            for start, stop in spans(run, number):
                inside = [i for i in mine if start <= i.t - begin <= stop]
                lane.segments += segments(
                    inside, begin + start, begin + stop, max(1, points // max(1, len(runs)))
                )
        begin = end
    job = [i for i in shifted if i.who == JOB]
    course.tokens = int(sum(i.sums.get("prompt_tokens", 0) + i.sums.get("completion_tokens", 0) for i in job))
    computed = [i for i in shifted if i.who != JOB]
    course.measured = any(i.sums.get("completion_tokens") for i in computed)
    spoken = computed if course.measured else job
    course.prompt_speed = rate(spoken, "prompt_tokens", begin, points)
    course.completion_speed = rate(spoken, "completion_tokens", begin, points)
    course.row_speed = rate(job, "rows", begin, points)
    course.in_flight = mean(job, partial(_mean_of, "in_flight"), begin, points)
    for number, parts in ranks.items():
        lane, mine = _rank(course, number), [i for part in parts for i in part]
        lane.batch = mean(mine, _batch, begin, points)
        for name, key in (
            ("kv_cache", "kv_cache_usage"),
            ("state_cache", "state_cache_usage"),
            ("mfu", "mfu"),
            ("expert_load", "expert_load_balance"),
        ):
            setattr(lane, name, mean(mine, partial(_mean_of, key), begin, points))
        course.verified_lengths = _lengths(course.verified_lengths, mine, "verified_lengths")
        course.accepted_lengths = _lengths(course.accepted_lengths, mine, "accepted_lengths")
    course.ranks.sort(key=lambda rank: rank.rank)
    return course


def spans(run: RunStats, number: int) -> list[tuple[float, float]]:
    """From when to when a rank was there, in seconds of the run; ranks that neither came nor went always."""
    noted = run.extra.get("further", {}).get(str(number), [[0.0, None]])
    return [(start, run.seconds if stop is None else stop) for start, stop in noted]


def _rank(course: Course, number: int) -> RankCourse:
    for rank in course.ranks:
        if rank.rank == number:
            return rank
    course.ranks.append(RankCourse(number))
    return course.ranks[-1]


def _mean_of(key: str, interval: Interval) -> float | None:
    return interval.means.get(key)


def _batch(interval: Interval) -> float | None:
    sums = interval.sums
    steps = sums.get("steps", 0) - sums.get("prompt_steps", 0) - sums.get("empty_steps", 0)
    return sums.get("decode_sequences", 0) / steps if steps > 0 else None


def _lengths(before: list[int], intervals: Iterable[Interval], key: str) -> list[int]:
    total = list(before)
    for interval in intervals:
        counts = interval.sums.get(key) or []
        total += [0] * (len(counts) - len(total))
        for index, count in enumerate(counts):
            total[index] += int(count)
    return total


def _bins(end: float, intervals: Sequence[Interval], points: int) -> int:
    """How many bins a curve gets: no finer than the intervals are."""
    typical = float(np.median([interval.d for interval in intervals])) or 1.0
    return int(max(1, min(points, end / typical)))


def rate(intervals: Sequence[Interval], key: str, end: float, points: int) -> Curve:
    """A sum's growth per second over [0, end]; each interval's sum is spread evenly over it."""
    if not intervals or end <= 0:
        return []
    count = _bins(end, intervals, points)
    width = end / count
    amounts = np.zeros(count)
    for interval in intervals:
        value = float(interval.sums.get(key, 0))
        for index, share in _overlaps(interval, width, count):
            amounts[index] += value * share
    return [((index + 0.5) * width, float(amount) / width) for index, amount in enumerate(amounts)]


def mean(
    intervals: Sequence[Interval], value: Callable[[Interval], float | None], end: float, points: int
) -> Curve:
    """A figure weighted by time; bins without data have no point."""
    known = [(interval, figure) for interval in intervals if (figure := value(interval)) is not None]
    if not known or end <= 0:
        return []
    count = _bins(end, [interval for interval, _ in known], points)
    width = end / count
    sums, weights = np.zeros(count), np.zeros(count)
    for interval, figure in known:
        length = max(interval.d, 1e-9)
        for index, share in _overlaps(interval, width, count):
            sums[index] += figure * share * length
            weights[index] += share * length
    return [((i + 0.5) * width, float(sums[i] / weights[i])) for i in range(count) if weights[i] > 0]


def _overlaps(interval: Interval, width: float, count: int) -> Iterable[tuple[int, float]]:
    """(bin, share of the interval that lies in it)."""
    start, end = max(0.0, interval.start), interval.t
    if end <= start:
        yield min(count - 1, max(0, int(end / width))), 1.0
        return
    first, last = min(count - 1, int(start / width)), min(count - 1, int(end / width))
    for index in range(first, last + 1):
        low = start if index == first else index * width
        high = end if index == last else (index + 1) * width
        if high > low:
            yield index, (high - low) / (end - start)


def segments(intervals: Sequence[Interval], begin: float, end: float, points: int) -> list[Segment]:
    """What one rank did in a run from `begin` to `end`, in at most about `points` groups of segments.

    Inside an interval prefill comes first, then decode, then idle time: the order is not known, the lengths
    are.
    """
    lane: list[Segment] = []
    now = begin
    built = False
    for group in _groups(intervals, points):
        start = max(now, min(group.start, group.t))
        if not built and start > now:
            lane.append((now, start, STARTING))
        elif start - now > PAUSE_S:
            lane.append((now, start, DOWN))
        else:
            start = now
        built = True
        length = group.t - start
        if length <= 0:
            continue
        prefill = float(group.sums.get("prompt_seconds", 0.0))
        decode = float(group.sums.get("decode_seconds", 0.0))
        scale = min(1.0, length / (prefill + decode)) if prefill + decode > 0 else 0.0
        for kind, seconds in ((PREFILL, prefill * scale), (DECODE, decode * scale)):
            if seconds > 0:
                lane.append((start, start + seconds, kind))
                start += seconds
        if group.t - start > 1e-6:
            lane.append((start, group.t, IDLE))
        now = max(now, group.t)
    if end - now > 1e-6:
        lane.append((now, end, IDLE if built else STARTING))
    return lane


def _groups(intervals: Sequence[Interval], points: int) -> list[Interval]:
    """Neighbours put together until few enough are left; never across a pause."""
    size = -(-len(intervals) // max(1, points))
    groups: list[Interval] = []
    taken = 0
    for interval in intervals:
        if groups and taken < size and interval.start - groups[-1].t <= PAUSE_S:
            groups[-1] = groups[-1].merged(interval)
            taken += 1
        else:
            groups.append(interval)
            taken = 1
    return groups
