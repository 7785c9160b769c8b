"""What is to be done, fixed before anything runs: files → units (row groups) → parts (row ranges).

Knows: file names, Parquet footers, row counts. Does not know: a row, a model, what is done already.
A part's name depends on the input alone, so a resumed run finds its parts again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from deepinfer_ray.errors import InputError
from deepinfer_ray.job.store import resolve

PART_BYTES = 64 << 20
"""Uncompressed input bytes that a part aims to stay below; rows of wide files go into smaller parts."""

_FOOTER_THREADS = 8
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, eq=False)
class InputFile:
    """One Parquet file. `name`: its path below the input, part of every row id. `row_groups`: their rows.

    `rows_per_part`: per row group, the length of its parts' row ranges. `footer`: SHA-256 of the Parquet
    footer, which names every column chunk's place and size.
    """

    name: str
    path: str
    size: int
    footer: str
    row_groups: tuple[int, ...]
    rows_per_part: tuple[int, ...]
    schema: pa.Schema
    filesystem: pafs.FileSystem

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
    """Rows `start` to `stop` (exclusive) of one row group; the unit of commitment."""

    unit: int
    sub: int
    file: InputFile
    row_group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"part-{self.unit:06d}-{self.sub:04d}.parquet"

    def row_name(self, row: int) -> str:
        """Row id of the part's row `row` when the user's data has none."""
        return f"{self.file.name}#{self.row_group}:{self.start + row}"


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
            for group, (rows, step) in enumerate(zip(file.row_groups, file.rows_per_part, strict=True)):
                taken = min(rows, left)
                for sub, start in enumerate(range(0, taken, step)):
                    yield Part(unit, sub, file, group, start, min(start + step, taken))
                left -= taken
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
) -> InputPlan:
    """Find the Parquet files of `locations` (files, directories, globs, URIs) and cut them into parts.

    Reads footers only. In directories and globs, names that start with `_` or `.` (`_SUCCESS`, hidden files)
    are left alone, in directories also what does not end in `.parquet`; a file named by itself is taken.
    Raises `InputError` for a location that gives no file and for a file whose footer cannot be read.
    """
    found: dict[
        str, tuple[pafs.FileSystem, str]
    ] = {}  # by path: a file counts once, however often it is named
    ignored = 0
    for location in locations:
        filesystem, paths, base, skipped = _expand(location)
        ignored += skipped
        for path in paths:
            found.setdefault(path, (filesystem, path[len(base) :].lstrip("/")))
    names = [name for _, name in found.values()]
    if len(set(names)) < len(names):  # two inputs with equal names below them: name from the common root on
        root = _common_root(list(found))
        found = {path: (filesystem, path[len(root) :]) for path, (filesystem, _) in found.items()}
    ordered = sorted(found, key=lambda path: found[path][1])

    def read(path: str) -> InputFile:
        filesystem, name = found[path]
        return _read_footer(name, path, filesystem, rows_per_part, part_bytes)

    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        files = pool.map(read, ordered)
        return InputPlan(tuple(files), limit, ignored)


def _expand(location: str) -> tuple[pafs.FileSystem, list[str], str, int]:
    """(file system, paths, base directory, files ignored) of one `--input`."""
    filesystem, path = resolve(location)
    try:
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.File:
            return filesystem, [path], path.rpartition("/")[0], 0
        pattern = None
        base = path
        if info.type == pafs.FileType.NotFound:
            if not _GLOB.search(path):
                raise InputError(f"the input {location} does not exist")
            base = path[: _GLOB.search(path).start()].rpartition("/")[0]  # type: ignore[union-attr]
            pattern = re.compile(_glob_pattern(path))
        listed = filesystem.get_file_info(pafs.FileSelector(base, recursive=True, allow_not_found=True))
    except OSError as error:
        raise InputError(f"cannot look into the input {location}: {error}") from None
    paths, ignored = [], 0
    for entry in listed:
        if entry.type != pafs.FileType.File:
            continue
        below = entry.path[len(base) :].strip("/")
        if pattern is not None and not pattern.fullmatch(entry.path):
            continue
        if any(piece.startswith(("_", ".")) for piece in below.split("/")):
            continue
        if pattern is None and not below.endswith(".parquet"):
            ignored += 1
            continue
        paths.append(entry.path)
    if not paths:
        other = f" ({ignored} files there do not end in .parquet)" if ignored else ""
        raise InputError(f"the input {location} has no Parquet file{other}")
    return filesystem, paths, base, ignored


def _glob_pattern(pattern: str) -> str:
    """Regular expression of a shell pattern: `*` and `?` stay within a name, `**/` crosses directories."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        special.get(piece) or (piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece))
        for piece in pieces
    )


def _common_root(paths: list[str]) -> str:
    folders = [path.split("/")[:-1] for path in paths]
    depth = 0
    while all(len(folder) > depth and folder[depth] == folders[0][depth] for folder in folders):
        depth += 1
    return "".join(f"{piece}/" for piece in folders[0][:depth])


def _read_footer(
    name: str, path: str, filesystem: pafs.FileSystem, rows_per_part: int, part_bytes: int
) -> InputFile:
    try:
        with filesystem.open_input_file(path) as source:
            size = source.size()
            parquet = pq.ParquetFile(source)
            metadata, schema = parquet.metadata, parquet.schema_arrow
            footer = metadata.serialized_size
            source.seek(size - 8 - footer)
            digest = hashlib.sha256(source.read(footer)).hexdigest()
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"the input file {path} cannot be read as Parquet: {error}. Repair it or leave it out"
        ) from None
    rows, steps = [], []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        rows.append(group.num_rows)
        bytes_per_row = max(1, group.total_byte_size // max(1, group.num_rows))
        steps.append(max(1, min(rows_per_part, part_bytes // bytes_per_row)))
    return InputFile(name, path, size, digest, tuple(rows), tuple(steps), schema, filesystem)
