"""Results of a step on their way from the device to the host.

Knows: one packed copy into pinned memory and the event behind it. Does not know: what the tensors mean.
"""

from __future__ import annotations

import numpy as np
import torch


class HostCopy:
    """Device tensors as arrays, once the device is done with them; on a CPU they are there already."""

    def __init__(self, tensors: dict[str, torch.Tensor | None]) -> None:
        """Launches the copy; on a CUDA device one for all tensors together."""
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._event: torch.cuda.Event | None = None
        if all(tensor.device.type != "cuda" for tensor in given.values()):
            self._tensors = given
            return
        # Wide elements first: every tensor then starts at a multiple of its element size.
        names = sorted(given, key=lambda name: -given[name].element_size())
        packed = _packed([given[name] for name in names])
        pinned = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(packed, non_blocking=True)
        parts = pinned.split_with_sizes([given[name].nbytes for name in names])
        self._tensors = {
            name: part.view(given[name].dtype).view(given[name].shape)
            for name, part in zip(names, parts, strict=True)
        }
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> dict[str, np.ndarray]:
        """The one place where the host waits for the device (spec/engine.md §7.2, step 3)."""
        if self._event is not None:
            self._event.synchronize()
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}


def _packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """uint8: the bytes of all tensors, one behind the other."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
