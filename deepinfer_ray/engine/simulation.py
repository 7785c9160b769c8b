"""A scheduler driven without a model: made-up tokens, chosen acceptance, both loops.

For tests, benchmarks and policy studies. Knows: the order of the calls of a step (scheduler.py). Does not
know: tensors. A made-up token depends on its sequence and position alone, so every schedule of the same
requests must give the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_ray.engine.phase_vote import Agreement, VoteGroup
from deepinfer_ray.engine.plan import CommitResult, StepOutputs, StepPlan
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Sequence, Terminal
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.table import SequenceTable

Accept = Callable[[np.ndarray], np.ndarray]
"""seq_ids int64 [n] -> int32 [n] drafts that the verification would accept, capped by q - 1."""

FIRST_ID = 1 << 32
"""Ids of a loop's own requests start here, away from the process-wide counter."""


def create_scheduler(*, votes: VoteGroup | None = None, **overrides: Any) -> Scheduler:
    """A small scheduler: 64 blocks, 1024 tokens, 8 sequences, 5 drafts; any `SchedulerSettings` field
    overrides."""
    values: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 1024,
        "max_batched_tokens": 1024,
        "max_seqs": 8,
        "num_drafts": 5,
        "state_slots": 40,
        "vocab_size": 1000,
    }
    return Scheduler(SchedulerSettings(**(values | overrides)), votes=votes)


def made_up_tokens(request_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int32 tokens in [3, 997) that depend on request and position only; never BOS, EOS or PAD."""
    mixed = request_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(994)).astype(np.int32) + np.int32(3)


def fixed_acceptance(count: int) -> Accept:
    """Every verification accepts `count` drafts."""
    return lambda seq_ids: np.full(len(seq_ids), count, np.int32)


class SimulatedModel:
    """Samples for a plan from the true position of each row, as a device would after its repair."""

    def __init__(self, table: SequenceTable, num_drafts: int, accept: Accept, eos_every: int = 0) -> None:
        """eos_every: about one token in so many is EOS (id 1); 0 = none."""
        self.table, self.num_drafts, self.accept, self.eos_every = table, num_drafts, accept, eos_every

    def run(self, plan: StepPlan) -> StepOutputs:
        """`plan.k` must be exact (plain loop, or after `refresh`)."""
        n, width = plan.num_seqs, self.num_drafts
        request_ids = np.fromiter(
            (s.request_id if (s := self.table.sequences[row]) else 0 for row in plan.rows.tolist()),
            np.int64,
            n,
        )
        first = plan.k if plan.is_prompt else plan.k - plan.q + 1
        tokens = made_up_tokens(request_ids[:, None], first[:, None] + np.arange(width + 1))
        if self.eos_every:
            tokens[tokens % self.eos_every == 0] = 1
        if plan.is_prompt or not width:
            return StepOutputs(tokens[:, 0].copy(), drafts=None, logprobs=-(tokens[:, :1] / np.float32(997)))
        count = np.minimum(self.accept(plan.seq_ids), plan.q - 1)
        columns = np.arange(width)
        accepted = np.where(columns < count[:, None], tokens[:, :width], -1).astype(np.int32)
        return StepOutputs(
            sampled=tokens[np.arange(n), count],
            accepted=accepted,
            drafts=np.zeros((n, width), np.int32),
            confidence=np.full((n, width), 0.5, np.float32),
            logprobs=-(tokens / np.float32(997)),
        )


@dataclass(slots=True)
class Turn:
    """One turn of the loop: its plan and what was committed during it."""

    plan: StepPlan
    commits: list[CommitResult] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """(request id, q, k) of each scheduled sequence, as scheduled."""
    free_blocks: int = 0
    """After the schedule, before the reclaim."""


class Loop:
    """The plain or the overlapped loop around a scheduler and a simulated model; one `turn` is one global
    step."""

    def __init__(
        self, scheduler: Scheduler, accept: Accept = fixed_acceptance(2), eos_every: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.model = SimulatedModel(scheduler.table, scheduler.settings.num_drafts, accept, eos_every)
        self.previous: tuple[StepPlan, StepOutputs] | None = None
        self.results: dict[int, Terminal] = {}
        self.turns = 0
        self._next_id = FIRST_ID

    def add(self, length: int, max_tokens: int = 16, **keywords: Any) -> Sequence:
        """A request of `length` made-up tokens; keywords of `Scheduler.add` and of `SamplingParams` mix
        freely."""
        own = {"checkpoints", "image_spans", "schedulable", "ready", "extra"}
        add = {name: keywords.pop(name) for name in own & keywords.keys()}
        params = SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | keywords))
        return self.scheduler.add(
            Request(np.full(length, 7, np.int32), params, request_id=self.take_id()), **add
        )

    def take_id(self) -> int:
        """A request id of this loop: the same in every process, so that a run follows from its seed alone."""
        self._next_id += 1
        return self._next_id - 1

    def turn(self, agreement: Agreement | None = None, between: Callable[[], None] | None = None) -> Turn:
        """Schedules one step and commits what is due. between: called while the step is in flight."""
        scheduler = self.scheduler
        plan = scheduler.schedule(agreement)
        turn = Turn(plan, free_blocks=scheduler.state.blocks.num_free)
        for row, q, k in zip(plan.rows.tolist(), plan.q.tolist(), plan.k.tolist(), strict=True):
            sequence = scheduler.table.sequences[row]
            assert sequence is not None
            turn.chunks.append((sequence.request_id, q, k))
        turn.terminals += plan.ignored
        if between is not None:
            between()
        if self.previous is not None:
            self._commit(turn, *self.previous)
            self.previous = None
            scheduler.refresh(plan)
        outputs = self.model.run(plan)
        scheduler.reclaim()
        if plan.is_prompt or not scheduler.settings.overlapped:
            self._commit(turn, plan, outputs)
        elif not plan.is_empty:
            self.previous = (plan, outputs)
        self._take(turn.terminals)
        self.turns += 1
        return turn

    def flush(self) -> Turn | None:
        """Commits the deferred step at the end of a run."""
        if self.previous is None:
            return None
        turn = Turn(self.previous[0])
        self._commit(turn, *self.previous)
        self.previous = None
        self._take(turn.terminals)
        return turn

    def run(self, max_turns: int = 100_000) -> dict[int, Terminal]:
        """Turns until nothing is unfinished; the records by request id."""
        while self.scheduler.has_unfinished:
            if self.turns >= max_turns:
                raise RuntimeError(
                    f"{self.scheduler.num_unfinished} requests are unfinished after {max_turns} steps"
                )
            self.turn()
        self.flush()
        return self.results

    def _commit(self, turn: Turn, plan: StepPlan, outputs: StepOutputs) -> None:
        result = self.scheduler.commit(plan, outputs)
        turn.commits.append(result)
        turn.terminals += result.terminals

    def _take(self, terminals: list[Terminal]) -> None:
        for terminal in terminals:
            if terminal.request_id in self.results:
                raise RuntimeError(f"{terminal} is the second record of its request")
            self.results[terminal.request_id] = terminal
