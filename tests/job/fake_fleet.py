"""A fleet in this process: the real router over ranks that are counters. One `poll` is one step of all ranks.

A rank runs up to `slots` rows, each a token a step; a row ends after its `max_tokens`. Tokens follow from
prompt and seed alone. What a rank holds when it dies comes back through the router, as in a real fleet.
"""

from __future__ import annotations

import numpy as np

from deepinfer_ray.engine.request import RequestResult
from deepinfer_ray.fleet.backend import WorkResult
from deepinfer_ray.fleet.router import Router

DOWN_STEPS = 5


class FakeFleet:
    """deaths: step → rank that dies then, holding rows. poison: whether an item kills its rank."""

    def __init__(self, ranks=4, slots=8, deaths=None, poison=lambda item: False, node_loss=False):
        self.ranks, self.slots, self.deaths, self.poison = ranks, slots, dict(deaths or {}), poison
        self.node_loss = node_loss
        self.router = Router()
        self.running = {rank: {} for rank in range(ranks)}  # rank → key → [item, tokens so far]
        self.received = dict.fromkeys(range(ranks), 0)
        self.rows_of = dict.fromkeys(range(ranks), 0)
        self.down = {}  # rank → step in which it is back
        self.steps = self.restarts = self.tokens = 0
        self.closed = []

    def start(self):
        for rank in range(self.ranks):
            self.router.rank_up(rank)

    def wanted(self):
        self._announce()
        return self.router.wanted()

    def submit(self, items):
        self.router.add(items)

    def poll(self, timeout_s):
        if not self.router.num_pending and not any(self.running.values()):
            return []
        self.steps += 1
        results = []
        for rank, step in list(self.down.items()):
            if step <= self.steps:
                del self.down[rank]
                self.received[rank] = 0
                self.router.rank_up(rank)
        self._announce()
        for rank, items in self.router.assign().items():
            self.received[rank] += len(items)
            self.rows_of[rank] += len(items)
            self.running[rank] |= {item.key: [item, 0] for item in items}
        for rank in self._alive():
            poisoned = any(self.poison(item) for item, _ in self.running[rank].values())
            if poisoned or self._dies(rank):
                results += self._die(rank)
            else:
                results += self._step(rank)
        self.router.check_integrity()
        return results

    def status(self):
        return {"restarts": self.restarts}

    def close(self, graceful):
        self.closed.append(graceful)

    def _alive(self):
        return [rank for rank in range(self.ranks) if rank not in self.down]

    def _announce(self):
        for rank in self._alive():
            self.router.credit(rank, self.slots - len(self.running[rank]), self.received[rank])

    def _dies(self, rank):
        due = [step for step, victim in self.deaths.items() if victim == rank and step <= self.steps]
        if due and self.running[rank]:
            del self.deaths[due[0]]
            return True
        return False

    def _die(self, rank):
        self.restarts += 1
        self.down[rank] = self.steps + DOWN_STEPS
        self.running[rank] = {}
        return self.router.lost(rank, blame_rows=not self.node_loss)

    def _step(self, rank):
        results = []
        for key, row in list(self.running[rank].items()):
            row[1] += 1
            self.tokens += 1
            item, count = row
            if count == item.params.max_tokens:
                del self.running[rank][key]
                result = WorkResult(key, completion(item), item.attempts)
                results += [given for given in [self.router.finished(rank, result)] if given is not None]
        return results


def completion(item):
    rng = np.random.default_rng([item.seed & 0xFFFFFFFF, *item.prompt.tolist()])
    ids = rng.integers(3, 259, item.params.max_tokens).astype(np.int32)
    return RequestResult(item.key, ids, f"{item.seed:x}", "length", len(item.prompt))
