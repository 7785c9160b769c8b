"""A loaded model whose drafter knows part of its target, and greedy requests for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from drafting_lab import Lab, bits, greedy_requests, run
from threads import one_thread

from deepinfer_ray.engine.request import Request


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab.load()


@pytest.fixture(scope="module")
def greedy(lab: Lab) -> tuple[list[Request], list[Any]]:
    requests = greedy_requests(lab, 32, 5)
    without = bits(run(lab.engine(0), requests))
    assert {entry[4] for entry in without} == {"stop", "length"}
    return requests, without
