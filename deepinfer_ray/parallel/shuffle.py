"""Expert weights move to their new slots, in place, layer by layer (spec/distributed.md §4.11).

Knows: who sends which slot to whom (a pure plan from the old and the new map), the scratch of one layer, the
order of copies that never overwrites a byte still needed. Does not know: why the map changed, what the bytes
mean.

A slot that keeps its expert is left alone. A rank that already holds an expert copies it; otherwise it gets
it once, from one of the ranks that held it, and copies it to its further slots. A layer without changes costs
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.parallel.expert_map import ExpertMap, ExpertMapError
from deepinfer_ray.parallel.expert_slots import ExpertSlots, layer_bytes
from deepinfer_ray.parallel.rank_group import Post, RankGroup


class Transfer(NamedTuple):
    """An expert's bytes from a local slot of one rank to a local slot of another."""

    expert: int
    sender: int
    source: int
    receiver: int
    target: int


class Copy(NamedTuple):
    """Bytes of a slot to another of the same rank."""

    rank: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All moves of one layer. `copies` read old bytes; `duplicates` read what a transfer has just brought."""

    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]
    duplicates: tuple[Copy, ...]

    def __bool__(self) -> bool:
        return bool(self.transfers or self.copies)


@dataclass(frozen=True, slots=True)
class ShufflePlan:
    """The moves of a change of maps; the same on every rank, since it depends on the maps alone."""

    layers: tuple[LayerPlan, ...]
    ep_size: int
    num_local: int

    @classmethod
    def between(cls, old: ExpertMap, new: ExpertMap) -> ShufflePlan:
        """The plan that turns `old` into `new`."""
        if old.physical_to_logical.shape != new.physical_to_logical.shape or old.ep_size != new.ep_size:
            raise ExpertMapError(
                f"a shuffle keeps the sizes, but the maps are {list(old.physical_to_logical.shape)} on "
                f"{old.ep_size} ranks and {list(new.physical_to_logical.shape)} on {new.ep_size}"
            )
        layers = zip(old.physical_to_logical, new.physical_to_logical, strict=True)
        return cls(tuple(plan_layer(o, q, old.ep_size) for o, q in layers), old.ep_size, old.num_local)

    @property
    def sent(self) -> np.ndarray:
        """int64 [E]: slots that each rank sends, over all layers."""
        return self._count("sender")

    @property
    def received(self) -> np.ndarray:
        """int64 [E]: slots that each rank receives."""
        return self._count("receiver")

    @property
    def copied(self) -> np.ndarray:
        """int64 [E]: slots that each rank fills from its own memory."""
        ranks = [copy.rank for layer in self.layers for copy in (*layer.copies, *layer.duplicates)]
        return np.bincount(np.array(ranks, np.int64), minlength=self.ep_size)

    def _count(self, end: str) -> np.ndarray:
        ranks = [getattr(transfer, end) for layer in self.layers for transfer in layer.transfers]
        return np.bincount(np.array(ranks, np.int64), minlength=self.ep_size)


def plan_layer(old: np.ndarray, new: np.ndarray, ep_size: int) -> LayerPlan:
    """The moves of one layer from its old and its new experts by slot [P].

    R ranks receive an expert and S held it, both ascending; k = R // S. Receiver j is served by sender j // k
    while j < k·S and by sender j - k·S afterwards.
    """
    num_local = len(old) // ep_size
    held: dict[int, dict[int, int]] = {}
    for slot, expert in enumerate(old.tolist()):
        rank, local = divmod(slot, num_local)
        held.setdefault(expert, {}).setdefault(rank, local)
    needed: dict[int, dict[int, list[int]]] = {}
    copies = []
    for slot, (before, expert) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        if before == expert:
            continue
        rank, local = divmod(slot, num_local)
        if expert not in held:
            raise ExpertMapError(f"no rank holds expert {expert}, which slot {slot} shall hold")
        if rank in held[expert]:
            copies.append(Copy(rank, held[expert][rank], local))
        else:
            needed.setdefault(expert, {}).setdefault(rank, []).append(local)
    transfers, duplicates = [], []
    for expert in sorted(needed):
        senders = list(held[expert].items())
        each = len(needed[expert]) // len(senders)
        for j, (rank, targets) in enumerate(needed[expert].items()):
            spread = j < each * len(senders)
            sender, source = senders[j // each if spread else j - each * len(senders)]
            transfers.append(Transfer(expert, sender, source, rank, targets[0]))
            duplicates += [Copy(rank, targets[0], target) for target in targets[1:]]
    return LayerPlan(tuple(transfers), tuple(copies), tuple(duplicates))


class Shuffled(NamedTuple):
    """What a shuffle did on this rank."""

    slots: int
    """Slots that have another expert now."""
    sent_bytes: int
    received_bytes: int
    seconds: float


class WeightShuffle:
    """Carries out plans on this rank's weights. Holds the scratch of one layer, from the start: the memory is
    there when a shuffle comes, and the memory profile has seen it.

    p2p_groups: batches of a layer's transfers, by (sender - receiver) mod groups; one waits for the other.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        num_local: int,
        group: RankGroup,
        p2p_groups: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if p2p_groups < 1:
            raise ConfigError(f"eplb.p2p_groups must be at least 1, got {p2p_groups}")
        self.slots, self.num_local, self.group = slots, num_local, group
        self.p2p_groups, self.clock = p2p_groups, clock
        shapes = [
            [view.shape[1] for view in layer_bytes(slots, y, num_local)] for y in range(slots.num_layers)
        ]
        for layer, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ConfigError(
                    f"layers balanced together must be laid out alike, but a slot of layer {layer} has "
                    f"tensors of {shape} bytes and one of layer 0 {shapes[0]}"
                )
        self.scratch = [
            torch.empty_like(view, memory_format=torch.contiguous_format) for view in self._first()
        ]

    def _first(self) -> list[torch.Tensor]:
        return layer_bytes(self.slots, 0, self.num_local) if self.slots.num_layers else []

    @torch.inference_mode()
    def run(self, plan: ShufflePlan) -> Shuffled:
        """Move this rank's part; collective. No step may be between dispatch and combine (on a device, work
        launched earlier on the same stream is in order)."""
        if len(plan.layers) != self.slots.num_layers or plan.num_local != self.num_local:
            raise ConfigError(
                f"a plan of {len(plan.layers)} layers and {plan.num_local} slots cannot move "
                f"{self.slots.num_layers} layers and {self.num_local} slots"
            )
        start = self.clock()
        changed = sent = received = 0
        for layer, moves in enumerate(plan.layers):
            if not moves:
                continue
            counts = self._run_layer(layer_bytes(self.slots, layer, self.num_local), moves)
            changed, sent, received = changed + counts[0], sent + counts[1], received + counts[2]
        return Shuffled(changed, sent, received, self.clock() - start)

    def _run_layer(self, live: list[torch.Tensor], moves: LayerPlan) -> tuple[int, int, int]:
        """One layer. Old bytes stay in place until every read of them is over: copies of this rank and the
        bytes that others ask for; arrivals wait in the scratch."""
        rank = self.group.rank
        copies = [copy for copy in moves.copies if copy.rank == rank]
        outgoing = [transfer for transfer in moves.transfers if transfer.sender == rank]
        incoming = [transfer for transfer in moves.transfers if transfer.receiver == rank]
        duplicates = [copy for copy in moves.duplicates if copy.rank == rank]
        for copy in copies:
            for held, waiting in zip(live, self.scratch, strict=True):
                waiting[copy.target].copy_(held[copy.source])
        for bucket in range(self.p2p_groups):
            sends: list[Post] = [
                (tensor[t.source], t.receiver)
                for t in outgoing
                if self._bucket(t) == bucket
                for tensor in live
            ]
            receives: list[Post] = [
                (tensor[t.target], t.sender)
                for t in incoming
                if self._bucket(t) == bucket
                for tensor in self.scratch
            ]
            if sends or receives:
                self.group.exchange(sends, receives)
        for target in [copy.target for copy in copies] + [transfer.target for transfer in incoming]:
            for held, waiting in zip(live, self.scratch, strict=True):
                held[target].copy_(waiting[target])
        for copy in duplicates:
            for held in live:
                held[copy.target].copy_(held[copy.source])
        size = sum(tensor.shape[1] for tensor in live)
        return len(copies) + len(incoming) + len(duplicates), len(outgoing) * size, len(incoming) * size

    def _bucket(self, transfer: Transfer) -> int:
        return (transfer.sender - transfer.receiver) % self.p2p_groups
