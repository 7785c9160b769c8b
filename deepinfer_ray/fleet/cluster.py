"""Joining a Ray cluster or starting one on this machine, and leaving it as it was.

Knows: `ray.init`, its traps, whose cluster it is. Does not know: ranks, rows.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepinfer_ray.errors import PlacementError
from deepinfer_ray.fleet.scratch import Scratch

logger = logging.getLogger(__name__)

LOCAL_OBJECT_STORE_BYTES = 200 * 2**20
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
ANSWER_TIMEOUT_S = 5.0

PATIENT = {"RAY_worker_register_timeout_seconds": "300"}
"""A worker on a busy small machine may take longer than Ray's 60 s to import what it needs."""


@dataclass(frozen=True)
class Connection:
    """A joined cluster. own: started here, so it ends with us. joined: this call connected the process.

    node_id: the machine through which this process is connected.
    """

    address: str
    own: bool
    joined: bool
    scratch: Scratch | None = None
    node_id: str = ""

    def close(self, *, keep_logs: bool = False) -> None:
        """Disconnect if `connect` connected; end the cluster and delete its files if it was started here."""
        import ray

        if self.joined and ray.is_initialized():
            ray.shutdown(wait_for_processes=self.own)
        if self.scratch is not None and keep_logs:
            self.scratch.keep()
            logger.warning("the logs of Ray and of every rank are kept in %s", self.scratch.path)
        elif self.scratch is not None:
            self.scratch.delete()


def connect(
    address: str | None = None, *, num_cpus: int | None = None, num_gpus: int | None = None
) -> Connection:
    """The cluster this process is in already, else `address`, else RAY_ADDRESS, else a new local one.

    num_cpus, num_gpus: logical resources of a new local cluster; they may exceed the machine's.
    Never joins a cluster that merely happens to run on this host. Raises `PlacementError` when an address
    does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise PlacementError(
            f"several ranks need Ray, which cannot be imported ({error}); install ray[default] or run one"
        ) from error

    if ray.is_initialized():
        return _connection(own=False, joined=False)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS") or None
    with own_signal_handlers():
        if address not in (None, "local"):
            require_answer(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise _no_answer(address, error) from error
            return _connection(own=False, joined=True)
        for name, value in PATIENT.items():
            os.environ.setdefault(name, value)
        scratch = Scratch()
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                _temp_dir=str(scratch.path),
                **quiet,
            )
        except BaseException:
            ray.shutdown()
            scratch.delete()
            raise
    return _connection(own=True, joined=True, scratch=scratch)


def _connection(*, own: bool, joined: bool, scratch: Scratch | None = None) -> Connection:
    import ray

    context = ray.get_runtime_context()
    return Connection(context.gcs_address, own, joined, scratch, context.get_node_id())


def require_answer(address: str) -> None:
    """`PlacementError` unless something listens at `host:port`; Ray itself would try for half a minute.

    Addresses of other forms (`auto`, `ray://…`) are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise _no_answer(address, error) from None


def _no_answer(address: str, error: Exception) -> PlacementError:
    return PlacementError(
        f"no Ray cluster answers at {address!r}: {error}\n"
        "  what to do: check RAY_ADDRESS, or unset it to run on this machine"
    )


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Keep the process's handlers: `ray.init` replaces the one of SIGTERM (spec/ray.md §0.1)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    saved = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            if handler is not None:
                signal.signal(number, handler)
