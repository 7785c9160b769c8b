"""The books of one rank's scheduler: queues, pools and the table, and the few acts that keep them consistent.

Knows: who owns which row, block and draft slot; how a sequence ends, gives its memory back, or gets a row.
Does not know: policy (admission.py, decode.py), tokens of a step (commit.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from deepinfer_ray.engine.block_manager import BlockPool, Fit, IntegrityError, SlotStack
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.prefix_cache import KeptPrefix, PrefixCache
from deepinfer_ray.engine.sequence import ForkSource, Sequence, Status, Terminal
from deepinfer_ray.engine.settings import BLOCK_TOKENS, SchedulerSettings
from deepinfer_ray.engine.table import NO_SEQUENCE, SequenceTable


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class SchedulerState:
    """Everything that outlives a step."""

    def __init__(
        self, settings: SchedulerSettings, compress: np.ndarray | None, clock: Callable[[], float]
    ) -> None:
        self.settings, self.clock = settings, clock
        num_rows = settings.num_state_slots
        # A commit writes num_drafts + 1 columns behind a length of at most max_model_len + 1.
        capacity = settings.max_model_len + settings.num_drafts + 3
        self.table = SequenceTable(
            num_rows, settings.max_blocks_per_seq, capacity, settings.num_drafts, compress
        )
        self.blocks = BlockPool(settings.num_blocks, "block")
        self.slots = BlockPool(num_rows, "state slot")
        self.draft_slots = SlotStack(settings.max_seqs)
        self.prefixes = PrefixCache(
            self.blocks,
            range(num_rows, num_rows + settings.prefix_snapshots),
            max_blocks=int(settings.prefix_block_fraction * settings.num_blocks),
            slack=settings.backtracking,
            min_saved_tokens=settings.prefix_min_saved_tokens,
            keep_tokens=settings.keep_tokens,
        )
        self.waiting: deque[Sequence] = deque()
        self.prompted: deque[Sequence] = deque()
        """Sequences with a complete prompt that enter decode without a prefill here: forks, hand-overs."""
        self.pending: dict[int, Sequence] = {}
        """By request id: added, but not yet allowed into the queue (grammar being built)."""
        self.live: dict[int, Sequence] = {}
        """By request id: every sequence without a terminal record."""
        self.running = np.empty(0, np.int64)
        """Rows in batch order; finished ones stay until they are reaped."""
        self.running_dirty = False
        """Some running row may be finished."""
        self.queues_dirty = False
        """Some queued sequence has ended."""
        self.outbox: list[Terminal] = []
        """Records that no commit made, for the next plan."""
        self.quarantine: list[int] = []
        """Released rows that an uncommitted step may still name."""
        self.reaped: list[Sequence] = []
        """Finished sequences whose memory returns at the next reclaim."""
        self.unpin_blocks: list[int] = []
        self.unpin_states: list[int] = []
        """Sources of copies that the current step has still to read."""
        self.in_flight: StepPlan | None = None
        """The last plan while it is uncommitted."""
        self.num_uncommitted = 0
        self.admissions = 0
        self.num_preempted = 0

    # -- questions ------------------------------------------------------------------------------------

    def length(self, sequence: Sequence) -> int:
        """Committed tokens, prompt and outputs."""
        return len(sequence.tokens) if sequence.tokens is not None else int(self.table.len[sequence.row])

    def num_decodable(self) -> int:
        """Running sequences that are not finished."""
        if not self.running_dirty:
            return len(self.running)
        return int((self.table.status[self.running] == Status.RUNNING).sum())

    def waiting_head(self) -> Sequence | None:
        """First live sequence of the queue; dead ones before it are dropped (their record is out already)."""
        while self.waiting:
            head = self.waiting[0]
            if not head.ended:
                return head
            self.waiting.popleft()
        return None

    @property
    def used_fraction(self) -> float:
        """Used share of the blocks (spec/engine.md §3.2); what kept prefixes would give back is not used."""
        used = self.blocks.size - self.blocks.num_free
        if len(self.prefixes):
            used -= self.prefixes.num_reclaimable()
        return used / self.blocks.size

    def can_place(self, num_blocks: int, prefix: KeptPrefix | None = None) -> Fit:
        """Whether `num_blocks` blocks and one state slot can be had together, `prefix` staying kept."""
        fit = self.blocks.can_take(num_blocks)
        if fit is Fit.LATER and len(self.prefixes):
            enough = self.blocks.num_free + self.prefixes.num_reclaimable(prefix) >= num_blocks
            fit = Fit.OK if enough else Fit.LATER
        if fit is Fit.OK and self.slots.num_free == 0:
            return Fit.LATER
        return fit

    # -- acts -----------------------------------------------------------------------------------------

    def take_blocks(self, count: int, prefix: KeptPrefix | None = None) -> np.ndarray:
        """int32 [count] blocks; kept prefixes other than `prefix` make room if they have to."""
        if count > self.blocks.num_free:
            self.prefixes.give_back(count, prefix)
        return self.blocks.take(count)

    def place(self, sequence: Sequence, blocks: np.ndarray) -> int:
        """A row for the sequence, with `blocks` (int32, references are already its own) as its block
        table."""
        self.prefixes.left(sequence)
        row = int(self.slots.take(1)[0])
        self.admissions += 1
        self.table.assign(row, sequence, self.settings.eos_token_id, self.admissions)
        self.table.block_table[row, : len(blocks)] = blocks
        self.table.n_blocks[row] = len(blocks)
        return row

    def start_running(self, sequence: Sequence) -> None:
        """WAITING to RUNNING: from here on it owns a draft slot."""
        row = sequence.row
        sequence.status = Status.RUNNING
        self.table.status[row] = Status.RUNNING
        if self.settings.num_drafts:
            self.table.draft_slot[row] = self.draft_slots.take()

    def free_row(self, row: int) -> None:
        """Blocks back at once (later steps are ordered behind earlier ones), the row into quarantine."""
        table = self.table
        self.free_draft_slot(row)
        self.blocks.free(table.block_table[row, : table.n_blocks[row]][::-1])
        table.clear(row)
        self.quarantine.append(row)

    def free_draft_slot(self, row: int) -> None:
        self.draft_slots.free(int(self.table.draft_slot[row]))
        self.table.draft_slot[row] = 0

    def drop_fork(self, sequence: Sequence) -> None:
        """Gives up what a fork would have shared; it computes its prompt itself. Idempotent."""
        fork = sequence.fork
        if fork is None:
            return
        sequence.fork = None
        sequence.cached_tokens = 0
        self.blocks.free(fork.blocks[::-1])
        self.unpin_state(fork.state)

    def unpin_state(self, row: int) -> None:
        self.slots.free([row])

    def fork_fits(self, fork: ForkSource) -> bool:
        """Whether the source's rings are still as they were at the fork (a pinned row is never
        reassigned)."""
        return int(self.table.sched_cnt[fork.state]) == fork.steps

    def to_rowless(self, sequence: Sequence) -> None:
        """Takes row and blocks away but keeps the tokens, for a later prefill of all of them."""
        row = sequence.row
        length = int(self.table.len[row])
        tokens, logprobs = self.table.tokens[row, :length].copy(), self.table.logprobs[row, :length].copy()
        self.free_row(row)
        sequence.tokens, sequence.logprobs = tokens, logprobs
        sequence.status = Status.WAITING
        sequence.cached_tokens = 0
        self.prefixes.joined(sequence)

    def end(
        self, sequence: Sequence, status: Status, error: str | None = None, error_code: str | None = None
    ) -> Terminal:
        """The one terminal record of a sequence. What memory it holds is for the caller to free or reap."""
        if sequence.ended:
            raise IntegrityError(f"{sequence} ended twice")
        self.prefixes.left(sequence)
        row = sequence.row
        if row:
            tokens, logprobs = self.table.output_tokens(row)
            self.table.status[row] = status
            self.free_draft_slot(row)
        else:
            assert sequence.tokens is not None, f"{sequence} has neither row nor tokens"
            tokens = sequence.tokens[sequence.prompt_len :].copy()
            logprobs = np.zeros(len(tokens), np.float32)
            if sequence.logprobs is not None:
                logprobs[:] = sequence.logprobs[sequence.prompt_len :]
            sequence.tokens = sequence.logprobs = None
        sequence.status, sequence.ended = status, True
        del self.live[sequence.request_id]
        return Terminal(sequence, status, tokens, logprobs, error, error_code)

    def reap(self) -> None:
        """Finished rows leave `running`; their memory returns at the next reclaim (spec/engine.md §5.1,
        D5)."""
        if not self.running_dirty:
            return
        self.running_dirty = False
        finished = self.table.status[self.running] >= Status.STOPPED
        if not finished.any():
            return
        for row in self.running[finished].tolist():
            sequence = self.table.sequences[row]
            assert sequence is not None
            self.reaped.append(sequence)
        self.running = self.running[~finished]

    def purge_waiting(self) -> None:
        """Drops ended sequences anywhere in the queues."""
        if self.queues_dirty:
            self.queues_dirty = False
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.ended)
            self.prompted = deque(sequence for sequence in self.prompted if not sequence.ended)

    # -- integrity ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """`IntegrityError` unless every reference has an owner and every owner exists."""
        table = self.table
        block_refs = np.zeros(self.blocks.size, np.int64)
        slot_refs = np.zeros(self.slots.size, np.int64)
        owners = np.flatnonzero(table.seq_id != NO_SEQUENCE)
        for row in owners.tolist():
            np.add.at(block_refs, table.block_table[row, : table.n_blocks[row]], 1)
            slot_refs[row] += 1
            sequence = table.sequences[row]
            if sequence is None or sequence.row != row or sequence.seq_id != table.seq_id[row]:
                raise IntegrityError(
                    f"row {row} says it belongs to {int(table.seq_id[row])}, its owner is {sequence}"
                )
        for row in self.quarantine:
            slot_refs[row] += 1
        for sequence in (*self.waiting, *self.prompted):
            if sequence.fork is not None:
                np.add.at(block_refs, sequence.fork.blocks, 1)
                slot_refs[sequence.fork.state] += 1
        self.prefixes.add_refs(block_refs)
        self.prefixes.check_demand(list(self.waiting))
        np.add.at(block_refs, self.unpin_blocks, 1)
        np.add.at(slot_refs, self.unpin_states, 1)
        self.blocks.check_integrity(block_refs)
        self.slots.check_integrity(slot_refs)
        if slot_refs[0] or block_refs[0]:
            raise IntegrityError("the sentinel id 0 is owned by somebody")
        used = np.sort(table.draft_slot[table.draft_slot > 0])
        if len(used) != self.draft_slots.num_used or len(np.unique(used)) != len(used):
            raise IntegrityError(f"{self.draft_slots.num_used} draft slots are in use, rows hold {len(used)}")
        if len(np.unique(self.running)) != len(self.running):
            raise IntegrityError("a row runs twice")
        known = {id(s) for s in (*self.waiting, *self.prompted, *self.pending.values())}
        known |= {id(table.sequences[row]) for row in owners.tolist()}
        lost = [s for s in self.live.values() if id(s) not in known]
        if lost:
            raise IntegrityError(f"{lost[0]} is in no queue and has no row ({len(lost)} such)")
        if self.settings.num_drafts == 0 and self.draft_slots.num_used:
            raise IntegrityError("draft slots are in use although there are no drafts")
