"""What ties an engine to the other ranks of its gang: one agreement a turn, leaders and followers, balancing.

Knows: the turns that all ranks of a gang make together (spec/engine.md §7.6, spec/distributed.md §1.3, §3.7).
Does not know: requests, how groups are made.

A driver makes a turn by `agree`; if anybody has work, every driver runs one step, a placeholder if it has
none itself, then all call `after_step`. Behind a driver stand its followers (context parallel ranks above 0):
its model and pools tell them each call before they carry it out themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_ray.cache.metadata import StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.engine.phase_vote import Agreement
from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.errors import RankFailure
from deepinfer_ray.parallel.channel import Channel
from deepinfer_ray.parallel.groups import ProcessGroups
from deepinfer_ray.parallel.load_window import LoadBalance
from deepinfer_ray.parallel.rebalance import Rebalancer

END_OF_TURN = "end of turn"
"""The driver made its turn: with a step (then `after_step`) or without."""


class Lockstep:
    """The turns of one driver. `leaving` is set from outside; `left` once all ranks left together."""

    def __init__(
        self, groups: ProcessGroups, rebalancer: Rebalancer | None = None, channel: Channel | None = None
    ) -> None:
        """channel: to this driver's followers, None = it has none."""
        self.groups, self.rebalancer, self.channel = groups, rebalancer, channel
        self.leaving = self.left = False
        self.idle = True
        """Whether nobody had work in the last turn."""
        self.part = ""
        """Where it waits for other ranks, outside the step itself."""

    def agree(self, scheduler: Scheduler, in_flight: bool) -> Agreement:
        """The beginning of a turn; collective over the gang's drivers."""
        self.part = "agreeing on the turn"
        agreement = scheduler.agree(in_flight=in_flight, leaving=self.leaving)
        self.part = ""
        self.idle, self.left = not agreement.unfinished or agreement.leaving, agreement.leaving
        if self.idle:
            self._end_turn(None)
        return agreement

    def after_step(self, is_prefill: bool) -> None:
        """The end of a turn with a step."""
        self._end_turn(is_prefill)
        self.balance(is_prefill)

    def take_load(self) -> LoadBalance | None:
        """What the expert group gathered since the last call, if it did."""
        load = None if self.rebalancer is None else self.rebalancer.take_load()
        return load if load is not None and load.mean else None

    def balance(self, is_prefill: bool) -> None:
        """Statistics and, at its time, a rebalance; by drivers and followers alike."""
        if self.rebalancer is not None:
            self.part = "balancing experts"
            self.rebalancer.after_step(is_prefill)
            self.part = ""

    def stats(self) -> dict[str, int]:
        """JSON-able numbers of this rank's gang."""
        return {"rebalances": 0 if self.rebalancer is None else self.rebalancer.rebalances}

    def _end_turn(self, is_prefill: bool | None) -> None:
        if self.channel is not None:
            self.channel.send((END_OF_TURN, is_prefill, self.left))

    def close(self) -> None:
        """End the groups: together if all left together, else at once."""
        if self.left:
            self.groups.close()
        else:
            self.groups.abort()


class LeadingPools(CachePools):
    """A driver's pools: copies of whole units are made by the followers too."""

    channel: Channel

    def clone_slots(self, src: Sequence[int] | torch.Tensor, dst: Sequence[int] | torch.Tensor) -> None:
        self.channel.send(("clone_slots", (src, dst)))
        super().clone_slots(src, dst)

    def clone_blocks(self, src: Sequence[int] | torch.Tensor, dst: Sequence[int] | torch.Tensor) -> None:
        self.channel.send(("clone_blocks", (src, dst)))
        super().clone_blocks(src, dst)


class LeadingModel:
    """A driver's model: its followers run what it runs, with the same metadata. Logits are its own alone."""

    def __init__(self, model: Any, channel: Channel) -> None:
        self.model, self.channel = model, channel

    def forward(self, meta: StepMetadata, pools: CachePools) -> Any:
        self.channel.send(("forward", (meta,)))
        return self.model.forward(meta, pools)

    def draft_block(self, request: Any, pools: CachePools, drafts: int) -> Any:
        """See the model's; the block's keys and experts need all ranks, choosing its tokens only this one."""
        self.channel.send(("draft_block", (request, drafts)))
        return self.model.draft_block(request, pools, drafts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class Follower:
    """The engine of a context parallel rank above 0: it repeats what its driver does."""

    def __init__(
        self,
        model: Any,
        pools: CachePools,
        groups: ProcessGroups,
        channel: Channel,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        self.model, self.pools, self.channel = model, pools, channel
        self.ranks = Lockstep(groups, rebalancer)
        self.num_steps = 0
        self.part = ""
        """What it is doing inside a step, for whoever watches it."""

    def add(self, request: Request) -> None:
        raise RankFailure("a follower takes no requests; they go to the driver of its context group")

    def wanted(self) -> int:
        return 0

    def has_unfinished(self) -> bool:
        """Whether its driver runs steps."""
        return not self.ranks.idle

    @torch.inference_mode()
    def step(self) -> list[RequestResult]:
        """One turn of the driver. No result ever: the driver has them."""
        while True:
            self.part = "waiting for its driver"
            what, *rest = self.channel.receive()
            self.part = what
            if what == END_OF_TURN:
                self._end_turn(*rest)
                return []
            self._repeat(what, *rest)

    def _repeat(self, what: str, arguments: tuple[Any, ...]) -> None:
        if what == "forward":
            self.model.forward(*arguments, self.pools)
        elif what == "draft_block":
            request, drafts = arguments
            self.model.draft_block(request, self.pools, drafts)
        elif what == "clone_slots":
            self.pools.clone_slots(*arguments)
        elif what == "clone_blocks":
            self.pools.clone_blocks(*arguments)
        else:
            raise RankFailure(f"a follower does not know the command {what!r} of its driver")

    def _end_turn(self, is_prefill: bool | None, left: bool) -> None:
        self.ranks.idle, self.ranks.left = is_prefill is None, left
        if is_prefill is not None:
            self.num_steps += 1
            self.ranks.balance(is_prefill)

    def close(self) -> None:
        self.ranks.close()
