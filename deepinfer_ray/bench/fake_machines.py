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

SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "worker_niceness": 0,
}
"""A raylet that is gone is noticed in two seconds instead of a dozen; a slow one has as long as ever."""

STORE_BYTES = 80 * 2**20
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
        self._environment = {name: os.environ.get(name) for name in (*QUIET, *PATIENT, "RAY_ADDRESS")}
        os.environ.update({**QUIET, **PATIENT})
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
        self._machines: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        """For RAY_ADDRESS."""
        return str(self._cluster.address)

    def connect(self) -> None:
        """Let this process look at the cluster."""
        import ray

        self._cluster.wait_for_nodes()
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def add(self) -> None:
        """One machine more."""
        self._machines.append(self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, wait=False))

    def ranks(self) -> list[LiveRank]:
        """Our actors that run, by process id."""
        import ray

        rows = ray._private.state.actors().values()
        return sorted(
            (
                LiveRank(row["Pid"], row["Address"]["NodeID"])
                for row in rows
                if row["ActorClassName"] == RANK and row["State"] == "ALIVE"
            ),
            key=lambda rank: rank.pid,
        )

    def machines(self) -> list[str]:
        """Node ids of the machines whose raylet runs."""
        return [machine.node_id for machine in self._machines]

    def kill(self, node_id: str) -> None:
        """SIGKILL to a machine's raylet."""
        machine = next(each for each in self._machines if each.node_id == node_id)
        self._machines.remove(machine)
        os.kill(machine.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self._cluster.remove_node(machine, allow_graceful=False)

    def held(self) -> list[str]:
        """What is held on the cluster: our actors, placement groups, CPUs."""
        import ray
        from ray.util import placement_group_table

        found = [f"actor with pid {rank.pid}" for rank in self.ranks()]
        found += [
            f"placement group {row['name']} {row['state']}"
            for row in placement_group_table().values()
            if row["state"] != "REMOVED"
        ]
        if ray.available_resources().get("CPU", 0) != ray.cluster_resources().get("CPU", 0):
            found.append("CPUs")
        return found

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
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def fake_machines(count: int) -> Iterator[FakeMachines]:
    """Started and connected; closed at the end."""
    machines = FakeMachines(count)
    try:
        machines.connect()
        yield machines
    finally:
        machines.close()
