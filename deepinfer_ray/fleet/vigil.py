"""What a fleet waits for no longer: ranks that are silent or stuck, engines that never stand, places that
never come.

Knows: gangs, their ranks' signs of life, how long each thing may take. Does not know: rows, what follows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator

from deepinfer_ray.fleet.gang import Gang, Rank
from deepinfer_ray.fleet.mail import Letter, Mail
from deepinfer_ray.fleet.roster import Roster
from deepinfer_ray.fleet.status import last_phases
from deepinfer_ray.fleet.watch import Watch

logger = logging.getLogger(__name__)

BEREFT_S = 3.0
"""How long a rank that lost another one waits for the news of that one's death."""


class Vigil:
    """Asked at every turn; pings ranks that are silent."""

    def __init__(self, watch: Watch, mail: Mail, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = watch
        self._mail = mail
        self._clock = clock
        self._bereft: dict[int, tuple[float, str]] = {}
        """Gangs of which a rank reported the loss of another one: since when, and what it said."""
        self._others_at = -math.inf  # when a gang that waits for its place was last not the only hope

    def bereft(self, gang: Gang, cause: str) -> None:
        """A rank reported that it lost another one of its gang; who really failed may be told yet."""
        self._bereft.setdefault(gang.index, (self._clock(), cause))

    def forget(self, gang: Gang) -> None:
        """The gang is gone."""
        self._bereft.pop(gang.index, None)

    def dead(self, gangs: Roster) -> Iterator[tuple[Gang, Rank | None, str]]:
        """Gangs that are up and count as dead: the rank to blame, if one is, and why."""
        for gang in gangs.up:
            since, cause = self._bereft.get(gang.index, (math.inf, ""))
            if self._clock() - since > BEREFT_S:
                yield gang, None, cause
                continue
            for rank in gang.ranks:
                verdict = self._watch.verdict(rank.rank)
                if verdict is not None:
                    yield gang, rank, verdict + last_phases(gang, self._watch)
                    break
                if rank.pinging is None and self._watch.wants_ping(rank.rank):
                    rank.pinging = self._mail.sent(rank.actor.ping.remote(), Letter("ping", gang, rank))

    def overdue(self, gang: Gang, gangs: Roster) -> str | None:
        """Why a gang that comes up is given up, or None.

        `PlacementError` when the fleet cannot do without it: at the start, and later when no other gang has
        run for `Patience.replacement`.
        """
        patience, waited_s = self._watch.patience, self._clock() - gang.since
        if gang.stage in ("creating", "meeting", "loading") and waited_s > patience.start:
            return f"no engine after {waited_s:.0f} s of {gang.stage}"
        if gang.stage != "placing" or waited_s <= patience.placement:
            return None
        others = any(other is not gang for other in gangs.up)
        limit_s, now = patience.replacement, self._clock()
        if others:
            self._others_at = now
        if gangs.is_further(gang):
            return f"no place within {limit_s:g} s" if waited_s > limit_s else None
        if gang.generation > 0 and now - max(gang.since, self._others_at) < limit_s:
            if not gang.late:
                gang.late = True
                goes_on = "the other ranks go on" if others else f"the job waits for {limit_s:.0f} s in all"
                logger.warning("%s", gang.placement.failure(waited_s, now=goes_on))
            return None
        copies = sum(other.stage == "placing" for other in gangs)
        raise gang.placement.failure(waited_s, copies=copies)
