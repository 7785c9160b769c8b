"""The gangs of a fleet by number, and which rank is whose.

Knows: numbers of gangs and ranks, generations, which gangs a fleet stands on. Does not know: Ray, rows, why a
gang comes or goes.

Gangs 0 … G-1 are those that the grid asks for; further ones take the lowest free number from G on. Gang g
holds the ranks [g·S, (g+1)·S) with S = lcm(C, E, N), so a number belongs to one living rank at a time, and
number and generation to one rank for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

from deepinfer_ray.fleet.gang import Gang, Rank
from deepinfer_ray.parallel.grid import RankGrid


class Roster:
    """Gangs in the order in which they came; `put` and `drop` are safe while one iterates."""

    def __init__(self, grid: RankGrid) -> None:
        self._grid = grid
        self._gangs: dict[int, Gang] = {}
        self._generations: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Gang]:
        return iter(list(self._gangs.values()))

    def __len__(self) -> int:
        return len(self._gangs)

    def __contains__(self, gang: Gang) -> bool:
        return self._gangs.get(gang.index) is gang

    def put(self, gang: Gang) -> None:
        """A new gang, in the place of the one that had its number."""
        self._gangs[gang.index] = gang

    def drop(self, gang: Gang) -> None:
        """A gang is gone and nobody takes its number for now."""
        del self._gangs[gang.index]

    @property
    def up(self) -> list[Gang]:
        """Gangs whose engines stand."""
        return [gang for gang in self if gang.stage == "up"]

    @property
    def further(self) -> list[Gang]:
        """Gangs beyond those that the grid asks for."""
        return [gang for gang in self if self.is_further(gang)]

    def is_further(self, gang: Gang) -> bool:
        """Whether the fleet does without it when it is gone."""
        return gang.index >= self._grid.num_gangs

    def free_number(self) -> int:
        """Of a further gang."""
        return next(number for number in count(self._grid.num_gangs) if number not in self._gangs)

    def next_generation(self, number: int) -> int:
        """0 for the first gang of a number, counted up with every call."""
        self._generations[number] += 1
        return self._generations[number] - 1

    def numbers(self, number: int) -> list[int]:
        """Global numbers of a gang's ranks."""
        size = self._grid.gang_size
        return list(range(number * size, (number + 1) * size))

    def member(self, rank: int) -> tuple[Gang, Rank]:
        """A rank that was numbered, and its gang; `KeyError` if there is none."""
        gang = self._gangs[rank // self._grid.gang_size]
        return gang, gang.ranks[rank % self._grid.gang_size]
