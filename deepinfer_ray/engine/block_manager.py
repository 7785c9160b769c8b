"""Reference-counted pools of ids: cache blocks and state slots, two instances of one class.

Knows: which ids are free, in which order they come back, how many owners each has (spec/engine.md §6).
Does not know: sequences, bytes. Id 0 is a sentinel and is never handed out.

Not thread-safe: a rank schedules on one thread, so "blocks and one state slot, or nothing" is the rule
check both, then take both (spec/engine.md §6.2).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from deepinfer_ray.errors import ConfigError, DeepInferError

Ids = np.ndarray | Sequence[int]


class IntegrityError(DeepInferError):
    """The scheduler's books do not balance: a bug, named with the ids that are wrong."""


class Fit(enum.Enum):
    """Whether a demand can be met (spec/engine.md §6.1)."""

    OK = "now"
    LATER = "when others have freed"
    NEVER = "not even by an empty pool"


class BlockPool:
    """Ids 1 … size-1 in FIFO order: freed ids go to the tail, so the order of reuse is deterministic.

    The free list is a ring in an array: k ids are taken or returned by one copy, whatever k is.
    """

    def __init__(self, size: int, noun: str) -> None:
        """size: number of ids, the sentinel included. noun: what an id stands for, in error texts."""
        if size < 2:
            raise ConfigError(
                f"a pool of {size} {noun}s has none to hand out; it needs at least 2 (id 0 is a sentinel)"
            )
        self.size, self.noun = size, noun
        self.refs = np.zeros(size, np.int32)
        self._ring = np.arange(1, size, dtype=np.int32)
        self._head = 0
        self._free = size - 1

    @property
    def num_free(self) -> int:
        return self._free

    @property
    def used_fraction(self) -> float:
        """Used share of all ids; the sentinel counts as used (spec/engine.md §3.2)."""
        return (self.size - self._free) / self.size

    def can_take(self, count: int) -> Fit:
        """NEVER for `count >= size`, OK if that many are free, else LATER."""
        if count >= self.size:
            return Fit.NEVER
        return Fit.OK if self._free >= count else Fit.LATER

    def take(self, count: int) -> np.ndarray:
        """int32 [count] ids with one reference each, from the head of the free list."""
        if count > self._free:
            raise IntegrityError(
                f"{count} {self.noun}s were taken, but {self._free} are free: ask can_take first"
            )
        capacity = self.size - 1
        end = self._head + count
        if end <= capacity:
            ids = self._ring[self._head : end].copy()
        else:
            ids = np.concatenate((self._ring[self._head :], self._ring[: end - capacity]))
        self._head = end % capacity
        self._free -= count
        self.refs[ids] = 1
        return ids

    def pin(self, ids: Ids) -> None:
        """One more reference for each id; all must be in use. An id may not occur twice."""
        index = np.asarray(ids, np.int64)
        self._require_used(index, "pinned")
        self.refs[index] += 1

    def free(self, ids: Ids) -> None:
        """One reference less for each id; ids without any go to the tail in the given order.

        An id may not occur twice. Blocks of a table are freed from last to first by the caller.
        """
        index = np.asarray(ids, np.int64)
        self._require_used(index, "freed")
        left = self.refs[index] - 1
        self.refs[index] = left
        gone = index[left == 0]
        count = len(gone)
        if not count:
            return
        capacity = self.size - 1
        start = (self._head + self._free) % capacity
        first = min(count, capacity - start)
        self._ring[start : start + first] = gone[:first]
        self._ring[: count - first] = gone[first:]
        self._free += count

    def _require_used(self, index: np.ndarray, verb: str) -> None:
        if index.size and (index.min() < 1 or index.max() >= self.size or self.refs[index].min() < 1):
            bad = index[(index < 1) | (index >= self.size)]
            if not bad.size:
                bad = index[self.refs[index] < 1]
            raise IntegrityError(f"{self.noun} {int(bad[0])} was {verb}, but it is not in use")

    def free_ids(self) -> np.ndarray:
        """int32 [num_free] free ids, next to be taken first."""
        return np.take(self._ring, np.arange(self._head, self._head + self._free), mode="wrap")

    def check_integrity(self, expected_refs: np.ndarray) -> None:
        """`IntegrityError` unless references are the expected ones (int [size]) and free + used = size -
        1."""
        wrong = np.flatnonzero(self.refs != expected_refs)
        if wrong.size:
            id_ = int(wrong[0])
            raise IntegrityError(
                f"{self.noun} {id_} has {int(self.refs[id_])} references, its owners hold "
                f"{int(expected_refs[id_])} ({wrong.size} {self.noun}s differ)"
            )
        free = np.sort(self.free_ids())
        unused = np.flatnonzero(self.refs[1:] == 0) + 1
        if not np.array_equal(free, unused):
            raise IntegrityError(
                f"{len(free)} {self.noun}s are on the free list, {len(unused)} of {self.size - 1} have no "
                f"owner"
            )


class SlotStack:
    """Draft slots 1 … size, last returned first taken (spec/speculative.md §3.6); 0 is the padding slot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._stack = list(range(size, 0, -1))
        self._used = [False] * (size + 1)

    @property
    def num_used(self) -> int:
        return self.size - len(self._stack)

    def take(self) -> int:
        if not self._stack:
            raise IntegrityError(f"all {self.size} draft slots are in use")
        slot = self._stack.pop()
        self._used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        """Slot 0 is ignored: it says that there is none to return."""
        if slot == 0:
            return
        if not self._used[slot]:
            raise IntegrityError(f"draft slot {slot} was freed, but it is not in use")
        self._used[slot] = False
        self._stack.append(slot)
