"""Records with tensors from the first rank of a group to the others: the way that a driver leads followers.

Knows: how a record becomes one message of bytes and one of tensor data. Does not know: what records mean.
Everything that is no tensor travels through the host group; the tensors travel as one buffer on their device.
Records are pickled: they pass between the ranks of one gang only.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from deepinfer_ray.parallel.rank_group import RankGroup

ALIGN = 16
"""Bytes at which a tensor's data starts in the buffer."""


class _Pickler(pickle.Pickler):
    """Tensors are taken out: (number, dtype, shape) stays in their place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1, obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffer: torch.Tensor) -> None:
        super().__init__(file)
        self._buffer, self._at = buffer, 0

    def persistent_load(self, pid: Any) -> torch.Tensor:
        _, dtype, shape = pid
        size = dtype.itemsize * torch.Size(shape).numel()
        data = self._buffer[self._at : self._at + size]
        self._at += _aligned(size)
        return data.view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Channel:
    """One direction: rank 0 of `group` sends, every other receives, in the same order."""

    def __init__(self, group: RankGroup, device: torch.device | str = "cpu") -> None:
        self.group, self.device = group, torch.device(device)

    def send(self, record: Any) -> None:
        """Collective; by rank 0."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(record)
        text = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        sizes = [_aligned(tensor.numel() * tensor.element_size()) for tensor in pickler.tensors]
        self.group.broadcast(torch.tensor([len(text), sum(sizes)]))
        self.group.broadcast(text)
        if sum(sizes):
            self.group.broadcast(self._joined(pickler.tensors, sizes))

    def _joined(self, tensors: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        at = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            buffer[at : at + len(data)].copy_(data)
            at += size
        return buffer

    def receive(self) -> Any:
        """Collective; by every other rank. Tensors lie on the channel's device."""
        sizes = torch.zeros(2, dtype=torch.int64)
        self.group.broadcast(sizes)
        length, total = sizes.tolist()
        text = torch.empty(length, dtype=torch.uint8)
        self.group.broadcast(text)
        buffer = torch.empty(total, dtype=torch.uint8, device=self.device)
        if total:
            self.group.broadcast(buffer)
        return _Unpickler(io.BytesIO(text.numpy().tobytes()), buffer).load()
