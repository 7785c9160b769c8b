"""Machines that went away, and machines that will: what decides whether a death is anybody's fault.

Knows: Ray's node table, the port of a raylet, drain notices. Does not know: gangs, rows.
Ray learns of a lost machine from missed health checks, many seconds after its processes are gone. Somebody
who has just lost a rank must know at once, so the raylet of its machine is called directly.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0
LOOK_EVERY_S = 1.0


def lost_machine(node_ids: Collection[str], rows: Collection[Mapping[str, Any]] | None = None) -> str | None:
    """The address of one of these machines that is dead for Ray, or whose raylet does not answer; else None.

    rows: the node table, for tests.
    """
    if rows is None:
        import ray

        rows = ray.nodes()
    table = {row["NodeID"]: row for row in rows}
    for node_id in node_ids:
        row = table.get(node_id)
        if row is None or not row["Alive"]:
            return str(row["NodeManagerAddress"]) if row else node_id
        if not _answers(row["NodeManagerAddress"], row["NodeManagerPort"]):
            return str(row["NodeManagerAddress"])
    return None


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=CALL_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def draining_nodes() -> dict[str, float]:
    """Node id → when it will be gone, in seconds of the system's clock; inf when nobody said.

    A private path of Ray: without it there are no notices.
    """
    import ray

    try:
        rows = ray._private.state.state.get_draining_nodes()
    except Exception:
        logger.debug("this Ray tells nothing of draining nodes", exc_info=True)
        return {}
    return {node_id: deadline_ms / 1e3 or math.inf for node_id, deadline_ms in rows.items()}


@dataclass
class DrainNotices:
    """Which machines will be taken away and how many seconds are left; asked for once in `LOOK_EVERY_S`."""

    ask: Callable[[], Mapping[str, float]] = draining_nodes
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    _asked: float = -math.inf

    def __post_init__(self) -> None:
        self._gone_at: dict[str, float] = {}

    def look(self) -> bool:
        """Ask if it is time to; whether any machine is announced to go."""
        if self.clock() - self._asked >= LOOK_EVERY_S:
            self._asked = self.clock()
            self._gone_at = dict(self.ask())
        return bool(self._gone_at)

    def seconds_left(self, node_ids: Collection[str]) -> float | None:
        """Until the first of these machines is gone: inf when its notice has no date, None without one."""
        dates = [self._gone_at[node_id] for node_id in node_ids if node_id in self._gone_at]
        return max(0.0, min(dates) - self.now()) if dates else None
