"""What became of a job, from its output directory alone: the figures of `report.html` and `report --json`.

Knows: parts and their footers, the manifest, the summary, the statistics of each run. Does not know: HTML,
ranks that run now. A killed or a running job gives a report like any other, of what is there.

Row-level columns are read from at most `MAX_PARTS` parts, spread evenly; counts come from every footer, or
from the caller who knows them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deepinfer_ray import __version__
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.job.course import Course, read_course
from deepinfer_ray.job.ledger import SUMMARY, Ledger
from deepinfer_ray.job.sink import Counts
from deepinfer_ray.job.stats_file import RunStats, read_stats
from deepinfer_ray.job.store import Store

REPORT = "_deepinfer/report.html"
MAX_PARTS = 2000
HURRIED_PARTS = 50
"""When a run was asked to stop, the report must not take long."""
SLOWEST = 20

_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason")
_THREADS = 8


@dataclass(slots=True)
class RowFigures:
    """Of the rows of the parts that were read. lengths: rows by power of two, [k] = 2^(k-1) … 2^k - 1 tokens,
    [0] = none."""

    parts: int = 0
    rows: int = 0
    prompt_lengths: np.ndarray = field(default_factory=lambda: np.zeros(33, np.int64))
    completion_lengths: np.ndarray = field(default_factory=lambda: np.zeros(33, np.int64))
    longest_prompt: int = 0
    longest_completion: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    rows_with_cached_prefix: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: RowFigures) -> None:
        for name in ("parts", "rows", "rows_with_cached_prefix", "prompt_tokens", "cached_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.prompt_lengths += other.prompt_lengths
        self.completion_lengths += other.completion_lengths
        self.longest_prompt = max(self.longest_prompt, other.longest_prompt)
        self.longest_completion = max(self.longest_completion, other.longest_completion)
        self.finish_reasons.update(other.finish_reasons)


@dataclass(slots=True)
class Report:
    """Everything the page shows. notes: what a reader should know about the figures themselves."""

    output: str
    model: str | None
    created: str | None
    rows_planned: int | None
    counts: Counts
    parts: int
    summary: dict[str, Any] | None
    rows: RowFigures
    course: Course
    slowest: list[dict[str, Any]]
    notes: list[str]
    made: str = ""

    def as_dict(self) -> dict[str, Any]:
        """What `report --json` prints."""
        rows = self.rows
        return {
            "version": __version__,
            "output": self.output,
            "model": self.model,
            "created": self.created,
            "made": self.made,
            "rows_planned": self.rows_planned,
            **self.counts.as_dict(),
            "parts": self.parts,
            "finish_reasons": dict(sorted(rows.finish_reasons.items())),
            "prompt_lengths": _by_length(rows.prompt_lengths),
            "completion_lengths": _by_length(rows.completion_lengths),
            "longest_prompt": rows.longest_prompt,
            "longest_completion": rows.longest_completion,
            "prefix_reuse_share": prefix_share(self.counts),
            "rows_with_cached_prefix": rows.rows_with_cached_prefix,
            "parts_read": rows.parts,
            "rows_read": rows.rows,
            "slowest": self.slowest,
            "course": self.course.as_dict(),
            "notes": self.notes,
        }


def prefix_share(counts: Counts) -> float:
    """Share of prompt tokens that came from a cached prefix."""
    return counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else 0.0


def length_bounds(bucket: int) -> tuple[int, int]:
    """First and last length of a bucket of `RowFigures`."""
    return (0, 0) if bucket == 0 else (2 ** (bucket - 1), 2**bucket - 1)


def _by_length(counts: np.ndarray) -> list[dict[str, int]]:
    used = np.flatnonzero(counts)
    if not len(used):
        return []
    return [
        {"from": length_bounds(k)[0], "to": length_bounds(k)[1], "rows": int(counts[k])}
        for k in range(int(used[0]), int(used[-1]) + 1)
    ]


def read_report(store: Store, counts: Counts | None = None, max_parts: int = MAX_PARTS) -> Report:
    """Read an output directory. counts: of all its parts, if the caller knows them.

    Raises `ConfigError` when it is no output of this program, `OutputError` for a part that cannot be read.
    """
    ledger = Ledger(store)
    manifest = ledger.stored_manifest()
    if manifest is None:
        raise ConfigError(f"{store.location} is no output of `generate`: it has no _deepinfer/manifest.json")
    names = sorted(ledger.part_names())
    notes = []
    chosen = _spread(names, max_parts)
    job = manifest.get("config", {}).get("job", {})
    rows, read_counts = _read_parts(ledger, chosen, str(job.get("output_prefix") or ""))
    if counts is None:
        counts = read_counts
        for more in ledger.counts(set(names) - set(chosen)).values():
            counts.add(more)
    if len(chosen) < len(names):
        notes.append(
            f"Lengths and finish reasons are those of {rows.rows:,} rows in {len(chosen):,} of "
            f"{len(names):,} parts, spread evenly."
        )
    runs = read_stats(store)
    if not any(run.intervals for run in runs):
        notes.append("No statistics over time were written, so there is nothing to show about speed.")
    summary = None
    with contextlib.suppress(ValueError, TypeError):
        summary = json.loads(store.read(SUMMARY) or b"null")
    planned = manifest.get("rows")
    if planned is not None and counts.rows < planned:
        notes.append(
            f"The job is not complete: {planned - counts.rows:,} of {planned:,} rows have no result yet. "
            "The command that began it goes on from here."
        )
    return Report(
        output=store.location,
        model=manifest.get("config", {}).get("model", {}).get("path"),
        created=manifest.get("created"),
        rows_planned=planned,
        counts=counts,
        parts=len(names),
        summary=summary,
        rows=rows,
        course=read_course(runs),
        slowest=_slowest(runs),
        notes=notes,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _spread(names: Sequence[str], most: int) -> list[str]:
    """At most `most` of the names, evenly over all."""
    if len(names) <= most:
        return list(names)
    return [names[index * len(names) // most] for index in range(most)]


def _read_parts(ledger: Ledger, names: Sequence[str], prefix: str) -> tuple[RowFigures, Counts]:
    total, counts = RowFigures(), Counts()
    with ThreadPoolExecutor(_THREADS) as pool:
        for figures, part in pool.map(lambda name: _read_part(ledger, name, prefix), names):
            total.add(figures)
            counts.add(part)
    return total, counts


def _read_part(ledger: Ledger, name: str, prefix: str) -> tuple[RowFigures, Counts]:
    with ledger.readable(name), ledger.store.filesystem.open_input_file(ledger.store.path(name)) as file:
        parquet = pq.ParquetFile(file)
        counts = Counts.from_footer(parquet.metadata.metadata, parquet.metadata.num_rows)
        there = set(parquet.schema_arrow.names)
        wanted = [prefix + column for column in _COLUMNS if prefix + column in there]
        table = parquet.read(columns=wanted, use_threads=False)
    figures = RowFigures(parts=1, rows=table.num_rows)
    columns = {column: _flat(table[prefix + column]) for column in _COLUMNS if prefix + column in wanted}
    prompt, completion, cached, reasons = (columns.get(column) for column in _COLUMNS)
    if prompt is not None:
        lengths = _numbers(prompt)
        figures.prompt_lengths = by_power_of_two(lengths)
        figures.longest_prompt = int(lengths.max(initial=0))
        figures.prompt_tokens = int(lengths.sum())
    if completion is not None:
        lengths = _numbers(completion)
        figures.completion_lengths = by_power_of_two(lengths)
        figures.longest_completion = int(lengths.max(initial=0))
    if cached is not None:
        lengths = _numbers(cached)
        figures.cached_tokens = int(lengths.sum())
        figures.rows_with_cached_prefix = int((lengths > 0).sum())
    if reasons is not None:
        for entry in pc.value_counts(reasons).to_pylist():
            if entry["values"] is not None:
                figures.finish_reasons[str(entry["values"])] += entry["counts"]
    return figures, counts


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column; those of all completions where a row has several."""
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """int64 of what is not null."""
    return column.drop_null().cast(pa.int64()).to_numpy()


def by_power_of_two(lengths: np.ndarray) -> np.ndarray:
    """int64 [33]: how many lengths have k bits, k = 0 … 32."""
    bits = np.where(lengths > 0, np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64) + 1, 0)
    return np.bincount(np.clip(bits, 0, 32), minlength=33)


def _slowest(runs: Sequence[RunStats]) -> list[dict[str, Any]]:
    """The slowest rows of all runs, a row that was redone once."""
    best: dict[str, dict[str, Any]] = {}
    for entry in _entries(runs):
        known = best.get(entry["row_id"])
        if known is None or entry["seconds"] > known["seconds"]:
            best[entry["row_id"]] = entry
    return sorted(best.values(), key=lambda entry: -entry["seconds"])[:SLOWEST]


def _entries(runs: Sequence[RunStats]) -> Iterator[dict[str, Any]]:
    for run in runs:
        for entry in run.extra.get("slowest") or ():
            if isinstance(entry, Mapping) and isinstance(entry.get("seconds"), int | float):
                yield {**entry, "row_id": str(entry.get("row_id"))}
