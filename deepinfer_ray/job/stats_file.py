"""The course of a run as a small file: one JSON line for each interval of the driver and of each rank.

Knows: lines, how intervals are put together, how large a file may become, how a killed run leaves it. Does
not know: which figures there are, ranks, rows.

`OUTPUT/_deepinfer/stats/run-TIME-ID.jsonl`, one file a run. A line has `t` (seconds since the run began, at
the end of the interval), `d` (its length), `who` (`job` or a rank), `sums` and `means`. When a file reaches
`MAX_LINES`, neighbours are put together and from then on intervals are twice as long: any run, however long,
ends with between half of that and all of it. On a local file system each line is appended and survives a kill
of the process; elsewhere the whole file is put again every `UPLOAD_S`. A torn last line is left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa

from deepinfer_ray.errors import OutputError
from deepinfer_ray.job.store import Store

logger = logging.getLogger(__name__)

FOLDER = "_deepinfer/stats"
MAX_LINES = 8192
MAX_FILES = 100
"""Runs of one output whose files are kept; the oldest go first."""
MAX_REPLACED = 64
"""Lines that a later one replaces; then the file is written anew without them."""
UPLOAD_S = 60.0

_FILE = re.compile(r"run-[\w-]+\.jsonl")


@dataclass(slots=True)
class Interval:
    """Figures of `who` in the `d` seconds before `t`. sums add up (numbers, or lists position by position),
    means are weighted by time."""

    who: str
    t: float
    d: float
    sums: dict[str, Any] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> float:
        return self.t - self.d

    def merged(self, later: Interval) -> Interval:
        """Both together; a pause between them is in neither length."""
        total = self.d + later.d
        means = {}
        for name in {*self.means, *later.means}:
            weights = [(part.means[name], part.d) for part in (self, later) if name in part.means]
            whole = sum(weight for _, weight in weights)
            means[name] = (
                sum(value * weight for value, weight in weights) / whole if whole else weights[-1][0]
            )
        sums = dict(self.sums)
        for name, value in later.sums.items():
            sums[name] = _sum(sums[name], value) if name in sums else value
        return Interval(self.who, later.t, total, sums, means)

    def line(self) -> str:
        content = {
            "t": round(self.t, 2),
            "d": round(self.d, 3),
            "who": self.who,
            "sums": {name: _short(value) for name, value in self.sums.items() if value},
            "means": {name: _short(value) for name, value in self.means.items()},
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Interval:
        return cls(
            str(content["who"]),
            float(content["t"]),
            float(content["d"]),
            dict(content["sums"]),
            dict(content["means"]),
        )


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        width = max(len(one), len(other))
        padded = ([*part, *[0] * (width - len(part))] for part in (one, other))
        return [a + b for a, b in zip(*padded, strict=True)]
    return one + other


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


class StatsFile:
    """Writes the file of one run. What goes wrong here is logged once and ends the writing, not the job."""

    def __init__(
        self, store: Store, name: str, head: Mapping[str, Any], *, max_lines: int = MAX_LINES
    ) -> None:
        """name: of the run, unique and growing with time. head: first line, what is known at the start."""
        self.name = f"{FOLDER}/run-{name}.jsonl"
        self._store = store
        self._max_lines = max_lines
        self._every = 0.0
        self._lines: list[str] = []
        self._extra: dict[str, str] = {"head": json.dumps({"head": dict(head)}, separators=(",", ":"))}
        self._waiting: dict[str, Interval] = {}
        self._file: BinaryIO | None = None
        self._replaced = 0
        self._uploaded = 0.0
        self._broken = False
        with self._guarded():
            store.filesystem.create_dir(store.path(FOLDER), recursive=True)
            for old in stats_files(store)[: -(MAX_FILES - 1)]:
                store.filesystem.delete_file(store.path(old))
            self._rewrite()

    def add(self, interval: Interval) -> None:
        """Count an interval in; it is written once it is as long as intervals are by now."""
        before = self._waiting.pop(interval.who, None)
        if before is not None:
            interval = before.merged(interval)
        if interval.d < self._every:
            self._waiting[interval.who] = interval
        else:
            self._write(interval.line(), interval.t)

    def set(self, name: str, content: Any) -> None:
        """Something that replaces what was set under this name before."""
        line = json.dumps({name: content}, separators=(",", ":"))
        if line == self._extra.get(name):
            return
        self._extra[name] = line
        self._replaced += 1
        if self._replaced % MAX_REPLACED:
            self._append(line)
        else:
            with self._guarded():
                self._rewrite()

    def close(self) -> None:
        """Everything that waits is written; may be called twice."""
        for interval in list(self._waiting.values()):
            self._write(interval.line(), interval.t)
        self._waiting.clear()
        with self._guarded():
            if not self._store.local:
                self._rewrite()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str, t: float) -> None:
        self._lines.append(line)
        if len(self._lines) > self._max_lines:
            self._halve()
            with self._guarded():
                self._rewrite()
        else:
            self._append(line)
        if not self._store.local and t - self._uploaded >= UPLOAD_S:
            self._uploaded = t
            with self._guarded():
                self._rewrite()

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        with self._guarded():
            self._file.write(f"{line}\n".encode())
            self._file.flush()

    def _halve(self) -> None:
        """Neighbours of each writer become one; later intervals are as long as the longest of them."""
        kept: list[Interval | None] = []
        open_at: dict[str, int] = {}
        for line in self._lines:
            interval = Interval.of(json.loads(line))
            at = open_at.pop(interval.who, None)
            if at is None:
                open_at[interval.who] = len(kept)
                kept.append(interval)
            else:
                first = kept[at]
                assert first is not None
                kept[at] = None  # the pair stands where its end is, so lines stay in the order of time
                kept.append(first.merged(interval))
        merged = [interval for interval in kept if interval is not None]
        self._lines = [interval.line() for interval in merged]
        lengths = sorted(interval.d for interval in merged)
        self._every = max(2 * self._every, lengths[len(lengths) // 2] * 0.9)

    def _rewrite(self) -> None:
        """The whole file anew; readers see the old one or the new one."""
        if self._broken:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        data = "".join(f"{line}\n" for line in (*self._extra.values(), *self._lines)).encode()
        self._store.write(self.name, lambda file: file.write(data))
        if self._store.local:
            self._file = open(self._store.path(self.name), "ab")  # noqa: SIM115

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, OutputError, pa.ArrowException) as error:
            self._file = None
            if not self._broken:
                logger.warning("statistics of the run are not written any more: %s", error)
            self._broken = True


@dataclass(slots=True)
class RunStats:
    """One file read back. extra: what was `set`, and `head`."""

    extra: dict[str, Any]
    intervals: list[Interval]

    @property
    def head(self) -> dict[str, Any]:
        return dict(self.extra.get("head", {}))

    @property
    def seconds(self) -> float:
        return max((interval.t for interval in self.intervals), default=0.0)


def stats_files(store: Store) -> list[str]:
    """Names of the runs' files, oldest first."""
    return [f"{FOLDER}/{name}" for name in store.names(FOLDER) if _FILE.fullmatch(name)]


def read_stats(store: Store) -> list[RunStats]:
    """All runs of an output, oldest first; lines that cannot be read are left out."""
    runs = []
    for name in stats_files(store):
        run = RunStats({}, [])
        for line in (store.read(name) or b"").decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                content = json.loads(line)
                if "who" in content:
                    run.intervals.append(Interval.of(content))
                else:
                    run.extra.update(content)
        runs.append(run)
    return runs
