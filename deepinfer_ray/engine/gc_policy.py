"""When a rank's process collects garbage (spec/engine.md §9.5).

Knows: Python's collector, a step counter. Does not know: engines, processes of other ranks.
A collection at a moment of Python's choosing stalls a step, and with it every rank that waits in the same
collective. A process that belongs to a rank switches the automatic collector off and collects every so many
steps, after a forward was launched, while the device works. A process that is the user's is left alone.
"""

from __future__ import annotations

import gc

COMPLETION_FACTOR = 10
"""A rank that only decodes runs many short steps: it collects this many times less often."""


class GcPolicy:
    """Call `step` once a step; it does nothing until `own_process`."""

    def __init__(self, interval: int, role: str = "normal") -> None:
        """interval: steps between collections (`runtime.gc_interval`)."""
        self.interval = interval * (COMPLETION_FACTOR if role == "completion" else 1)
        self.collections = 0
        self._steps = 0
        self._owned = False

    def own_process(self) -> None:
        """This process does nothing but run the rank: what was loaded so far stays, the collector stops."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._owned = True

    def release_process(self) -> None:
        """Undo `own_process`; may be called without it."""
        if self._owned:
            self._owned = False
            gc.enable()
            gc.unfreeze()

    def step(self) -> None:
        """Collects if it is time."""
        if not self._owned:
            return
        self._steps += 1
        if self._steps % self.interval == 0:
            gc.collect()
            self.collections += 1
