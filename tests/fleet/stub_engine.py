"""An engine without a model: its answer is a function of the prompt, its faults are ordered by the prompt.

prompt[0] says what happens, prompt[1:] are arguments:
  0 echo               the answer is the prompt reversed
  1 kill               the process kills itself with SIGKILL when the row is stepped
  2 refuse             `add` raises RowError("prompt_too_long")
  3 trip               `add` raises a plain exception
  4 break              `step` raises
  5 slow               the row takes prompt[1] milliseconds
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.errors import CheckpointError, RowError

ECHO, KILL, REFUSE, TRIP, BREAK, SLOW = range(6)


class StubEngine:
    """Up to `room` rows at a time; a step finishes the oldest after `delay_s`.

    until: a file; when it is there slow rows take no time any more.
    """

    def __init__(self, room: int = 8, delay_s: float = 0.0, until: str | None = None) -> None:
        self.room = room
        self.delay_s = delay_s
        self.until = until
        self.rows: deque[Request] = deque()

    def add(self, request: Request) -> None:
        if request.prompt[0] == REFUSE:
            raise RowError("prompt_too_long", "the row is longer than the stub allows")
        if request.prompt[0] == TRIP:
            raise ZeroDivisionError("the stub tripped over the row")
        self.rows.append(request)

    def wanted(self) -> int:
        return max(0, self.room - len(self.rows))

    def has_unfinished(self) -> bool:
        return bool(self.rows)

    def step(self) -> list[RequestResult]:
        if any(row.prompt[0] == KILL for row in self.rows):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(row.prompt[0] == BREAK for row in self.rows):
            raise FloatingPointError("the stub engine broke")
        request = self.rows.popleft()
        slow = request.prompt[0] == SLOW and not (self.until and Path(self.until).exists())
        time.sleep(self.delay_s + (request.prompt[1] / 1e3 if slow else 0.0))
        return [
            RequestResult(
                request.request_id,
                request.prompt[::-1].copy(),
                f"pid {os.getpid()}",
                "stop",
                len(request.prompt),
            )
        ]


class GangConfig(dict[str, Any]):
    """The factory's `engine_config` for gangs of `size` ranks, which share nothing but their fate."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(options)
        self.parallel = SimpleNamespace(cp=1, ep=size, engram=size)


def make(spec: Any) -> StubEngine:
    """The factory. `engine_config`: {"room": N, "delay_s": {rank: seconds}, "until": path, "fail": kind}."""
    config = spec.engine_config or {}
    if config.get("fail") == "checkpoint":
        raise CheckpointError(f"{spec.model_dir}: model.safetensors is missing; nothing was started")
    if config.get("fail") == "bug":
        raise KeyError("a bug of the factory")
    if config.get("fail") == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if "log" in config:
        with Path(config["log"]).open("a") as log:
            log.write(f"{spec.rank} {spec.generation} {os.getpid()} {os.environ['OMP_NUM_THREADS']}\n")
    return StubEngine(
        config.get("room", 8), config.get("delay_s", {}).get(spec.rank, 0.0), config.get("until")
    )


def prompt(*ids: int) -> np.ndarray:
    """int32 prompt."""
    return np.array(ids, np.int32)
