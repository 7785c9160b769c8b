"""How the ranks of a data-parallel group agree on prefill or decode, once a step.

Knows: the votes, their points and their order (spec/engine.md §3), a rank on its own and ranks as threads.
Does not know: queues, blocks, plans; processes: their group is a `parallel.rank_group` over gloo, as a vote
must not wait for a device.

Every rank calls `agree` and then `decide` exactly once per global step. The counter is the only input of "is
this a point", the agreement is the same on all ranks, hence so is the number of collectives of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer_ray.errors import ConfigError, RankFailure


class VoteGroup(Protocol):
    """The two reductions that scheduling needs, over all data-parallel ranks; both block until all came."""

    @property
    def size(self) -> int: ...

    def minimum(self, value: int) -> int:
        """Smallest of the ranks' values (int32)."""
        ...

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """Element-wise largest of the ranks' vectors, int32 [n] -> int32 [n]."""
        ...


class SingleRank:
    """A group of one: every reduction is the identity."""

    size = 1

    def minimum(self, value: int) -> int:
        return value

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return values


class InProcessGroup:
    """Ranks as threads of one process, for tests and simulations. `member(rank)` is that rank's
    `VoteGroup`."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(size)
        self._inputs: list[np.ndarray | None] = [None] * size

    def member(self, rank: int) -> InProcessMember:
        return InProcessMember(self, rank)

    def abort(self) -> None:
        """Releases every waiting rank with `RankFailure`; for a rank that leaves early."""
        self._barrier.abort()

    def exchange(self, rank: int, values: np.ndarray) -> np.ndarray:
        """int32 [size, m] the vectors of all ranks."""
        self._inputs[rank] = values
        try:
            self._barrier.wait(self._timeout_s)
            everyone = np.stack([value for value in self._inputs if value is not None])
            self._barrier.wait(self._timeout_s)  # nobody may overwrite before all have read
        except threading.BrokenBarrierError:
            raise RankFailure(
                f"rank {rank} waited {self._timeout_s} s for the other {self.size - 1} ranks of the vote, or "
                f"one left"
            ) from None
        return everyone


class InProcessMember:
    """One rank's view of an `InProcessGroup`."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    @property
    def size(self) -> int:
        return self._group.size

    def minimum(self, value: int) -> int:
        return int(self._group.exchange(self._rank, np.array([value], np.int32)).min())

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return self._group.exchange(self._rank, values.copy()).max(axis=0)


def agree_num_blocks(group: VoteGroup, num_blocks: int) -> int:
    """The block count of every rank: the smallest one, rounded down to even (spec/engine.md §10.2, ours:
    MIN).

    `ConfigError` if nothing is left.
    """
    agreed = group.minimum(num_blocks) // 2 * 2
    if agreed < 2:
        raise ConfigError(
            f"the cache holds {num_blocks} blocks here and {agreed} on the smallest rank; at least 2 are "
            f"needed: "
            "raise cache.memory_utilization or lower scheduler.max_seqs"
        )
    return agreed


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know before they schedule. unfinished: some rank still has work. idle: nobody has a
    sequence to decode and somebody wants a prefill, so that waiting for the next point would only spin.
    leaving: every rank wants to end."""

    unfinished: bool
    idle: bool
    leaving: bool = False


class PhaseVote:
    """The decode-step counter and the votes of a NORMAL rank (spec/engine.md §3.2)."""

    def __init__(self, group: VoteGroup, all_interval: int, any_interval: int, idle_fast_path: bool) -> None:
        self.group = group
        self._all_interval, self._any_interval = all_interval, any_interval
        self._idle_fast_path = idle_fast_path
        self.decode_step = 0
        self.num_votes = 0

    def agree(
        self, unfinished: bool, decodable: bool, wants_prefill: bool, leaving: bool = False
    ) -> Agreement:
        """One collective: does anybody have work, is everybody idle beside a waiting prompt (§3.4), does
        everybody want to leave."""
        mine = np.array((unfinished, decodable, wants_prefill, not leaving), np.int32)
        anyone = self.group.maximum(mine)
        idle = self._idle_fast_path and not anyone[1] and bool(anyone[2])
        return Agreement(unfinished=bool(anyone[0]), idle=bool(idle), leaving=not anyone[3])

    def decide(self, wants_prefill: Callable[[], bool], try_prefill: Callable[[], bool], idle: bool) -> bool:
        """Whether this step is a prefill on every rank. `try_prefill` admits and says if it found anything;
        it runs only if the first vote passed and this rank wants it."""
        step = self.decode_step
        any_point = idle or (step != 0 and step % self._any_interval == 0)
        all_point = step % self._all_interval == 0
        prefill = False
        if any_point or all_point:
            wants = wants_prefill()
            if self._any_of(wants) if any_point else self._all_of(wants):
                prefill = self._any_of(wants and try_prefill())
        self.decode_step = 0 if prefill else step + 1
        return prefill

    def _all_of(self, mine: bool) -> bool:
        self.num_votes += 1
        return self.group.minimum(1 if mine else 0) == 1

    def _any_of(self, mine: bool) -> bool:
        self.num_votes += 1
        return self.group.minimum(0 if mine else 1) == 0
