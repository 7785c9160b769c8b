"""A fleet of real schedulers in lock-step on a simulated clock.

Knows: the order of calls of the overlapped loop (scheduler.py), that all ranks wait for the slowest, what a
step costs (policy_cost.py). Does not know: policies to compare, tensors, tokens: every token is 7 and a
sequence ends at its drawn length. Which drafts are accepted depends on request and position alone, so that
two policies decode the same sequences.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from deepinfer_ray.bench.policy_cost import CostModel, RankLoad
from deepinfer_ray.bench.policy_workload import Arrival
from deepinfer_ray.engine import admission
from deepinfer_ray.engine.phase_vote import Agreement, InProcessGroup, InProcessMember
from deepinfer_ray.engine.plan import StepOutputs, StepPlan
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Status, Terminal
from deepinfer_ray.engine.settings import PREFILL_WATERMARK, SchedulerSettings
from deepinfer_ray.engine.state import blocks_for

TOKEN = 7
ACCEPT_RATE = 0.7
"""Chance that one draft is accepted after all before it were; an assumption, no figure is published."""


@contextmanager
def prefill_watermark(fraction: float) -> Iterator[None]:
    """Schedules inside see another watermark: it is a constant of the engine, only a study may bend it."""
    admission.PREFILL_WATERMARK = fraction
    try:
        yield
    finally:
        admission.PREFILL_WATERMARK = PREFILL_WATERMARK


def accepted_counts(request_ids: np.ndarray, first: np.ndarray, num_drafts: int, rate: float) -> np.ndarray:
    """int32 [n] leading drafts accepted for positions `first …` of each request; geometric, cut at
    num_drafts."""
    positions = (first[:, None] + np.arange(num_drafts)).astype(np.uint64)
    mixed: np.ndarray = request_ids[:, None].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ positions) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    chance = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.logical_and.accumulate(chance < rate, axis=1).sum(axis=1, dtype=np.int32)


class _Board:
    """What the ranks said in this step's `agree`. It is asked twice, as it changes nothing: the answers of
    the first pass are partial and dropped, those of the second know everybody."""

    def __init__(self) -> None:
        self._largest: np.ndarray | None = None

    def clear(self) -> None:
        self._largest = None

    def maximum(self, values: np.ndarray) -> np.ndarray:
        self._largest = values if self._largest is None else np.maximum(self._largest, values)
        return self._largest


class _Member(InProcessMember):
    """A rank's vote: `minimum` waits for all ranks as ever, `maximum` goes over the board."""

    def __init__(self, group: InProcessGroup, rank: int, board: _Board) -> None:
        super().__init__(group, rank)
        self._board = board

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return self._board.maximum(values)


