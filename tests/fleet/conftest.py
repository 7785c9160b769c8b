"""The stub engine for all fleet tests, and the local Ray cluster for those that need Ray."""

from __future__ import annotations

import importlib.util
import sys
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


@pytest.fixture
def cluster(local_ray: Any, stub: ModuleType) -> Iterator[Any]:
    """The cluster; afterwards nothing of ours may be left on it."""
    local_ray.cloudpickle.register_pickle_by_value(stub)
    yield local_ray
    eventually(lambda: leftovers(local_ray) == [], lambda: f"still held: {leftovers(local_ray)}")


def leftovers(ray: Any) -> list[str]:
    """What is still held: live ranks, placement groups, CPUs. Ray Data keeps actors of its own for good."""
    from ray.util import placement_group_table

    from deepinfer_ray.fleet.rank_actor import RankActor

    found = [
        f"placement group {row['name']} {row['state']}"
        for row in placement_group_table().values()
        if row["state"] != "REMOVED"
    ]
    found += [
        f"actor {actor['ActorClassName']} {actor['State']}"
        for actor in ray._private.state.actors().values()
        if actor["State"] != "DEAD" and actor["ActorClassName"] == RankActor.__name__
    ]
    if ray.available_resources().get("CPU", 0) != ray.cluster_resources().get("CPU", 0):
        found.append("CPUs")
    return found


def eventually(holds: Callable[[], bool], message: str | Callable[[], str], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, message if isinstance(message, str) else message()
        time.sleep(0.05)
