"""How long the parts of a step take, on the host and on the device, without waiting for either.

Knows: named spans of the step loop, CUDA events, where else a span is shown (timeline, torch profiler).
Does not know: what a span does, statistics, logs. One thread opens spans and calls `take`.

A span costs two clock reads and one small object. On a CUDA device the spans of `DEVICE_SPANS` also record
two events; their time is read once the device has passed them, never waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from deepinfer_ray.engine.timeline import Timeline

DEVICE_SPANS = frozenset({"forward", "sample"})
"""Spans in which work is launched on the device."""

MAX_PENDING_EVENTS = 1024
"""Pairs that the device may lag behind; older ones are forgotten."""


@dataclass(slots=True)
class Timing:
    """Of one span since the last `take`; seconds."""

    last: float = 0.0
    total: float = 0.0
    longest: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        self.last = seconds
        self.total += seconds
        self.longest = max(self.longest, seconds)
        self.calls += 1

    @property
    def mean(self) -> float:
        return self.total / self.calls if self.calls else 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """What `take` gives: spans by name on the host and on the device."""

    cpu: dict[str, Timing]
    cuda: dict[str, Timing]


class StepTimers:
    """Opens spans and adds them up. timeline, annotate: switched on and off between steps."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.timeline = timeline
        self.annotate = False
        """Whether spans are shown to a running torch profiler."""
        self.on_cuda = torch.device(device).type == "cuda"
        self._cpu: dict[str, Timing] = {}
        self._cuda: dict[str, Timing] = {}
        self._pending: deque[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = deque(
            maxlen=MAX_PENDING_EVENTS
        )
        self.listener: Callable[[str, int, float], None] | None = None
        """Told name, step and seconds of each span of `DEVICE_SPANS`, once they are known."""

    def span(self, name: str, step: int) -> _Span:
        """A context manager: the time inside it counts as `name` of step number `step`."""
        return _Span(self, name, step)

    def take(self) -> Timings:
        """Everything since the last call; device spans that are not over yet come with the next one."""
        self.poll()
        taken = Timings(self._cpu, self._cuda)
        self._cpu, self._cuda = {}, {}
        return taken

    def poll(self) -> None:
        """Read the times of device spans that are over."""
        while self._pending and self._pending[0][3].query():
            name, step, start, end = self._pending.popleft()
            seconds = start.elapsed_time(end) / 1e3
            self._cuda.setdefault(name, Timing()).add(seconds)
            if self.listener is not None:
                self.listener(name, step, seconds)

    def _close(self, span: _Span, end: float) -> None:
        timing = self._cpu.get(span.name)
        if timing is None:
            timing = self._cpu[span.name] = Timing()
        timing.add(end - span.start)
        if self.timeline is not None:
            self.timeline.add(span.name, span.step, span.start, end)
        if self.listener is not None and not self.on_cuda and span.name in DEVICE_SPANS:
            self.listener(span.name, span.step, end - span.start)

    def _close_on_device(self, name: str, step: int, start: torch.cuda.Event) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pending.append((name, step, start, end))


class _Span:
    """One open span."""

    __slots__ = ("_event", "_profiled", "_timers", "name", "start", "step")

    def __init__(self, timers: StepTimers, name: str, step: int) -> None:
        self._timers, self.name, self.step = timers, name, step
        self._event: torch.cuda.Event | None = None
        self._profiled: Any = None
        self.start = 0.0

    def __enter__(self) -> None:
        timers = self._timers
        if timers.annotate:
            self._profiled = torch.profiler.record_function(f"{self.name} {self.step}")
            self._profiled.__enter__()
        if timers.on_cuda and self.name in DEVICE_SPANS:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self.start = timers.clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timers = self._timers
        timers._close(self, timers.clock())
        if self._event is not None:
            timers._close_on_device(self.name, self.step, self._event)
        if self._profiled is not None:
            self._profiled.__exit__(kind, error, trace)
