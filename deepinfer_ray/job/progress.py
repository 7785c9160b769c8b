"""How far the job is, on stderr: a live line on a terminal, plain lines when piped.

Knows: counts and time. Does not know: rows, ranks. Prints no prompt, no completion.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

LINE_INTERVAL_S = 5.0
"""Seconds between two lines when stderr is no terminal."""

LIVE_INTERVAL_S = 0.2


def format_duration(seconds: float) -> str:
    """`8s`, `3m05s`, `2h07m`, `3d04h`."""
    whole = int(max(0.0, seconds))
    for unit, parts, first, second in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= unit:
            return f"{whole // unit}{first}{whole % unit // parts:02d}{second}"
    return f"{whole}s"


class Progress:
    """Call `update` whenever counts change; it decides when to print."""

    def __init__(
        self,
        total_rows: int,
        resumed_rows: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_interval_s: float = LINE_INTERVAL_S,
    ) -> None:
        self.total_rows = total_rows
        self.resumed_rows = resumed_rows
        self._stream = stream or sys.stderr
        self._clock = clock
        self._started = clock()
        self._interval_s = line_interval_s
        self._printed = self._started
        # rich leaves out colours when NO_COLOR is set; FORCE_COLOR makes it take any pipe for a terminal
        console = Console(file=self._stream, highlight=False)
        terminal = console.is_terminal and self._stream.isatty()
        self._live = Live(console=console, auto_refresh=False, transient=True) if terminal else None
        if self._live is not None:
            self._interval_s = LIVE_INTERVAL_S
            self._live.start()

    def line(self, rows: int, errors: int, tokens: int) -> str:
        """rows: ended by this run. tokens: prompt and completion tokens of those rows."""
        seconds = max(self._clock() - self._started, 1e-9)
        done = self.resumed_rows + rows
        share = done / self.total_rows if self.total_rows else 1.0
        left = self.total_rows - done
        eta = format_duration(left * seconds / rows) if rows else "unknown"
        failed = f" · {errors} errors" if errors else ""
        return (
            f"{done:,}/{self.total_rows:,} rows ({share:.0%}){failed} · {tokens:,} tokens · "
            f"{tokens / seconds:,.0f} tokens/s · ETA {eta if left else '0s'}"
        )

    def update(self, rows: int, errors: int, tokens: int, *, force: bool = False) -> None:
        now = self._clock()
        if not force and now - self._printed < self._interval_s:
            return
        self._printed = now
        if self._live is not None:
            self._live.update(Text(self.line(rows, errors, tokens)), refresh=True)
        else:
            print(self.line(rows, errors, tokens), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
