"""Ctrl-C and SIGTERM: the first asks the job to stop in order, the second ends it at once.

Knows: signal handlers, how long a stop in order may take. Does not know: what stopping means.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_WAIT_DEFAULT_S = "3"
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the environment of a submitted job's driver (spec/ray.md §3.3)."""

FLUSH_SHARE, FLUSH_MAX_S = 0.25, 10.0
"""Of the time to the kill, what is kept for writing finished parts and for leaving the cluster."""


def stop_wait_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds from the signal of `ray job stop` to its SIGKILL; None when nothing sets a limit."""
    text = environment.get(STOP_WAIT) or (STOP_WAIT_DEFAULT_S if SUBMITTED in environment else "")
    try:
        return max(0.0, float(text))
    except ValueError:
        return None


class StopNow(BaseException):  # not an Exception: nothing that handles errors may swallow it
    """The process must end now, with exit code 128 + `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class StopSignals:
    """A context in which SIGINT and SIGTERM set `requested` instead of ending the process.

    Before `arm` (nothing is running that could be drained) and from the second signal on, the handler raises
    `StopNow` in the main thread. `arm` also installs the handlers again: `ray.init` replaces them.
    wait_s: when the process is killed after its first signal; None = never.
    """

    def __init__(self, wait_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested: int | None = None
        self.announced = False
        self._wait_s = stop_wait_s() if wait_s is None else wait_s
        self._clock = clock
        self._stop_by = math.inf
        self._armed = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From now on the first signal only sets `requested`."""
        self._install()
        self._armed = True

    def announce(self, seconds: float) -> None:
        """The machine of this process goes in so many seconds: stop in order. A signal is still a first."""
        self.announced = True
        self._limit(seconds)

    @property
    def stopping(self) -> bool:
        """Whether the job is to stop in order."""
        return self.announced or self.requested is not None

    @property
    def time_is_up(self) -> bool:
        """Whether what is left until the process is killed should go to writing what is finished."""
        return self._clock() >= self._stop_by

    def _limit(self, seconds: float) -> None:
        flush = min(FLUSH_MAX_S, FLUSH_SHARE * seconds)
        self._stop_by = min(self._stop_by, self._clock() + seconds - flush)

    def _install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        if first:
            self.requested = number
            if self._wait_s is not None:
                self._limit(self._wait_s)
        if not first or not self._armed:
            raise StopNow(number)
