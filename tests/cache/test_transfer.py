"""Staging: arrays arrive with their values, shapes and types; a CUDA ring never refills a buffer in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.transfer import RING_SLOTS, Staging


def arrays() -> list[np.ndarray]:
    return [
        np.arange(5, dtype=np.int32),
        np.empty((3, 0), np.int64),
        np.linspace(-1, 1, 7, dtype=np.float32),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1:3],
        np.array([True, False]),
        np.float32([[1.5], [np.inf]]),
        np.array([2**40, -1]),
    ]


def assert_same(sent: list[torch.Tensor], given: list[np.ndarray]) -> None:
    assert len(sent) == len(given)
    for tensor, array in zip(sent, given, strict=True):
        assert tensor.dtype == (torch.float32 if array.dtype == np.float32 else torch.int64)
        assert tuple(tensor.shape) == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array.astype(tensor.numpy().dtype))


def test_cpu_tensors_are_the_arrays_and_stay_so() -> None:
    staging = Staging("cpu")
    given = arrays()
    first = staging.send(given)
    staging.send([np.zeros(100, np.int64)])
    assert_same(first, given)
    assert staging.send([]) == []
    assert staging.num_slots == 0


class Event:
    """Stands for a CUDA event: done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda"
        self.done = False

    def query(self) -> bool:
        return self.done


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Staging:
    """The path of a CUDA device with ordinary memory and events that the test completes."""
    empty = torch.empty

    def unpinned(*shape: int, pin_memory: bool = False, **more: object) -> torch.Tensor:
        return empty(*shape, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", unpinned)
    staging = Staging("cpu", fixed=True)
    staging.device = torch.device("cuda")  # takes the other branch; the device's buffer is replaced
    monkeypatch.setattr(staging, "_target", lambda words: empty(words, dtype=torch.int64))
    return staging


def test_a_buffer_in_use_is_not_refilled(ring: Staging) -> None:
    for _ in range(5):
        assert_same(ring.send(arrays()), arrays())
    assert ring.num_slots == 5  # nothing was finished: the ring grew instead of waiting
    addresses = [slot.buffer.data_ptr() for slot in ring._ring]
    assert len(set(addresses)) == 5


def test_finished_buffers_are_taken_in_turns(ring: Staging) -> None:
    seen = []
    for _ in range(4 * RING_SLOTS):
        ring.send(arrays())
        for slot in ring._ring:
            slot.ready.done = True  # type: ignore[attr-defined]
        seen.append(ring._ring[-1].buffer.data_ptr())
    assert ring.num_slots == RING_SLOTS
    assert seen[RING_SLOTS:] == seen[:-RING_SLOTS]


def test_a_buffer_grows_when_more_is_sent(ring: Staging) -> None:
    for size in (10, 5000, 10, 40_000):
        given = [np.arange(size)]
        assert_same(ring.send(given), given)
        for slot in ring._ring:
            slot.ready.done = True  # type: ignore[attr-defined]
    assert ring.num_slots == RING_SLOTS
    assert ring._ring[-1].buffer.numel() >= 40_000
