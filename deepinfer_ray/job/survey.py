"""What a data set holds, without running it: exact prompt lengths, rows that would fail, the first prompt.

Knows: rows as the job encodes them. Does not know: models, machines, time. Reads every row once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_ray.job.plan import InputPlan
from deepinfer_ray.job.prepare import RowSetup
from deepinfer_ray.job.source import read_parts

PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class Lengths:
    """How many rows have how many tokens; exact at any number of rows."""

    rows: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.rows.total()

    @property
    def total(self) -> int:
        return sum(tokens * rows for tokens, rows in self.rows.items())

    def quantile(self, share: float) -> int:
        """The least length that at least this share of the rows does not exceed; 0 without rows."""
        seen = 0
        for tokens in sorted(self.rows):
            seen += self.rows[tokens]
            if seen >= share * self.count:
                return tokens
        return 0

    def histogram(self) -> list[dict[str, int]]:
        """Buckets with both ends included, doubling from 16 up to the longest row; gaps are kept."""
        if not self.rows:
            return []
        buckets, start = [], 0
        while start < max(self.rows):
            stop = max(16, start * 2)
            rows = sum(rows for tokens, rows in self.rows.items() if start < tokens <= stop)
            buckets.append({"from": start + 1, "to": stop, "rows": rows})
            start = stop
        while buckets and buckets[0]["rows"] == 0:
            del buckets[0]
        return buckets

    def as_dict(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "min": min(self.rows, default=0),
            "max": max(self.rows, default=0),
            "mean": self.total / self.count if self.rows else 0.0,
            **{name: self.quantile(share) for name, share in PERCENTILES.items()},
            "histogram": self.histogram(),
        }


@dataclass
class Survey:
    """Counts over all rows. prompts: of the good ones. max_completion_tokens: if no completion ended early.

    examples: for each error code its first row and message. first_prompt: int32 ids of the first good row.
    """

    rows: int = 0
    error_codes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)
    prompts: Lengths = field(default_factory=Lengths)
    max_completion_tokens: int = 0
    first_row: str | None = None
    first_prompt: np.ndarray | None = None

    @property
    def bad_rows(self) -> int:
        return self.error_codes.total()


def survey(setup: RowSetup, plan: InputPlan, progress: Callable[[int], None] = lambda rows: None) -> Survey:
    """Encode every row of the plan. `progress` gets the rows seen so far. `InputError`, `CheckpointError`."""
    encoder, seen = setup.encoder(), Survey()
    context = setup.engine.max_model_len
    for part, table in read_parts(plan.iter_parts()):
        for row in encoder.encode(part, table, part.errors):
            seen.rows += 1
            if row.prompt is None or row.params is None:
                assert row.error is not None
                seen.error_codes[row.error.code] += 1
                seen.examples.setdefault(row.error.code, (row.row_id, str(row.error)))
                continue
            length = len(row.prompt)
            seen.prompts.rows[length] += 1
            room = context - length
            seen.max_completion_tokens += min(row.params.max_tokens or room, room) * len(row.seeds)
            if seen.first_prompt is None:
                seen.first_row, seen.first_prompt = row.row_id, row.prompt
        progress(seen.rows)
    return seen
