"""When the parts of each step ran, for a person to look at.

Knows: named spans on named tracks, the Chrome trace format. Does not know: what the spans mean. Off unless a
`Timeline` is given to the step loop: then it costs two clock reads a span.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Timeline:
    """A bounded record of spans; the oldest are dropped."""

    def __init__(self, limit: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: deque[tuple[str, int, float, float]] = deque(maxlen=limit)

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """Records the time inside the block as `name` of step number `step`."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, step, start, self._clock())

    def add(self, name: str, step: int, start: float, end: float) -> None:
        """Records a span that is over; seconds of a clock that all spans share."""
        self._spans.append((name, step, start, end))

    @property
    def spans(self) -> list[tuple[str, int, float, float]]:
        """(name, step, start, end) in the order in which they ended; seconds of the clock."""
        return list(self._spans)

    def chrome_trace(self, rank: int = 0) -> dict[str, object]:
        """The JSON object that chrome://tracing and Perfetto load; one track a name, microseconds."""
        tracks = {name: index for index, name in enumerate(dict.fromkeys(span[0] for span in self._spans))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            for name, track in tracks.items()
        ]
        events += [
            {
                "ph": "X",
                "name": f"{name} {step}",
                "cat": name,
                "pid": rank,
                "tid": tracks[name],
                "ts": round(start * 1e6, 3),
                "dur": round((end - start) * 1e6, 3),
                "args": {"step": step},
            }
            for name, step, start, end in self._spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: str | Path, rank: int = 0) -> None:
        Path(path).write_text(json.dumps(self.chrome_trace(rank)))
