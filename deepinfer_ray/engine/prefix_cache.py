"""Kept prefixes: the cache of token prefixes that several requests share, computed once.

Knows: which prefixes waiting requests share, which are kept, what a kept one holds: references to its blocks
and the number of a snapshot, a copy of the donor's state slot (attention spec §15). Does not know: bytes,
steps, who runs. Copies are made by the step loop, in the order of the plan's lists.

A request may take over the cache of its first P tokens where P is a multiple of 128, or its length - 1: there
it recomputes only its last token, which is how the n completions of one prompt share it (spec/engine.md
§2.5). A snapshot of P is right while the donor's computed length is in [P, P + slack], slack = ring rows -
window: later tokens overwrite window rows that P needs. So a chunk of the donor has to end there, unless its
prompt ends within the slack anyway. Rows of the snapshot at or behind P are stale: the new owner writes each
of them before any of its queries can see it.

A prefix is kept when requests that wait would save enough by it. Kept ones are found by a digest of all their
token ids, and given up, least recently used first and those that nobody waits for before others, when
sequences need their blocks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_ray.engine.block_manager import BlockPool, IntegrityError
from deepinfer_ray.engine.sequence import Sequence
from deepinfer_ray.engine.settings import BLOCK_TOKENS

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SharePoints:
    """Ascending lengths at which a prompt's cache may be taken over, and the digest of the tokens before
    each."""

    lengths: tuple[int, ...]
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, prompt: np.ndarray, *, end: int | None = None, whole: bool = True) -> SharePoints:
        """prompt: int32 [N]. end: first token that the ids alone do not describe (an image), None = none.
        whole: offer N - 1 beside the multiples of 128."""
        last = len(prompt) - 1
        limit = last if end is None else min(last, end)
        lengths = list(range(BLOCK_TOKENS, limit + 1, BLOCK_TOKENS))
        if whole and limit == last and last > 0 and last % BLOCK_TOKENS:
            lengths.append(last)
        data = np.ascontiguousarray(prompt, "<i4").tobytes()
        digest, start, keys = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, []
        for length in lengths:
            digest.update(data[4 * start : 4 * length])
            keys.append(digest.copy().digest())
            start = length
        return cls(tuple(lengths), tuple(keys))


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """The cache of `num_tokens` tokens. blocks: int32 [B], one reference each; the last may be partial.
    snapshot: the slot that holds the rings."""

    key: bytes
    num_tokens: int
    blocks: np.ndarray
    snapshot: int

    def __repr__(self) -> str:  # no digest of a prompt either
        return f"KeptPrefix({self.num_tokens} tokens, snapshot={self.snapshot})"


class PrefixCache:
    """Kept prefixes of one rank, within `num_snapshots` snapshots and `max_blocks` blocks.

    Without snapshots it is off and costs nothing.
    """

    def __init__(
        self,
        blocks: BlockPool,
        snapshots: range,
        *,
        max_blocks: int,
        slack: int,
        min_saved_tokens: int = 1,
        keep_tokens: int = 0,
    ) -> None:
        """snapshots: slot ids that are the cache's own. slack: ring rows beyond the window. keep_tokens: of
        prefill truncation, 0 = off: rings of consumer layers are then only right up to N - keep."""
        self.blocks, self.snapshots = blocks, snapshots
        self.max_blocks, self.slack, self.keep_tokens = max_blocks, slack, keep_tokens
        self.min_saved_tokens = min_saved_tokens
        self.num_hits = 0
        self.num_evicted = 0
        self._free = list(reversed(snapshots))
        self._kept: OrderedDict[bytes, KeptPrefix] = OrderedDict()  # least recently used first
        self._coming: dict[bytes, KeptPrefix] = {}  # of the pass in progress: not there before its step ran
        self._demand: Counter[bytes] = Counter()  # waiting requests by each of their points
        self._held = np.zeros(blocks.size, np.int32)  # kept prefixes that hold each block
        self._num_held = 0

    @property
    def enabled(self) -> bool:
        return len(self.snapshots) > 0

    def __len__(self) -> int:
        return len(self._kept) + len(self._coming)

    # -- who waits --------------------------------------------------------------------------------------

    def joined(self, sequence: Sequence) -> None:
        """The sequence waits without a row: it would take over a prefix that is kept by then."""
        if not self.enabled or sequence.tokens is None:
            return
        if sequence.share is None:
            end = min((start for start, _ in sequence.image_spans), default=None)
            prompt = sequence.tokens[: sequence.prompt_len]
            sequence.share = SharePoints.of(prompt, end=end, whole=not self.keep_tokens)
        if sequence.request.params.prompt_logprobs is None:  # else every prompt row has to be computed
            sequence.in_demand = True
            self._demand.update(sequence.share.keys)

    def left(self, sequence: Sequence) -> None:
        """It has a row or ended. Idempotent."""
        if sequence.in_demand and sequence.share is not None:
            sequence.in_demand = False
            self._demand.subtract(sequence.share.keys)
            for key in sequence.share.keys:
                if not self._demand[key]:
                    del self._demand[key]

    # -- questions --------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, length: int) -> KeptPrefix | None:
        """The longest kept prefix that a waiting sequence of `length` tokens may start from."""
        if not sequence.in_demand or not self._kept:
            return None
        return self._longest(self._kept, sequence, length)

    def is_coming(self, sequence: Sequence, length: int, than: int) -> bool:
        """Whether a step that is being planned computes a prefix of the sequence longer than `than`."""
        if not sequence.in_demand or not self._coming:
            return False
        entry = self._longest(self._coming, sequence, length)
        return entry is not None and entry.num_tokens > than

    def _longest(
        self, entries: Mapping[bytes, KeptPrefix], sequence: Sequence, length: int
    ) -> KeptPrefix | None:
        share = sequence.share
        assert share is not None
        limit = min(length - 1, length - self.keep_tokens)
        for tokens, key in zip(reversed(share.lengths), reversed(share.keys), strict=True):
            if tokens <= limit and key in entries:
                return entries[key]
        return None

    def next_cut(self, sequence: Sequence, start: int, stop: int, length: int) -> int | None:
        """Where a chunk [start, stop) of a sequence of `length` tokens should end to leave a prefix behind;
        None = nowhere inside."""
        if not self.enabled:
            return None
        for tokens, _ in self._worth_keeping(sequence):
            if tokens >= stop:
                break
            if tokens > start and tokens + self.slack < length and self._can_keep(tokens):
                return tokens
        return None

    def _worth_keeping(self, sequence: Sequence) -> Iterator[tuple[int, bytes]]:
        """Points of the sequence, ascending, that are not kept yet and would save others enough.

        A point counts for the waiting requests that share no later point with the sequence; what they save
        is what lies between it and the kept prefix before it.
        """
        share = sequence.share
        if share is None:
            return
        counts = []
        for key in share.keys:
            others = self._demand.get(key, 0) - sequence.in_demand
            if others <= 0:
                break  # nobody shares a later point either
            counts.append(others)
        below = 0
        for index, others in enumerate(counts):
            tokens, key = share.lengths[index], share.keys[index]
            if key in self._kept or key in self._coming:
                below = tokens
                continue
            further = counts[index + 1] if index + 1 < len(counts) else 0
            if (others - further) * (tokens - below) >= self.min_saved_tokens:
                yield tokens, key

    def _can_keep(self, tokens: int) -> bool:
        """Whether there would be a snapshot and blocks for it."""
        if -(-tokens // BLOCK_TOKENS) > self.max_blocks:
            return False
        return bool(self._free) or any(key not in self._demand for key in self._kept)

    def num_reclaimable(self, spare: KeptPrefix | None = None) -> int:
        """Blocks that giving up every kept prefix but `spare` would free."""
        held = [entry.blocks for entry in self._kept.values() if entry is not spare]
        if not held:
            return 0
        refs = np.bincount(np.concatenate(held), minlength=self.blocks.size)
        return int(np.count_nonzero((refs > 0) & (refs == self.blocks.refs)))

    # -- acts -------------------------------------------------------------------------------------------

    def use(self, entry: KeptPrefix) -> None:
        """A sequence starts from it."""
        self._kept.move_to_end(entry.key)
        self.num_hits += 1

    def keep(self, sequence: Sequence, computed: int, blocks: np.ndarray) -> list[int]:
        """Keeps what is worth it of a sequence whose cache will hold `computed` tokens after this step.

        blocks: its block table. Returns the snapshots into which its state slot must be copied right after
        the step's forward. The prefixes can be found after `publish`.
        """
        if not self.enabled:
            return []
        snapshots = []
        for tokens, key in list(self._worth_keeping(sequence)):
            if not computed - self.slack <= tokens <= computed:
                continue
            own = blocks[: -(-tokens // BLOCK_TOKENS)]
            if not self._make_room(own):
                continue
            snapshot = self._free.pop()
            self.blocks.pin(own)
            self._hold(own, 1)
            self._coming[key] = KeptPrefix(key, tokens, own.copy(), snapshot)
            snapshots.append(snapshot)
        return snapshots

    def publish(self) -> None:
        """The pass is planned: what it keeps can be found by the next one."""
        self._kept.update(self._coming)
        self._coming.clear()

    def give_back(self, num_free: int, spare: KeptPrefix | None = None) -> None:
        """Gives up prefixes, all but `spare` if need be, until `num_free` blocks are free."""
        for wanted in (False, True):
            for entry in list(self._kept.values()):
                if self.blocks.num_free >= num_free:
                    return
                if entry is not spare and (entry.key in self._demand) == wanted:
                    self._drop(entry)

    def clear(self) -> None:
        """Gives up everything; for the end of an engine and for tests."""
        for entry in list(self._kept.values()):
            self._drop(entry)

    def _make_room(self, blocks: np.ndarray) -> bool:
        """Room for one more prefix within the budget, at the expense of those that nobody waits for."""

        def fits() -> bool:
            added = int(np.count_nonzero(self._held[blocks] == 0))
            return bool(self._free) and self._num_held + added <= self.max_blocks

        for entry in list(self._kept.values()):
            if fits():
                break
            if entry.key not in self._demand:
                self._drop(entry)
        return fits()

    def _drop(self, entry: KeptPrefix) -> None:
        del self._kept[entry.key]
        self._hold(entry.blocks, -1)
        self.blocks.free(entry.blocks[::-1])
        self._free.append(entry.snapshot)
        self.num_evicted += 1

    def _hold(self, blocks: np.ndarray, change: int) -> None:
        before = self._held[blocks]
        self._held[blocks] = before + change
        self._num_held += int(np.count_nonzero(before + change)) - int(np.count_nonzero(before))

    # -- integrity --------------------------------------------------------------------------------------

    def add_refs(self, block_refs: np.ndarray) -> None:
        """Adds the references it holds to int [num_blocks]; `IntegrityError` if its own books are wrong."""
        entries = [*self._kept.values(), *self._coming.values()]
        held = np.zeros(self.blocks.size, np.int64)
        for entry in entries:
            held[entry.blocks] += 1
        if not np.array_equal(held, self._held) or self._num_held != np.count_nonzero(held):
            raise IntegrityError("the count of blocks that kept prefixes hold is wrong")
        slots = sorted([*self._free, *(entry.snapshot for entry in entries)])
        if slots != list(self.snapshots):
            raise IntegrityError(f"of {len(self.snapshots)} snapshots {len(slots)} are free or in use")
        block_refs += held

    def check_demand(self, waiting: list[Sequence]) -> None:
        """`IntegrityError` unless exactly the points of `waiting` are counted."""
        expected: Counter[bytes] = Counter()
        for sequence in waiting:
            if sequence.in_demand and sequence.share is not None:
                expected.update(sequence.share.keys)
        if expected != self._demand:
            raise IntegrityError(
                f"{len(self._demand)} share points are counted, the queue has {len(expected)}"
            )
