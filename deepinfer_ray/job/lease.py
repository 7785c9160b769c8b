"""One driver for one output: a small file with an owner and a heartbeat.

Knows: the lease file, clocks, whether a process of this machine lives. Does not know: what the driver does.
A second driver is refused; a lease whose heartbeat stopped, or whose process is gone, is taken over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from deepinfer_ray.errors import ConfigError, DeepInferError, OutputError
from deepinfer_ray.job.store import Store

LEASE = "_deepinfer/lease.json"

EXPIRY_S = 60.0
"""A heartbeat older than this means that its driver is gone."""

HEARTBEAT_S = 10.0


class Lease:
    """Held from `acquire` to `release`; a thread renews it in between.

    `check` raises `OutputError` once the lease is lost (another driver took it after our heartbeat failed).
    """

    def __init__(
        self,
        store: Store,
        *,
        expiry_s: float = EXPIRY_S,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._expiry_s = expiry_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._owner = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": _process_start(os.getpid()),
        }
        self._stop = threading.Event()
        self._lost: str | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease. Raises `ConfigError` naming the other driver when it is held."""
        for _ in range(3):
            if self._store.create(LEASE, self._content()):
                break
            holder = self._read()
            if holder is not None and self._alive(holder):
                age = max(0.0, self._clock() - float(holder.get("heartbeat", 0)))
                raise ConfigError(
                    f"another driver writes to {self._store.location}: process {holder.get('pid')} on "
                    f"{holder.get('host')}, last heartbeat {age:.0f} s ago. Wait for it or stop it; a driver "
                    f"that died is taken over {self._expiry_s:.0f} s after its last heartbeat"
                )
            self._store.take(LEASE)
        else:
            raise ConfigError(f"cannot take the lease of {self._store.location}: another driver was faster")
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._lost is not None:
            raise OutputError(self._lost)

    def release(self) -> None:
        """Stop renewing and remove the file if it is still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, DeepInferError):
            holder = self._read()
            if holder is not None and holder.get("id") == self._owner["id"]:
                self._store.take(LEASE)

    def _renew(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            try:
                holder = self._read()
                if holder is None or holder.get("id") != self._owner["id"]:
                    who = "was removed" if holder is None else f"is now held by process {holder.get('pid')}"
                    self._lost = (
                        f"the lease of {self._store.location} {who}; this driver stops to write nothing twice"
                    )
                    return
                self._store.write(LEASE, lambda file: file.write(self._content()))
            except (OSError, DeepInferError):
                continue  # a store that fails for a moment; if it goes on, a commit will say so

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "heartbeat": self._clock()}).encode()

    def _read(self) -> dict[str, Any] | None:
        for _ in range(3):
            raw = self._store.read(LEASE)
            if raw is None:
                return None
            try:
                return dict(json.loads(raw))
            except ValueError:
                time.sleep(0.1)  # just created, not yet filled
        return {}

    def _alive(self, holder: dict[str, Any]) -> bool:
        if self._clock() - float(holder.get("heartbeat", 0)) > self._expiry_s:
            return False
        if holder.get("host") != self._owner["host"]:
            return True
        started = holder.get("process_started")
        return started is None or _process_start(int(holder.get("pid", -1))) == started


def _process_start(pid: int) -> str | None:
    """When a process of this machine began, in its kernel's words; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
