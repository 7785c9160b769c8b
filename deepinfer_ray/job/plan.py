"""What is to be done, fixed before anything runs: files → units (row groups) → parts (row ranges).

Knows: Parquet footers, blocks of JSON lines, row counts. Does not know: a row, a model, what is done already.
A part's name depends on the input alone, so a resumed run finds its parts again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from deepinfer_ray.errors import InputError, RowError
from deepinfer_ray.job import jsonl
from deepinfer_ray.job.locate import KINDS, FoundFile, FoundFiles, Kind, locate

PART_BYTES = 64 << 20
"""Uncompressed input bytes that a part aims to stay below; rows of wide files go into smaller parts."""

_FOOTER_THREADS = 8


@dataclass(frozen=True, eq=False)
class InputFile:
    """One input file. `name`: its path below the input, part of every row id. `row_groups`: their rows.

    `rows_per_part`: per row group, the length of its parts' row ranges. `footer`: SHA-256 of the Parquet
    footer, which names every column chunk's place and size, or of all JSON lines. `schema`: the columns,
    those of `partitions` (key → value, of the file's folders) last. `blocks`: of JSON lines, where row groups
    begin. `texts`: columns of JSON lines in which anything but a string is the row's error.
    """

    name: str
    path: str
    size: int
    footer: str
    row_groups: tuple[int, ...]
    rows_per_part: tuple[int, ...]
    schema: pa.Schema
    filesystem: pafs.FileSystem
    kind: Kind = "parquet"
    partitions: Mapping[str, str | int | None] = field(default_factory=dict)
    blocks: tuple[jsonl.Block, ...] = ()
    texts: tuple[str, ...] = ()

    def layout(self) -> dict[str, Any]:
        """What a resumed run must find again."""
        return {
            "name": self.name,
            "size": self.size,
            "footer_sha256": self.footer,
            "row_groups": list(self.row_groups),
            "rows_per_part": list(self.rows_per_part),
        }


@dataclass(frozen=True, eq=False)
class Part:
    """Rows `start` to `stop` (exclusive) of one row group; the unit of commitment.

    `row_base`: what its row numbers count from, in JSON lines the rows before its block, else 0. `errors`:
    rows that could not be read, by row of the part; known once the part was read.
    """

    unit: int
    sub: int
    file: InputFile
    row_group: int
    start: int
    stop: int
    row_base: int = 0
    errors: Mapping[int, RowError] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"part-{self.unit:06d}-{self.sub:04d}.parquet"

    def row_name(self, row: int) -> str:
        """Row id of the part's row `row` when the user's data has none."""
        group = self.row_group if self.file.kind == "parquet" else 0
        return f"{self.file.name}#{group}:{self.row_base + self.start + row}"


@dataclass(frozen=True, eq=False)
class InputPlan:
    """All files in name order and all parts in order. `limit`: only the first rows count, None = all."""

    files: tuple[InputFile, ...]
    limit: int | None
    ignored_files: int

    def iter_parts(self) -> Iterator[Part]:
        """All parts in order, made on the fly: a plan of a million parts stays small."""
        unit, left = 0, self.rows
        for file in self.files:
            base = 0
            for group, (rows, step) in enumerate(zip(file.row_groups, file.rows_per_part, strict=True)):
                taken = min(rows, left)
                for sub, start in enumerate(range(0, taken, step)):
                    yield Part(unit, sub, file, group, start, min(start + step, taken), base)
                left -= taken
                base += rows if file.kind == "jsonl" else 0
                unit += 1  # an empty row group keeps its number, so that a limit moves no other

    def with_rows_per_part(self, fixed: Mapping[str, Sequence[int]]) -> InputPlan:
        """The plan with the row ranges that an earlier run fixed, by file name; other files keep theirs."""
        files = (
            replace(file, rows_per_part=tuple(fixed[file.name]))
            if len(fixed.get(file.name, ())) == len(file.row_groups)
            else file
            for file in self.files
        )
        return replace(self, files=tuple(files))

    @property
    def rows(self) -> int:
        total = sum(sum(file.row_groups) for file in self.files)
        return total if self.limit is None else min(total, self.limit)


def plan_input(
    locations: Sequence[str],
    *,
    rows_per_part: int,
    limit: int | None = None,
    part_bytes: int = PART_BYTES,
    texts: Sequence[str] = (),
) -> InputPlan:
    """Find the files of `locations` (files, directories, globs, URIs) and cut them into parts.

    Reads footers of Parquet files, and JSON lines once. texts: see `InputFile`. Raises `InputError` for a
    location that gives no file and for a file that cannot be read.
    """
    return plan_files(
        locate(locations), rows_per_part=rows_per_part, limit=limit, part_bytes=part_bytes, texts=texts
    )


def plan_files(
    found: FoundFiles, *, rows_per_part: int, limit: int | None, part_bytes: int, texts: Sequence[str] = ()
) -> InputPlan:
    """`plan_input` of files that were found already."""
    types = _partition_types(found.files)

    def read(file: FoundFile) -> InputFile:
        return _read_footer(file, types, rows_per_part, part_bytes)

    if any(file.kind == "jsonl" for file in found.files):
        files = _index_lines(found.files, types, rows_per_part, part_bytes, tuple(texts))
    else:
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            files = tuple(pool.map(read, found.files))
    return InputPlan(files, limit, found.ignored)


def _read_footer(
    found: FoundFile, types: Mapping[str, pa.DataType], rows_per_part: int, part_bytes: int
) -> InputFile:
    try:
        with found.filesystem.open_input_file(found.path) as source:
            size = source.size()
            parquet = pq.ParquetFile(source)
            metadata, schema = parquet.metadata, parquet.schema_arrow
            footer = metadata.serialized_size
            source.seek(size - 8 - footer)
            digest = hashlib.sha256(source.read(footer)).hexdigest()
    except (OSError, pa.ArrowException) as error:
        advice = "Input is Parquet (.parquet) or JSON lines (.jsonl)"
        if found.path.endswith(tuple(KINDS)):
            advice = "Repair it or leave it out"
        raise InputError(
            f"the input file {found.path} cannot be read as Parquet: {str(error).rstrip('.')}. {advice}"
        ) from None
    rows, steps = [], []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        rows.append(group.num_rows)
        steps.append(_rows_per_part(group.total_byte_size, group.num_rows, rows_per_part, part_bytes))
    partitions = _partitions(found, types, schema)
    for name in partitions:
        schema = schema.append(pa.field(name, types[name]))
    return InputFile(
        name=found.name,
        path=found.path,
        size=size,
        footer=digest,
        row_groups=tuple(rows),
        rows_per_part=tuple(steps),
        schema=schema,
        filesystem=found.filesystem,
        partitions=partitions,
    )


def file_footer(file: InputFile) -> str:
    """The hash of a Parquet file's footer as it is now. Raises `InputError`."""
    found = FoundFile(file.filesystem, file.path, file.name, file.kind)
    return _read_footer(found, {}, 1, 1).footer


def _index_lines(
    found: Sequence[FoundFile],
    types: Mapping[str, pa.DataType],
    rows_per_part: int,
    part_bytes: int,
    texts: tuple[str, ...],
) -> tuple[InputFile, ...]:
    """JSON lines share one schema, so that every part has the same columns."""
    indexes = [jsonl.scan(file.filesystem, file.path) for file in found]
    own = jsonl.schema_of(index.kinds for index in indexes)
    names = dict.fromkeys(itertools.chain.from_iterable(_partitions(file, types, own) for file in found))
    schema = pa.schema([*own, *(pa.field(name, types[name]) for name in names)])
    return tuple(
        InputFile(
            name=file.name,
            path=file.path,
            size=index.size,
            footer=index.digest,
            row_groups=tuple(index.rows),
            rows_per_part=tuple(
                _rows_per_part(size, rows, rows_per_part, part_bytes)
                for size, rows in zip(index.bytes, index.rows, strict=True)
            ),
            schema=schema,
            filesystem=file.filesystem,
            kind="jsonl",
            partitions=dict.fromkeys(names) | _partitions(file, types, own),
            blocks=tuple(index.blocks),
            texts=texts,
        )
        for file, index in zip(found, indexes, strict=True)
    )


def _rows_per_part(size: int, rows: int, most: int, part_bytes: int) -> int:
    return max(1, min(most, part_bytes // max(1, size // max(1, rows))))


def _partition_types(files: Sequence[FoundFile]) -> dict[str, pa.DataType]:
    """int64 where every value of a key is a whole number in its usual spelling, else string."""
    values: dict[str, list[str]] = {}
    for file in files:
        for key, value in file.partitions:
            values.setdefault(key, []).extend([] if value is None else [value])
    return {
        key: pa.int64() if seen and all(_is_plain_int(text) for text in seen) else pa.string()
        for key, seen in values.items()
    }


def _is_plain_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 19 and str(int(text)) == text


def _partitions(
    found: FoundFile, types: Mapping[str, pa.DataType], own: pa.Schema
) -> dict[str, str | int | None]:
    """Values of the file's folders, but for keys that are columns of the data."""
    return {
        key: int(text) if text is not None and pa.types.is_integer(types[key]) else text
        for key, text in found.partitions
        if key not in own.names
    }
