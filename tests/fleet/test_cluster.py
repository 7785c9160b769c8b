"""Joining and leaving a cluster: what needs no cluster."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from deepinfer_ray.errors import PlacementError
from deepinfer_ray.fleet.cluster import own_signal_handlers, require_answer


def test_an_address_where_nothing_listens_fails_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(
        PlacementError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'.*refused"
    ) as caught:
        require_answer("127.0.0.1:1")
    assert "check RAY_ADDRESS, or unset it" in str(caught.value)
    assert time.monotonic() - started < 5


def test_a_listening_address_passes_and_other_forms_are_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_answer(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("auto", "ray://nowhere:10001", "nonsense"):
        require_answer(address)


def test_signal_handlers_survive_what_replaces_them() -> None:
    def ours(number: int, frame: object) -> None:
        raise AssertionError("never called")

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with own_signal_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as ray.init does
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_handlers_are_left_alone() -> None:
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with own_signal_handlers():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert failures == []
