"""The process groups of one gang: who calls whom, over torch.distributed (spec/distributed.md §1.2, §5).

Knows: rendezvous at an address that somebody gives, gloo and NCCL groups of a `RankGrid`, their time-outs,
one warm-up collective each, how to leave. Does not know: Ray, models, what is sent.

A gang is one torch world: gangs share no collective. Ranks here are numbered inside the gang. Every rank
creates every group in the same order, also those that it is not in.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from deepinfer_ray.errors import RankFailure
from deepinfer_ray.parallel.deep_ep import DeepEPBuffer
from deepinfer_ray.parallel.grid import RankGrid, RankPlace
from deepinfer_ray.parallel.model_ranks import ModelRanks
from deepinfer_ray.parallel.rank_group import RankGroup, SingleRank, TorchGroup
from deepinfer_ray.parallel.rendezvous import Rendezvous


class Store:
    """The store itself; it lives as long as this object does. Whoever makes it binds a free port at once, so
    that nobody can take the port between choosing and using it."""

    def __init__(self, host: str, prefix: str, timeout_s: float = 60.0) -> None:
        """host: an address of this machine that the other ranks reach. `RankFailure` if no port is free."""
        try:
            self._server = dist.TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, OSError) as error:
            raise RankFailure(f"no rendezvous can be served at {host}: {error}") from None
        self.rendezvous = Rendezvous(host, self._server.port, prefix)


class ProcessGroups:
    """The groups of one rank. `connect` makes them, `abort` leaves after an error, `close` after success."""

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        *,
        cp: RankGroup,
        ep: RankGroup,
        engram: RankGroup,
        gang: RankGroup,
        votes: RankGroup,
    ) -> None:
        self.grid, self.rank = grid, rank
        self.place: RankPlace = grid.place(rank)
        self.cp, self.ep, self.engram, self.gang = cp, ep, engram, gang
        self.votes = votes
        """The gang's drivers, which take the same kind of step, over gloo; of no use to a follower."""

    @classmethod
    def single(cls) -> ProcessGroups:
        """A rank on its own."""
        one = SingleRank()
        return cls(RankGrid.build(), 0, cp=one, ep=one, engram=one, gang=one, votes=one)

    @classmethod
    def connect(
        cls,
        grid: RankGrid,
        rank: int,
        rendezvous: Rendezvous,
        *,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 60.0,
        device: torch.device | str = "cpu",
        nccl_ctas: int = 32,
    ) -> ProcessGroups:
        """Meet the other ranks of this gang (`grid` is the gang's) and make all groups; collective.

        timeout_s: of every later collective. On CUDA each group is an NCCL one with a gloo twin.
        `RankFailure` when somebody does not come.
        """
        where = f"rank {rank} of {grid.world_size} at {rendezvous.host}:{rendezvous.port}"
        timeout, cuda = timedelta(seconds=timeout_s), torch.device(device).type == "cuda"
        try:
            client = dist.TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                timeout=timedelta(seconds=connect_timeout_s),
            )
            store = dist.PrefixStore(rendezvous.prefix, client)
            _check_in(store, rank, grid, connect_timeout_s)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=grid.world_size, timeout=timeout
            )
            made = _Maker(rank, timeout, cuda, nccl_ctas)
            gang = made.group("gang", [list(range(grid.world_size))])
            cp = made.group("context", grid.groups("cp"))
            ep = made.group("expert", grid.groups("ep"))
            engram = made.group("Engram", grid.groups("engram"))
            drivers = list(range(0, grid.world_size, grid.cp))
            votes = made.host_group("vote", drivers)
            made.warm_up(torch.device(device))
        except (RuntimeError, ValueError) as error:  # torch.distributed's own errors are RuntimeErrors
            abort()
            raise RankFailure(
                f"{where}: the ranks of this gang did not all meet (one is missing, died, or the network "
                f"keeps them apart; parallel.timeout_s): {str(error).splitlines()[0]}"
            ) from error
        return cls(grid, rank, cp=cp, ep=ep, engram=engram, gang=gang, votes=votes)

    def for_model(self, extra_experts: int = 0, deep_ep: DeepEPBuffer | None = None) -> ModelRanks:
        """What the model needs of these groups."""
        return ModelRanks(self.ep, self.engram, self.cp, extra_experts, deep_ep)

    def check_alike(self, settings: str) -> None:
        """`RankFailure` on every rank unless all were given the same settings; collective."""
        digest = hashlib.blake2b(settings.encode(), digest_size=8).digest()
        everyone = self.gang.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        different = [rank for rank in range(self.gang.size) if not torch.equal(everyone[rank], everyone[0])]
        if different:
            raise RankFailure(
                f"rank {different[0]} of this gang was started with other settings than rank 0; all ranks of "
                "a gang need the same engine configuration and the same version of this package"
            )

    def close(self) -> None:
        """Leave together; collective, only where no rank failed."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def abort(self) -> None:
        """Leave at once: peers that wait for this rank get an error instead of waiting on."""
        abort()


def abort() -> None:
    """Drop every group of this process without asking the others."""
    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        if torch.cuda.is_initialized():
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            dist.distributed_c10d._abort_process_group()
            return
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _check_in(store: dist.Store, rank: int, grid: RankGrid, timeout_s: float) -> None:
    """All ranks name their grid; different ones would hang later, or worse, not."""
    store.set(f"grid/{rank}", str(grid))
    deadline = time.monotonic() + timeout_s
    for other in range(grid.world_size):
        store.wait([f"grid/{other}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        theirs = store.get(f"grid/{other}").decode()
        if theirs != str(grid):
            raise ValueError(f"rank {other} was started for {theirs}, rank {rank} for {grid}")


class _Maker:
    """Makes groups in one order; kinds of equal member lists share their communicators."""

    def __init__(self, rank: int, timeout: timedelta, cuda: bool, nccl_ctas: int) -> None:
        self._rank, self._timeout, self._cuda, self._ctas = rank, timeout, cuda, nccl_ctas
        self._made: dict[str, TorchGroup] = {}

    def host_group(self, name: str, members: list[int]) -> RankGroup:
        """A group over gloo alone; whoever is not in it gets a group of one."""
        if len(members) == 1:
            return SingleRank()
        group = self._gloo(members)
        return TorchGroup(group, name=name) if self._rank in members else SingleRank()

    def _gloo(self, members: list[int]) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(members, timeout=self._timeout, backend="gloo")
        return made

    def _nccl(self, members: list[int]) -> dist.ProcessGroup:
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = self._ctas
        made: dist.ProcessGroup = dist.new_group(
            members, timeout=self._timeout, backend="nccl", pg_options=options
        )
        return made

    def group(self, name: str, lists: list[list[int]]) -> RankGroup:
        if len(lists[0]) == 1:
            return SingleRank()
        key = str(lists)
        if key not in self._made:
            mine: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
            for members in lists:
                cpu = self._gloo(members)
                device = self._nccl(members) if self._cuda else cpu
                if self._rank in members:
                    mine = device, cpu
            assert mine is not None
            self._made[key] = TorchGroup(*mine, name=name)
        return self._made[key]

    def warm_up(self, device: torch.device) -> None:
        """One sum of one float on every group: NCCL communicators are made by their first collective."""
        for group in self._made.values():
            group.sum(torch.ones(1))
            if self._cuda:
                group.sum(torch.ones(1, device=device))
