"""Which row kills ranks, and when to give up: bisection of suspects and the restart budget. Pure bookkeeping.

Knows: rows by key, groups of suspects, counts of deaths. Does not know: Ray, ranks, time.

Rows in flight when a rank dies are suspects. They are redone in halves, each half alone on a rank; a half
that dies is halved again, one that ends is cleared. A row that kills a rank alone twice is convicted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from deepinfer_ray.errors import RankFailure
from deepinfer_ray.fleet.backend import WorkItem

SOLO_DEATHS_TO_CONVICT = 2


class Suspects:
    """Groups of rows that must run alone, oldest first."""

    def __init__(self) -> None:
        self._groups: deque[list[WorkItem]] = deque()
        self._solo_deaths: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def next_group(self) -> list[WorkItem]:
        """The group that waited longest; breadth first, so that innocents come free between deaths."""
        return self._groups.popleft()

    def died(self, items: Sequence[WorkItem]) -> WorkItem | None:
        """Rows that were in flight together at a death; the row that is convicted by it, if any."""
        if len(items) > 1:
            middle = (len(items) + 1) // 2
            self._groups.extend([list(items[:middle]), list(items[middle:])])
            return None
        for item in items:
            self._solo_deaths[item.key] = self._solo_deaths.get(item.key, 0) + 1
            if self._solo_deaths[item.key] >= SOLO_DEATHS_TO_CONVICT:
                del self._solo_deaths[item.key]
                return item
            self._groups.append([item])
        return None

    def requeue(self, items: Sequence[WorkItem]) -> None:
        """A group whose rank was lost for a reason outside the rows: it runs again undivided, first."""
        if items:
            self._groups.appendleft(list(items))

    def cleared(self, key: int) -> None:
        """The row ended without killing its rank."""
        self._solo_deaths.pop(key, None)


class RestartBudget:
    """Deaths without progress, which is any row that ends; counted for each magnitude of rows in flight.

    Bisection of a few killer rows stays within the limit at every magnitude: each costs one death per
    halving. An engine that kills every group runs out soon: the number of groups doubles with each halving.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._deaths: Counter[int] = Counter()

    @property
    def deaths(self) -> int:
        """Deaths since the last progress."""
        return self._deaths.total()

    def progress(self) -> None:
        """A row got its result."""
        self._deaths.clear()

    def death(self, rows_in_flight: int, cause: str) -> None:
        """Count a death; `RankFailure` when the budget is spent."""
        magnitude = (rows_in_flight - 1).bit_length() if rows_in_flight else -1  # halving lowers it by one
        self._deaths[magnitude] += 1
        if self._deaths[magnitude] > self.limit:
            raise RankFailure(
                f"ranks died {self.deaths} times without a row ending in between (limit {self.limit} at "
                f"about {rows_in_flight} rows in flight); the last cause: {cause}\n"
                "  what to do: mend the cause, then run again with the same output to resume"
            )
