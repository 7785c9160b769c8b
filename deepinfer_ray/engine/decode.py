"""The decode step: who takes part, how many rows each, who gets a block and who gives way.

Knows: reservations, batch order and victim order (spec/engine.md §5). Does not know: votes, tokens.
The normal case touches arrays only; a Python loop over sequences runs only when the pool is short.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from deepinfer_ray.engine.admission import materialise
from deepinfer_ray.engine.block_manager import Fit, IntegrityError
from deepinfer_ray.engine.plan import NO_PAIRS, NO_TRIPLES, StepPlan
from deepinfer_ray.engine.preemption import preempt
from deepinfer_ray.engine.settings import BLOCK_TOKENS
from deepinfer_ray.engine.state import SchedulerState
from deepinfer_ray.engine.table import SequenceTable

AGE_BITS = 40
_SHIFT = BLOCK_TOKENS.bit_length() - 1


class DraftLengths(Protocol):
    """How many rows each sequence verifies (spec/speculative.md §4.3)."""

    def choose(self, table: SequenceTable, rows: np.ndarray) -> np.ndarray:
        """int32 [n] rows per sequence, each in [1, 1 + n_draft], for table rows int64 [n] in batch order."""
        ...


class AllDrafts:
    """Fixed length: every pending draft is verified (spec/engine.md §5.4, no performance curve)."""

    def choose(self, table: SequenceTable, rows: np.ndarray) -> np.ndarray:
        return table.n_draft.take(rows) + np.int32(1)


class DecodeScheduler:
    """Makes decode steps out of the running sequences."""

    def __init__(self, state: SchedulerState, draft_lengths: DraftLengths) -> None:
        self.state, self.draft_lengths = state, draft_lengths
        self._index_of_row = np.full(state.table.num_rows, -1, np.int32)
        self._arange = np.arange(state.table.num_rows, dtype=np.int32)
        self._updates: list[np.ndarray] = []
        self._clone_states: list[tuple[int, int]] = []
        self._clone_blocks: list[tuple[int, int]] = []

    def plan(self, step: int) -> StepPlan:
        """One decode step of everything that runs; may be empty."""
        state = self.state
        table, settings = state.table, state.settings
        self._updates, self._clone_states, self._clone_blocks = [], [], []
        state.reap()
        if state.prompted:
            self._drain_prompted()
        rows = state.running
        if len(rows):
            rows = self._reserve(rows)
            # Longest first, then oldest admission: one sort key, no ties.
            key = table.admit_no.take(rows) - (table.len.take(rows).astype(np.int64) << AGE_BITS)
            rows = rows[key.argsort()]
            state.running = rows
        q = self.draft_lengths.choose(table, rows)
        k = table.num_cached.take(rows) + table.inflight.take(rows)
        k += q
        width = settings.num_drafts + 1
        if len(rows):
            bound = int((k - q).max()) + width + settings.num_drafts
            if bound > settings.runtime_max_model_len:
                raise IntegrityError(
                    f"a decode step would touch position {bound - 1}, the bound is "
                    f"{settings.runtime_max_model_len}"
                )
        table.inflight[rows] += width
        table.sched_cnt[rows] += 1
        seq_ids = table.seq_id.take(rows)
        slots = table.draft_slot.take(rows)
        if settings.num_drafts:
            read = slots * table.has_draft.take(rows)
            table.has_draft[rows] = False
        else:
            read = slots
        return StepPlan(
            step=step,
            is_prompt=False,
            rows=rows,
            seq_ids=seq_ids,
            q=q,
            k=k,
            last_chunk=np.ones(len(rows), np.bool_),
            num_tokens=int(q.sum()),
            remap=self._remap(rows, seq_ids),
            draft_read=read,
            draft_write=slots,
            clone_states=np.array(self._clone_states, np.int32) if self._clone_states else NO_PAIRS,
            clone_blocks=np.array(self._clone_blocks, np.int32) if self._clone_blocks else NO_PAIRS,
            block_updates=np.concatenate(self._updates) if self._updates else NO_TRIPLES,
        )

    def _remap(self, rows: np.ndarray, seq_ids: np.ndarray) -> np.ndarray:
        """int32 [n] index of each sequence in the uncommitted previous decode step, -1 = not in it."""
        previous = self.state.in_flight
        if previous is None or previous.is_prompt or not len(previous.rows):
            return np.full(len(rows), -1, np.int32)
        if len(rows) == len(previous.rows) and np.array_equal(seq_ids, previous.seq_ids):
            return self._arange[: len(rows)].copy()
        index = self._index_of_row
        index[previous.rows] = self._arange[: len(previous.rows)]
        remap = index.take(rows)
        index[previous.rows] = -1
        # A row may have changed hands since: the sequence id decides.
        same = (remap >= 0) & (previous.seq_ids.take(remap, mode="clip") == seq_ids)
        return np.where(same, remap, np.int32(-1))

    # -- reservations ---------------------------------------------------------------------------------

    def _reserve(self, rows: np.ndarray) -> np.ndarray:
        """Blocks for `len + in flight + drafts` tokens of each; returns the rows that keep running."""
        state, table = self.state, self.state.table
        need = table.len.take(rows)
        need += table.inflight.take(rows)
        need += table.n_draft.take(rows)
        need += BLOCK_TOKENS - 1
        need >>= _SHIFT
        held = table.n_blocks.take(rows)
        need -= held
        low, high = int(need.min()), int(need.max())
        if high > 1:
            raise IntegrityError(f"row {int(rows[need.argmax()])} needs {high} new blocks in one step")
        strict = state.settings.strict_block_headroom
        if low == 0 and high == 0 and not (strict and not state.blocks.num_free):
            return rows
        for row, surplus in zip(rows[need < 0].tolist(), (-need[need < 0]).tolist(), strict=True):
            self._trim(row, surplus)  # after a prompt step flushed the pipeline
        wanting = need > 0
        count = int(np.count_nonzero(wanting))
        if len(state.prefixes) and state.blocks.num_free < count + strict:
            state.prefixes.give_back(count + strict)
        left = state.blocks.num_free - count
        if left < 0 or (left == 0 and strict):
            return self._reserve_short(rows, need)
        if count:
            self._append(rows[wanting], held[wanting], state.blocks.take(count))
        return rows

    def _append(self, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray) -> None:
        table = self.state.table
        table.block_table[rows, columns] = ids
        table.n_blocks[rows] = columns + 1
        self._updates.append(np.stack((rows.astype(np.int32), columns, ids), axis=1))

    def _trim(self, row: int, surplus: int) -> None:
        table = self.state.table
        end = int(table.n_blocks[row])
        self.state.blocks.free(table.block_table[row, end - surplus : end][::-1])
        table.n_blocks[row] = end - surplus

    def _reserve_short(self, rows: np.ndarray, need: np.ndarray) -> np.ndarray:
        """The pool is short: shortest outputs are served first, longest outputs give way (spec/engine.md
        §5.1).

        Among equal outputs the youngest is the victim, so that the oldest makes progress (D15).
        """
        state, table = self.state, self.state.table
        strict = state.settings.strict_block_headroom
        outputs = table.len.take(rows) - table.prompt_len.take(rows)
        order = np.lexsort((-table.admit_no.take(rows), -outputs))
        queue, needs = rows[order].tolist(), need[order].tolist()
        kept: list[int] = []
        left, right = 0, len(queue)
        while left < right:
            row = queue[right - 1]
            wants = needs[right - 1] > 0
            while (wants or strict) and not state.blocks.num_free and right - left > 1:
                preempt(state, queue[left])
                left += 1
            if state.blocks.num_free or not (wants or strict):
                if wants:
                    index = np.array([row])
                    self._append(index, table.n_blocks[index], state.blocks.take(1))
                kept.append(row)
            else:
                preempt(state, row)
            right -= 1
        return np.array(kept, np.int64)

    # -- sequences that arrive with a complete prompt -------------------------------------------------

    def _drain_prompted(self) -> None:
        """Forks and hand-overs enter decode while there is room (spec/engine.md §5.1 step 3)."""
        state, settings = self.state, self.state.settings
        entered: list[int] = []
        while state.prompted and len(state.running) + len(entered) < settings.max_seqs:
            sequence = state.prompted[0]
            if not sequence.ended:
                if sequence.fork is not None and not state.fork_fits(sequence.fork):
                    state.drop_fork(sequence)
                if not sequence.row and sequence.fork is None:
                    state.prompted.popleft()
                    state.waiting.appendleft(sequence)  # its source moved on: it prefills itself
                    continue
                if sequence.fork is not None:
                    if state.can_place(1) is not Fit.OK:
                        if state.running.size or entered:
                            break
                        state.drop_fork(sequence)  # nobody runs, so nobody would ever make room
                        continue
                    self._place_fork(sequence.fork.num_tokens)
                state.start_running(sequence)
                self._seed_drafts(sequence.row)
                entered.append(sequence.row)
                if sequence.first_scheduled_time is None:
                    sequence.first_scheduled_time = state.clock()
            sequence.queued = False
            state.prompted.popleft()
        if entered:
            state.running = np.concatenate((state.running, np.array(entered, np.int64)))

    def _place_fork(self, num_tokens: int) -> None:
        state = self.state
        sequence = state.prompted[0]
        assert sequence.fork is not None
        full, partial = divmod(num_tokens, BLOCK_TOKENS)
        new = state.take_blocks(1 if partial else 0)
        row = materialise(
            state, sequence, sequence.fork.blocks[:full], new, self._clone_states, self._clone_blocks
        )
        count = int(state.table.n_blocks[row])
        columns = np.arange(count, dtype=np.int32)
        self._updates.append(
            np.stack((np.full(count, row, np.int32), columns, state.table.block_table[row, :count]), axis=1)
        )

    def _seed_drafts(self, row: int) -> None:
        """Placeholder drafts, as after a prefill (D10)."""
        table, settings = self.state.table, self.state.settings
        table.n_draft[row] = settings.num_drafts
        table.draft[row] = settings.draft_pad_id
