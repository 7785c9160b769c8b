"""Counters of one rank's engine and the picture that is made of them (spec/engine.md §9.6).

Knows: what each step did and which sequences ended. Does not know: devices, logging, other ranks. A step
costs a few additions; everything else is computed when somebody asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from deepinfer_ray.engine.plan import CommitResult, StepPlan
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Status, Terminal

WINDOW_STEPS = 100


@dataclass(slots=True)
class _Sample:
    """One step: when it ended, how long it took, what it carried."""

    time: float
    seconds: float
    is_prompt: bool
    tokens: int
    emitted: int
    verified: int
    accepted: int


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, a window of the last steps, first-token times of sequences ended in it.

    clock: seconds, monotonic; it must be the scheduler's clock, whose times the sequences carry.
    """

    clock: Callable[[], float] = time.monotonic
    steps: int = 0
    prompt_steps: int = 0
    empty_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Ended sequences by finish reason."""
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    sum_qxk: int = 0
    """Query rows times visible length, summed over the last step."""
    k_range: tuple[int, int] = (0, 0)
    """Smallest and largest sequence length of the last step."""
    _window: deque[_Sample] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _endings: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=1000))

    def record_step(self, plan: StepPlan, commits: Iterable[CommitResult], started: float) -> None:
        """After each step: its plan, what was committed in it (of this step or the one before), and the
        clock when it began."""
        now = self.clock()
        seconds = now - started
        emitted = verified = accepted = 0
        for commit in commits:
            emitted += int(commit.counts.sum())
            verified += commit.num_drafts_verified
            accepted += commit.num_drafts_accepted
        self.steps += 1
        self.empty_steps += plan.is_empty
        self.completion_tokens += emitted
        if plan.is_prompt:
            self.prompt_steps += 1
            self.prompt_seconds += seconds
            self.prompt_tokens += int(plan.q.sum())
        else:
            self.decode_seconds += seconds
        if not plan.is_empty:
            self.sum_qxk = int((plan.q.astype(np.int64) * plan.k).sum())
            self.k_range = int(plan.k.min()), int(plan.k.max())
        self._window.append(
            _Sample(now, seconds, plan.is_prompt, plan.num_tokens, emitted, verified, accepted)
        )

    def record_terminal(self, terminal: Terminal) -> None:
        """A sequence ended."""
        reason = terminal.reason.value
        self.finished[reason] = self.finished.get(reason, 0) + 1
        sequence = terminal.sequence
        self.cached_tokens += sequence.cached_tokens
        if terminal.status in (Status.STOPPED, Status.LENGTH_CAPPED):
            first = sequence.first_token_time
            wait = 0.0 if first is None else first - sequence.arrival_time
            self._endings.append((wait, sequence.prompt_len, len(terminal.token_ids)))

    def snapshot(self, scheduler: Scheduler) -> dict[str, float | int | dict[str, int]]:
        """A JSON-able picture. Rates: the first sample of the window is left out, its time is the start."""
        settings, state = scheduler.settings, scheduler.state
        samples = list(self._window)
        span = samples[-1].time - samples[0].time if len(samples) > 1 else 0.0
        rest = samples[1:]
        last = samples[-1] if samples else None
        budget = settings.token_budget if last and last.is_prompt else settings.max_seqs
        verified = sum(sample.verified for sample in samples)
        waits = [wait for wait, _, _ in self._endings]

        def rate(amount: float) -> float:
            return amount / span if span > 0 else 0.0

        def mean(values: list[float]) -> float:
            return sum(values) / len(values) if values else 0.0

        return {
            "steps": self.steps,
            "prompt_steps": self.prompt_steps,
            "empty_steps": self.empty_steps,
            "decode_step": scheduler.decode_step,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "steps_per_second": rate(len(rest)),
            "prompt_tokens_per_second": rate(sum(s.tokens for s in rest if s.is_prompt)),
            "completion_tokens_per_second": rate(sum(s.emitted for s in rest)),
            "draft_accept_rate": sum(s.accepted for s in samples) / verified if verified else 0.0,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "batched_tokens": last.tokens if last else 0,
            "batch_usage": last.tokens / budget if last else 0.0,
            "kv_cache_usage": 1 - state.blocks.num_free / (state.blocks.size - 1),
            "state_cache_usage": 1 - state.slots.num_free / (state.slots.size - 1),
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "ttft_mean_s": mean(waits),
            "ttft_max_s": max(waits, default=0.0),
            "mean_input_length": mean([float(length) for _, length, _ in self._endings]),
            "mean_output_length": mean([float(length) for _, _, length in self._endings]),
            "finished": dict(self.finished),
            "preempted": scheduler.num_preempted,
            "sum_seqlen_qxk": self.sum_qxk,
            "min_seqlen_k": self.k_range[0],
            "max_seqlen_k": self.k_range[1],
        }
