"""Host arrays of one step to the device in one copy.

Knows: pinned host buffers that are taken in turns, and a device buffer that may keep its address. Does not
know: what the arrays mean. Integers arrive as int64 (torch indexes with it), floats as float32.

A copy from ordinary memory makes the host wait for the device, and a pinned buffer must not be refilled while
a copy still reads it: with a step in flight and one being prepared, three buffers are needed
(spec/engine.md §7.5). Should the host run further ahead, the ring grows instead of waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

RING_SLOTS = 3
_LEAST_WORDS = 1 << 12


@dataclass(slots=True)
class _Slot:
    """One pinned buffer. ready: the last copy out of it is done when this event is."""

    buffer: torch.Tensor
    ready: torch.cuda.Event


def _capacity(words: int) -> int:
    """Powers of two, so that a buffer is replaced a few times in its life."""
    return max(_LEAST_WORDS, 1 << max(words - 1, 0).bit_length())


class Staging:
    """Sends lists of arrays to one device. On a CPU the tensors are the packed host buffer itself.

    fixed: the device side is one buffer whose address changes only when it has to grow, as captured graphs
    need it; what the last `send` returned is then overwritten by the next one, in stream order. All sends and
    all readers must use one stream.
    """

    def __init__(self, device: torch.device | str, *, fixed: bool = False) -> None:
        self.device, self.fixed = torch.device(device), fixed
        self._ring: deque[_Slot] = deque()
        self._static: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Pinned buffers in the ring."""
        return len(self._ring)

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Tensors of the arrays' shapes, in order: views of one buffer."""
        sizes = [(array.size + 1) // 2 if array.dtype == np.float32 else array.size for array in arrays]
        words = sum(sizes)
        if self.device.type != "cuda":
            host = np.empty(words, np.int64)
            _pack(host, arrays, sizes)
            return _unpack(torch.from_numpy(host).to(self.device), arrays, sizes)
        slot = self._take(words)
        _pack(slot.buffer.numpy(), arrays, sizes)
        target = self._target(words)
        target.copy_(slot.buffer[:words], non_blocking=True)
        slot.ready.record(torch.cuda.current_stream(self.device))
        self._ring.append(slot)
        return _unpack(target, arrays, sizes)

    def _take(self, words: int) -> _Slot:
        """A pinned buffer that no copy reads any more: the oldest, or a new one while that is in use."""
        with torch.inference_mode(False):
            if len(self._ring) < RING_SLOTS or not self._ring[0].ready.query():
                buffer = torch.empty(_capacity(words), dtype=torch.int64, pin_memory=True)
                return _Slot(buffer, torch.cuda.Event())
            slot = self._ring.popleft()
            if slot.buffer.numel() < words:
                slot.buffer = torch.empty(_capacity(words), dtype=torch.int64, pin_memory=True)
            return slot

    def _target(self, words: int) -> torch.Tensor:
        if not self.fixed:
            return torch.empty(words, dtype=torch.int64, device=self.device)
        if self._static is None or self._static.numel() < words:
            with torch.inference_mode(False):
                self._static = torch.empty(_capacity(words), dtype=torch.int64, device=self.device)
        return self._static[:words]


def _pack(host: np.ndarray, arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> None:
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        if array.dtype == np.float32:
            host[at : at + size].view(np.float32)[: array.size] = array.reshape(-1)
        else:
            host[at : at + size] = array.reshape(-1)
        at += size


def _unpack(buffer: torch.Tensor, arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> list[torch.Tensor]:
    tensors = []
    for part, array in zip(buffer.split_with_sizes(sizes), arrays, strict=True):
        if array.dtype == np.float32:
            part = part.view(torch.float32)[: array.size]
        tensors.append(part if array.ndim == 1 else part.view(array.shape))
    return tensors
