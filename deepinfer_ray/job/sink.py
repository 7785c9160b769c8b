"""A finished part as a table and as Parquet: input columns unchanged, ours beside them, a footer that says
where it comes from.

Knows: outcomes of rows and the output schema. Does not know: where the bytes go, when they are committed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from deepinfer_ray.engine.request import FinishReason, RequestResult
from deepinfer_ray.job.completion import CompletionReader
from deepinfer_ray.job.encode import EncodedRow
from deepinfer_ray.job.plan import Part
from deepinfer_ray.job.schema import COMPLETION_COLUMNS, ROW_COLUMNS, output_fields

FOOTER_COUNTS = b"deepinfer_ray.counts"
"""Footer key of a part's `Counts` as JSON."""

_TOP_LOGPROB_BYTES = 120
"""Of one (id, logprob) pair as Python objects."""


@dataclass
class Counts:
    """Sums over rows; of one part in its footer, of a job in its summary."""

    rows: int = 0
    ok: int = 0
    errors: int = 0
    error_codes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: Counts) -> None:
        for name in ("rows", "ok", "errors", "prompt_tokens", "completion_tokens", "cached_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.error_codes.update(other.error_codes)

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "error_codes": dict(sorted(self.error_codes.items()))}

    @classmethod
    def from_footer(cls, metadata: Mapping[bytes, bytes] | None, rows: int) -> Counts:
        """Counts of a committed part; only its rows when the footer has none."""
        stored = json.loads((metadata or {}).get(FOOTER_COUNTS, b"{}"))
        return cls(**{**stored, "rows": rows, "error_codes": Counter(stored.get("error_codes", {}))})


class RowOutcome:
    """What became of one row: an error before it ran, or the results of its `n` completions."""

    __slots__ = ("_missing", "_results", "attempts", "row")

    def __init__(self, row: EncodedRow) -> None:
        self.row = row
        self.attempts = 0
        self._results: list[RequestResult | None] = [None] * len(row.seeds)
        self._missing = len(row.seeds)
        row.prompt = None  # handed over to the backend: an open part holds no prompt twice

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def set(self, index: int, result: RequestResult, attempts: int) -> int:
        """The result of completion `index`, which comes once; about how many bytes it takes."""
        self._missing -= 1
        self._results[index] = result
        self.attempts = max(self.attempts, attempts)
        top = sum(map(len, result.top_logprobs or ())) * _TOP_LOGPROB_BYTES
        return 4 * len(result.token_ids) + len(result.text) + top

    def counts(self) -> Counts:
        """Counts of this one row."""
        error = self.row.error
        results = [result for result in self._results if result is not None]
        code = error.code if error is not None else _first_error(results)[0]
        return Counts(
            1,
            int(code is None),
            int(code is not None),
            Counter() if code is None else Counter([code]),
            self.row.prompt_tokens or 0,
            sum(len(result.token_ids) for result in results),
            sum(result.cached_tokens for result in results),
        )

    def values(self, n: int, reader: CompletionReader) -> dict[str, Any]:
        """Output columns by name; completion columns as lists when n > 1."""
        row = self.row
        if row.error is not None:
            failure: tuple[str | None, str | None] = (row.error.code, str(row.error))
            one: dict[str, Any] = {"finish_reason": str(FinishReason.ERROR), "completion_tokens": 0}
            many = [one] * n
            prompt_logprobs = None
        else:
            results = [result for result in self._results if result is not None]
            many = [_completion(result) | self._text(reader, i, result) for i, result in enumerate(results)]
            failure = _first_error(results)
            prompt_logprobs = results[0].prompt_logprobs
        columns: dict[str, Any] = {
            "row_id": row.row_id,
            "prompt_tokens": row.prompt_tokens,
            "attempts": self.attempts,
            "prompt_logprobs": prompt_logprobs,
            "error": failure[1],
            "error_code": failure[0],
        }
        for name in COMPLETION_COLUMNS:
            columns[name] = [each.get(name) for each in many] if n > 1 else many[0].get(name)
        return columns

    def _text(self, reader: CompletionReader, index: int, result: RequestResult) -> dict[str, Any]:
        row = self.row
        scope = row.row_id if index == 0 else f"{row.row_id}\x1f{index}"
        return reader.columns(result, row.parse, row.params.stop if row.params else (), scope)


