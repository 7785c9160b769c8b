"""One driver for one output: a small file with an owner and a heartbeat.

Knows: the lease file, clocks, whether a process of this machine lives. Does not know: what the driver does.
A second driver is refused; a lease whose heartbeat stopped, or whose process is gone, is taken over.

A local file system decides who creates the file. An object store cannot, the last upload wins there: so a
driver looks again after a while whether the lease is still its own, and every heartbeat looks once more. Two
drivers that were at it in the same moment may thus overlap for a heartbeat; both would write the same rows
under the same names.
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

SETTLE_S = 1.0
"""How long after its upload a driver looks whether the lease is still its own; longer if uploads are slow."""

LOCAL_SETTLE_S = 0.1
"""The same on a local file system, where only a takeover can meet another one."""


_held: set[str] = set()
"""Ids of the leases that this process holds."""


class Lease:
    """Held from `acquire` to `release`; a thread renews it in between.

    `check` raises `OutputError` once the lease is lost: another driver has it, or it could not be renewed for
    so long that another driver may have it. clock: seconds since 1970, as all drivers see it.
    """

    def __init__(
        self,
        store: Store,
        *,
        expiry_s: float = EXPIRY_S,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._expiry_s = expiry_s
        self._heartbeat_s = heartbeat_s
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._owner: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_namespace": _pid_namespace(),
            "process_started": _process_start(os.getpid()),
        }
        self._stop = threading.Event()
        self._renewing = threading.Lock()
        self._renewed = monotonic()
        self._lost: str | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease. Raises `ConfigError` naming the other driver when it is held."""
        for _ in range(3):
            began = self._monotonic()
            holder = self._read()
            if holder is not None and self._alive(holder):
                self._refuse(holder)
            if self._claim(began, free=holder is None):
                break
        else:
            raise ConfigError(f"cannot take the lease of {self._store.location}: another driver was faster")
        self._renewed = self._monotonic()
        _held.add(self._owner["id"])
        self._thread = threading.Thread(target=self._renew_forever, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """To be called before anything is written. Raises `OutputError`."""
        if self._lost is None and self._monotonic() - self._renewed > self._expiry_s:
            self._renew()  # the thread could not for long: this process may have been asleep
            if self._lost is None and self._monotonic() - self._renewed > self._expiry_s:
                self._lost = (
                    f"the lease of {self._store.location} could not be renewed for {self._expiry_s:.0f} s, "
                    "so another driver may have taken the output over. What is committed is safe: run the "
                    "same command again"
                )
        if self._lost is not None:
            raise OutputError(self._lost)

    def release(self) -> None:
        """Stop renewing and remove the file if it is still ours."""
        self._stop.set()
        _held.discard(self._owner["id"])
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, DeepInferError):
            if self._is_ours(self._read()):
                self._store.take(LEASE)

    def _claim(self, began: float, *, free: bool) -> bool:
        """Write our name over nothing (free) or over an expired lease; whether it is still there later.

        began: when we looked; others may be as slow as we were.
        """
        if self._store.local:
            if not free:
                self._store.take(LEASE)
            if not self._store.create(LEASE, self._content()):
                return False
            settle = 0.0 if free else LOCAL_SETTLE_S
        else:
            self._store.write(LEASE, lambda file: file.write(self._content()))
            settle = max(SETTLE_S, 2 * (self._monotonic() - began))
        if settle:
            self._sleep(settle)
        return self._is_ours(self._read())

    def _renew_forever(self) -> None:
        while not self._stop.wait(self._heartbeat_s) and self._lost is None:
            self._renew()

    def _renew(self) -> None:
        with self._renewing, contextlib.suppress(OSError, DeepInferError):  # a store may fail for a moment
            holder = self._read()
            if not self._is_ours(holder):
                who = "was removed" if holder is None else f"is now held by process {holder.get('pid')}"
                self._lost = (
                    f"the lease of {self._store.location} {who}; this driver stops to write nothing twice"
                )
                return
            began = self._monotonic()
            self._store.write(LEASE, lambda file: file.write(self._content()))
            self._renewed = began

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "heartbeat": self._clock()}).encode()

    def _is_ours(self, holder: dict[str, Any] | None) -> bool:
        return holder is not None and holder.get("id") == self._owner["id"]

    def _read(self) -> dict[str, Any] | None:
        for _ in range(3):
            raw = self._store.read(LEASE)
            if raw is None:
                return None
            try:
                return dict(json.loads(raw))
            except (ValueError, TypeError):
                time.sleep(0.1)  # just created, not yet filled
        return {}

    def _alive(self, holder: dict[str, Any]) -> bool:
        """Whether the holder's process lives or its heartbeat goes on.

        A heartbeat that looks old may come from a machine whose clock is behind, so it is watched a while.
        """
        started = holder.get("process_started")
        here = all(holder.get(name) == self._owner[name] for name in ("host", "pid_namespace"))
        if here and started is not None:
            if holder.get("pid") == self._owner["pid"] and started == self._owner["process_started"]:
                return holder.get("id") in _held  # else a job of this process that could not remove it
            return _process_start(int(holder.get("pid", -1))) == started
        if self._clock() - float(holder.get("heartbeat", 0)) <= self._expiry_s:
            return True
        if not holder:
            return False
        self._sleep(1.5 * self._heartbeat_s)
        return self._read() not in (None, holder)

    def _refuse(self, holder: dict[str, Any]) -> None:
        age = max(0.0, self._clock() - float(holder.get("heartbeat", 0)))
        raise ConfigError(
            f"another driver writes to {self._store.location}: process {holder.get('pid')} on "
            f"{holder.get('host')}, last heartbeat {age:.0f} s ago. Wait for it or stop it; a driver "
            f"that died is taken over {self._expiry_s:.0f} s after its last heartbeat"
        )


def _process_start(pid: int) -> str | None:
    """When a process of this machine began, in its kernel's words; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _pid_namespace() -> str | None:
    """Containers with one host name may number their processes apart."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
