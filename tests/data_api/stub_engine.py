"""An engine without a model: completions depend on prompt and seed alone, and come in an order of their own.

A prompt whose second id is one of these has an effect; ids after it are arguments:
  KILL    the process kills itself once the row is stepped, unless `directory/killed` says it did before
  BREAK   `step` raises
  SLOW    the row takes so many more steps as the next id says
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from deepinfer_ray.engine.request import RequestResult

KILL, BREAK, SLOW = 201, 202, 203


class StubEngine:
    """Up to `room` rows; a step ends the youngest one that is due."""

    def __init__(self, directory=None, room=8, step_s=0.0):
        self.directory, self.room, self.step_s = directory, room, step_s
        self.rows = []
        self.steps = 0
        self.most = 0

    def add(self, request):
        wait = int(request.prompt[2]) if self._effect(request) == SLOW else 0
        self.rows.append((self.steps + wait, request))
        self.most = max(self.most, len(self.rows))

    def wanted(self):
        return max(0, self.room - len(self.rows))

    def has_unfinished(self):
        return bool(self.rows)

    def step(self):
        self.steps += 1
        time.sleep(self.step_s)
        due = [index for index, (at, _) in enumerate(self.rows) if at < self.steps]
        if not due:
            return []
        _, request = self.rows.pop(due[-1])
        if self._effect(request) == BREAK:
            raise FloatingPointError("the stub engine broke")
        if self._effect(request) == KILL:
            mark = Path(self.directory) / "killed"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        ids = ((request.prompt.astype(np.int64) + request.seed % 97) % 251).astype(np.int32)
        ids = ids[: request.params.max_tokens]
        return [RequestResult(request.request_id, ids, f"{request.seed:x}", "length", len(request.prompt))]

    @staticmethod
    def _effect(request):
        return int(request.prompt[1]) if len(request.prompt) > 1 else 0


def make(spec, directory=None, room=8, step_s=0.0):
    """The factory; with `functools.partial` for the options."""
    return StubEngine(directory, room, step_s)
