"""`ExpertSlots`: the tensors of a rank's experts as rows of bytes that can be moved and compared.

Knows: the slot is the leading dimension, any layout behind it. Does not know: formats, what a layer computes.
Weights travel as opaque bytes, so quantised, packed and transposed layouts are moved alike.

Shape letters: Y layers, n slots of this rank, B bytes of one slot of one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from deepinfer_ray.errors import ConfigError, RankFailure
from deepinfer_ray.parallel.expert_map import ExpertMap
from deepinfer_ray.parallel.rank_group import RankGroup


class ExpertSlots(Protocol):
    """The live expert weights of equally laid out layers; a shuffle writes into them."""

    num_layers: int

    def layer_tensors(self, layer: int) -> Sequence[torch.Tensor]:
        """[n, …] each: views of everything that belongs to a slot, the same kinds in the same order in every
        layer and on every rank."""
        ...


class TensorSlots:
    """`ExpertSlots` over lists of tensors, one list per layer; for tests, which need no model then."""

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        self.layers = layers
        self.num_layers = len(layers)

    def layer_tensors(self, layer: int) -> Sequence[torch.Tensor]:
        return self.layers[layer]


def slot_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n, B]: a view of `tensor` [n, …] whose row is one slot, gaps of a padded layout included.

    `ConfigError` if slots interleave: then no slot is a range of bytes.
    """
    if tensor.dim() == 0 or 0 in tensor.shape:
        raise ConfigError(f"expert weights must be [slots, …], got the shape {list(tensor.shape)}")
    tensor = tensor.detach()
    sizes, strides = tensor.shape[1:], tensor.stride()[1:]
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if tensor.shape[0] > 1 and tensor.stride(0) < span:
        raise ConfigError(
            f"a slot must be one range of memory, but in the shape {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} slots lie {tensor.stride(0)} elements apart and span {span}; "
            "make the slot the leading dimension"
        )
    flat = tensor.as_strided((tensor.shape[0], span), (max(tensor.stride(0), span), 1))
    return flat.view(torch.uint8)


def layer_bytes(slots: ExpertSlots, layer: int, num_local: int) -> list[torch.Tensor]:
    """uint8 [n, B] of each tensor of a layer."""
    views = [slot_bytes(tensor) for tensor in slots.layer_tensors(layer)]
    if not views or any(len(view) != num_local for view in views):
        raise ConfigError(
            f"layer {layer}: tensors of {[len(view) for view in views]} slots where each rank has {num_local}"
        )
    return views


def slot_digests(slots: ExpertSlots, num_local: int) -> torch.Tensor:
    """int64 [Y, n] on the CPU: a hash of each slot's bytes, over all its tensors. Reads everything."""
    digests = np.empty((slots.num_layers, num_local), np.int64)
    for layer in range(slots.num_layers):
        views = [view.cpu().numpy() for view in layer_bytes(slots, layer, num_local)]
        for slot in range(num_local):
            digest = hashlib.blake2b(digest_size=8)
            for view in views:
                digest.update(view[slot].tobytes())
            digests[layer, slot] = np.frombuffer(digest.digest(), np.int64)[0]
    return torch.from_numpy(digests)


class SlotLedger:
    """What each expert's bytes hash to: taken once after loading, compared after each shuffle. Collective."""

    def __init__(self, slots: ExpertSlots, placement: ExpertMap, group: RankGroup) -> None:
        self.expected = np.zeros((placement.num_layers, placement.num_logical), np.int64)
        digests = self._all(slots, placement, group)
        layers = np.arange(placement.num_layers)[:, None]
        self.expected[layers, placement.physical_to_logical] = digests
        self._compare(digests, placement)

    def check(self, slots: ExpertSlots, placement: ExpertMap, group: RankGroup) -> None:
        """`RankFailure` on every rank, naming a slot whose bytes are not those of its expert."""
        self._compare(self._all(slots, placement, group), placement)

    def _compare(self, digests: np.ndarray, placement: ExpertMap) -> None:
        want = np.take_along_axis(self.expected, placement.physical_to_logical.astype(np.int64), axis=1)
        wrong = np.argwhere(digests != want)
        if len(wrong):
            layer, slot = wrong[0].tolist()
            rank, local = divmod(slot, placement.num_local)
            raise RankFailure(
                f"layer {layer}: slot {local} of expert rank {rank} does not hold the bytes of expert "
                f"{int(placement.physical_to_logical[layer, slot])} ({len(wrong)} slots differ); the gang's "
                "weights are damaged, rebuild it"
            )

    @staticmethod
    def _all(slots: ExpertSlots, placement: ExpertMap, group: RankGroup) -> np.ndarray:
        mine = slot_digests(slots, placement.num_local)
        gathered = group.gather(mine)  # [E, Y, n]
        flat: np.ndarray = gathered.permute(1, 0, 2).reshape(mine.shape[0], -1).numpy()
        return flat
