"""Reading rows: the tables of parts as a stream, and the users' row ids checked as a whole.

Knows: Parquet reading with bounded memory. Does not know: prompts, tokens, what becomes of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deepinfer_ray.errors import InputError
from deepinfer_ray.job.plan import InputFile, InputPlan, Part

BATCH_ROWS = 256
"""Rows decoded at a time."""

READ_BUFFER = 1 << 20
"""Bytes of a column chunk read at a time; without it a whole column chunk is in memory."""


def read_parts(parts: Iterable[Part]) -> Iterator[tuple[Part, pa.Table]]:
    """The tables of `parts` in the given order, which must be plan order; gaps are skipped.

    Holds one part and one batch of `BATCH_ROWS` rows. Raises `InputError` naming file and row group when data
    cannot be decoded.
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
    file, row_group = parts[0].file, parts[0].row_group
    position = 0  # row of the row group that the next batch begins with
    waiting = iter(parts)
    part = next(waiting)
    pieces: list[pa.RecordBatch] = []
    for batch in _batches(file, row_group, None):
        end = position + batch.num_rows
        while True:
            begin, stop = max(part.start, position), min(part.stop, end)
            if begin < stop:
                pieces.append(batch.slice(begin - position, stop - begin))
            if part.stop > end:
                break
            yield part, pa.Table.from_batches(pieces, schema=file.schema)
            pieces = []
            following = next(waiting, None)
            if following is None:
                return
            part = following
        position = end
    raise InputError(
        f"the input file {file.path} ends early: row group {row_group} has {position} rows, its footer says "
        f"{file.row_groups[row_group]}"
    )


def _batches(file: InputFile, row_group: int, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(file.filesystem.open_input_file(file.path))
            parquet = pq.ParquetFile(source, buffer_size=READ_BUFFER, pre_buffer=False)
            yield from parquet.iter_batches(
                BATCH_ROWS, row_groups=[row_group], columns=columns, use_threads=False
            )
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"the input file {file.path}, row group {row_group}, cannot be read: {error}. "
                "Repair the file and run the same command again; what is committed is kept"
            ) from None


def check_ids(plan: InputPlan, column: str) -> None:
    """Refuse null and duplicate ids before anything is loaded, naming file and row.

    Reads the id column alone and keeps 8 bytes a row. Raises `InputError`.
    """
    for file in plan.files:
        kind = file.schema.field(column).type
        if not _is_id_type(kind):
            raise InputError(f"{file.name}: the id column {column} is {kind}; ids are strings or integers")
    hashes = np.empty(plan.rows, np.int64)
    filled = 0
    for where, ids in _id_batches(plan, column):
        if None in ids:
            row = ids.index(None)
            raise InputError(f"the id column {column} is null in {_place(where, row)}; every row needs an id")
        hashes[filled : filled + len(ids)] = [hash(value) for value in ids]
        filled += len(ids)
    hashes.sort()
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not suspects:
        return
    seen: dict[str, str] = {}  # a hash may be shared by two ids, hence the second look
    for where, ids in _id_batches(plan, column):
        for row, value in enumerate(ids):
            if hash(value) not in suspects or value is None:
                continue
            place = _place(where, row)
            if value in seen:
                raise InputError(
                    f"the id {value!r} of column {column} occurs twice: in {seen[value]} and in {place}; "
                    "ids must be unique over all input files"
                )
            seen[value] = place


def id_strings(values: pa.Array | pa.ChunkedArray) -> list[str | None]:
    """Ids as strings: an integer by its decimal digits. Raises `UnicodeDecodeError` for broken UTF-8."""
    return [None if value is None else str(value) for value in values.to_pylist()]


def _id_batches(
    plan: InputPlan, column: str
) -> Iterator[tuple[tuple[InputFile, int, int], list[str | None]]]:
    """((file, row group, first row), ids) of the rows that the plan covers."""
    left = plan.rows
    for file in plan.files:
        for group, rows in enumerate(file.row_groups):
            position = 0
            if not rows or not left:
                continue
            for batch in _batches(file, group, [column]):
                batch = batch.slice(0, left)
                try:
                    ids = id_strings(batch.column(0))
                except UnicodeDecodeError:
                    raise InputError(
                        f"the id column {column} of {file.name} holds an id that is not UTF-8, in row group "
                        f"{group} within rows {position} to {position + batch.num_rows - 1}"
                    ) from None
                yield (file, group, position), ids
                position += batch.num_rows
                left -= batch.num_rows


def _place(where: tuple[InputFile, int, int], row: int) -> str:
    file, group, position = where
    return f"{file.name}, row group {group}, row {position + row}"


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
