"""Lost machines and drain notices, on an invented node table and clock."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_ray.fleet.machines import DrainNotices, lost_machine


@pytest.fixture
def raylet() -> Iterator[int]:
    """The port of something that listens as a raylet does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def row(node_id: str, port: int, alive: bool = True) -> dict[str, Any]:
    address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    return {"NodeID": node_id, "Alive": alive, **address}


def test_a_machine_is_lost_when_its_raylet_does_not_answer(raylet: int) -> None:
    """Long before Ray's health checks say so."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    table = [row("a", raylet), row("b", closed), row("c", raylet, alive=False)]
    assert lost_machine(["a"], table) is None
    assert lost_machine(["a", "b"], table) == "127.0.0.1"
    assert lost_machine(["c"], table) == "127.0.0.1"
    assert lost_machine(["forgotten"], table) == "forgotten"
    assert lost_machine([], table) is None, "a gang without a place lost none"


def test_notices_are_asked_for_once_a_second_and_count_down() -> None:
    time, asked, rows = [100.0], [], {"a": 130.0, "b": math.inf}

    def ask() -> dict[str, float]:
        asked.append(time[0])
        return rows

    notices = DrainNotices(ask=ask, clock=lambda: time[0], now=lambda: time[0])
    assert notices.seconds_left(["a"]) is None, "not asked yet"
    assert notices.look()
    assert notices.look()
    assert asked == [100.0]
    assert notices.seconds_left(["a", "c"]) == 30.0
    assert notices.seconds_left(["b"]) == math.inf
    assert notices.seconds_left(["a", "b"]) == 30.0
    assert notices.seconds_left(["c"]) is None
    time[0] = 131.0
    rows = {}
    assert notices.seconds_left(["a"]) == 0.0, "its time is over"
    assert not notices.look()
    assert notices.seconds_left(["a"]) is None
