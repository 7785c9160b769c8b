"""Counters of one rank's engine and the picture that is made of them (spec/engine.md §9.6).

Knows: what each step did and which sequences ended. Does not know: devices, logging, other ranks.

A step costs a few additions here. `capture` copies what a picture needs on the engine's thread;
`Capture.figures` computes it, on any thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from deepinfer_ray.engine.flops import FlopModel, StepFlops
from deepinfer_ray.engine.plan import CommitResult, StepPlan
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Status, Terminal

WINDOW_STEPS = 100
PULSE_STEPS = 16
"""Steps from which a pulse estimates MFU: it is taken between two steps and must not take long."""
ENDINGS = 1000
"""Ended sequences whose lengths and first-token times are remembered."""


@dataclass(slots=True)
class Sample:
    """One step. time: when it ended. seconds: from its start to its end, or to the start of the next one in
    an overlapped loop that goes on. q, k: rows and lengths by sequence. drafts, accepted: sequences that had
    0, 1, … drafts verified, accepted (int64 [N+1]), None without drafts."""

    time: float
    started: float
    seconds: float
    is_prompt: bool
    q: np.ndarray
    k: np.ndarray
    tokens: int
    emitted: int
    drafts: np.ndarray | None
    accepted: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Ending:
    """One sequence that stopped by itself. wait: seconds to its first token."""

    wait: float
    prompt: int
    output: int
    cached: int


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, a window of the last steps, lengths and waits of sequences ended in it.

    clock: seconds, monotonic; it must be the scheduler's clock, whose times the sequences carry.
    flops, peak_tflops: for MFU; without them it is None. cp: ranks that share a step's work.
    """

    clock: Callable[[], float] = time.monotonic
    window: int = WINDOW_STEPS
    flops: FlopModel | None = None
    peak_tflops: float | None = None
    cp: int = 1
    load_window: int = 128
    """Steps over which the balance of expert load is judged."""
    steps: int = 0
    prompt_steps: int = 0
    """With work in them; an empty step counts as empty, whatever its kind."""
    empty_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    decode_sequences: int = 0
    """Sequences of all decode steps together: by their number, the mean batch."""
    finished: dict[str, int] = field(default_factory=dict)
    """Ended sequences by finish reason."""
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    drafts: np.ndarray | None = None
    """int64 [N+1] sequence-steps by number of drafts verified; None until a draft was."""
    accepted: np.ndarray | None = None
    """int64 [N+1] the same by number accepted."""
    confidence_error: float | None = None
    """Sum of |acceptance probability - confidence| over verified drafts; None until it is reported."""
    _samples: deque[Sample] = field(init=False)
    _endings: deque[Ending] = field(default_factory=lambda: deque(maxlen=ENDINGS))
    _loads: deque[tuple[float, float]] = field(init=False)
    _went_on: bool = False
    _born: float = field(init=False)

    def __post_init__(self) -> None:
        self._born = self.clock()
        self._samples = deque(maxlen=max(2, self.window))
        self._loads = deque(maxlen=self.load_window)

    # -- recording, on the engine's thread --------------------------------------------------------------

    def record_step(
        self, plan: StepPlan, commits: Iterable[CommitResult], started: float, *, goes_on: bool = False
    ) -> None:
        """After each step: its plan, what was committed in it (of this step or the one before), and the
        clock when it began. goes_on: overlapped, and the next step follows at once: this one's time lasts
        until that begins."""
        now = self.clock()
        if self._went_on and self._samples:
            last = self._samples[-1]
            self._count_seconds(last, started - last.started - last.seconds)
        emitted = 0
        drafts = accepted = None
        for commit in commits:
            emitted += int(commit.counts.sum())
            if commit.accepted_each is not None and commit.verified_each is not None:
                width = max(int(commit.verified_each.max(initial=0)) + 1, len(_or_empty(self.drafts)))
                verified_now = np.bincount(commit.verified_each, minlength=width)
                accepted_now = np.bincount(commit.accepted_each, minlength=width)
                drafts, accepted = _add(drafts, verified_now), _add(accepted, accepted_now)
            if commit.confidence_error is not None:
                self.confidence_error = (self.confidence_error or 0.0) + commit.confidence_error
        self.steps += 1
        self.empty_steps += plan.is_empty
        self.completion_tokens += emitted
        if plan.is_prompt:
            self.prompt_steps += not plan.is_empty
            self.prompt_tokens += int(plan.q.sum())
        else:
            self.decode_sequences += plan.num_seqs
        if drafts is not None:
            self.drafts, self.accepted = _add(self.drafts, drafts), _add(self.accepted, accepted)
        sample = Sample(
            now, started, 0.0, plan.is_prompt, plan.q, plan.k, plan.num_tokens, emitted, drafts, accepted
        )
        self._count_seconds(sample, now - started)
        self._samples.append(sample)
        self._went_on = goes_on

    def _count_seconds(self, sample: Sample, seconds: float) -> None:
        sample.seconds += seconds
        if sample.is_prompt:
            self.prompt_seconds += seconds
        else:
            self.decode_seconds += seconds

    def record_terminal(self, terminal: Terminal) -> None:
        """A sequence ended."""
        reason = terminal.reason.value
        self.finished[reason] = self.finished.get(reason, 0) + 1
        sequence = terminal.sequence
        self.cached_tokens += sequence.cached_tokens
        if terminal.status in (Status.STOPPED, Status.LENGTH_CAPPED):
            first = sequence.first_token_time
            wait = 0.0 if first is None else first - sequence.arrival_time
            self.first_tokens += 1
            self.first_token_seconds += wait
            self._endings.append(
                Ending(wait, sequence.prompt_len, len(terminal.token_ids), sequence.cached_tokens)
            )

    def record_expert_load(self, tokens_per_rank: np.ndarray) -> None:
        """Tokens that each rank's experts computed in a step, [ranks]; ranks that share experts report it."""
        self._loads.append((float(tokens_per_rank.max()), float(tokens_per_rank.mean())))

    def record_expert_balance(self, most: float, mean: float) -> None:
        """Sums of the busiest rank's and of the mean rank's tokens over the last `load_window` steps; they
        replace what was known."""
        self._loads.clear()
        self._loads.append((most, mean))

    # -- pictures ---------------------------------------------------------------------------------------

    def capture(self, scheduler: Scheduler) -> Capture:
        """A copy of what `figures` needs."""
        settings, state = scheduler.settings, scheduler.state
        # Half prefilled sequences stand at the head of the queue and own a row; there are few of them.
        head = islice(state.waiting, settings.num_state_slots)
        return Capture(
            now=self.clock(),
            samples=list(self._samples),
            endings=list(self._endings),
            loads=list(self._loads),
            flops=self.flops,
            peak_tflops=self.peak_tflops,
            cp=self.cp,
            prompt_budget=settings.token_budget,
            decode_budget=settings.max_seqs * (1 + settings.num_drafts),
            num_drafts=settings.num_drafts,
            confidence_error=self.confidence_error,
            verified_total=_count(self.drafts),
            totals={**self.totals(scheduler), "decode_step": scheduler.decode_step},
            gauges=self.gauges(scheduler) | {"chunked": sum(1 for sequence in head if sequence.row)},
        )

    def totals(self, scheduler: Scheduler) -> dict[str, Any]:
        """Sums since the start; they never fall."""
        totals: dict[str, Any] = {
            "steps": self.steps,
            "prompt_steps": self.prompt_steps,
            "empty_steps": self.empty_steps,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "decode_sequences": self.decode_sequences,
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "first_tokens": self.first_tokens,
            "first_token_seconds": self.first_token_seconds,
            "finished": dict(self.finished),
            "preempted": scheduler.num_preempted,
        }
        if self.accepted is not None and self.drafts is not None:
            totals["verified_lengths"] = self.drafts.tolist()
            totals["accepted_lengths"] = self.accepted.tolist()
        return totals

    def gauges(self, scheduler: Scheduler) -> dict[str, Any]:
        """What holds at this moment."""
        state = scheduler.state
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "batched_tokens": self._samples[-1].tokens if self._samples else 0,
            "kv_cache_usage": 1 - state.blocks.num_free / (state.blocks.size - 1),
            "state_cache_usage": 1 - state.slots.num_free / (state.slots.size - 1),
        }

    def snapshot(self, scheduler: Scheduler) -> dict[str, Any]:
        """A JSON-able picture of everything."""
        return self.capture(scheduler).figures()

    def pulse(self, scheduler: Scheduler) -> dict[str, Any]:
        """Totals (`seconds`: since this object was made), gauges and, where the device is known, MFU: what
        the driver is told about once a second."""
        pulse = {
            "seconds": self.clock() - self._born,
            **self.totals(scheduler),
            **self.gauges(scheduler),
        }
        if self.peak_tflops is not None:
            samples = list(islice(reversed(self._samples), PULSE_STEPS))[::-1]
            tflops, _ = tflops_of(samples, self.flops, self.cp)
            pulse["mfu"] = None if tflops is None else tflops / self.peak_tflops
        if self._loads:
            pulse["expert_load_balance"] = balance(list(self._loads))
        return pulse


