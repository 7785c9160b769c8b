"""The private temporary directory of a local cluster: short, and not left behind even by a killed driver.

Knows: one directory per live driver, held by a file lock that the kernel drops with the process. Does not
know: Ray. A directory whose lock nobody holds belongs to a dead driver; the next driver here deletes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path("/tmp")
"""Ray keeps Unix sockets in its temporary directory; their paths must stay below 107 bytes."""

PREFIX = "dray-"
LOCK = "driver.lock"


class Scratch:
    """A new directory `ROOT/dray-…`, locked until `delete` or `keep`."""

    def __init__(self, root: Path = ROOT) -> None:
        sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        # the lock file appears under its name only when it is locked, so no sweep can take it in between
        hidden = self.path / f".{LOCK}"
        self._lock = os.open(hidden, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hidden.rename(self.path / LOCK)

    def delete(self) -> None:
        """Remove everything in it. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """Leave it for a person to read; no sweep will touch it."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(root: Path = ROOT) -> list[Path]:
    """Delete the directories of dead drivers of this user; returns them."""
    deleted = []
    for lock in root.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if lock.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                deleted.append(lock.parent)
            finally:
                os.close(descriptor)
    return deleted