class KeptOutcome:
    """A row as an earlier run committed it: `columns` by name, without prefix."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def values(self, n: int, reader: CompletionReader) -> Mapping[str, Any]:
        return self._columns

    def counts(self) -> Counts:
        code = self._columns["error_code"]
        return Counts(
            1,
            int(code is None),
            int(code is not None),
            Counter() if code is None else Counter([code]),
            self._columns["prompt_tokens"] or 0,
            _total(self._columns["completion_tokens"]),
            _total(self._columns["cached_tokens"]),
        )


def _total(value: int | list[int | None] | None) -> int:
    return sum(each or 0 for each in value) if isinstance(value, list) else value or 0


def _first_error(results: Sequence[RequestResult]) -> tuple[str | None, str | None]:
    for result in results:
        if result.error_code is not None or result.finish_reason == FinishReason.ERROR:
            return result.error_code or "internal", result.error or "the engine gave no reason"
    return None, next((result.error for result in results if result.error), None)


def _completion(result: RequestResult) -> dict[str, Any]:
    top = result.top_logprobs
    return {
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.cached_tokens,
        "token_ids": result.token_ids,
        "logprobs": result.logprobs,
        "top_logprobs": None
        if top is None
        else [
            [{"id": int(token), "logprob": float(logprob)} for token, logprob in position] for position in top
        ],
    }


class PartWriter:
    """Builds the output table of a part and serialises it.

    provenance: what a footer says about where its rows come from, text by name. reader: of completions.
    """

    def __init__(
        self, n: int, prefix: str, provenance: Mapping[str, str], reader: CompletionReader | None = None
    ) -> None:
        self.n = n
        self.prefix = prefix
        self._reader = reader or CompletionReader()
        self._provenance = dict(provenance)

    def table(
        self, inputs: pa.Table, outcomes: Sequence[RowOutcome | KeptOutcome]
    ) -> tuple[pa.Table, Counts]:
        """(output table, its counts); rows in input order."""
        rows = [outcome.values(self.n, self._reader) for outcome in outcomes]
        counts = Counts()
        for outcome in outcomes:
            counts.add(outcome.counts())
        arrays = [_readable(column) for column in inputs.columns]
        fields = list(inputs.schema.remove_metadata())
        for name, output in zip(ROW_COLUMNS, output_fields(self.n, self.prefix), strict=True):
            arrays.append(pa.array([row[name] for row in rows], output.type))
            fields.append(output)
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields)), counts

    def serialiser(self, part: Part, table: pa.Table, counts: Counts) -> Callable[[Any], None]:
        """A function that writes the Parquet file into an open file."""
        footer = {
            **{f"deepinfer_ray.{name}": value for name, value in self._provenance.items()},
            "deepinfer_ray.part": json.dumps(
                {"input": part.file.name, "row_group": part.row_group, "rows": [part.start, part.stop]}
            ),
            FOOTER_COUNTS.decode(): json.dumps(counts.as_dict()),
        }

        def fill(file: Any) -> None:
            pq.write_table(table.replace_schema_metadata(footer), file, compression="zstd")

        return fill


def _readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column itself; in a string column, U+FFFD stands for bytes that are not UTF-8.

    Written as they are, those bytes would make the whole part unreadable for most readers.
    """
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.large_binary()).to_pylist()
        fixed = [None if value is None else value.decode(errors="replace") for value in raw]
        return pa.chunked_array([pa.array(fixed, column.type)])
    return column
