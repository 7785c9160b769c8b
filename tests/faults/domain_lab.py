"""What the lab does with NVLink domains: labelled machines of one GPU each, gangs on them that come and go.

The machines stay between calls; each call sees to it that there are those it needs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

import numpy as np

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.load import from_options
from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.errors import PlacementError
from deepinfer_ray.fleet.backend import WorkItem
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.fleet.watch import Patience

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
TIMEOUT_S = 120


class Told(logging.Handler):
    """What the project logs, from warnings on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class DomainLab:
    """The calls."""

    def __init__(self, machines, stub):
        self.machines, self.stub = machines, stub
        self.told = Told()
        logging.getLogger("deepinfer_ray").addHandler(self.told)

    def place(self, ranks, gpus, domains, placement_s=30):
        """Start a gang of so many ranks, and end it: where its ranks stood, or why they did not."""
        self._have(domains)
        options = self._options(gpus_per_rank=gpus, patience=Patience(placement=placement_s))
        config = self.stub.GangConfig(ranks)
        fleet = RayFleet("none", config, ranks, device="cpu", engine_factory=self.stub.make, options=options)
        self.told.lines.clear()
        started, error, nodes = time.monotonic(), None, []
        try:
            with fleet:
                nodes = [rank["node_id"] for rank in fleet.status()["ranks"]]
        except PlacementError as failure:
            error = str(failure)
        seconds = time.monotonic() - started
        return {
            "domains": [self.machines.domains().get(node) for node in nodes],
            "nodes": nodes,
            "error": error,
            "seconds": seconds,
            "told": list(self.told.lines),
            "held": self._held(),
        }

    def come_and_go(self):
        """A gang of two in domain b; another in a, which gets its second machine when rows run, loses it by
        a notice, gets one again, and has nothing to do at the end."""
        self._have("abb")
        options = self._options(max_gangs=2, max_restarts=0, gpus_per_rank=1.0)
        fleet = RayFleet(
            "none", self.stub.GangConfig(2, room=4), 2,
            device="cpu", engine_factory=self.stub.make, options=options,
        )  # fmt: skip
        todo = [
            WorkItem(key, self.stub.prompt(self.stub.SLOW, 30, key), SamplingParams(), key)
            for key in range(20_000)
        ]
        seen, attempts, new, submitted = [], {}, None, 0
        stage = "alone"

        def further(status):
            return [rank for rank in status["ranks"] if rank["gang"] == 1]

        def note(status):
            seen.append({"stage": stage, "gangs": status["gangs"], "ranks": status["ranks"]})

        deadline = time.monotonic() + TIMEOUT_S
        with fleet:
            while (todo or fleet.router.num_in_flight) and time.monotonic() < deadline:
                fleet.expect(len(todo))
                room = min(fleet.wanted(), len(todo))
                fleet.submit([todo.pop() for _ in range(room)])
                submitted += room
                for done in fleet.poll(0.2):
                    assert done.key not in attempts, "a row came twice"
                    assert done.result.error is None
                    attempts[done.key] = done.attempts
                status = fleet.status()
                busy = [rank["done"] >= 4 for rank in further(status)]
                if stage == "alone" and any(rank["stage"] == "placing" for rank in further(status)):
                    note(status)
                    stage, new = "joining", self.machines.add(gpus=1, domain="a")
                elif stage == "joining" and busy and all(busy):
                    note(status)
                    self.machines.drain(new, 600)
                    stage = "leaving"
                elif stage == "leaving" and status["gangs"]["left"] == 1:
                    note(status)
                    self.machines.kill(new)
                    stage, new = "joining again", self.machines.add(gpus=1, domain="a")
                elif stage == "joining again" and busy and all(busy):
                    note(status)
                    stage, todo = "tail", todo[:40]
            while fleet.status()["gangs"]["left"] < 2 and time.monotonic() < deadline:
                fleet.expect(0)
                fleet.poll(0.1)
            note(fleet.status())
            held = self.machines.held()
            fleet.router.check_integrity()
            restarts = fleet.restarts
        return {
            "seen": seen,
            "lost": submitted - len(attempts),
            "attempts": Counter(attempts.values()),
            "restarts": restarts,
            "domains": self.machines.domains(),
            "groups": [entry for entry in held if entry.startswith("placement group")],
            "held": self._held(),
        }

    def lose_a_machine_of_a_gang(self, count):
        """A real model over gloo on two ranks of one expert group; the machine of one dies in the middle."""
        self._have("aabb")
        alone = self._alone(count)
        options = self._options(gpus_per_rank=1.0, max_restarts=0)
        engine = self._config(dp=2, ep=2)
        fleet = RayFleet(TINY, engine, 2, device="cpu", options=options)
        rows, killed, attempts = {}, None, {}
        todo = [WorkItem(r.request_id, r.prompt, r.params, r.seed) for r in reversed(self._requests(count))]
        deadline = time.monotonic() + TIMEOUT_S
        with fleet:
            before = [rank["node_id"] for rank in fleet.status()["ranks"]]
            while len(rows) < count and time.monotonic() < deadline:
                fleet.submit([todo.pop() for _ in range(min(fleet.wanted(), len(todo)))])
                for done in fleet.poll(0.05):
                    assert done.key not in rows, "a row came twice"
                    rows[done.key], attempts[done.key] = _bits(done.result), done.attempts
                if killed is None and rows:
                    killed = before[1]
                    self.machines.kill(killed)
            fleet.router.check_integrity()
            after = [rank["node_id"] for rank in fleet.status()["ranks"]]
            restarts = fleet.restarts
        return {
            "same": [rows.get(key) for key in range(count)] == alone,
            "redone": sum(tries > 1 for tries in attempts.values()),
            "restarts": restarts,
            "moved": killed not in after and len(after) == 2,
            "domains": [self.machines.domains().get(node) for node in after],
            "held": self._held(),
        }

    # ---- small things

    def _have(self, domains):
        """Exactly these labelled machines."""
        missing = Counter(domains)
        for node_id, domain in self.machines.domains().items():
            if missing[domain]:
                missing[domain] -= 1
            elif domains:
                self.machines.kill(node_id)
        for domain in missing.elements():
            self.machines.add(gpus=1, domain=domain)

    def _options(self, **options):
        return FleetOptions(address=self.machines.address, cpus_per_rank=1.0, **options)

    def _held(self):
        self.machines.wait_until(lambda: not self.machines.held(), 20)
        return self.machines.held()

    @staticmethod
    def _config(**parallel):
        options = {
            "max_model_len": 256,
            "scheduler": {"max_seqs": 4, "max_batched_tokens": 256},
            "cache.cpu_budget_bytes": 64 << 20,
            "parallel": {"timeout_s": 20.0},
        }
        return from_options(EngineConfig, {**options, **parallel})

    @staticmethod
    def _requests(count):
        random = np.random.default_rng(5)
        return [
            Request(
                random.integers(3, 500, int(random.integers(4, 40))).astype(np.int32),
                SamplingParams(temperature=index % 2, max_tokens=24, logprobs=1, ignore_eos=True),
                seed=index,
                request_id=index,
            )
            for index in range(count)
        ]

    def _alone(self, count):
        """The rows of one process."""
        engine = build_engine(TINY, self._config(), "cpu")
        for request in self._requests(count):
            engine.add(request)
        results = sorted(engine.run(), key=lambda result: result.request_id)
        engine.close()
        return [_bits(result) for result in results]


def _bits(result):
    return (result.error, result.token_ids.tolist(), result.logprobs.tolist())
