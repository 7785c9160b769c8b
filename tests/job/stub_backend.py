"""A backend in this process: results that depend on the item alone, in another order than the items came."""

from __future__ import annotations

import heapq
import time

import numpy as np

from deepinfer_ray.engine.request import FinishReason, RequestResult
from deepinfer_ray.errors import RankFailure
from deepinfer_ray.fleet.backend import WorkResult


class StubBackend:
    """Completion = the prompt's ids reversed and cut to max_tokens; each row is ready after its own delay.

    capacity: rows under way. delay_s: of the slowest row. die_after: results until `RankFailure`. twice: give
    every result a second time. fail: code for rows whose prompt has a length divisible by 7. answer: item →
    (ids, text, finish reason) instead of the reversed prompt.
    """

    def __init__(
        self, capacity=64, delay_s=0.0, die_after=None, twice=False, fail=None, on_poll=None, answer=None
    ):
        self.capacity, self.delay_s, self.die_after, self.twice, self.fail = (
            capacity,
            delay_s,
            die_after,
            twice,
            fail,
        )
        self.on_poll = on_poll
        self.answer = answer
        self.submitted = 0
        self.most_under_way = 0
        self.closed = []
        self._heap = []
        self._order = 0
        self._given = 0

    def start(self):
        pass

    def wanted(self):
        return max(0, self.capacity - len(self._heap))

    def submit(self, items):
        now = time.monotonic()
        for item in items:
            share = (item.seed % 97) / 97
            heapq.heappush(self._heap, (now + share * self.delay_s, item.seed % 97, self._order, item))
            self._order += 1
        self.submitted += len(items)
        self.most_under_way = max(self.most_under_way, len(self._heap))

    def poll(self, timeout_s):
        if self.on_poll is not None:
            self.on_poll(self)
        deadline = time.monotonic() + timeout_s
        while self._heap and self._heap[0][0] > time.monotonic() and time.monotonic() < deadline:
            time.sleep(min(0.002, timeout_s))
        results = []
        while self._heap and self._heap[0][0] <= time.monotonic() and len(results) < 32:
            item = heapq.heappop(self._heap)[-1]
            self._given += 1
            if self.die_after is not None and self._given > self.die_after:
                raise RankFailure("rank 0 died 4 times without progress; see its log")
            results.append(WorkResult(item.key, self.result(item), item.attempts))
        return results * 2 if self.twice else results

    def result(self, item):
        if self.fail is not None and len(item.prompt) % 7 == 0:
            return RequestResult.failed(item.key, len(item.prompt), self.fail, "this row does not fit")
        if self.answer is not None:
            ids, text, reason = self.answer(item)
            return RequestResult(item.key, np.array(ids, np.int32), text, reason, len(item.prompt))
        ids = item.prompt[::-1][: item.params.max_tokens].astype(np.int32)
        text = f"{item.seed:x}:{item.params.temperature:g}:{int(ids.sum())}"
        top = None
        if item.params.logprobs:
            top = [[(int(token), -0.5)] for token in ids]
        return RequestResult(
            item.key,
            ids,
            text,
            FinishReason.LENGTH,
            len(item.prompt),
            logprobs=np.full(len(ids), -0.25, np.float32),
            top_logprobs=top,
        )

    def status(self):
        return {"restarts": 2, "in_flight": len(self._heap)}

    def close(self, graceful):
        self.closed.append(graceful)
