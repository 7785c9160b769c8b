"""An engine that computes nothing and takes its time: what a rank with a fast accelerator looks like from
outside.

Knows: seats, steps of a fixed length, one token a sequence and step. Does not know: models, Ray.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_ray.engine.engine import QUEUE_SHARE
from deepinfer_ray.engine.request import FinishReason, Request, RequestResult

if TYPE_CHECKING:
    from deepinfer_ray.fleet.messages import RankSpec


class PacedEngine:
    """Up to `seats` sequences grow by a token a step; a step takes `step_s`, whatever is in it.

    A sequence ends after its `max_tokens`. Its tokens count up from the last one of its prompt.
    """

    def __init__(self, seats: int, step_s: float) -> None:
        self._seats = seats
        self._step_s = step_s
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[Request, int]] = {}
        self._due = 0.0

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    def wanted(self) -> int:
        return max(0, self._seats + self._seats // QUEUE_SHARE - len(self._running) - len(self._waiting))

    def step(self) -> list[RequestResult]:
        began = time.perf_counter()
        while self._waiting and len(self._running) < self._seats:
            request = self._waiting.popleft()
            self._running[request.request_id] = (request, 0)
        ended = []
        for key, (request, length) in self._running.items():
            self._running[key] = (request, length + 1)
            if length + 1 >= (request.params.max_tokens or 1):
                ended.append(request)
        results = [self._result(request) for request in ended]
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
        return results

    def _result(self, request: Request) -> RequestResult:
        del self._running[request.request_id]
        ids = np.arange(request.params.max_tokens or 1, dtype=np.int32) + request.prompt[-1]
        text = "word " * len(ids)
        return RequestResult(request.request_id, ids, text, FinishReason.LENGTH, len(request.prompt))


def paced(seats: int, step_s: float, spec: RankSpec) -> PacedEngine:
    """The factory of a rank, once seats and pace are given."""
    return PacedEngine(seats, step_s)
