"""Ctrl-C and SIGTERM: the first asks the job to stop in order, the second ends it at once.

Knows: signal handlers. Does not know: what stopping means.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    """

    def __init__(self) -> None:
        self.requested: int | None = None
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

    def _install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        if first:
            self.requested = number
        if not first or not self._armed:
            raise StopNow(number)
