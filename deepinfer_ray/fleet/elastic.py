"""When a further gang is worth having, and when it may go. Pure decisions on an injected clock.

Knows: counts of rows and gangs, how long a gang takes to come up, failures. Does not know: Ray, places.

A fleet starts with the gangs that its grid asks for and replaces those it loses. Gangs beyond them come, one
at a time, while all ranks are full and enough rows wait to be worth it; they go when there is nothing to do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_ray.fleet.watch import Patience

SETTLE_S = 2.0
"""How long all ranks must have been full: a rank that just reported has room until the next rows come."""

MOST_DOUBLINGS = 6
"""Of the pause after failures in a row."""


@dataclass(frozen=True)
class Work:
    """What there is to do, and who does it.

    Rows: waiting (queued, or still to be submitted), running (ranks hold them), room (ranks would take so
    many at once), ended (since the start). Gangs: up, and coming or going (asked for, being built, ending).
    """

    waiting: int
    running: int
    room: int
    ended: int
    up: int
    coming: int


class Elastic:
    """Asked by the fleet at every `poll`. most: gangs that may stand at once."""

    def __init__(self, most: int, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._patience = patience
        self._clock = clock
        self._since: float | None = None
        self._hungry_at = -math.inf
        self._build_s = 0.0
        self._busy_at: dict[int, float] = {}
        self._failures = 0
        self._retry_at = -math.inf

    def wants_another(self, work: Work) -> bool:
        """Whether to ask for one more gang now.

        All that were asked for are up and full, a gang's share of rows still waits, and at the speed so far
        the waiting rows last longer than a gang takes to come up.
        """
        now = self._clock()
        if self._since is None:
            self._since = self._hungry_at = now
        if work.room:
            self._hungry_at = now
        if work.coming or work.up >= self.most or now < self._retry_at or now - self._hungry_at < SETTLE_S:
            return False
        if work.waiting * work.up <= work.running:
            return False
        return work.waiting * (now - self._since) >= self._build_s * work.ended

    def may_leave(self, gang: int, rows: int, work: Work) -> str | None:
        """Why a further gang with so many rows in flight may go, or None; one that is coming may go too."""
        if not work.waiting and not rows:
            return "no rows are left for it"
        if gang not in self._busy_at:
            return None
        if rows:
            self._busy_at[gang] = self._clock()
        if self._clock() - self._busy_at[gang] < self._patience.idle:
            return None
        return f"it had no rows for {self._patience.idle:g} s"

    # ---- what happened

    def built(self, seconds: float) -> None:
        """Any gang came up, so many seconds after it had its place."""
        self._build_s = max(self._build_s, seconds)

    def joined(self, gang: int) -> None:
        """A further gang takes rows from now on."""
        self._busy_at[gang] = self._clock()
        self._failures = 0

    def left(self, gang: int) -> bool:
        """A further gang is gone; whether it had joined."""
        return self._busy_at.pop(gang, None) is not None

    def failed(self) -> float:
        """A further gang did not come to stand, or died; how long none is asked for, in seconds."""
        pause = self._patience.retry * 2 ** min(self._failures, MOST_DOUBLINGS)
        self._failures += 1
        self._retry_at = self._clock() + pause
        return pause
