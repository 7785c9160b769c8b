"""Profiles of a running engine: a torch trace and a timeline of the next steps (spec/engine.md §12).

Knows: one request at a time, when its steps are over, file names. Does not know: HTTP, schedulers, results.

Anybody may `request`; the engine's thread picks the request up at its next step, profiles, and goes on while
a thread of the profiler writes the files. Whatever fails here fails the request, never a step.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import torch

from deepinfer_ray.engine.timeline import Timeline
from deepinfer_ray.engine.timers import StepTimers

logger = logging.getLogger(__name__)

DEFAULT_STEPS, MAX_STEPS = 20, 50
PICKUP_S, FINISH_S = 30.0, 600.0


class ProfileBusyError(RuntimeError):
    """Another profile is queued or running."""


class ProfileTimeoutError(RuntimeError):
    """A profile was not begun, or not finished, in time."""


def visible_gpu(device: torch.device, fallback: int = 0) -> int:
    """The machine's number of the GPU that this process uses; `fallback` on a CPU."""
    if device.type != "cuda":
        return fallback
    index = device.index or 0
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return int(names[index]) if index < len(names) and names[index].isdigit() else index


def host_address() -> str:
    """This machine's address as it resolves its own name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class Profiler:
    """The mailbox of one engine. `request` and `wait` on any thread, the rest on the engine's."""

    def __init__(
        self,
        timers: StepTimers,
        *,
        output_dir: str | None = None,
        gpu_id: int = 0,
        rank: int = 0,
    ) -> None:
        """output_dir: where profiles go that name no directory; None = the system's temporary one."""
        self.gpu_id, self.rank = gpu_id, rank
        self._timers = timers
        self._output_dir = output_dir or tempfile.gettempdir()
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._future: Future[Path] | None = None
        self._asked = 0
        self._left = 0
        self._directory = Path(self._output_dir)
        self._torch: Any = None
        self._timeline: Timeline | None = None
        self._outer: Timeline | None = None
        self._writer: ThreadPoolExecutor | None = None

    # -- any thread -------------------------------------------------------------------------------------

    def request(self, num_steps: int = DEFAULT_STEPS, output_dir: str | Path | None = None) -> Future[Path]:
        """Profile the next steps; the future gives the torch trace once it is written.

        `ValueError`: num_steps outside 1 … 50, a directory that cannot be made. `ProfileBusyError`.
        """
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or not 1 <= num_steps <= MAX_STEPS:
            raise ValueError(f"num_steps is {num_steps!r}; it must be a whole number from 1 to {MAX_STEPS}")
        directory = Path(output_dir or self._output_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the output_dir {directory} cannot be made: {error.strerror or error}"
            ) from None
        with self._lock:
            if self._future is not None and not self._future.done():
                raise ProfileBusyError("another profile is queued or running; try again when it is done")
            self._begun.clear()
            self._asked, self._directory = num_steps, directory
            self._future = Future()
            return self._future

    def wait(self, future: Future[Path], pickup_s: float = PICKUP_S, finish_s: float = FINISH_S) -> Path:
        """The trace of a request. `ProfileTimeoutError`; a request that no step picked up is withdrawn."""
        deadline = time.monotonic() + pickup_s
        while not self._begun.wait(max(0.0, min(0.2, deadline - time.monotonic()))):
            if future.done():
                break
            if time.monotonic() >= deadline and future.cancel():
                raise ProfileTimeoutError(
                    f"no step began within {pickup_s:g} s; is the engine idle? The request is withdrawn"
                )
        try:
            return future.result(finish_s)
        except FutureTimeout:
            raise ProfileTimeoutError(f"the profile was not finished within {finish_s:g} s") from None

    def close(self) -> None:
        """Waits for files being written; a profile that still runs is ended."""
        if self._torch is not None:
            self._finish()
        if self._writer is not None:
            self._writer.shutdown()
        if self._future is not None:
            self._future.cancel()

    # -- the engine's thread ----------------------------------------------------------------------------

    def before_step(self) -> None:
        """Begins a profile that was asked for."""
        future = self._future
        if future is None or self._torch is not None or future.done() or future.running():
            return
        with self._lock:
            if not future.set_running_or_notify_cancel():
                return
        self._begun.set()
        try:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._timers.on_cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            profile = torch.profiler.profile(activities=activities)
            profile.start()
        except Exception as error:
            logger.warning("a profile could not be started: %s", error)
            future.set_exception(error)
            return
        self._torch, self._left = profile, self._asked
        self._outer, self._timeline = self._timers.timeline, Timeline(clock=self._timers.clock)
        self._timers.timeline, self._timers.annotate = self._timeline, True

    def after_step(self, goes_on: bool) -> None:
        """Ends a profile after its last step, or earlier when no work is left."""
        if self._torch is None:
            return
        self._left -= 1
        if self._left <= 0 or not goes_on:
            self._finish()

    def _finish(self) -> None:
        profile, self._torch = self._torch, None
        timeline, future = self._timeline, self._future
        self._timers.timeline, self._timers.annotate = self._outer, False
        assert timeline is not None
        assert future is not None
        if self._outer is not None:
            for span in timeline.spans:
                self._outer.add(*span)
        try:
            profile.stop()
            now = datetime.datetime.now()
            stamp = f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}"
            name = f"profile-{host_address()}-gpu{self.gpu_id}-rank{self.rank}-{stamp}"
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, "profile-writer")
            self._writer.submit(self._write, profile, timeline, self._directory / f"{name}.json", future)
        except Exception as error:
            logger.warning("a profile failed: %s", error)
            future.set_exception(error)

    def _write(self, profile: Any, timeline: Timeline, trace: Path, future: Future[Path]) -> None:
        try:
            timeline.write(trace.with_name(f"{trace.stem}-timeline.json"), self.rank)
            profile.export_chrome_trace(str(trace))
        except Exception as error:
            logger.warning("the profile %s could not be written: %s", trace, error)
            future.set_exception(error)
        else:
            future.set_result(trace)
