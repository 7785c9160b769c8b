"""Reading rows: the tables of parts as a stream.

Knows: Parquet and JSON lines, read with bounded memory. Does not know: prompts, what becomes of a row.

Data that cannot be decoded although the file is there and its footer is what it was is damaged: its rows come
as nulls with an error each, and the rest of the input goes on. A file that is gone, or another one, ends the
job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from deepinfer_ray.errors import InputError, RowError
from deepinfer_ray.job import jsonl
from deepinfer_ray.job.plan import InputFile, Part, file_footer

BATCH_ROWS = 256
"""Rows decoded at a time."""

READ_BUFFER = 1 << 20
"""Bytes of a column chunk read at a time; without it a whole column chunk is in memory."""

UNREADABLE = "unreadable_input"
"""Error code of rows whose place in the input is damaged."""

_RETRY_DELAYS_S = (1.0, 4.0)
"""Waits before a remote file is read once more."""


class DamagedError(Exception):
    """Rows of a row group from `position` on cannot be decoded."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


def read_parts(parts: Iterable[Part]) -> Iterator[tuple[Part, pa.Table]]:
    """The tables of `parts` in the given order, which must be plan order; gaps are skipped.

    Holds one part and one batch of `BATCH_ROWS` rows. Rows that cannot be read are null in the table and
    stand in the part's `errors`. Raises `InputError` naming the file when all of it is gone or has changed.
    """
    group: list[Part] = []
    for part in parts:
        if group and group[-1].unit != part.unit:
            yield from _read_group(group)
            group = []
        group.append(part)
    if group:
        yield from _read_group(group)


def _read_group(parts: list[Part]) -> Iterator[tuple[Part, pa.Table]]:
    """Cuts the batches of one row group into its parts."""
    position = 0  # row of the row group that the next batch begins with
    waiting = iter(parts)
    part = next(waiting)
    pieces: list[pa.Table] = []
    errors: dict[int, RowError] = {}
    for batch, broken in _readable_batches(parts[0]):
        end = position + batch.num_rows
        while True:
            begin, stop = max(part.start, position), min(part.stop, end)
            if begin < stop:
                pieces.append(batch.slice(begin - position, stop - begin))
                errors |= {
                    position + row - part.start: error
                    for row, error in broken.items()
                    if begin <= position + row < stop
                }
            if part.stop > end:
                break
            yield replace(part, errors=errors) if errors else part, _joined(pieces, part.file.schema)
            pieces, errors = [], {}
            following = next(waiting, None)
            if following is None:
                return
            part = following
        position = end
    raise InputError(
        f"the input file {part.file.path} ends early: row group {part.row_group} has {position} rows, it had "
        f"{part.file.row_groups[part.row_group]} when the job was planned"
    )


def _joined(pieces: list[pa.Table], schema: pa.Schema) -> pa.Table:
    """Pieces of one schema; nulls in the place of damaged rows make a required column an optional one."""
    if all(piece.schema.equals(schema) for piece in pieces):
        return pa.concat_tables(pieces) if pieces else schema.empty_table()
    optional = pa.schema([field.with_nullable(True) for field in schema])
    return pa.concat_tables([piece.cast(optional) for piece in pieces])


def _readable_batches(first: Part) -> Iterator[tuple[pa.Table, dict[int, RowError]]]:
    """(rows, errors by row) of the part's row group, from its beginning."""
    file, group = first.file, first.row_group
    if file.kind == "jsonl":
        yield from _line_batches(file, group)
        return
    try:
        for batch in parquet_batches(file, group, None):
            yield batch, {}
    except DamagedError as damage:
        rows = file.row_groups[group] - damage.position
        error = RowError(
            UNREADABLE,
            f"the input file {file.name}, row group {group}, cannot be read from row {damage.position} on: "
            f"{damage}",
        )
        for start in range(0, rows, BATCH_ROWS):
            count = min(BATCH_ROWS, rows - start)
            columns = [pa.nulls(count, field.type) for field in file.schema]
            optional = pa.schema([field.with_nullable(True) for field in file.schema])
            yield pa.Table.from_arrays(columns, schema=optional), dict.fromkeys(range(count), error)


