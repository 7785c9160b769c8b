"""The users' row ids: as strings, and checked as a whole before anything is loaded.

Knows: id columns of all input files. Does not know: other columns, prompts, parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from deepinfer_ray.errors import InputError, RowError
from deepinfer_ray.job.plan import InputFile, InputPlan
from deepinfer_ray.job.source import BATCH_ROWS, DamagedError, line_objects, parquet_batches


def check_ids(plan: InputPlan, column: str) -> None:
    """Refuse null and duplicate ids before anything is loaded, naming file and row.

    Reads the id column alone and keeps 8 bytes a row. Raises `InputError`.
    """
    for file in plan.files:
        if column in file.partitions:
            raise InputError(
                f"{file.name}: the id column {column} is a folder's name, the same for all its rows"
            )
        kind = file.schema.field(column).type
        if not _is_id_type(kind):
            raise InputError(f"{file.name}: the id column {column} is {kind}; ids are strings or integers")
    hashes = np.empty(plan.rows, np.int64)
    filled = 0
    for where, ids in _id_batches(plan, column):
        if None in ids:
            row = ids.index(None)
            raise InputError(f"the id column {column} is null in {where.of(row)}; every row needs an id")
        hashes[filled : filled + len(ids)] = [hash(value) for value in ids]
        filled += len(ids)
    hashes = np.sort(hashes[:filled])
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not suspects:
        return
    seen: dict[str, str] = {}  # a hash may be shared by two ids, hence the second look
    for where, ids in _id_batches(plan, column):
        for row, value in enumerate(ids):
            if hash(value) not in suspects or value is None:
                continue
            place = where.of(row)
            if value in seen:
                raise InputError(
                    f"the id {value!r} of column {column} occurs twice: in {seen[value]} and in {place}; "
                    "ids must be unique over all input files"
                )
            seen[value] = place


def id_strings(values: pa.Array | pa.ChunkedArray) -> list[str | None]:
    """Ids as strings: an integer by its decimal digits. Raises `UnicodeDecodeError` for broken UTF-8."""
    return [None if value is None else str(value) for value in values.to_pylist()]


@dataclass(frozen=True)
class _Place:
    """Where a batch of ids stands. lines: of JSON lines, the number of each row's line."""

    file: InputFile
    group: int
    position: int
    lines: tuple[int, ...] = ()

    def of(self, row: int) -> str:
        if self.lines:
            return f"{self.file.name}, line {self.lines[row]}"
        return f"{self.file.name}, row group {self.group}, row {self.position + row}"


def _id_batches(plan: InputPlan, column: str) -> Iterator[tuple[_Place, list[str | None]]]:
    """(place, ids) of the rows that the plan covers; lines that are no objects are left out."""
    left = plan.rows
    for file in plan.files:
        for group, rows in enumerate(file.row_groups):
            if not rows or not left:
                continue
            taken = min(rows, left)
            read = _line_ids if file.kind == "jsonl" else _parquet_ids
            yield from read(file, group, column, taken)
            left -= taken


def _parquet_ids(
    file: InputFile, group: int, column: str, rows: int
) -> Iterator[tuple[_Place, list[str | None]]]:
    position = 0
    try:
        for batch in parquet_batches(file, group, [column]):
            batch = batch.slice(0, rows - position)
            try:
                ids = id_strings(batch.column(0))
            except UnicodeDecodeError:
                raise InputError(
                    f"the id column {column} of {file.name} holds an id that is not UTF-8, in row group "
                    f"{group} within rows {position} to {position + batch.num_rows - 1}"
                ) from None
            yield _Place(file, group, position), ids
            position += batch.num_rows
            if position >= rows:
                return
    except DamagedError as damage:
        raise InputError(
            f"the id column {column} of {file.path}, row group {group}, cannot be read: {damage}. Repair the "
            "file or leave it out"
        ) from None


def _line_ids(
    file: InputFile, group: int, column: str, rows: int
) -> Iterator[tuple[_Place, list[str | None]]]:
    ids: list[str | None] = []
    lines: list[int] = []
    for number, (line, row) in zip(range(1, rows + 1), line_objects(file, group), strict=False):
        if not isinstance(row, RowError):
            ids.append(_line_id(row.get(column), f"{column} of {file.name}, line {line.number}"))
            lines.append(line.number)
        if ids and (len(ids) == BATCH_ROWS or number == rows):
            yield _Place(file, group, 0, tuple(lines)), ids
            ids, lines = [], []


def _line_id(value: Any, where: str) -> str | None:
    text = value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise InputError(f"the id column {where}, is no valid Unicode: it holds a lone surrogate") from None
    return text


def _is_id_type(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_integer,
        )
    )
