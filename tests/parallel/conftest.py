"""Ranks as threads, and the scenario that threads and processes share."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepinfer_ray.parallel.rank_group import ThreadGroup

torch.set_num_threads(1)


def _run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(group: ThreadGroup) -> None:
        try:
            results[group.rank] = work(group)
        except BaseException as error:  # the test's own thread raises it
            errors.append(error)

    threads = [threading.Thread(target=body, args=(group,)) for group in ThreadGroup.of(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[ThreadGroup], Any]], list[Any]]:
    """Run a function on every rank of a group of threads; results in rank order, or the first error."""
    return _run_ranks


@pytest.fixture(scope="session")
def scenario() -> ModuleType:
    """`eplb_scenario.py`: also a script, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(
        "eplb_scenario", Path(__file__).with_name("eplb_scenario.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
