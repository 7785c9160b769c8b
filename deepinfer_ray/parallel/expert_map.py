"""`ExpertMap`: which slot holds which expert, and which replica of an expert a row goes to.

Knows: how many redundant experts a group gets, the initial placement, the three tables of a placement and
what must hold between them, replica choice (spec/distributed.md §3.1, §4.1, §4.10). Does not know: loads,
weights, transports.

A logical expert is one of the checkpoint; a physical expert (slot) is a place for one on a rank. Slot s
belongs to expert rank s // n and is its local slot s mod n.

Shape letters: Y layers, L logical experts, X redundant slots, P = L + X slots, E ranks, n = P / E slots a
rank, T rows, k experts a row.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_ray.errors import ConfigError, DeepInferError

logger = logging.getLogger("deepinfer_ray.eplb")

REPLICA_STRIDE = 23333
"""A row's place in its buffer times this picks its replica: neighbours go to different ones."""
_UINT32 = 0xFFFF_FFFF


class ExpertMapError(DeepInferError):
    """A placement of experts that cannot be: a bug, named with the layer and the slot."""


def physical_experts(num_logical: int, ep_size: int, requested: int = 0) -> int:
    """P = L + X: the least multiple of E that holds the L experts and so many redundant ones (spec §3.1)."""
    return num_logical + requested + -(num_logical + requested) % ep_size


def extra_experts(num_logical: int, ep_size: int, requested: int = 0) -> int:
    """X = requested + (-(L + requested) mod E), with a warning when that is more than was requested."""
    if num_logical < 1 or ep_size < 1 or requested < 0:
        raise ConfigError(
            f"eplb.extra_experts must be >= 0 with at least one expert and one rank, got {requested} for "
            f"{num_logical} experts on {ep_size} ranks"
        )
    extra = physical_experts(num_logical, ep_size, requested) - num_logical
    if extra != requested:
        logger.warning(
            "eplb.extra_experts = %d becomes %d: (%d + %d) experts divide over %d ranks",
            requested, extra, num_logical, extra, ep_size,
        )  # fmt: skip
    return extra


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMap:
    """A placement of the experts of equally laid out layers. A value: a rebalance makes a new one."""

    ep_size: int
    physical_to_logical: np.ndarray
    """int32 [Y, P]."""
    logical_to_physical: np.ndarray
    """int32 [Y, L, X + 1]: an expert's slots in replica order (not sorted), then -1."""
    logical_count: np.ndarray
    """int32 [Y, L]: replicas of each expert."""

    @classmethod
    def initial(cls, num_layers: int, num_logical: int, ep_size: int, requested: int = 0) -> ExpertMap:
        """Every layer holds 0 … L - 1, then j mod L for the redundant slots j = 0 … X - 1."""
        extra = extra_experts(num_logical, ep_size, requested)
        row = np.concatenate((np.arange(num_logical), np.arange(extra) % num_logical))
        return cls.from_physical(np.tile(row, (num_layers, 1)), num_logical, ep_size)

    @classmethod
    def from_physical(cls, physical_to_logical: np.ndarray, num_logical: int, ep_size: int) -> ExpertMap:
        """The map of these slots [Y, P]; replicas are numbered in ascending slot order."""
        slots = np.ascontiguousarray(physical_to_logical, dtype=np.int32)
        layers, physical = slots.shape
        if slots.size and (slots.min() < 0 or slots.max() >= num_logical):
            raise ExpertMapError(
                f"slots must hold experts 0 … {num_logical - 1}, found {slots.min()} … {slots.max()}"
            )
        counts = np.zeros((layers, num_logical), np.int32)
        back = np.full((layers, num_logical, physical - num_logical + 1), -1, np.int32)
        for layer in range(layers):
            for slot, expert in enumerate(slots[layer].tolist()):
                replica = counts[layer, expert]
                if replica == back.shape[2]:
                    raise ExpertMapError(
                        f"layer {layer}: some expert has no slot, expert {expert} has too many"
                    )
                back[layer, expert, replica] = slot
                counts[layer, expert] += 1
        made = cls(ep_size, slots, back, counts)
        made.check_integrity()
        return made

    # ---- numbers

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def num_logical(self) -> int:
        """L."""
        return int(self.logical_count.shape[1])

    @property
    def num_physical(self) -> int:
        """P = L + X."""
        return int(self.physical_to_logical.shape[1])

    @property
    def num_extra(self) -> int:
        """X."""
        return self.num_physical - self.num_logical

    @property
    def num_local(self) -> int:
        """n = P / E."""
        return self.num_physical // self.ep_size

    def local_experts(self, layer: int, rank: int) -> list[int]:
        """Logical expert of each local slot of a rank: what the rank loads, in slot order."""
        n = self.num_local
        return [int(expert) for expert in self.physical_to_logical[layer, rank * n : (rank + 1) * n]]

    # ---- as one array, to send

    def flat(self) -> np.ndarray:
        """int32: the three tables one behind the other."""
        tables = (self.physical_to_logical, self.logical_to_physical, self.logical_count)
        return np.concatenate([table.ravel() for table in tables])

    def like(self, flat: np.ndarray) -> ExpertMap:
        """The map that `flat()` of a map of these sizes describes, checked."""
        tables = (self.physical_to_logical, self.logical_to_physical, self.logical_count)
        parts = np.split(np.asarray(flat, np.int32), np.cumsum([table.size for table in tables]))
        if len(parts[-1]):
            raise ExpertMapError(f"a map of {self.flat().size} numbers was expected, got {len(flat)}")
        shaped = [part.reshape(table.shape) for part, table in zip(parts, tables, strict=False)]
        made = ExpertMap(self.ep_size, *shaped)
        made.check_integrity()
        return made

    # ---- what must hold

    def check_integrity(self) -> None:
        """`ExpertMapError` unless the tables describe one placement in which every expert has a slot."""
        slots, back, counts = self.physical_to_logical, self.logical_to_physical, self.logical_count
        L, P = self.num_logical, self.num_physical
        shapes = (back.shape, counts.shape)
        if shapes != ((self.num_layers, L, P - L + 1), (self.num_layers, L)) or P % self.ep_size:
            raise ExpertMapError(
                f"tables of {self.num_layers} layers, {L} experts and {P} slots on {self.ep_size} ranks "
                f"cannot have the shapes {slots.shape}, {back.shape}, {counts.shape}"
            )
        for layer in range(self.num_layers):
            count = counts[layer]
            if count.min() < 1 or count.sum() != P:
                raise ExpertMapError(
                    f"layer {layer}: every expert needs a slot and counts must add up to {P}, but expert "
                    f"{int(count.argmin())} has {int(count.min())} and the sum is {int(count.sum())}"
                )
            valid = np.arange(back.shape[2]) < count[:, None]
            if (back[layer][~valid] != -1).any():
                raise ExpertMapError(f"layer {layer}: logical_to_physical goes on behind logical_count")
            places = back[layer][valid]
            if not np.array_equal(np.sort(places), np.arange(P)):
                raise ExpertMapError(f"layer {layer}: logical_to_physical must name each of {P} slots once")
            listed = np.repeat(np.arange(L), count)
            wrong = np.flatnonzero(slots[layer][places] != listed)
            if wrong.size:
                slot = int(places[wrong[0]])
                raise ExpertMapError(
                    f"layer {layer}: slot {slot} holds expert {int(slots[layer, slot])}, but is listed under "
                    f"expert {int(listed[wrong[0]])}"
                )


