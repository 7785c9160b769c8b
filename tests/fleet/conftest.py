"""The stub engine for all fleet tests, and one local Ray cluster for those that need Ray."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STUB = Path(__file__).with_name("stub_engine.py")


def load_stub() -> ModuleType:
    """The stub as a module that travels to workers by value: they need not find the tests."""
    spec = importlib.util.spec_from_file_location("fleet_stub_engine", STUB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stub() -> ModuleType:
    return load_stub()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One local cluster of 4 logical CPUs for the whole session; the value is the ray module."""
    from deepinfer_ray.fleet.cluster import PATIENT, QUIET

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as temp:
        for name, value in {**QUIET, **PATIENT}.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            _temp_dir=temp,
        )
        try:
            yield ray
        finally:
            ray.shutdown(wait_for_processes=True)


@pytest.fixture
def cluster(ray_cluster: Any, stub: ModuleType) -> Iterator[Any]:
    """The cluster; afterwards nothing of ours may be left on it."""
    ray_cluster.cloudpickle.register_pickle_by_value(stub)
    yield ray_cluster
    eventually(lambda: leftovers(ray_cluster) == [], "actors, placement groups or resources are still held")


def leftovers(ray: Any) -> list[str]:
    """What is still held: live actors, placement groups, CPUs."""
    from ray.util import placement_group_table

    found = [
        f"placement group {row['name']} {row['state']}"
        for row in placement_group_table().values()
        if row["state"] != "REMOVED"
    ]
    found += [
        f"actor {actor['ActorClassName']} {actor['State']}"
        for actor in ray._private.state.actors().values()
        if actor["State"] != "DEAD"
    ]
    if ray.available_resources().get("CPU", 0) != ray.cluster_resources().get("CPU", 0):
        found.append("CPUs")
    return found


def eventually(holds: Callable[[], bool], message: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)
