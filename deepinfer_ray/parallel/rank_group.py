"""What the ranks of one group say to each other: rows to owners, gathers, sums, broadcasts, byte copies.

Knows: the contract, the group of one rank, ranks as threads of one process, torch.distributed. Does not know:
what is sent, which ranks form a group (`groups.py`). Every call is collective and made by all ranks in the
same order, but `exchange`, which only the ranks that send or receive make.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from deepinfer_ray.errors import RankFailure

Post = tuple[torch.Tensor, int]
"""(contiguous 1-D uint8 tensor, the other rank inside the group)."""


class RankGroup(Protocol):
    """Ranks that act together; tensors may lie on any device that the transport knows."""

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
        """[size, …]: the tensors of all ranks, in rank order; equal shapes."""
        ...

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """[sum(receive), …]: from each rank, in rank order, the rows that it had for this one.

        rows: [sum(send), …], the first `send[0]` for rank 0 and so on. Zero rows are fine.
        """
        ...

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values (below 2^63)."""
        ...

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """Element-wise largest of the ranks' vectors of one dtype and length."""
        ...


class SingleRank:
    """A group of one: nothing to tell anybody."""

    rank, size = 0, 1

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        if sends or receives:
            raise RankFailure("a group of one rank has nobody to exchange bytes with")

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def sum(self, tensor: torch.Tensor) -> None:
        pass

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return rows

    def minimum(self, value: int) -> int:
        return value

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return values


class TorchGroup:
    """A torch.distributed group (NCCL or gloo), with a gloo twin for tensors in host memory.

    cpu_group: where `group` is NCCL, the same ranks over gloo. Time-outs are those of the groups. name: what
    errors call it; a collective that fails is a `RankFailure`.
    """

    def __init__(
        self, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup | None = None, name: str = "expert"
    ) -> None:
        self.group, self.cpu_group, self.name = group, cpu_group or group, name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def _for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.cpu_group if tensor.device.type == "cpu" else self.group

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankFailure(
                f"{self.name} rank {self.rank} of {self.size}: {what} failed, another rank of the group is "
                f"gone or too slow (parallel.timeout_s): {str(error).splitlines()[0]}"
            ) from error

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post]) -> None:
        works: list[dist.P2POp] = []
        for action, posts in ((dist.irecv, receives), (dist.isend, sends)):
            for tensor, peer in posts:
                group = self._for(tensor)
                works.append(dist.P2POp(action, tensor, dist.get_global_rank(group, peer), group))
        with self._named("an exchange of bytes"):
            for work in dist.batch_isend_irecv(works) if works else ():
                work.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        group = self._for(tensor)
        with self._named("a broadcast"):
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group)

    def sum(self, tensor: torch.Tensor) -> None:
        with self._named("a sum"):
            dist.all_reduce(tensor, group=self._for(tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._named("a gather"):
            dist.all_gather(parts, tensor.contiguous(), group=self._for(tensor))
        return torch.stack(parts)

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        # As bytes: a transport need not know every dtype.
        width = math.prod(rows.shape[1:]) * rows.element_size()
        data = rows.contiguous().view(-1).view(torch.uint8).view(rows.shape[0], width)
        out = data.new_empty((sum(receive), width))
        with self._named("an exchange of rows"):
            dist.all_to_all_single(out, data, list(receive), list(send), group=self._for(rows))
        return out.view(-1).view(rows.dtype).view(len(out), *rows.shape[1:])

    def minimum(self, value: int) -> int:
        least = torch.tensor([value], dtype=torch.int64)
        with self._named("a minimum"):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.cpu_group)
        return int(least)

    def maximum(self, values: np.ndarray) -> np.ndarray:
        most = torch.from_numpy(values.copy())
        with self._named("a maximum"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.cpu_group)
        result: np.ndarray = most.numpy()
        return result


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
                raise RankFailure(f"rank {self.rank} waited in vain for bytes of rank {peer}") from None

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._all(tensor)[0])

    def sum(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._all(tensor)).sum(0))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor))

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        sizes = torch.tensor(list(send))
        parts = []
        for theirs, sent in zip(self._all(sizes), self._all(rows), strict=True):
            parts.append(sent.split(theirs.tolist())[self.rank])
        if [len(part) for part in parts] != list(receive):
            raise RankFailure(f"rank {self.rank} expected {list(receive)} rows, got other numbers")
        return torch.cat(parts)

    def minimum(self, value: int) -> int:
        return min(int(part) for part in self._all(torch.tensor(value)))

    def maximum(self, values: np.ndarray) -> np.ndarray:
        result: np.ndarray = torch.stack(self._all(torch.from_numpy(values))).amax(0).numpy()
        return result

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        shared = self._shared
        try:
            shared.slots[self.rank] = tensor.clone()
            shared.barrier.wait(shared.timeout_s)
            parts = list(shared.slots)
            shared.barrier.wait(shared.timeout_s)
        except threading.BrokenBarrierError:
            raise RankFailure(f"rank {self.rank} waited in vain for the others") from None
        return [part for part in parts if part is not None]


class _Shared:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor | None] = [None] * size
        self.mail: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (source, target): queue.SimpleQueue() for source in range(size) for target in range(size)
        }
