"""A directory on any pyarrow file system, with writes that are there whole or not at all.

Knows: paths, temporary names, fsync, rename. Does not know: parts, manifests, tables.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow import fs as pafs

from deepinfer_ray.errors import ConfigError, OutputError

TEMPORARY = "_deepinfer/tmp"
"""Where half-written files live: on the file system of the output, so that a rename is atomic."""


def resolve(location: str) -> tuple[pafs.FileSystem, str]:
    """(file system, path on it) of a local path or a URI such as `s3://bucket/key` or `hf://datasets/…`.

    Raises `ConfigError` for a URI that no file system takes.
    """
    if "://" not in location:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))
    try:
        filesystem, path = pafs.FileSystem.from_uri(location)
    except pa.ArrowInvalid:  # no file system of pyarrow's
        return _fsspec(location)
    except OSError as error:
        raise ConfigError(f"cannot use the location {location}: {error}") from None
    return filesystem, path


def _fsspec(location: str) -> tuple[pafs.FileSystem, str]:
    try:
        filesystem, path = fsspec.core.url_to_fs(location)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(
            f"cannot use the location {location}: {error}. Give a local path or what pyarrow or fsspec opens"
        ) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


@contextlib.contextmanager
def output_errors(what: str) -> Iterator[None]:
    """Turn a failing disk or store into `OutputError`, which says what failed and that it can be resumed."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise OutputError(
            f"cannot write {what}: {reason}. What is committed is safe: "
            "free the output directory of this problem and run the same command again"
        ) from error


class Store:
    """Files under one root. Relative names use `/`."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.filesystem, self.root = resolve(location)
        self.local = isinstance(self.filesystem, pafs.LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def make(self) -> None:
        """Create the root and our own folder in it. Raises `OutputError`."""
        with output_errors(self.location):
            info = self.filesystem.get_file_info(self.root)
            if info.type == pafs.FileType.File:
                raise ConfigError(f"the output {self.location} is a file; give a directory")
            self.filesystem.create_dir(self.path(TEMPORARY), recursive=True)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files directly in `folder`, sorted; empty when there is no such folder."""
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True)
        return sorted(
            info.base_name
            for info in self.filesystem.get_file_info(selector)
            if info.type == pafs.FileType.File
        )

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return bool(self.filesystem.get_file_info(self.path(name)).type == pafs.FileType.File)

    def read(self, name: str) -> bytes | None:
        """The content of a file, None when there is none."""
        if self.filesystem.get_file_info(self.path(name)).type != pafs.FileType.File:
            return None
        try:
            with self.filesystem.open_input_file(self.path(name)) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def write(self, name: str, fill: Callable[[Any], None]) -> None:
        """Create or replace `name` by what `fill(file)` writes; readers see the old content or the new.

        Local: temporary file, fsync, rename, fsync of the directory, so a power cut cannot show half a file.
        Elsewhere: one upload, which object stores show only when it is complete. Raises `OutputError`.
        """
        with output_errors(self.path(name)):
            if not self.local:
                with self.filesystem.open_output_stream(self.path(name)) as file:
                    fill(file)
                return
            temporary = self.path(f"{TEMPORARY}/{name.replace('/', '-')}.{uuid.uuid4().hex[:8]}")
            try:
                with open(temporary, "wb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            _sync_directory(os.path.dirname(self.path(name)))

    def create(self, name: str, data: bytes) -> bool:
        """Create `name`; False when it exists already (decided by the file system where that is local)."""
        with output_errors(self.path(name)):
            if not self.local:
                if self.read(name) is not None:
                    return False
                self.write(name, lambda file: file.write(data))
                return True
            try:
                handle = os.open(self.path(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            with open(handle, "wb") as file:
                file.write(data)
            return True

    def take(self, name: str) -> bool:
        """Remove `name`; of several processes that try, exactly one is told True (local file systems)."""
        try:
            self.filesystem.delete_file(self.path(name))
        except OSError:
            return False
        return True

    def clear_temporary(self) -> int:
        """Remove what a killed run left half-written; how many files that was."""
        left = self.names(TEMPORARY)
        for name in left:
            with contextlib.suppress(OSError):
                self.filesystem.delete_file(self.path(f"{TEMPORARY}/{name}"))
        return len(left)


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
