"""The driver's pull queue: which rank gets which row, and what becomes of the rows of a dead rank. Pure
Python.

Knows: rows, ranks by number, credits. Does not know: Ray, time, engines.

A rank gets rows only against credits that it announced, so a slow rank holds no row that a fast one could
run. Every row that is added comes back exactly once: by `finished`, or convicted by `lost`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer_ray.engine.request import RequestResult
from deepinfer_ray.fleet.affinity import PrefixHomes
from deepinfer_ray.fleet.backend import WorkItem, WorkResult
from deepinfer_ray.fleet.suspects import Suspects


@dataclass(slots=True)
class RankLoad:
    """One live rank. wanted and received are its last report's; sent counts rows handed to it."""

    wanted: int = 0
    received: int = 0
    sent: int = 0
    done: int = 0
    alone: bool = False  # runs a group of suspects and nothing beside it
    leaving: bool = False  # ends what it has and gets nothing new
    in_flight: dict[int, WorkItem] = field(default_factory=dict)

    @property
    def credits(self) -> int:
        """Rows it would take now: its wish less what is on its way to it."""
        return 0 if self.leaving else max(0, self.wanted - (self.sent - self.received))


class Router:
    """Rows waiting and in flight, over the ranks that are up."""

    def __init__(self) -> None:
        self._pending: deque[WorkItem] = deque()
        self._suspects = Suspects()
        self._ranks: dict[int, RankLoad] = {}
        self._keys: set[int] = set()
        self._homes = PrefixHomes()

    # ---- rows

    def add(self, items: Iterable[WorkItem]) -> None:
        """Queue rows in arrival order; `ValueError` on a key that is still in use."""
        for item in items:
            if item.key in self._keys:
                raise ValueError(f"row key {item.key} is already queued or in flight; keys must be unique")
            self._keys.add(item.key)
            self._pending.append(item)

    def wanted(self) -> int:
        """Rows the ranks would take beyond those that already wait."""
        open_credits = sum(load.credits for load in self._ranks.values() if not load.alone)
        return max(0, open_credits - len(self._pending) - len(self._suspects))

    def assign(self) -> dict[int, list[WorkItem]]:
        """Hand out waiting rows against credits; the caller sends them. Rank → its new rows, oldest first."""
        given: dict[int, list[WorkItem]] = {}
        for rank, load in self._ranks.items():
            if len(self._suspects) and load.credits and not load.in_flight:
                load.alone = True
                for item in self._suspects.next_group():
                    self._give(rank, item, given)
        open_ranks = [
            rank for rank in self._ranks if rank != self._withheld() and not self._ranks[rank].alone
        ]
        credits = {rank: self._ranks[rank].credits for rank in open_ranks if self._ranks[rank].credits}
        while self._pending and credits:
            item = self._pending.popleft()
            rank = self._homes.choose(item.prompt, credits)
            self._give(rank, item, given)
            credits[rank] -= 1
            if not credits[rank]:
                del credits[rank]
        return given

    def finished(self, rank: int, result: WorkResult) -> WorkResult | None:
        """A rank's result, to be passed on; None if the row is not this rank's (any more)."""
        load = self._ranks.get(rank)
        if load is None or load.in_flight.pop(result.key, None) is None:
            return None
        load.done += 1
        load.alone = load.alone and bool(load.in_flight)
        self._suspects.cleared(result.key)
        self._keys.discard(result.key)
        return result

    # ---- ranks

    def rank_up(self, rank: int) -> None:
        """A rank can take rows; it has announced none yet."""
        self._ranks[rank] = RankLoad()

    def credit(self, rank: int, wanted: int, received: int) -> None:
        """What a rank's report says: rows it has received and how many more it wants."""
        load = self._ranks[rank]
        load.wanted, load.received = wanted, received

    def withdraw(self, rank: int) -> None:
        """A rank will go away: it gets no more rows. Legal for one that is not up."""
        if rank in self._ranks:
            self._ranks[rank].leaving = True

    def lost(self, rank: int, *, blame_rows: bool = True) -> list[WorkResult]:
        """A rank is gone: its rows wait again with one more attempt; results of rows convicted by it.

        blame_rows False (the machine went away): its rows go back to the front of the queue unsuspected.
        """
        load = self._ranks.pop(rank, None)
        self._homes.forget(rank)
        if load is None:
            return []
        rows = list(load.in_flight.values())
        if blame_rows and (convicted := self._suspects.died(rows)) is not None:
            self._keys.discard(convicted.key)
            return [rank_killer(convicted)]
        for item in rows:
            item.attempts += 1
        if not blame_rows:
            if load.alone:
                self._suspects.requeue(rows)
            else:
                self._pending.extendleft(reversed(rows))
        return []

    # ---- numbers

    def load(self, rank: int) -> RankLoad | None:
        """The books of a live rank."""
        return self._ranks.get(rank)

    @property
    def num_pending(self) -> int:
        """Rows that wait for a rank, suspects included."""
        return len(self._pending) + len(self._suspects)

    @property
    def num_in_flight(self) -> int:
        """Rows that a rank holds."""
        return sum(len(load.in_flight) for load in self._ranks.values())

    def check_integrity(self) -> None:
        """Every key is in exactly one place (for tests and when idle)."""
        held = self.num_pending + self.num_in_flight
        assert held == len(self._keys), f"{held} rows are held under {len(self._keys)} keys"

    def _withheld(self) -> int | None:
        """The rank that gets nothing new so that waiting suspects find it empty; the least loaded one."""
        if not len(self._suspects) or any(load.alone for load in self._ranks.values()):
            return None
        staying = [rank for rank, load in self._ranks.items() if not load.leaving]
        return min(staying, key=lambda rank: (len(self._ranks[rank].in_flight), rank), default=None)

    def _give(self, rank: int, item: WorkItem, given: dict[int, list[WorkItem]]) -> None:
        load = self._ranks[rank]
        load.in_flight[item.key] = item
        load.sent += 1
        given.setdefault(rank, []).append(item)


def rank_killer(item: WorkItem) -> WorkResult:
    """The result of a row that killed a rank alone as often as it takes."""
    message = f"this row killed a rank each time it ran alone ({item.attempts} attempts in all)"
    return WorkResult(
        item.key,
        RequestResult.failed(item.key, len(item.prompt), "rank_killer", message),
        item.attempts,
    )
