"""What balancing asks of an expert-parallel group: sums, gathers, one sender's array, paired byte copies.

Knows: the contract, the group of one rank, ranks as threads of one process, torch.distributed. Does not know:
what is sent. Every call is collective and made by all ranks in the same order, but `exchange`, which only the
ranks that send or receive make.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from deepinfer_ray.errors import RankFailure

Post = tuple[torch.Tensor, int]
"""(contiguous 1-D uint8 tensor, the other rank inside the group)."""


class ExpertGroup(Protocol):
    """The ranks that share one set of experts; tensors may lie on any device that the transport knows."""

    rank: int
    size: int

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        """Start all sends and receives at once, return when all are done. Between two ranks the n-th send
        meets the n-th receive."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with that of rank 0."""
        ...

    def sum(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with the sum over the ranks."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, …]: the tensors of all ranks, in rank order."""
        ...


class SingleRank:
    """A group of one: nothing to tell anybody."""

    rank, size = 0, 1

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        if sends or receives:
            raise RankFailure("a group of one rank has nobody to exchange expert weights with")

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def sum(self, tensor: torch.Tensor) -> None:
        pass

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


class TorchGroup:
    """A torch.distributed group (NCCL or gloo), with a gloo twin for tensors in host memory.

    cpu_group: where `group` is NCCL, the same ranks over gloo. Time-outs are those of the groups.
    """

    def __init__(self, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup | None = None) -> None:
        self.group, self.cpu_group = group, cpu_group or group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def _for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.cpu_group if tensor.device.type == "cpu" else self.group

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        works: list[dist.P2POp] = []
        for action, posts in ((dist.irecv, receives), (dist.isend, sends)):
            for tensor, peer in posts:
                group = self._for(tensor)
                works.append(dist.P2POp(action, tensor, dist.get_global_rank(group, peer), group))
        for work in dist.batch_isend_irecv(works) if works else ():
            work.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        group = self._for(tensor)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group)

    def sum(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._for(tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._for(tensor))
        return torch.stack(parts)


class ThreadGroup:
    """A rank that is a thread of this process: the same protocol without processes, for tests and benchmarks.

    A peer that does not show up within `timeout_s` is a `RankFailure`.
    """

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    @classmethod
    def of(cls, size: int, timeout_s: float = 20.0) -> list[ThreadGroup]:
        """The ranks of one group; each belongs to one thread."""
        shared = _Shared(size, timeout_s)
        return [cls(rank, size, shared) for rank in range(size)]

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        shared = self._shared
        for tensor, peer in sends:
            shared.mail[self.rank, peer].put(tensor.clone())
        for tensor, peer in receives:
            try:
                tensor.copy_(shared.mail[peer, self.rank].get(timeout=shared.timeout_s))
            except queue.Empty:
                raise RankFailure(
                    f"expert rank {self.rank} waited in vain for bytes of rank {peer}"
                ) from None

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._all(tensor)[0])

    def sum(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._all(tensor)).sum(0))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor))

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        shared = self._shared
        try:
            shared.slots[self.rank] = tensor.clone()
            shared.barrier.wait(shared.timeout_s)
            parts = list(shared.slots)
            shared.barrier.wait(shared.timeout_s)
        except threading.BrokenBarrierError:
            raise RankFailure(f"expert rank {self.rank} waited in vain for the others") from None
        return [part for part in parts if part is not None]


class _Shared:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor | None] = [None] * size
        self.mail: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (source, target): queue.SimpleQueue() for source in range(size) for target in range(size)
        }
