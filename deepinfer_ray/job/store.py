"""A directory on any pyarrow file system, with writes that are there whole or not at all.

Knows: paths, temporary names, fsync, rename, uploads. Does not know: parts, manifests, tables.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any

import fsspec
import pyarrow as pa
from pyarrow import fs as pafs

from deepinfer_ray.errors import ConfigError, OutputError

TEMPORARY = "_deepinfer/tmp"
"""Where half-written files live: on the file system of the output, so that a rename is atomic."""

SPOOL_BYTES = 64 << 20
"""What is to be uploaded stays in memory up to this size, beyond it on the local disk."""

COPY_BYTES = 64 << 20
"""One piece up to this size: a file system that uploads in pieces then has but one."""

PUT_DELAYS_S = (0.5, 2.0, 8.0)
"""Waits between the tries of an upload."""

GOOGLE_RETRY_S = 120
"""How long one call to Google's storage tries; `?retry_limit_seconds=` in a location says otherwise."""

_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/")


def resolve(location: str) -> tuple[pafs.FileSystem, str]:
    """(file system, path on it) of a local path or a URI such as `s3://bucket/key` or `hf://datasets/…`.

    Raises `ConfigError` for a URI that no file system takes.
    """
    if "://" not in location:
        if scheme := _ONE_SLASH.match(location):  # else a typo would fill the local disk
            raise ConfigError(
                f"cannot use the location {location}: a URI begins with {scheme[1]}://. "
                f"For a local directory of that name write ./{location}"
            )
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))
    try:
        filesystem, path = pafs.FileSystem.from_uri(_with_patience(location))
    except pa.ArrowInvalid:  # no file system of pyarrow's
        return _fsspec(location)
    except OSError as error:
        raise ConfigError(f"cannot use the location {location}: {error}") from None
    return filesystem, path


def _with_patience(location: str) -> str:
    """A Google location with a limit: without one it retries for 15 minutes, deaf to signals."""
    google = location.startswith(("gs://", "gcs://")) and "?" not in location
    return f"{location}?retry_limit_seconds={GOOGLE_RETRY_S}" if google else location


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
    """Files under one root. Relative names use `/`. sleep: waits before a failed upload is tried again."""

    def __init__(self, location: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.location = location
        self._sleep = sleep
        self._made: set[str] = set()
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

    def make_folder(self, folder: str) -> None:
        """Create a folder whose parent is there, once. Raises `OutputError`."""
        if folder not in self._made:
            with output_errors(self.path(folder)):
                self.filesystem.create_dir(self.path(folder), recursive=False)
            self._made.add(folder)

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
        Elsewhere: one upload of what is complete already, which object stores show only when all of it is
        there; tried a few times, and its size is looked up. Raises `OutputError`.
        """
        with output_errors(self.path(name)):
            if not self.local:
                with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as whole:
                    fill(whole)
                    self._put(name, whole)
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

    def _put(self, name: str, whole: IO[bytes]) -> None:
        """Upload all of `whole`. What is left of a failed upload is removed: nobody must see half of it."""
        size, before = whole.tell(), self._size(name)
        delays = iter(PUT_DELAYS_S)
        while True:
            try:
                whole.seek(0)
                with self.filesystem.open_output_stream(self.path(name)) as file:
                    shutil.copyfileobj(whole, file, COPY_BYTES)
                there = self._size(name)
                if there == size:
                    return
                raise OSError(f"{size} bytes were sent, {there} are there")
            except BaseException as error:  # closing a stream may have shown what it had got so far
                with contextlib.suppress(Exception):
                    if self._size(name) not in (None, size, before):
                        self.filesystem.delete_file(self.path(name))
                if not isinstance(error, Exception):
                    raise
                delay = next(delays, None)
                if delay is None:
                    raise OSError(str(error)) from error  # stores have error types of their own
                self._sleep(delay)

    def _size(self, name: str) -> int | None:
        info = self.filesystem.get_file_info(self.path(name))
        return info.size if info.type == pafs.FileType.File else None

    def create(self, name: str, data: bytes) -> bool:
        """Create `name` on a local file system, which decides between several that try; False: it exists."""
        with output_errors(self.path(name)):
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