@dataclass(slots=True)
class FleetRun:
    """What happened. Times are simulated seconds; shares are of rank-steps unless they say otherwise."""

    seconds: float = 0.0
    steps: int = 0
    prompt_steps: int = 0
    rank_steps: int = 0
    idle_rank_steps: int = 0
    rank_seconds: float = 0.0
    idle_rank_seconds: float = 0.0
    blocked_rank_steps: int = 0
    """The head of the queue lacked blocks while another waiting request would have fitted."""
    prompt_tokens: int = 0
    """Of requests that arrived."""
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    decode_rank_steps: int = 0
    decode_sequences: int = 0
    preemptions: int = 0
    waits: list[float] = field(default_factory=list)
    """Time to first token of each request."""
    endings: dict[int, Terminal] = field(default_factory=dict)
    timeline: list[tuple[float, float, tuple[str, ...]]] = field(default_factory=list)
    """(start, end, what each rank did: prefill, decode or idle); only if it was asked for."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def ttft_mean_s(self) -> float:
        return float(np.mean(self.waits)) if self.waits else 0.0

    @property
    def ttft_p95_s(self) -> float:
        return float(np.percentile(self.waits, 95)) if self.waits else 0.0

    @property
    def idle_share(self) -> float:
        return self.idle_rank_steps / max(self.rank_steps, 1)

    @property
    def idle_time_share(self) -> float:
        """As `idle_share`, each step weighted with its duration."""
        return self.idle_rank_seconds / self.rank_seconds if self.rank_seconds else 0.0

    @property
    def recomputed_share(self) -> float:
        """Prefilled tokens that a preemption had computed already."""
        return 1 - self.prompt_tokens / max(self.computed_prompt_tokens, 1)

    @property
    def blocked_share(self) -> float:
        return self.blocked_rank_steps / max(self.rank_steps, 1)

    @property
    def mean_batch(self) -> float:
        """Sequences of a rank in a decode step."""
        return self.decode_sequences / max(self.decode_rank_steps, 1)


class Fleet:
    """`cost.ranks` schedulers with the same settings; `run` may be called once."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: CostModel,
        accept_rate: float = ACCEPT_RATE,
        keep_timeline: bool = False,
    ) -> None:
        self.settings, self.cost = settings, cost
        self.accept_rate, self.keep_timeline = accept_rate, keep_timeline
        self.now = 0.0
        self.result = FleetRun()
        group = InProcessGroup(cost.ranks)
        self._board = _Board()
        self.schedulers = [
            Scheduler(settings, votes=_Member(group, rank, self._board), clock=lambda: self.now)
            for rank in range(cost.ranks)
        ]
        self._previous: list[StepPlan] | None = None
        self._columns = np.arange(settings.num_drafts)
        self._request_ids: list[list[int]] = [[0] for _ in range(cost.ranks)]
        """Of each rank, by sequence id (the scheduler counts them from 1)."""

    def run(self, work: list[Arrival], max_steps: int = 1_000_000) -> FleetRun:
        """Serves all of `work` (by arrival time). `RuntimeError` if that takes more than `max_steps`."""
        queue = deque(work)
        result = self.result
        with ThreadPoolExecutor(self.cost.ranks) as pool:
            for _ in itertools.count():
                while queue and queue[0].time <= self.now:
                    self._add(queue.popleft())
                agreement = self._agree()
                if not agreement.unfinished:
                    self._settle()
                    if not queue:
                        break
                    self.now = max(self.now, queue[0].time)
                    continue
                if result.steps >= max_steps:
                    left = sum(scheduler.num_unfinished for scheduler in self.schedulers)
                    raise RuntimeError(f"{left} requests are unfinished after {max_steps} steps")
                self._step(agreement, pool)
        result.seconds = self.now
        result.preemptions = sum(scheduler.num_preempted for scheduler in self.schedulers)
        for scheduler in self.schedulers:
            scheduler.check_integrity()
        return result

    def _add(self, arrival: Arrival) -> None:
        params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
        prompt = np.full(arrival.prompt, TOKEN, np.int32)
        request = Request(prompt, params, request_id=arrival.request_id, arrival_time=arrival.time)
        sequence = self.schedulers[arrival.rank].add(request)
        ids = self._request_ids[arrival.rank]
        if sequence.seq_id != len(ids):
            raise RuntimeError(f"{sequence} was expected to have sequence id {len(ids)}")
        ids.append(arrival.request_id)
        self.result.prompt_tokens += arrival.prompt

    def _agree(self) -> Agreement:
        self._board.clear()
        for scheduler in self.schedulers:
            scheduler.agree()
        return self.schedulers[0].agree()

    def _step(self, agreement: Agreement, pool: ThreadPoolExecutor) -> None:
        settings, schedulers = self.settings, self.schedulers
        start, step, votes = self.now, schedulers[0].decode_step, schedulers[0].num_votes
        point = agreement.idle or not step % settings.prefill_all_interval
        if point or not step % settings.prefill_any_interval:  # a vote blocks until every rank has come
            plans = list(pool.map(lambda scheduler: scheduler.schedule(agreement), schedulers))
        else:
            plans = [scheduler.schedule(agreement) for scheduler in schedulers]
        self.now += (schedulers[0].num_votes - votes) * self.cost.vote_s
        self._settle()
        for scheduler, plan in zip(schedulers, plans, strict=True):
            self._take(plan.ignored)
            if not plan.is_empty:
                scheduler.refresh(plan)
        is_prompt = any(plan.is_prompt for plan in plans)
        loads = [RankLoad.of(plan.q, plan.k) for plan in plans]
        self.now += self.cost.prompt_s(loads) if is_prompt else self.cost.decode_s(loads)
        self._record(plans, is_prompt, start)
        for scheduler in schedulers:
            scheduler.reclaim()
        self._previous = plans
        if is_prompt or not settings.overlapped:
            self._settle()

    def _settle(self) -> None:
        """Commits the step that is in flight, if there is one."""
        plans, self._previous = self._previous, None
        for scheduler, plan, ids in zip(self.schedulers, plans or (), self._request_ids, strict=False):
            committed = scheduler.commit(plan, self._outputs(plan, ids))
            self.result.output_tokens += int(committed.counts.sum())
            self._take(committed.terminals)

    def _outputs(self, plan: StepPlan, request_ids: list[int]) -> StepOutputs:
        n, num_drafts = plan.num_seqs, self.settings.num_drafts
        sampled = np.full(n, TOKEN, np.int32)
        if plan.is_prompt or not num_drafts or not n:
            return StepOutputs(sampled)
        ids = np.array([request_ids[seq_id] for seq_id in plan.seq_ids.tolist()], np.int64)
        count = accepted_counts(ids, plan.k - plan.q + 1, num_drafts, self.accept_rate)
        count *= plan.draft_read > 0  # placeholders behind a prompt are rejected
        accepted = np.where(self._columns < count[:, None], TOKEN, -1).astype(np.int32)
        return StepOutputs(sampled, accepted, drafts=np.full((n, num_drafts), TOKEN, np.int32))

    def _take(self, terminals: list[Terminal]) -> None:
        for terminal in terminals:
            if terminal.request_id in self.result.endings:
                raise RuntimeError(f"{terminal} is the second record of its request")
            self.result.endings[terminal.request_id] = terminal
            sequence = terminal.sequence
            if terminal.status is Status.LENGTH_CAPPED and sequence.first_token_time is not None:
                self.result.waits.append(sequence.first_token_time - sequence.arrival_time)

    def _record(self, plans: list[StepPlan], is_prompt: bool, start: float) -> None:
        result, seconds = self.result, self.now - start
        idle = [plan.is_empty for plan in plans]
        result.steps += 1
        result.prompt_steps += is_prompt
        result.rank_steps += len(plans)
        result.idle_rank_steps += sum(idle)
        result.rank_seconds += seconds * len(plans)
        result.idle_rank_seconds += seconds * sum(idle)
        result.blocked_rank_steps += sum(map(_head_blocks_others, self.schedulers))
        if is_prompt:
            result.computed_prompt_tokens += sum(int(plan.q.sum()) for plan in plans)
        else:
            result.decode_rank_steps += len(plans)
            result.decode_sequences += sum(plan.num_seqs for plan in plans)
        if self.keep_timeline:
            work = "prefill" if is_prompt else "decode"
            result.timeline.append((start, self.now, tuple("idle" if empty else work for empty in idle)))


def _head_blocks_others(scheduler: Scheduler) -> bool:
    """Whether a seat is free, the head of the queue lacks blocks for it, and somebody behind it does not."""
    state = scheduler.state
    head = state.waiting_head()
    if head is None or head.row or len(state.running) >= state.settings.max_seqs:
        return False
    free = state.blocks.num_free
    if blocks_for(state.length(head)) <= free:
        return False
    return any(not other.row and blocks_for(state.length(other)) <= free for other in state.waiting)
