"""One rank's scheduler: what runs in the next step, and what a finished step changes.

Knows: requests in, plans out, outputs back in, terminal records out; exactly one record a request.
Does not know: tensors, text, the device. The policy is in admission.py (prefill), decode.py, preemption.py
and phase_vote.py, the books in state.py, the commit in commit.py.

One step of the plain loop                One step of the overlapped loop (previous = step t-1)
    plan = s.schedule(s.agree())              plan = s.schedule(s.agree())
    launch forward(plan)                      launch forward(plan)      # repaired by plan.remap on the device
    sample                                    s.commit(previous, its outputs); s.refresh(plan)
    s.reclaim()                               launch sample(plan); s.reclaim()
    s.commit(plan, outputs)                   a prompt step is committed now, a decode step one step later

Defects of spec/engine.md §15 and where they are fixed
    D1  dropped request          `add` always leads to one record; illegal requests end through it
    D2  bogus token              `Terminal` of a refused sequence has zero tokens
    D3  silent abort             `abort` emits the record at once
    D4  abort leaks              memory of a queued sequence is freed by `abort`
    D5  finished block seats     `state.reap` in both branches, idle points        (parity:
    idle_fast_path=False) D6  one-free-block rule      `decode._reserve` asks for what is needed (parity:
    strict_block_headroom=True) D7  image > budget           refused by `add`
    D8  mean block count         `phase_vote.agree_num_blocks` takes the minimum
    D9  double state bytes       not the scheduler's: the capacity plan reserves a copy only if one is made
    D10 fork without drafts      `decode._seed_drafts`
    D11 early side effects       `admission._book` is the only place with side effects
    D12 abort blind spots        `abort` finds a request wherever it is
    D13 peak FLOPs on Hopper     not the scheduler's: statistics
    D14 double free              `table.clear` resets the row; pools refuse a second free by name
    D15 unstable ties            admission number breaks every tie
    D16 fatal checks             `StepOutputs.failures`, `fail`; what is left raises `IntegrityError`
    D17 endless self-preemption  `preemption.MAX_SELF_PREEMPTIONS`, `SchedulerSettings.require_headroom`
    D18 uninitialised memory     not the scheduler's: the pools are zeroed at allocation
    D19 lazy environment         `SchedulerSettings` is explicit and frozen
Nobody starves: requests are first scheduled in the order of arrival; while a live request's head of queue is
ready, at most 4 steps (without the idle fast path: prefill_any_interval + 4) pass without a prefilled token,
a committed token or a record; every recomputation commits at least one token. Hence a request ends after at
most that many steps for each chunk and token, recomputed ones included, of what came before it or runs beside
it.

Beyond that list, found by the random tests
    the watermark stopped half prefilled sequences for good once nothing ran      `admission.wants_prefill`
    a queue whose head waits for blocks that the queue itself holds stood still   `admission._relieve`
    forks whose source moved on would have cloned rings that no longer fit        `state.fork_fits`
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from deepinfer_ray.engine.admission import Adder, wants_prefill
from deepinfer_ray.engine.block_manager import Fit, IntegrityError
from deepinfer_ray.engine.commit import Committer, OnTokens
from deepinfer_ray.engine.decode import AllDrafts, DecodeScheduler, DraftLengths
from deepinfer_ray.engine.phase_vote import Agreement, PhaseVote, SingleRank, VoteGroup
from deepinfer_ray.engine.plan import CommitResult, StepOutputs, StepPlan
from deepinfer_ray.engine.request import Request
from deepinfer_ray.engine.sequence import ForkSource, Sequence, Status
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.state import SchedulerState, blocks_for

STATUS_OF_CODE = {
    "bad_schema": Status.SO_FAILED,
    "schema_timeout": Status.SO_FAILED,
    "bad_image": Status.VE_FAILED,
}


class Scheduler:
    """The scheduler of one data-parallel rank. Not thread-safe: everything is called by the step loop's
    thread."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        votes: VoteGroup | None = None,
        compress: np.ndarray | None = None,
        draft_lengths: DraftLengths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """votes: the data-parallel group, None = one rank. compress: int32 token id -> Engram id."""
        self.settings = settings
        self.state = SchedulerState(settings, compress, clock)
        self.table = self.state.table
        self._decode = DecodeScheduler(self.state, draft_lengths or AllDrafts())
        self._committer = Committer(self.state)
        self._vote = PhaseVote(
            votes or SingleRank(),
            settings.prefill_all_interval,
            settings.prefill_any_interval,
            settings.idle_fast_path,
        )
        self._step = 0
        self._next_seq_id = 1

    # -- requests in ----------------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        *,
        checkpoints: Iterable[int] = (),
        image_spans: Iterable[tuple[int, int]] = (),
        schedulable: bool = True,
        ready: bool = True,
        extra: Any = None,
    ) -> Sequence:
        """Queues a request behind all others.

        checkpoints: lengths at which a chunk must end. image_spans: half-open token ranges no chunk may cut.
        schedulable: False while its images are encoded: it holds the queue up when it gets to the head.
        ready: False while its grammar is built: it joins the queue with `make_ready`.
        A request that can never run ends with a terminal record. `ValueError`: the caller's mistakes, a
        duplicate id or checkpoints while prompts are never cut.
        """
        points = deque(sorted(checkpoints))
        if points and not self.settings.chunked_prefill:
            raise ValueError("checkpoints cut a prompt into chunks, but scheduler.chunked_prefill is off")
        spans = tuple(sorted(image_spans))
        sequence = Sequence(
            request,
            self._take_seq_id(),
            prompt_len=len(request.prompt),
            tokens=np.array(request.prompt, np.int32),
            schedulable=schedulable,
            checkpoints=points,
            image_spans=spans,
            arrival_time=request.arrival_time or self.state.clock(),
            extra=extra,
        )
        self._register(sequence)
        align = self.settings.cp_align
        largest = max((end - start for start, end in spans), default=0)
        if sequence.prompt_len == 0:
            self._end_now(sequence, Status.IGNORED, "empty_prompt", "the prompt has no token")
        elif largest > self.settings.token_budget // align * align:
            self._end_now(
                sequence,
                Status.IGNORED,
                "bad_image",
                f"an image of {largest} tokens does not fit a step of scheduler.max_batched_tokens = "
                f"{self.settings.token_budget}; raise it or shrink the image",
            )
        elif not ready:
            self.state.pending[sequence.request_id] = sequence
        else:
            self._enqueue(sequence)
        return sequence

    def make_ready(self, request_id: int) -> None:
        """A request added with `ready=False` joins the queue. No effect once it has ended."""
        sequence = self.state.pending.pop(request_id, None)
        if sequence is not None:
            self._enqueue(sequence)

    def set_schedulable(self, request_id: int) -> None:
        """A request added with `schedulable=False` may be scheduled. No effect once it has ended."""
        sequence = self.state.live.get(request_id)
        if sequence is not None:
            sequence.schedulable = True

    def abort(self, request_id: int) -> bool:
        """Ends a request wherever it is; its record comes with the next plan. False if it is not alive."""
        return self._cut(request_id, Status.ABORTED, None, None)

    def fail(self, request_id: int, code: str, message: str) -> bool:
        """As `abort`, for a request that failed alone (grammar, image): the record carries code and
        message."""
        return self._cut(request_id, STATUS_OF_CODE.get(code, Status.FAILED), message, code)

    def fork(
        self, parent_id: int, request: Request, *, num_tokens: int | None = None, extra: Any = None
    ) -> Sequence:
        """A new request whose prompt is the parent's first `num_tokens` tokens (default: all), sharing its
        cache.

        Call between a commit and the next schedule. Full blocks are shared, a partial one and the state slot
        are copied when the child is scheduled; until then they are pinned. The child computes its whole
        prompt itself if the parent moves on first. `request.prompt` is not looked at. `ValueError` if the
        parent has no cache.
        """
        state, table = self.state, self.table
        parent = state.live.get(parent_id)
        if parent is None or not parent.row or table.num_cached[parent.row] == 0:
            raise ValueError(
                f"request {parent_id} has no cache to fork from: it is unknown, waiting or ended"
            )
        row = parent.row
        length = int(table.len[row]) if num_tokens is None else num_tokens
        if not 1 <= length <= table.len[row]:
            raise ValueError(f"a fork of {length} tokens, but request {parent_id} has {int(table.len[row])}")
        cached = min(int(table.num_cached[row]), length - 1)
        tokens = table.tokens[row, :length].copy()
        child = Sequence(
            request,
            self._take_seq_id(),
            prompt_len=length,
            tokens=tokens,
            image_spans=parent.image_spans,
            arrival_time=request.arrival_time or state.clock(),
            extra=extra,
        )
        self._register(child)
        if length > self.settings.max_model_len:
            self._end_now(
                child,
                Status.LENGTH_CAPPED,
                None,
                f"the fork has {length} tokens, scheduler.max_model_len is {self.settings.max_model_len}",
            )
            return child
        written = int(table.num_cached[row] + table.inflight[row])
        if cached > 0 and written - 1 <= cached + self.settings.backtracking:
            blocks = table.blocks_of(row)[: blocks_for(cached)]
            state.blocks.pin(blocks)
            state.slots.pin([row])
            child.fork = ForkSource(blocks, cached, row, parent.seq_id, int(table.sched_cnt[row]))
        child.queued = True
        if child.fork is not None and cached == length - 1:
            state.prompted.append(child)
        else:
            state.waiting.appendleft(child)
        return child

    # -- steps ----------------------------------------------------------------------------------------

    def agree(self, *, in_flight: bool = False, leaving: bool = False) -> Agreement:
        """One collective over the group: is there work anywhere, is everybody idle, does everybody leave.
        Once per turn of the loop. in_flight: a step that is not committed here counts as work."""
        state = self.state
        return self._vote.agree(
            self.has_unfinished or in_flight,
            state.num_decodable() > 0 or bool(state.prompted),
            wants_prefill(state),
            leaving,
        )

    def schedule(self, agreement: Agreement | None = None) -> StepPlan:
        """The next step, possibly empty. Collective at vote points; agrees itself if the caller did not.

        At most one earlier step may be uncommitted, and only if it is a decode step.
        """
        state, settings = self.state, self.settings
        if state.in_flight is not None and state.in_flight.is_prompt:
            raise IntegrityError(f"{state.in_flight} must be committed before the next schedule")
        if state.num_uncommitted > 1:
            raise IntegrityError(f"{state.num_uncommitted} steps are uncommitted; at most one may be")
        self._step += 1
        if settings.idle_fast_path or settings.role == "prompt":
            state.reap()
        if settings.role == "prompt":
            adder = Adder(state)
            adder.run()
            plan = adder.plan(self._step)
        elif settings.role == "completion":
            plan = self._decode.plan(self._step)
        else:
            plan = self._schedule_by_vote(agreement)
        plan.decode_step = self._vote.decode_step
        plan.ignored, state.outbox = state.outbox, []
        plan.finished = state.reaped.copy()
        state.in_flight = None if plan.is_empty else plan
        state.num_uncommitted += not plan.is_empty
        return plan

    def _schedule_by_vote(self, agreement: Agreement | None) -> StepPlan:
        state = self.state
        if agreement is None and self.settings.idle_fast_path:
            agreement = self.agree()
        idle = agreement.idle if agreement is not None else False
        adder = Adder(state)
        if self._vote.decide(lambda: wants_prefill(state), adder.run, idle):
            return adder.plan(self._step)
        plan = self._decode.plan(self._step)
        state.purge_waiting()
        return plan

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> CommitResult:
        """Makes a step's tokens part of its sequences; in the overlapped loop one schedule later.

        Sequences that ended or gave way since the schedule are passed over. An empty plan may be committed
        too.
        """
        return self._committer.commit(plan, outputs)

    def refresh(self, plan: StepPlan) -> None:
        """Exact `k` and `draft_read` of a launched plan, once the step before it is committed; before
        sampling."""
        self._committer.refresh(plan)

    def reclaim(self) -> None:
        """Memory of reaped sequences, copy sources and quarantined rows becomes free. Once a step, after the
        previous step is committed and this one's copies are enqueued."""
        state = self.state
        for sequence in state.reaped:
            state.free_row(sequence.row)
        state.reaped.clear()
        for block in state.unpin_blocks:
            state.blocks.free((block,))
        state.unpin_blocks.clear()
        if state.quarantine or state.unpin_states:
            for row in (*state.quarantine, *state.unpin_states):
                state.slots.free((row,))
            state.quarantine.clear()
            state.unpin_states.clear()

    @property
    def on_tokens(self) -> OnTokens | None:
        """Hook that sees the new tokens of watched rows and may stop them (commit.py)."""
        return self._committer.on_tokens

    @on_tokens.setter
    def on_tokens(self, hook: OnTokens | None) -> None:
        self._committer.on_tokens = hook

    @property
    def draft_lengths(self) -> DraftLengths:
        """How many drafts of each sequence the next decode steps verify."""
        return self._decode.draft_lengths

    @draft_lengths.setter
    def draft_lengths(self, lengths: DraftLengths) -> None:
        self._decode.draft_lengths = lengths

    # -- hand-over between roles ----------------------------------------------------------------------

    def release_processed(self, request_id: int) -> None:
        """A sequence whose prompt is done leaves without a record: another engine goes on with it.

        For role `prompt`, after its cache and state bytes were copied out; memory returns at the next
        reclaim.
        """
        state = self.state
        sequence = state.live.get(request_id)
        if sequence is None or sequence.row not in state.running:
            raise ValueError(
                f"request {request_id} has no complete prompt here: it is unknown, queued or ended"
            )
        state.running = state.running[state.running != sequence.row]
        del state.live[request_id]
        sequence.ended = True
        state.reaped.append(sequence)

    def try_receive(
        self, request: Request, tokens: np.ndarray, *, logprobs: np.ndarray | None = None, extra: Any = None
    ) -> Sequence | None:
        """A row and blocks for a sequence whose cache another engine computed; None when there is no room
        now.

        tokens: int32 [L], the prompt and what was generated of it (at least one token): the cache of the
        first L-1 is to be copied into `table.block_table[row]` and slot `row`; then `enqueue_received`.
        logprobs: float32 [L] by position, of the outputs among them.
        """
        state = self.state
        count = blocks_for(len(tokens) - 1)
        if state.can_place(count) is not Fit.OK:
            return None
        sequence = Sequence(
            request,
            self._take_seq_id(),
            prompt_len=len(request.prompt),
            tokens=np.array(tokens, np.int32),
            logprobs=logprobs,
            arrival_time=request.arrival_time or state.clock(),
            extra=extra,
        )
        self._register(sequence)
        row = state.place(sequence, state.take_blocks(count))
        self.table.num_cached[row] = len(tokens) - 1
        sequence.queued = True
        return sequence

    def enqueue_received(self, sequence: Sequence) -> None:
        """The bytes have arrived: the sequence enters decode as soon as a seat is free."""
        if not sequence.ended:
            self.state.prompted.append(sequence)

    # -- what is going on -----------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests without a terminal record."""
        return len(self.state.live)

    @property
    def num_waiting(self) -> int:
        return len(self.state.waiting) + len(self.state.pending)

    @property
    def num_running(self) -> int:
        return len(self.state.running)

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return self.state.num_preempted

    @property
    def num_votes(self) -> int:
        """Phase votes (collectives beside `agree`) so far."""
        return self._vote.num_votes

    @property
    def decode_step(self) -> int:
        return self._vote.decode_step

    @property
    def has_unfinished(self) -> bool:
        """Whether this rank needs another step: live requests, records to hand out, rows to reap."""
        state = self.state
        return bool(state.live or state.outbox or len(state.running))

    def check_integrity(self) -> None:
        """`IntegrityError` unless all books balance, and are empty when there is nothing unfinished."""
        state = self.state
        state.check_integrity()
        owed = state.quarantine or state.unpin_blocks or state.unpin_states or state.reaped
        if self.has_unfinished or owed:
            return
        kept = {state.blocks: state.prefixes.num_reclaimable()}
        for pool in (state.blocks, state.slots):
            used = pool.size - 1 - pool.num_free - kept.get(pool, 0)
            if used:
                raise IntegrityError(
                    f"the engine is idle, but {used} of {pool.size - 1} {pool.noun}s are used"
                )
        if state.draft_slots.num_used:
            raise IntegrityError(f"the engine is idle, but {state.draft_slots.num_used} draft slots are used")

    # -- private --------------------------------------------------------------------------------------

    def _take_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id - 1

    def _register(self, sequence: Sequence) -> None:
        if sequence.request_id in self.state.live:
            raise ValueError(f"request id {sequence.request_id} is already alive in this engine")
        self.state.live[sequence.request_id] = sequence

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.queued = True
        self.state.waiting.append(sequence)
        self.state.prefixes.joined(sequence)

    def _end_now(self, sequence: Sequence, status: Status, code: str | None, message: str) -> None:
        self.state.outbox.append(self.state.end(sequence, status, message, code))

    def _cut(self, request_id: int, status: Status, message: str | None, code: str | None) -> bool:
        state = self.state
        sequence = state.live.get(request_id)
        if sequence is None:
            return False
        state.pending.pop(request_id, None)
        state.drop_fork(sequence)
        state.outbox.append(state.end(sequence, status, message, code))
        if sequence.queued:  # it stands in a queue, not in a step: its memory is free at once
            sequence.queued = False
            state.queues_dirty = True
            if sequence.row:
                state.free_row(sequence.row)
        elif sequence.row:
            state.running_dirty = True  # in a step: its late commit is passed over, then it is reaped
        return True