@dataclass(frozen=True, slots=True)
class Capture:
    """Numbers of one moment, independent of the engine."""

    now: float
    samples: list[Sample]
    endings: list[Ending]
    loads: list[tuple[float, float]]
    flops: FlopModel | None
    peak_tflops: float | None
    cp: int
    prompt_budget: int
    decode_budget: int
    num_drafts: int
    confidence_error: float | None
    verified_total: int
    totals: dict[str, Any]
    gauges: dict[str, Any]

    def figures(self) -> dict[str, Any]:
        """Totals, gauges, rates, drafts, lengths and the last step, by name."""
        return {
            **self.totals,
            **self.gauges,
            **self.rates(),
            **self._drafts(),
            **self._endings(),
            **self._last_step(),
        }

    def rates(self) -> dict[str, float | None]:
        """Per second. The first sample of the window is left out, its time is the start; MFU ends with the
        last step, the rest with this moment."""
        samples, rest = self.samples, self.samples[1:]
        span = self.now - samples[0].time if rest else 0.0

        def rate(amount: float) -> float:
            return amount / span if span > 0 else 0.0

        tflops, attention = tflops_of(samples, self.flops, self.cp)
        known = tflops is not None and self.peak_tflops is not None
        return {
            "steps_per_second": rate(len(rest)),
            "prompt_tokens_per_second": rate(sum(s.tokens for s in rest if s.is_prompt)),
            "completion_tokens_per_second": rate(sum(s.emitted for s in rest)),
            "prompt_time_share": _ratio(
                sum(s.seconds for s in samples if s.is_prompt), sum(s.seconds for s in samples)
            ),
            "tflops": tflops,
            "attention_tflops": attention,
            "mfu": tflops / self.peak_tflops if known else None,  # type: ignore[operator]
        }

    def _drafts(self) -> dict[str, Any]:
        """Acceptance in the window. verified_tokens, accepted_tokens: of the last step."""
        drafts = accepted = None
        for sample in self.samples:
            if sample.drafts is not None:
                drafts, accepted = _add(drafts, sample.drafts), _add(accepted, sample.accepted)
        last = self.samples[-1] if self.samples else None
        verified, passed = at_least(drafts, self.num_drafts), at_least(accepted, self.num_drafts)
        return {
            "draft_accept_rate": _ratio(_count(accepted), _count(drafts)) or 0.0,
            "draft_accept_rates": [_ratio(p, v) for p, v in zip(passed, verified, strict=True)],
            "verified_tokens": _count(last.drafts) if last else 0,
            "accepted_tokens": _count(last.accepted) if last else 0,
            "mean_verified_length": _ratio(_count(drafts), int(_or_empty(drafts).sum())),
            "mean_confidence_error": None
            if self.confidence_error is None
            else _ratio(self.confidence_error, self.verified_total),
            "expert_load_balance": balance(self.loads),
        }

    def _endings(self) -> dict[str, float | None]:
        """Of the last sequences that ended by themselves."""
        endings = self.endings
        count = len(endings)
        return {
            "ttft_mean_s": _ratio(sum(e.wait for e in endings), count) or 0.0,
            "ttft_max_s": max((e.wait for e in endings), default=0.0),
            "mean_input_length": _ratio(sum(e.prompt for e in endings), count) or 0.0,
            "mean_output_length": _ratio(sum(e.output for e in endings), count) or 0.0,
            "prefill_caching_rate": _ratio(sum(e.cached for e in endings), sum(e.prompt for e in endings))
            or 0.0,
        }

    def _last_step(self) -> dict[str, Any]:
        last = self.samples[-1] if self.samples else None
        budget = self.prompt_budget if last and last.is_prompt else self.decode_budget
        seconds = last.seconds if last else 0.0
        done = (last.tokens if last.is_prompt else last.emitted) if last else 0
        busy = next((s for s in reversed(self.samples) if len(s.q)), None)
        return {
            "is_prompt": bool(last and last.is_prompt),
            "batch_usage": last.tokens / budget if last else 0.0,
            "last_steps_per_second": _ratio(1, seconds) or 0.0,
            "last_tokens_per_second": _ratio(done, seconds) or 0.0,
            "sum_seqlen_qxk": int((busy.q.astype(np.int64) * busy.k).sum()) if busy else 0,
            "min_seqlen_k": int(busy.k.min()) if busy else 0,
            "max_seqlen_k": int(busy.k.max()) if busy else 0,
        }


