"""JSON lines: where blocks of rows begin, which columns there are, and rows as Arrow tables.

Knows: one file's lines. Does not know: parts, prompts, what a column is for.

A row is a line that is not blank. A line that is no JSON object is a row too, with null columns and an error
of its own. Columns are of one Arrow type over all files: JSON's numbers, booleans and strings as such; a
column that holds lists or objects, or values of different types, holds JSON texts, its strings as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from deepinfer_ray.engine.request import is_unicode
from deepinfer_ray.errors import InputError, RowError

BLOCK_ROWS = 10_000
BLOCK_BYTES = 64 << 20
"""Rows and bytes of a block at most (one row at least): what a row group is to a Parquet file."""

MAX_LINE_BYTES = 256 << 20
MAX_COLUMNS = 1000

JSON_NAMES = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "list",
    dict: "object",
}
"""Python type → what people call it."""

_CHUNK = 1 << 20
_INT64 = range(-(2**63), 2**63)
_TYPES = {
    frozenset({"bool"}): pa.bool_(),
    frozenset({"int"}): pa.int64(),
    frozenset({"float"}): pa.float64(),
    frozenset({"int", "float"}): pa.float64(),
}


@dataclass(frozen=True)
class Block:
    """Where a block begins: byte offset, and number of its first line, counted from 1."""

    offset: int
    line: int


@dataclass
class LineIndex:
    """What one pass over a file finds. rows, bytes: of each block. kinds: JSON types by column.

    malformed: rows that are no object; problem: what is wrong with the first of them.
    """

    size: int = 0
    digest: str = ""
    blocks: list[Block] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    kinds: dict[str, set[str]] = field(default_factory=dict)
    malformed: int = 0
    problem: str = ""


def scan(filesystem: pafs.FileSystem, path: str) -> LineIndex:
    """Read a file once. Raises `InputError` when it cannot be read or is no JSON lines at all."""
    index, digest = LineIndex(), hashlib.sha256()
    for line in _lines(filesystem, path, Block(0, 1), digest):
        index.size = line.end
        if line.blank:
            continue
        if not index.rows or index.rows[-1] >= BLOCK_ROWS or index.bytes[-1] >= BLOCK_BYTES:
            index.blocks.append(Block(line.offset, line.number))
            index.rows.append(0)
            index.bytes.append(0)
        index.rows[-1] += 1
        index.bytes[-1] += len(line.data)
        row = parse(line)
        if isinstance(row, RowError):
            index.malformed += 1
            index.problem = index.problem or str(row)
            continue
        for name, value in row.items():
            index.kinds.setdefault(name, set()).add(_kind_of(value))
        if len(index.kinds) > MAX_COLUMNS:
            raise InputError(f"the input file {path} has more than {MAX_COLUMNS} different keys in its rows")
    if index.malformed and index.malformed == sum(index.rows):
        raise InputError(
            f"the input file {path} has no line that is a JSON object: {index.problem}. JSON lines hold one "
            "object a line, not an array and not objects over several lines"
        )
    index.digest = digest.hexdigest()
    return index


def schema_of(kinds: Iterable[Mapping[str, set[str]]]) -> pa.Schema:
    """One schema for files of these JSON types, columns in the order in which they come up."""
    joined: dict[str, set[str]] = {}
    for one in kinds:
        for name, seen in one.items():
            joined.setdefault(name, set()).update(seen)
    return pa.schema(
        [(name, _TYPES.get(frozenset(seen - {"null"}), pa.string())) for name, seen in joined.items()]
    )


@dataclass(slots=True)
class Line:
    """number: from 1. offset, end: bytes in the file. data: without line end."""

    number: int
    offset: int
    end: int
    data: bytes

    @property
    def blank(self) -> bool:
        return not self.data or self.data.isspace()


def read_lines(filesystem: pafs.FileSystem, path: str, block: Block) -> Iterator[Line]:
    """The rows' lines from a block on, to the end of the file. Raises `InputError`."""
    return (line for line in _lines(filesystem, path, block, None) if not line.blank)


def parse(line: Line) -> dict[str, Any] | RowError:
    """The object of a line, or what is wrong with it (`wrong_type`)."""
    try:
        row = json.loads(line.data.decode())
    except UnicodeDecodeError as error:
        return RowError("wrong_type", f"line {line.number} is not valid UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        text = f"line {line.number} is no JSON: {error.msg} at column {error.colno}"
        return RowError("wrong_type", text)
    except (ValueError, RecursionError) as error:
        return RowError("wrong_type", f"line {line.number} is no JSON: {error}")
    if not isinstance(row, dict):
        return RowError("wrong_type", f"line {line.number} holds {_kind_of(row)}, a row is a JSON object")
    if b"\\u" in line.data and any(not is_unicode(name) for name in row):
        return RowError("wrong_type", f"line {line.number} has a key that holds a lone surrogate")
    return row


def table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as columns of `schema`. Raises `ValueError` or `TypeError` for a value of another type."""
    arrays = []
    for column in schema:
        values = [row.get(column.name) for row in rows]
        if pa.types.is_string(column.type):
            arrays.append(_strings(values))
        elif pa.types.is_floating(column.type):
            arrays.append(pa.array([None if v is None else float(v) for v in values], column.type))
        else:
            arrays.append(pa.array(values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _strings(values: Sequence[Any]) -> pa.Array:
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a lone surrogate: kept as bytes that are no UTF-8, which is the row's error
        raw = [None if text is None else text.encode(errors="surrogatepass") for text in texts]
        binary = pa.array(raw, pa.binary())
        return pa.Array.from_buffers(pa.string(), len(binary), binary.buffers(), binary.null_count)


def _lines(filesystem: pafs.FileSystem, path: str, start: Block, digest: Any) -> Iterator[Line]:
    """All lines from `start` on; `digest` is fed with every byte."""
    number, offset = start.line, start.offset
    rest: list[bytes] = []  # pieces of the line that is not complete yet
    waiting = 0
    try:
        with filesystem.open_input_file(path) as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK):
                if digest is not None:
                    digest.update(chunk)
                first, *others = chunk.split(b"\n")
                rest.append(first)
                waiting += len(first)
                if waiting > MAX_LINE_BYTES:
                    raise InputError(
                        f"the input file {path} has a line of more than {MAX_LINE_BYTES} bytes, line {number}"
                    )
                for piece in others:
                    data = b"".join(rest)
                    yield _line(number, offset, data)
                    number, offset = number + 1, offset + len(data) + 1
                    rest, waiting = [piece], len(piece)
    except OSError as error:
        raise InputError(f"the input file {path} cannot be read: {error}") from None
    if waiting:
        data = b"".join(rest)
        yield Line(number, offset, offset + len(data), _line(number, offset, data).data)


def _line(number: int, offset: int, data: bytes) -> Line:
    end = offset + len(data) + 1
    if offset == 0:
        data = data.removeprefix(b"\xef\xbb\xbf")
    return Line(number, offset, end, data.removesuffix(b"\r"))


def _kind_of(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if value in _INT64 else "big int"
    return JSON_NAMES[type(value)]
