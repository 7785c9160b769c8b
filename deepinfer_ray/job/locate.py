"""Which files an input names: files, directories, globs and URIs, with the partitions their folders spell.

Knows: paths, names, kinds of files. Does not know: what is in them, rows, parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import unquote

from pyarrow import fs as pafs

from deepinfer_ray.errors import InputError
from deepinfer_ray.job.store import resolve

Kind = Literal["parquet", "jsonl"]

KINDS: dict[str, Kind] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Endings of files that a directory is searched for."""

NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""How a folder spells a null."""

_COMPRESSED = (".gz", ".zst", ".bz2", ".lz4", ".xz", ".zip")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class FoundFile:
    """name: path below the input, part of every row id. partitions: (key, value) of `key=value` folders, in
    order; a null value is None."""

    filesystem: pafs.FileSystem
    path: str
    name: str
    kind: Kind
    partitions: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True)
class FoundFiles:
    """In name order. ignored: files in the directories that are of no kind we read."""

    files: tuple[FoundFile, ...]
    ignored: int


def locate(locations: Sequence[str]) -> FoundFiles:
    """The files of `locations`, each once, all of one kind.

    In directories and globs, names that start with `_` or `.` (`_SUCCESS`, hidden files) are left alone, in
    directories also what ends in none of `KINDS`; a file named by itself is taken. Raises `InputError`.
    """
    found: dict[str, FoundFile] = {}  # by path: a file counts once, however often it is named
    ignored = 0
    for location in locations:
        files, skipped = _expand(location)
        ignored += skipped
        for file in files:
            found.setdefault(file.path, file)
    _refuse_mixture(list(found.values()))
    names = [file.name for file in found.values()]
    if len(set(names)) < len(names):  # two inputs with equal names below them: name from the common root on
        root = _common_root(list(found))
        found = {path: replace(file, name=path[len(root) :]) for path, file in found.items()}
    return FoundFiles(tuple(sorted(found.values(), key=lambda file: file.name)), ignored)


def would_read(location: str, output: str) -> bool:
    """Whether parts written to the directory `output` would be files of the input `location`."""
    filesystem, path = resolve(location)
    output_system, root = resolve(output)
    if not filesystem.equals(output_system):
        return False
    if f"{root.rstrip('/')}/".startswith(f"{path.rstrip('/')}/"):
        return True
    return bool(re.fullmatch(_glob_pattern(path), f"{root.rstrip('/')}/part-000000-0000.parquet"))


def same_directory(location: str, other: str) -> bool:
    """Whether both are one directory; a local one by whatever path or link."""
    (filesystem, path), (other_system, other_path) = resolve(location), resolve(other)
    if isinstance(filesystem, pafs.LocalFileSystem):
        path, other_path = os.path.realpath(path), os.path.realpath(other_path)
    return filesystem.equals(other_system) and path.rstrip("/") == other_path.rstrip("/")


def _expand(location: str) -> tuple[list[FoundFile], int]:
    """(files, files ignored) of one `--input`."""
    filesystem, path = resolve(location)
    try:
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.File:
            return [_found(filesystem, path, path.rpartition("/")[0])], 0
        pattern, base = None, path
        if info.type == pafs.FileType.NotFound:
            special = _GLOB.search(path)
            if special is None:
                raise InputError(f"the input {location} does not exist")
            base = path[: special.start()].rpartition("/")[0]
            pattern = re.compile(_glob_pattern(path))
        listed = filesystem.get_file_info(pafs.FileSelector(base, recursive=True, allow_not_found=True))
        files, ignored = [], 0
        for entry in listed:
            below = entry.path[len(base) :].strip("/")
            if entry.type != pafs.FileType.File or (pattern and not pattern.fullmatch(entry.path)):
                continue
            if any(piece.startswith(("_", ".")) for piece in below.split("/")):
                continue
            if pattern is None and not below.endswith(tuple(KINDS)):
                ignored += 1
                continue
            files.append(_found(filesystem, entry.path, base))
    except OSError as error:
        raise InputError(f"cannot look into the input {location}: {error}") from None
    if not files:
        other = f" ({ignored} files there do not end in .parquet or .jsonl)" if ignored else ""
        raise InputError(f"the input {location} has no Parquet or JSONL file{other}")
    return files, ignored


def _found(filesystem: pafs.FileSystem, path: str, base: str) -> FoundFile:
    return FoundFile(
        filesystem, path, path[len(base) :].lstrip("/"), _kind(filesystem, path), _partitions(path)
    )


def _kind(filesystem: pafs.FileSystem, path: str) -> Kind:
    """By the ending of the name, else by the first bytes."""
    ending = next((ending for ending in KINDS if path.endswith(ending)), None)
    if ending is not None:
        return KINDS[ending]
    if path.endswith(_COMPRESSED):
        raise InputError(f"the input file {path} is compressed as a whole; decompress it first")
    if path.endswith(".json"):
        return "jsonl"
    with filesystem.open_input_file(path) as file:
        return "jsonl" if file.read(1024).lstrip()[:1] == b"{" else "parquet"


def _partitions(path: str) -> tuple[tuple[str, str | None], ...]:
    found: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        if key and equals:
            found[unquote(key)] = None if value == NO_PARTITION else unquote(value)
    return tuple(found.items())


def _refuse_mixture(files: list[FoundFile]) -> None:
    first = {file.kind: file for file in sorted(files, key=lambda file: file.name, reverse=True)}
    if len(first) > 1:
        raise InputError(
            f"the input holds Parquet and JSONL files, e.g. {first['parquet'].name} and "
            f"{first['jsonl'].name}; give one kind, e.g. with a glob that ends in *.parquet"
        )


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