def tflops_of(samples: list[Sample], flops: FlopModel | None, cp: int) -> tuple[float | None, float | None]:
    """(TFLOP/s, those of core attention) of each of `cp` ranks from the end of the first step to that of the
    last; None where nothing can be said."""
    busy = samples[-1].time - samples[0].time if samples else 0.0
    if flops is None or busy <= 0:
        return None, None
    work = StepFlops(0.0, 0.0)
    for is_prompt, cost in ((True, flops.prompt), (False, flops.decode)):
        steps = [s for s in samples[1:] if s.is_prompt is is_prompt and len(s.q)]
        if steps:
            work += cost(np.concatenate([s.q for s in steps]), np.concatenate([s.k for s in steps]))
    return work.total / 1e12 / busy / cp, work.attention / 1e12 / busy / cp


def balance(loads: list[tuple[float, float]]) -> float | None:
    """Σ of the fullest rank's tokens / Σ of the mean rank's over the steps; 1 = even, None = no data."""
    return _ratio(sum(most for most, _ in loads), sum(mean for _, mean in loads))


def at_least(by_length: np.ndarray | None, num_drafts: int) -> list[int]:
    """[N]: how many sequence-steps had at least 1, 2, … N, from their numbers by length."""
    counts = _or_empty(by_length)
    return [int(counts[length:].sum()) for length in range(1, num_drafts + 1)]


def _or_empty(array: np.ndarray | None) -> np.ndarray:
    return np.zeros(0, np.int64) if array is None else array


def _count(by_length: np.ndarray | None) -> int:
    """Drafts in all, from the number of sequence-steps by length."""
    counts = _or_empty(by_length)
    return int((counts * np.arange(len(counts))).sum())


def _add(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray:
    one, other = _or_empty(one), _or_empty(other)
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.astype(np.int64)
    total[: len(shorter)] += shorter
    return total


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
