"""When a silent or stuck rank counts as dead. Pure decisions on an injected clock.

Knows: time-outs, last signs of life, step counters. Does not know: Ray, rows, what follows from a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer_ray.fleet.messages import Heartbeat


@dataclass(frozen=True)
class Patience:
    """Limits in seconds. ping_after: silence before a rank is pinged; silent: before it counts as dead.

    step: how long one engine step may take. start: how long building an engine may take.
    placement: how long the first placement may take. replacement: how long a gang that was lost may wait for
    a machine, which may have to be started first, while no other gang runs; and how long a further gang waits
    for its own. idle: how long a further gang may be without rows. retry: how long none is asked for after
    one that did not come to stand; doubles with each failure.
    """

    ping_after: float = 5.0
    silent: float = 30.0
    step: float = 300.0
    start: float = 1800.0
    placement: float = 45.0
    replacement: float = 900.0
    idle: float = 60.0
    retry: float = 30.0


@dataclass
class Watch:
    """Signs of life of the ranks that are up. The driver calls `looking` before every look at its mail.

    Time in which the driver itself was away (writing, swapped out, stopped) is no rank's silence.
    """

    patience: Patience
    clock: Callable[[], float] = time.monotonic
    _heard: dict[int, float] = field(default_factory=dict)
    _beats: dict[int, Heartbeat] = field(default_factory=dict)
    _looked_at: float | None = None

    def looking(self) -> None:
        """The driver looks at its mail now; forgives the ranks its own absence."""
        now = self.clock()
        away = 0.0 if self._looked_at is None else now - self._looked_at
        if away > self.patience.ping_after / 2:
            self._heard = {rank: at + away for rank, at in self._heard.items()}
        self._looked_at = now

    def heard(self, rank: int, beat: Heartbeat | None = None) -> None:
        """A rank answered, with its pulse if it gave one."""
        self._heard[rank] = self.clock()
        if beat is not None:
            self._beats[rank] = beat

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        self._heard.pop(rank, None)
        self._beats.pop(rank, None)

    def beat(self, rank: int) -> Heartbeat | None:
        """The last pulse of a rank."""
        return self._beats.get(rank)

    def wants_ping(self, rank: int) -> bool:
        """Whether a rank was silent long enough to be asked."""
        return self._silence(rank) > self.patience.ping_after

    def verdict(self, rank: int) -> str | None:
        """Why a rank counts as dead, or None."""
        silence, beat = self._silence(rank), self._beats.get(rank)
        last = f"last seen in {beat}" if beat else "never heard of"
        if silence > self.patience.silent:
            return (
                f"no answer for {silence:.0f} s (limit {self.patience.silent:g} s), {last}: the process "
                "hangs, was stopped, or its machine is unreachable"
            )
        if beat is not None and beat.phase == "step" and beat.age_s > self.patience.step:
            return (
                f"one step takes longer than {self.patience.step:g} s, {last}; if the step is merely slow, "
                "raise parallel.step_timeout_s"
            )
        return None

    def _silence(self, rank: int) -> float:
        return max(0.0, self.clock() - self._heard.get(rank, self.clock()))
