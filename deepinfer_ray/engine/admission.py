"""Prefill admission: which prompts, and how much of each, make up the next prompt step.

Knows: the checks of spec/engine.md §4 in their order, FIFO without overtaking. Does not know: votes, decode.

Differences from the table of §4, each for a defect of §15: every check comes before every side effect (D11);
an aborted sequence gave its memory back when it was aborted (D4); a chunk that ends the prompt, or that opens
the step, is never too small (no fatal check); the terminal record of a refused sequence has no token (D2).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from deepinfer_ray.engine.block_manager import Fit
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.prefix_cache import KeptPrefix
from deepinfer_ray.engine.sequence import Sequence, Status
from deepinfer_ray.engine.settings import BLOCK_TOKENS, PREFILL_WATERMARK
from deepinfer_ray.engine.state import SchedulerState, blocks_for


def protect_images(sequence: Sequence, start: int, count: int, length: int, *, grow: bool) -> int:
    """Chunk length near `count` from `start` on that cuts no image; images are longer than one token.

    grow: move a cut inside an image to its end, else to its start (not before `start`).
    """
    cut = start + count
    if cut >= length or not sequence.image_spans:
        return count
    index = bisect_right(sequence.image_spans, cut, key=lambda span: span[0]) - 1
    if index < 0:
        return count
    first, end = sequence.image_spans[index]
    if not first < cut < end:
        return count
    return end - start if grow else max(first - start, 0)


@dataclass(slots=True)
class _Candidate:
    """Head of the queue as it would be scheduled: nothing of it is booked yet."""

    sequence: Sequence
    length: int
    num_cached: int
    new_blocks: int
    """Blocks to take; 0 for a continuing chunk."""
    shared: list[int] = field(default_factory=list)
    prefix: KeptPrefix | None = None
    q: int = 0
    leaves_prefix: bool = False
    """The chunk was cut so that others can start from what is computed then."""
    num_checkpoints: int = 0
    """Leading checkpoints that are behind the sequence once this chunk ran."""


@dataclass(slots=True)
class Adder:
    """The budget of one admission pass; thrown away after it."""

    state: SchedulerState
    tokens: int = 0
    num_seqs: int = 0
    sum_k_left: int = 0
    chosen: list[_Candidate] = field(default_factory=list)
    clone_states: list[tuple[int, int]] = field(default_factory=list)
    clone_blocks: list[tuple[int, int]] = field(default_factory=list)
    save_states: list[tuple[int, int]] = field(default_factory=list)
    ignored: bool = False
    stop: bool = False

    def run(self) -> bool:
        """Admits from the head of the queue until a check says stop. True if anything was admitted or
        refused."""
        settings = self.state.settings
        self.num_seqs = len(self.state.running)
        self.sum_k_left = settings.prefill_max_sum_k
        while not self.stop and (head := self.state.waiting_head()) is not None:
            candidate = self._fit_memory(head)
            if candidate is None or not self._fit_step(candidate):
                continue  # refused (the next head follows) or `stop` is set
            self._book(candidate)
        return bool(self.chosen) or self.ignored

    # -- checks: no side effect but a refusal ---------------------------------------------------------

    def _fit_memory(self, sequence: Sequence) -> _Candidate | None:
        """Checks 2 to 4."""
        state, settings = self.state, self.state.settings
        if not sequence.schedulable:
            self.stop = True
            return None
        length = state.length(sequence)
        if sequence.row:
            return _Candidate(sequence, length, int(state.table.num_cached[sequence.row]), 0)
        if length > settings.prompt_limit:
            limit = (
                "max_model_len" if settings.prompt_limit == settings.max_model_len else "max_batched_tokens"
            )
            self._refuse(
                sequence,
                "prompt_too_long",
                f"{length} tokens, but scheduler.{limit} allows {settings.prompt_limit}; "
                "shorten the prompt or raise it",
            )
            return None
        total = blocks_for(length)
        if state.blocks.can_take(total) is Fit.NEVER:
            self._refuse(
                sequence,
                "out_of_blocks",
                f"{length} tokens need {total} cache blocks, the pool has {state.blocks.size - 1}; "
                "give the cache more memory or shorten the prompt",
            )
            return None
        if sequence.fork is not None and not state.fork_fits(sequence.fork):
            state.drop_fork(sequence)
        prefix = state.prefixes.find(sequence, length) if sequence.fork is None else None
        if state.prefixes.is_coming(sequence, length, prefix.num_tokens if prefix is not None else 0):
            self.stop = True  # this very step computes a longer prefix of it
            return None
        while True:
            fork = sequence.fork
            cached = fork.num_tokens if fork is not None else prefix.num_tokens if prefix is not None else 0
            full = cached // BLOCK_TOKENS
            if state.can_place(total - full, prefix) is Fit.OK:
                shared = fork.blocks[:full] if fork is not None else []
                return _Candidate(sequence, length, cached, total - full, shared, prefix)
            stuck = not (self.chosen or state.num_decodable() or state.prompted)
            if not stuck or not self._relieve(sequence):
                self.stop = True
                return None

    def _relieve(self, head: Sequence) -> bool:
        """Takes memory from the last waiting sequence that holds some, so that the head can go on.

        Only when nothing runs: then nobody else would ever free any, and the queue would stand still for
        good.
        """
        state = self.state
        for sequence in reversed(state.waiting):
            if sequence is head or sequence.ended:
                continue
            if sequence.fork is not None:
                state.drop_fork(sequence)
                return True
            if sequence.row:
                state.to_rowless(sequence)
                sequence.num_preemptions += 1
                state.num_preempted += 1
                return True
        if head.fork is not None:
            state.drop_fork(head)
            return True
        return False

    def _fit_step(self, c: _Candidate) -> bool:
        """Checks 5 to 13: sets the chunk length, or `stop`."""
        settings = self.state.settings
        first, rest, sequence = not self.chosen, c.length - c.num_cached, c.sequence
        if self.num_seqs + 1 > settings.max_seqs or self.sum_k_left < c.length:
            self.stop = True
            return False
        budget, align = settings.token_budget, settings.cp_align
        available = (budget - self.tokens) // align * align
        q = min(rest, available)
        passed = 0
        for checkpoint in sequence.checkpoints:
            if checkpoint > c.num_cached + q:
                break
            passed += 1
            if checkpoint > c.num_cached:
                q = checkpoint - c.num_cached
                break
        if settings.chunked_prefill:
            end = c.num_cached + q
            cut = self.state.prefixes.next_cut(sequence, c.num_cached, end, c.length)
            c.leaves_prefix = cut is not None
            q = (end if cut is None else cut) - c.num_cached
            while passed and sequence.checkpoints[passed - 1] > c.num_cached + q:
                passed -= 1  # beyond the cut
        grown = protect_images(sequence, c.num_cached, q, c.length, grow=first)
        if self.tokens + -(-grown // align) * align > budget:
            grown = protect_images(sequence, c.num_cached, q, c.length, grow=False)
        q = grown
        is_chunk = q < rest
        too_small = is_chunk and not first and q < settings.min_chunk_tokens
        if q <= 0 or too_small or (is_chunk and not settings.chunked_prefill):
            self.stop = True
            return False
        while passed < len(sequence.checkpoints) and sequence.checkpoints[passed] <= c.num_cached + q:
            passed += 1  # a cut that grew past further checkpoints
        if passed and sequence.checkpoints[passed - 1] > c.num_cached + q:
            passed -= 1  # a cut that shrank before its checkpoint
        c.q, c.num_checkpoints = q, passed
        return True

    def _refuse(self, sequence: Sequence, code: str, message: str) -> None:
        """Ends a sequence that can never be prefilled; one that was preempted keeps its tokens."""
        state = self.state
        state.waiting.popleft()
        sequence.queued = False
        state.drop_fork(sequence)
        status = Status.PREEMPTED if sequence.num_preemptions else Status.IGNORED
        state.outbox.append(state.end(sequence, status, message, code))
        self.ignored = True

    # -- commit -------------------------------------------------------------------------------------

    def _book(self, c: _Candidate) -> None:
        """Check 14 and 15: takes memory and budget, in this order and only here."""
        state, settings, sequence = self.state, self.state.settings, c.sequence
        align = settings.cp_align
        self.tokens += -(-c.q // align) * align
        self.sum_k_left -= c.length
        state.waiting.popleft()
        sequence.queued = False
        if not sequence.row:
            self._place(c)
        for _ in range(c.num_checkpoints):
            sequence.checkpoints.popleft()
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = state.clock()
        self.chosen.append(c)
        if c.num_cached + c.q == c.length:
            self.num_seqs += 1
            state.start_running(sequence)
        elif c.leaves_prefix:
            self.num_seqs += 1  # goes on in the next step, and then wants its seat
        elif settings.role == "normal":
            self.stop = True  # a chunk closes the batch
        row = sequence.row
        kept = state.prefixes.keep(sequence, c.num_cached + c.q, state.table.block_table[row])
        self.save_states += [(row, snapshot) for snapshot in kept]

    def _place(self, c: _Candidate) -> None:
        state = self.state
        new = state.take_blocks(c.new_blocks, c.prefix)
        if c.prefix is None:
            materialise(state, c.sequence, c.shared, new, self.clone_states, self.clone_blocks)
        else:
            restore(state, c.sequence, c.prefix, new, self.clone_states, self.clone_blocks)

    def plan(self, step: int) -> StepPlan:
        """The prompt step of what was admitted; empty if nothing was."""
        state = self.state
        state.prefixes.publish()
        table = state.table
        rows = np.array([c.sequence.row for c in self.chosen], np.int64)
        q = np.array([c.q for c in self.chosen], np.int32)
        k = table.num_cached[rows] + q
        table.inflight[rows] += state.settings.num_drafts + 1
        table.sched_cnt[rows] += 1
        fresh = [c for c in self.chosen if c.new_blocks or c.shared]
        updates = [
            np.stack(
                (
                    np.full(count := int(table.n_blocks[c.sequence.row]), c.sequence.row, np.int32),
                    np.arange(count, dtype=np.int32),
                    table.block_table[c.sequence.row, :count],
                ),
                axis=1,
            )
            for c in fresh
        ]
        return StepPlan(
            step=step,
            is_prompt=True,
            rows=rows,
            seq_ids=table.seq_id[rows],
            q=q,
            k=k,
            last_chunk=k >= table.len[rows],
            num_tokens=self.tokens,
            remap=np.full(len(rows), -1, np.int32),
            draft_read=np.zeros(len(rows), np.int32),
            draft_write=table.draft_slot[rows],
            clone_states=np.array(self.clone_states, np.int32).reshape(-1, 2),
            clone_blocks=np.array(self.clone_blocks, np.int32).reshape(-1, 2),
            save_states=np.array(self.save_states, np.int32).reshape(-1, 2),
            block_updates=np.concatenate(updates) if updates else np.empty((0, 3), np.int32),
        )


def materialise(
    state: SchedulerState,
    sequence: Sequence,
    shared: list[int],
    new: np.ndarray,
    clone_states: list[tuple[int, int]],
    clone_blocks: list[tuple[int, int]],
) -> int:
    """Gives a sequence its row; a fork shares the full blocks `shared` and copies the partial one into
    `new[0]`.

    The fork's references move: those of shared blocks become the table's, those of copied sources wait for
    the copy (released in `reclaim`), the rest is released now. Returns the row.
    """
    fork = sequence.fork
    blocks = np.concatenate((np.array(shared, np.int32), new))
    row = state.place(sequence, blocks)
    if fork is None:
        return row
    sequence.fork = None
    state.table.num_cached[row] = fork.num_tokens
    sequence.cached_tokens = fork.num_tokens
    clone_states.append((fork.state, row))
    state.unpin_states.append(fork.state)
    keep = len(shared)
    if fork.num_tokens % BLOCK_TOKENS:
        clone_blocks.append((fork.blocks[keep], int(new[0])))
        state.unpin_blocks.append(fork.blocks[keep])
        keep += 1
    state.blocks.free(fork.blocks[keep:][::-1])
    return row


def restore(
    state: SchedulerState,
    sequence: Sequence,
    prefix: KeptPrefix,
    new: np.ndarray,
    clone_states: list[tuple[int, int]],
    clone_blocks: list[tuple[int, int]],
) -> int:
    """Gives a sequence its row with a kept prefix in it: full blocks are shared, a partial one is copied into
    `new[0]`, the rings come from the snapshot. Returns the row."""
    state.prefixes.use(prefix)
    full = prefix.num_tokens // BLOCK_TOKENS
    shared = prefix.blocks[:full]
    state.blocks.pin(shared)
    if full < len(prefix.blocks):
        source = int(prefix.blocks[full])
        state.blocks.pin([source])
        state.unpin_blocks.append(source)
        clone_blocks.append((source, int(new[0])))
    row = state.place(sequence, np.concatenate((shared, new)))
    state.table.num_cached[row] = sequence.cached_tokens = prefix.num_tokens
    clone_states.append((prefix.snapshot, row))
    return row


def wants_prefill(state: SchedulerState) -> bool:
    """Whether this rank would start a prompt step: below the watermark and the head of the queue is ready.

    With nothing to decode there is nothing that the watermark would protect: half prefilled sequences that
    hold more than its share would otherwise never go on.
    """
    head = state.waiting_head()
    if head is None or not head.schedulable:
        return False
    if state.blocks.used_fraction <= PREFILL_WATERMARK or state.used_fraction <= PREFILL_WATERMARK:
        return True
    return not state.num_decodable() and not state.prompted