def parquet_batches(file: InputFile, group: int, names: list[str] | None) -> Iterator[pa.Table]:
    """Rows of a row group of a Parquet file; names: the columns, None = all. Raises `DamagedError`."""
    position = 0
    delays = iter(() if isinstance(file.filesystem, pafs.LocalFileSystem) else _RETRY_DELAYS_S)
    own = None if names is None else [name for name in names if name not in file.partitions]
    while True:
        skipped = 0
        try:
            with contextlib.ExitStack() as stack:
                source = stack.enter_context(file.filesystem.open_input_file(file.path))
                parquet = pq.ParquetFile(source, buffer_size=READ_BUFFER, pre_buffer=False)
                for batch in parquet.iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=own, use_threads=False
                ):
                    if skipped < position:  # had before the reading was begun again
                        skipped += batch.num_rows
                        continue
                    yield _with_partitions(pa.Table.from_batches([batch]), file, names)
                    position += batch.num_rows
                    skipped = position
            return
        except (OSError, pa.ArrowException) as error:
            delay = next(delays, None)
            if delay is None:
                raise _damage(file, position, error) from None
            time.sleep(delay)


def _damage(file: InputFile, position: int, error: Exception) -> DamagedError:
    """Damaged data, unless the file as a whole is gone or has changed, which raises `InputError`."""
    if file_footer(file) != file.footer:
        raise InputError(
            f"the input file {file.path} has changed since the job was planned. Bring it back and run the "
            "same command again; what is committed is kept"
        ) from None
    return DamagedError(position, str(error))


def _with_partitions(table: pa.Table, file: InputFile, names: list[str] | None) -> pa.Table:
    for name, value in file.partitions.items():
        if names is None or name in names:
            field = file.schema.field(name)
            table = table.append_column(field, pa.array([value] * table.num_rows, field.type))
    return table


def _line_batches(file: InputFile, group: int) -> Iterator[tuple[pa.Table, dict[int, RowError]]]:
    """(rows, errors by row) of a block of JSON lines."""
    rows: list[dict[str, Any]] = []
    errors: dict[int, RowError] = {}
    for count, (line, parsed) in enumerate(line_objects(file, group), 1):
        row = {} if isinstance(parsed, RowError) else parsed
        problem = parsed if isinstance(parsed, RowError) else _no_text(row, file.texts, line.number)
        if problem is not None:
            errors[len(rows)] = problem
        rows.append(row)
        if len(rows) == BATCH_ROWS or count == file.row_groups[group]:
            yield _line_table(rows, file), errors
            rows, errors = [], {}


def line_objects(file: InputFile, group: int) -> Iterator[tuple[jsonl.Line, dict[str, Any] | RowError]]:
    lines = jsonl.read_lines(file.filesystem, file.path, file.blocks[group])
    for _, line in zip(range(file.row_groups[group]), lines, strict=False):
        yield line, jsonl.parse(line)


def _no_text(row: dict[str, Any], texts: tuple[str, ...], line: int) -> RowError | None:
    for name in texts:
        if (value := row.get(name)) is not None and not isinstance(value, str):
            kind = jsonl.JSON_NAMES[type(value)]
            return RowError("wrong_type", f"column {name} holds {kind} in line {line}, expected a string")
    return None


def _line_table(rows: list[dict[str, Any]], file: InputFile) -> pa.Table:
    own = pa.schema([field for field in file.schema if field.name not in file.partitions])
    try:
        return _with_partitions(jsonl.table(rows, own), file, None)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise InputError(
            f"the input file {file.path} has changed since the job was planned: {error}. Bring it back and "
            "run the same command again; what is committed is kept"
        ) from None
