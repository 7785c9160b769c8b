"""Several machines of a Ray cluster on this one, some of which die: for `bench kills` and for tests.

Knows: Ray's fake nodes, their raylet processes, which of our actors run where. Does not know: jobs, rows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_ray.fleet.cluster import PATIENT, QUIET
from deepinfer_ray.fleet.topology import GPU_DOMAIN_LABEL

SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "worker_niceness": 0,
}
"""A raylet that is gone is noticed in two seconds instead of a dozen; a slow one has as long as ever."""

STORE_BYTES = 80 * 2**20
DRAIN_REASON_PREEMPTION = 2
RANK = "RankActor"
POLL_S = 0.05


@dataclass(frozen=True)
class LiveRank:
    """An actor of ours that runs."""

    pid: int
    node_id: str


class FakeMachines:
    """A head without CPUs, where drivers attach, and `count` machines of one CPU each."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="rk-", dir="/tmp"))  # short: it holds Unix sockets
        # Ray notes the newest cluster in a file that `address="auto"` elsewhere would read: keep it in here.
        (self.folder / "ray").mkdir()
        own = {**QUIET, **PATIENT, "RAY_TMPDIR": str(self.folder)}
        self._environment = {name: os.environ.get(name) for name in (*own, "RAY_ADDRESS")}
        os.environ.update(own)
        os.environ.pop("RAY_ADDRESS", None)
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "temp_dir": str(self.folder),
                "_system_config": SYSTEM,
            },
        )
        self._state = self._cluster.global_state  # of its own: this process need not be connected
        self._machines: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        """For RAY_ADDRESS."""
        return str(self._cluster.address)

    def add(self, *, gpus: int = 0, domain: str | None = None) -> str:
        """One machine more; its node id. domain: the NVLink domain that its label names."""
        labels = {GPU_DOMAIN_LABEL: domain} if domain else {}
        machine = self._cluster.add_node(
            num_cpus=1, num_gpus=gpus, object_store_memory=STORE_BYTES, labels=labels
        )
        self._machines.append(machine)
        return str(machine.node_id)

    def ranks(self) -> list[LiveRank]:
        """Our actors that run, by process id."""
        return sorted(
            (
                LiveRank(row["Pid"], row["Address"]["NodeID"])
                for row in self._state.actor_table(None).values()
                if row["ActorClassName"] == RANK and row["State"] == "ALIVE"
            ),
            key=lambda rank: rank.pid,
        )

    def alive(self) -> list[str]:
        """Node ids of the machines that live for Ray."""
        return [row["NodeID"] for row in self._state.node_table() if row["Alive"]]

    def domains(self) -> dict[str, str]:
        """Node id → domain, of the machines that live and name one."""
        return {
            row["NodeID"]: row["Labels"][GPU_DOMAIN_LABEL]
            for row in self._state.node_table()
            if row["Alive"] and GPU_DOMAIN_LABEL in row["Labels"]
        }

    def kill(self, node_id: str) -> None:
        """SIGKILL to a machine's raylet."""
        machine = next(each for each in self._machines if each.node_id == node_id)
        self._machines.remove(machine)
        raylet = machine.all_processes["raylet"][0].process
        if raylet.poll() is None:
            os.kill(raylet.pid, signal.SIGKILL)
        self._cluster.remove_node(machine, allow_graceful=False)

    def held(self) -> list[str]:
        """What is held on the cluster: our actors, placement groups, CPUs."""
        found = [f"actor with pid {rank.pid}" for rank in self.ranks()]
        found += [
            f"placement group {row['name']} {row['state']}"
            for row in self._state.placement_group_table().values()
            if row["state"] != "REMOVED"
        ]
        if self._state.available_resources().get("CPU", 0) != self._state.cluster_resources().get("CPU", 0):
            found.append("CPUs")
        return found

    def drain(self, node_id: str, seconds: float) -> None:
        """Announce that a machine will be taken away."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined, unused-ignore]

        deadline_ms = int((time.time() + seconds) * 1e3)
        accepted, why = GcsClient(address=self.address).drain_node(
            node_id, DRAIN_REASON_PREEMPTION, "a test", deadline_ms
        )
        if not accepted:
            raise RuntimeError(f"the notice for {node_id} was refused: {why}")

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it came true in time."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """End every process and delete the files."""
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def fake_machines(count: int) -> Iterator[FakeMachines]:
    """Started, closed at the end. This process must not be connected to another cluster."""
    machines = FakeMachines(count)
    try:
        yield machines
    finally:
        machines.close()
