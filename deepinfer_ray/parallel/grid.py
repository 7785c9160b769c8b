"""`RankGrid`: which ranks exist and which of them form a group (spec/distributed.md §1). Pure arithmetic.

Knows: the four parallel sizes, the member lists of every group, the equation behind each rule.
Does not know: processes, hosts, transports, Ray, torch. The fleet maps it on bundles; torch makes its groups.

Symbols: D data parallel, C context parallel, E expert parallel, N Engram parallel, W = max(C·D, N) ranks.
A rank is (replica, dp, cp) in row-major order: r = (replica·D + dp)·C + cp; an engine is one CP group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from deepinfer_ray.errors import ConfigError

GroupKind = Literal["world", "local", "dp", "cp", "ep", "ep_in_dp", "engram"]
"""Names of the groups, in the order in which every rank must create them."""

GROUP_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)

KINDS_WITH_CPU_TWIN: frozenset[GroupKind] = frozenset({"dp", "cp", "ep_in_dp"})
"""Groups that also exist over gloo: votes, metadata and map agreement never wait for a device."""


class RankPlace(NamedTuple):
    """Where a rank stands on the grid; each `*_rank` is its index inside its own group."""

    rank: int
    replica: int
    engine: int
    dp_rank: int
    cp_rank: int
    ep_group: int
    ep_rank: int
    engram_group: int
    engram_rank: int
    gang: int

    @property
    def is_driver(self) -> bool:
        """Whether this rank owns its engine's scheduler, tokenizer and sampler (CP rank 0)."""
        return self.cp_rank == 0


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of one fleet. `RankGrid.build` resolves automatic sizes and checks the rules."""

    dp: int
    cp: int
    ep: int
    engram: int

    @classmethod
    def build(cls, *, dp: int = 0, cp: int = 1, ep: int = 1, engram: int = 0) -> RankGrid:
        """The grid of these sizes; `dp = 0` means max(1, E // C), `engram = 0` means C·D.

        Raises `ConfigError` with the equation that failed and its numbers.
        """
        for name, value, least in (("dp", dp, 0), ("cp", cp, 1), ("ep", ep, 1), ("engram", engram, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"parallel.{name} must be an integer >= {least}, got {value!r}")
        dp = dp or max(1, ep // cp)
        grid = cls(dp=dp, cp=cp, ep=ep, engram=engram or cp * dp)
        grid._check()
        return grid

    def _check(self) -> None:
        C, D, E, N, W = self.cp, self.dp, self.ep, self.engram, self.world_size
        if (C * D) % E:
            raise ConfigError(
                f"an expert group must not cross a replica: (C·D) mod E = ({C}·{D}) mod {E} = {(C * D) % E}, "
                f"must be 0; choose parallel.ep among the divisors of {C * D}"
            )
        if C % E and E % C:
            raise ConfigError(
                f"context and expert groups must nest: C = {C} and E = {E}, but neither {C} mod {E} = "
                f"{C % E} nor {E} mod {C} = {E % C} is 0; choose parallel.ep as a divisor or a multiple of "
                "parallel.cp"
            )
        if W % (C * D):
            raise ConfigError(
                f"the world must hold whole replicas: W mod (C·D) = max({C}·{D}, {N}) mod {C * D} = "
                f"{W % (C * D)}, must be 0; choose parallel.engram as a multiple of {C * D}"
            )
        if W % N:
            raise ConfigError(
                f"the world must hold whole Engram groups: W mod N = max({C}·{D}, {N}) mod {N} = {W % N}, "
                f"must be 0; choose parallel.engram among the divisors or multiples of {C * D}"
            )

    # ---- numbers

    @property
    def world_size(self) -> int:
        """W = max(C·D, N)."""
        return max(self.cp * self.dp, self.engram)

    @property
    def num_replicas(self) -> int:
        """W / (C·D): worlds of the model that share nothing but the Engram table."""
        return self.world_size // (self.cp * self.dp)

    @property
    def num_engines(self) -> int:
        """W / C: schedulers in the fleet, one per CP group."""
        return self.world_size // self.cp

    @property
    def gang_size(self) -> int:
        """lcm(C, E, N): ranks tied by at least one collective, so they live, die and vote together.

        CP, EP and Engram groups are contiguous blocks; a cut that crosses none lies at a common multiple.
        """
        return math.lcm(self.cp, self.ep, self.engram)

    @property
    def num_gangs(self) -> int:
        """W / lcm(C, E, N)."""
        return self.world_size // self.gang_size

    @property
    def independent(self) -> bool:
        """Whether every rank is a gang of its own: no collective, no vote, one death costs one rank."""
        return self.gang_size == 1

    def gang_grid(self) -> RankGrid:
        """The grid of one gang on its own: its ranks are numbered from 0 and share every collective."""
        replica = self.cp * self.dp
        return RankGrid(
            dp=min(self.gang_size, replica) // self.cp, cp=self.cp, ep=self.ep, engram=self.engram
        )

    def rank_seed(self, seed: int, rank: int) -> int:
        """Seed of a rank's generators: configured seed + r."""
        return seed + self._in_world(rank)

    # ---- places

    def rank_of(self, replica: int, dp_rank: int, cp_rank: int) -> int:
        """r = (replica·D + dp)·C + cp."""
        for name, value, size in (
            ("replica", replica, self.num_replicas),
            ("dp rank", dp_rank, self.dp),
            ("cp rank", cp_rank, self.cp),
        ):
            if not 0 <= value < size:
                raise ConfigError(f"{name} {value} is outside [0, {size}) of {self}")
        return (replica * self.dp + dp_rank) * self.cp + cp_rank

    def engine_driver(self, engine: int) -> int:
        """Global rank of an engine's driver: r = e·C."""
        if not 0 <= engine < self.num_engines:
            raise ConfigError(
                f"engine rank must satisfy 0 <= e < W // C = {self.world_size} // {self.cp} = "
                f"{self.num_engines}, got {engine}"
            )
        return engine * self.cp

    def place(self, rank: int) -> RankPlace:
        """Every coordinate of a rank."""
        engine, cp_rank = divmod(self._in_world(rank), self.cp)
        replica, dp_rank = divmod(engine, self.dp)
        ep_group, ep_rank = divmod(rank, self.ep)
        engram_group, engram_rank = divmod(rank, self.engram)
        return RankPlace(
            rank, replica, engine, dp_rank, cp_rank, ep_group, ep_rank, engram_group, engram_rank,
            gang=rank // self.gang_size,
        )  # fmt: skip

    # ---- groups

    def groups(self, kind: GroupKind) -> list[list[int]]:
        """All member lists of a kind, in the order in which ranks create them; a partition of the world."""
        if kind == "dp":
            replica = self.cp * self.dp
            return [
                list(range(start + cp_rank, start + replica, self.cp))
                for start in range(0, self.world_size, replica)
                for cp_rank in range(self.cp)
            ]
        return self._blocks(self._block_size(kind))

    def group_of(self, kind: GroupKind, rank: int) -> list[int]:
        """The member list of a kind that holds `rank`, ascending."""
        self._in_world(rank)
        if kind == "dp":
            place = self.place(rank)
            return [self.rank_of(place.replica, dp_rank, place.cp_rank) for dp_rank in range(self.dp)]
        size = self._block_size(kind)
        start = rank // size * size
        return list(range(start, start + size))

    def gangs(self) -> list[list[int]]:
        """Ranks that share a collective, directly or through others: the unit of placement and of failure."""
        return self._blocks(self.gang_size)

    def vote_group(self, rank: int) -> list[int]:
        """DP members that must take the same step kind as `rank`: its DP group within its gang."""
        gang = self._in_world(rank) // self.gang_size
        return [member for member in self.group_of("dp", rank) if member // self.gang_size == gang]

    def __str__(self) -> str:
        return (
            f"D={self.dp} C={self.cp} E={self.ep} N={self.engram}: W = max({self.cp}·{self.dp}, "
            f"{self.engram}) = {self.world_size} ranks in {self.num_gangs} gang(s) of {self.gang_size}"
        )

    def _block_size(self, kind: GroupKind) -> int:
        sizes: dict[str, int] = {
            "world": self.world_size,
            "local": 1,
            "cp": self.cp,
            "ep": self.ep,
            "ep_in_dp": self.ep,
            "engram": self.engram,
        }
        if kind not in sizes:
            raise ConfigError(f"no group is called {kind!r}; the groups are {', '.join(GROUP_KINDS)}")
        return sizes[kind]

    def _blocks(self, size: int) -> list[list[int]]:
        return [list(range(start, start + size)) for start in range(0, self.world_size, size)]

    def _in_world(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside [0, {self.world_size}) of {self}")
        return rank