def choose_replicas(
    experts_Tk: torch.Tensor, to_physical: torch.Tensor, count: torch.Tensor, ep_rank: int
) -> torch.Tensor:
    """int64 [T, k]: the slot of each row's expert; -1 stays -1.

    Row i of a rank's buffer (padding rows included) takes replica (rank + 23333·i) mod 2³² mod count.
    to_physical: int [L, X + 1]; count: int [L]; both on the device of `experts_Tk`.
    """
    rows = torch.arange(experts_Tk.shape[0], device=experts_Tk.device).unsqueeze(1)
    turn = (rows * REPLICA_STRIDE + ep_rank) & _UINT32
    index = experts_Tk.clamp_min(0).long()
    slots = to_physical[index, turn % count[index].long()].long()
    return slots.masked_fill(experts_Tk < 0, -1)


class RoutingTables:
    """A map's tables on a device. Written in place: captured graphs keep their addresses."""

    def __init__(self, placement: ExpertMap, ep_rank: int, device: torch.device | str = "cpu") -> None:
        if not 0 <= ep_rank < placement.ep_size:
            raise ExpertMapError(f"expert rank {ep_rank} is outside [0, {placement.ep_size})")
        self.ep_rank = ep_rank
        n = placement.num_local
        self._mine = slice(ep_rank * n, (ep_rank + 1) * n)
        self.physical_to_logical = torch.empty(
            placement.physical_to_logical.shape, dtype=torch.int32, device=device
        )
        self.logical_to_physical = torch.empty(
            placement.logical_to_physical.shape, dtype=torch.int32, device=device
        )
        self.logical_count = torch.empty(placement.logical_count.shape, dtype=torch.int32, device=device)
        self.local_experts = torch.empty(placement.num_layers, n, dtype=torch.int64, device=device)
        """int64 [Y, n]: expert of each local slot."""
        self.update(placement)

    def update(self, placement: ExpertMap) -> None:
        """Take over a map of the same sizes."""
        self.physical_to_logical.copy_(torch.from_numpy(placement.physical_to_logical))
        self.logical_to_physical.copy_(torch.from_numpy(placement.logical_to_physical))
        self.logical_count.copy_(torch.from_numpy(placement.logical_count))
        self.local_experts.copy_(self.physical_to_logical[:, self._mine])

    def to_physical(self, layer: int, experts_Tk: torch.Tensor) -> torch.Tensor:
        """`choose_replicas` of a layer."""
        return choose_replicas(
            experts_Tk, self.logical_to_physical[layer], self.logical_count[layer], self.ep_rank
        )
