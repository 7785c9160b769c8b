"""One safetensors file: its header, checked by hand, and positional reads of byte ranges.

Knows: the container format and its limits (spec/model.md §2.5, 7). Does not know: which tensors should exist.
Data is read with `pread` into buffers that the caller keeps: no mapping, no second copy, so that resident
memory grows by what is kept and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.model.tensors import ITEM_BYTES

MAX_HEADER_BYTES = 100_000_000
READ_CHUNK_BYTES = 64 * 2**20
"""Bytes of one `pread`: progress is checked between chunks."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class TensorEntry(NamedTuple):
    """Where a tensor lies: `begin`/`end` are absolute byte offsets in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _entry(path: Path, name: str, raw: object, data_start: int, size: int) -> TensorEntry:
    """One header item; every malformed one is a `CheckpointError` that names file and tensor."""

    def bad(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name}: {why}; the file is damaged, fetch it again")

    if not isinstance(raw, dict):
        raise bad("its header entry is not an object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str):
        raise bad(f"dtype {dtype!r} is not a text")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise bad(f"shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise bad(f"data_offsets {offsets!r} are not two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - data_start:
        raise bad(f"data_offsets [{begin}, {end}] lie outside the file's {size - data_start} data bytes")
    # A dtype that we do not know matters only if the model needs the tensor (checked against its spec).
    if dtype in ITEM_BYTES and end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise bad(
            f"data_offsets [{begin}, {end}] hold {end - begin} bytes, but {dtype} {shape} needs "
            f"{prod(shape) * ITEM_BYTES[dtype]}"
        )
    return TensorEntry(dtype, tuple(shape), data_start + begin, data_start + end)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Entries of a safetensors file by stored name, all ranges checked. Raises `CheckpointError`."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = os.pread(file.fileno(), 8, 0)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: holds {size} bytes, too short for a safetensors header")
            length = int.from_bytes(prefix, "little")
            limit = min(MAX_HEADER_BYTES, size - 8)
            if not 0 < length <= limit:
                raise CheckpointError(
                    f"{path}: header length {length} is outside [1, {limit}]; "
                    "the file is truncated or no safetensors file, fetch it again"
                )
            text = _pread_all(file.fileno(), length, 8, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not valid JSON: {error}; fetch the file again"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object; fetch the file again")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, raw, 8 + length, size) for name, raw in header.items()}


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, value in pairs:
        if key in items:
            raise ValueError(f"the key {key!r} occurs twice")
        items[key] = value
    return items


def _pread_all(fd: int, length: int, offset: int, path: Path) -> bytes:
    parts = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            raise CheckpointError(
                f"{path}: ends at byte {offset}, {length} bytes are missing; fetch it again"
            )
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Writable bytes of a contiguous CPU tensor of any dtype."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class ShardFile:
    """An open shard. Reads are positional, so threads may share one."""

    def __init__(self, path: Path, entries: dict[str, TensorEntry]) -> None:
        self.path = path
        self.entries = entries
        self._fd: int | None = None

    def read_into(
        self, buffer: memoryview, offset: int, name: str, between_chunks: Callable[[], None] | None = None
    ) -> None:
        """Fill `buffer` from the file at byte `offset`; a short file is a `CheckpointError`."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from None
        done = 0
        while done < len(buffer):
            if between_chunks is not None:
                between_chunks()
            try:
                got = os.preadv(self._fd, [buffer[done : done + READ_CHUNK_BYTES]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: reading {name} failed: {error.strerror}") from None
            if got == 0:
                raise CheckpointError(
                    f"{self.path}: tensor {name} ends after {done} of {len(buffer)} bytes; "
                    "the file was truncated after it was opened, fetch it again"
                )
            done += got

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
