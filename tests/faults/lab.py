"""A process with a cluster of fake machines, on which tests let things die.

A process can be connected to one cluster only, and the tests' own is connected to theirs. stdin: one JSON
object a line, {"call": name, "args": {…}}; stdout: one a line, {"result": …} or {"error": traceback}.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from domain_lab import DomainLab

from deepinfer_ray.bench.fake_machines import fake_machines
from deepinfer_ray.bench.kills import MACHINES, Kill, KillLab, figures
from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.fleet.backend import WorkItem
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.options import FleetOptions

STUB = Path(__file__).parents[1] / "fleet" / "stub_engine.py"
RUN_TIMEOUT_S = 120


def load_stub():
    """The stub engine as a module that travels to workers by value."""
    import ray

    spec = importlib.util.spec_from_file_location("fleet_stub_engine", STUB)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    return module


class Lab(DomainLab):
    """The calls."""

    def __init__(self, machines, folder):
        super().__init__(machines, load_stub())
        self.folder = folder
        self.kills = None

    def strike(self, victims, seed):
        """`KillLab.strike` as a dict."""
        self.kills = self.kills or KillLab(self.machines, self.folder)
        return dataclasses.asdict(self.kills.strike(victims, seed))

    def figures(self, kills):
        return figures([Kill(**{**kill, "victims": tuple(kill["victims"])}) for kill in kills])

    def lose_a_machine(self, rows, row_ms):
        """Two ranks, no death allowed, and the machine of one of them dies with rows in flight."""

        def lose(fleet):
            self.machines.kill(self._machine_of(fleet))
            self.machines.add()

        return self._run(rows, row_ms, lose)

    def drain_a_machine(self, rows, row_ms, seconds):
        """Two ranks, no death allowed, and the machine of one of them will be taken away."""
        where = {}

        def announce(fleet):
            where["before"] = self._machine_of(fleet)
            self.machines.drain(where["before"], seconds)

        found = self._run(rows, row_ms, announce)
        self.machines.wait_until(lambda: where["before"] not in self.machines.alive(), 30)
        gone = where["before"] not in self.machines.alive()
        self.machines.kill(where["before"])
        self.machines.add()
        return {**found, "moved": where["before"] not in found["nodes"], "gone": gone}

    def _machine_of(self, fleet):
        """Where rank 1 runs."""
        pid = fleet.status()["ranks"][1]["pid"]
        return next(rank.node_id for rank in self.machines.ranks() if rank.pid == pid)

    def _run(self, rows, row_ms, disturb):
        options = FleetOptions(address=self.machines.address, max_restarts=0)
        fleet = RayFleet("none", {"room": 4}, 2, device="cpu", engine_factory=self.stub.make, options=options)
        attempts, disturbed = {}, False
        todo = [
            WorkItem(key, self.stub.prompt(self.stub.SLOW, row_ms, key), SamplingParams(), key)
            for key in reversed(range(rows))
        ]
        deadline = time.monotonic() + RUN_TIMEOUT_S
        with fleet:
            while len(attempts) < rows and time.monotonic() < deadline:
                fleet.submit([todo.pop() for _ in range(min(fleet.wanted(), len(todo)))])
                for done in fleet.poll(0.2):
                    assert done.result.error is None
                    assert done.key not in attempts
                    attempts[done.key] = done.attempts
                if not disturbed and len(attempts) >= 4:
                    disturbed = True
                    disturb(fleet)
            fleet.router.check_integrity()
            nodes = [rank.node_id for rank in self.machines.ranks()]
            restarts = fleet.restarts
        self.machines.wait_until(lambda: not self.machines.held(), 20)
        return {
            "rows": len(attempts),
            "attempts": sorted(attempts.values()),
            "restarts": restarts,
            "nodes": nodes,
            "held": self.machines.held(),
        }

    def poison(self, flags):
        """A job over the stub engine; its exit code, summary and what is held afterwards."""
        driver = Path(__file__).with_name("stub_driver.py")
        environment = {**os.environ, "RAY_ADDRESS": self.machines.address}
        done = subprocess.run(
            [sys.executable, str(driver), json.dumps(flags)],
            env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S,
        )  # fmt: skip
        self.machines.wait_until(lambda: not self.machines.held(), 20)
        summary = json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
        return {"code": done.returncode, "summary": summary, "log": done.stderr, "held": self.machines.held()}


def main():
    answers = os.fdopen(os.dup(1), "w")  # whatever prints here must not end up among the answers
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder, fake_machines(MACHINES) as machines:
        lab = Lab(machines, Path(folder))
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"result": getattr(lab, request["call"])(**request["args"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
