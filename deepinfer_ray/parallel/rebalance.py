"""`Rebalancer`: statistics after each step; at its time, new maps and moved weights (distributed spec §4.2).

Knows: when (a function of step counters alone, hence the same on every rank), who decides (expert rank 0) and
the order of a rebalance. Does not know: the policy, the copies, the model; steps in flight are the caller's
matter: it calls `after_step` between two steps, on the stream of the forward, where the host may wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from deepinfer_ray.errors import ConfigError, RankFailure
from deepinfer_ray.parallel.balancer import balance, rank_balance, rank_loads
from deepinfer_ray.parallel.expert_map import ExpertMap, RoutingTables
from deepinfer_ray.parallel.expert_slots import ExpertSlots, SlotLedger
from deepinfer_ray.parallel.load_window import ExpertCounters, LoadBalance, LoadMeter, LoadWindow
from deepinfer_ray.parallel.rank_group import RankGroup
from deepinfer_ray.parallel.shuffle import ShufflePlan, WeightShuffle

logger = logging.getLogger("deepinfer_ray.eplb")

Role = Literal["normal", "prompt", "completion"]


class Verdict(NamedTuple):
    """What a step calls for."""

    record: bool
    rebalance: bool


class Trigger:
    """When statistics are recorded and when experts are rearranged.

    interval: steps between two rearrangements, 0 = never; the first comes after a quarter of it. An engine
    that prefills and decodes leaves prefill steps out, or with `after_prefill` records them and rearranges in
    the first step after them.
    """

    def __init__(
        self, interval: int, window: int, *, after_prefill: bool = False, role: Role = "normal"
    ) -> None:
        if interval < 0 or (interval and not 1 <= window <= interval):
            raise ConfigError(
                f"eplb must satisfy 1 <= window <= interval, or interval = 0: got window = {window}, "
                f"interval = {interval}"
            )
        self.interval, self.after_prefill, self.role = interval, after_prefill, role
        self.counter = max(0, interval - max(1, interval // 4))

    def step(self, is_prefill: bool) -> Verdict:
        """The verdict on the step that has just run."""
        mixed_prefill = is_prefill and self.role == "normal"
        if not self.interval or (mixed_prefill and not self.after_prefill):
            return Verdict(False, False)
        if mixed_prefill:
            self.counter = self.interval - 1
            return Verdict(True, False)
        self.counter += 1
        if self.counter < self.interval:
            return Verdict(True, False)
        self.counter = 0
        return Verdict(True, True)


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """What one layer's router asks: replicas for its experts, and where to count what arrives."""

    tables: RoutingTables
    counters: ExpertCounters
    layer: int

    def to_physical(self, experts_Tk: torch.Tensor) -> torch.Tensor:
        """int64 [T, k]: the slot that each row of this rank goes to; -1 stays -1."""
        return self.tables.to_physical(self.layer, experts_Tk)

    def count(self, experts_Rk: torch.Tensor) -> None:
        """Count received rows by local slot (int64 [R, k], -1 = none)."""
        self.counters.add(self.layer, experts_Rk)


class LayerGroup:
    """The state of MoE layers of one layout: map, tables, counters, window and weights (§4.1).

    The backbone is one group, a drafter with experts of its own another.
    """

    def __init__(
        self,
        placement: ExpertMap,
        slots: ExpertSlots,
        ep_rank: int,
        window: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if slots.num_layers != placement.num_layers:
            raise ConfigError(
                f"a map of {placement.num_layers} layers cannot place the experts of {slots.num_layers}"
            )
        self.placement, self.slots = placement, slots
        self.tables = RoutingTables(placement, ep_rank, device)
        self.counters = ExpertCounters(placement.num_layers, placement.num_local, device)
        self.window = LoadWindow(window, placement.num_layers, placement.num_logical, device)

    def routing(self, layer: int) -> LayerRouting:
        """What the group's layer number `layer` holds."""
        return LayerRouting(self.tables, self.counters, layer)


class Rebalance(NamedTuple):
    """One rebalance as a rank saw it."""

    number: int
    slots: int
    """Slots of this rank that got another expert."""
    sent_bytes: int
    received_bytes: int
    decide_s: float
    shuffle_s: float
    balance_before: float
    """Mean rank load / busiest rank's load over the window, at most 1, under the old maps."""
    balance_after: float


class Rebalancer:
    """Statistics and rearrangements of one expert group. All ranks make the same calls.

    verify: hash every slot after loading and after each rebalance (reads all weights; for tests and doubt).
    verbose: rank 0 also logs every expert's mean load at each rebalance.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        ranks: RankGroup,
        trigger: Trigger,
        *,
        stat_interval: int = 128,
        p2p_groups: int = 1,
        verify: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for group in groups:
            if group.placement.ep_size != ranks.size or group.tables.ep_rank != ranks.rank:
                raise ConfigError(
                    f"a map for rank {group.tables.ep_rank} of {group.placement.ep_size} was given to rank "
                    f"{ranks.rank} of {ranks.size}"
                )
        self.groups, self.ranks, self.trigger, self.clock = groups, ranks, trigger, clock
        self.active, self.verbose = ranks.size > 1, verbose
        self.rebalances = 0
        self.load = LoadBalance(0.0, 0.0)
        """Sums since the last `take_load`."""
        device = groups[0].counters.counts.device if groups else "cpu"
        layers = sum(group.placement.num_layers for group in groups)
        self.meter = LoadMeter(stat_interval, layers, device)
        moves = self.active and trigger.interval > 0
        self.shuffles = [
            WeightShuffle(group.slots, group.placement.num_local, ranks, p2p_groups, clock)
            for group in groups if moves
        ]  # fmt: skip
        self.ledgers = [
            SlotLedger(group.slots, group.placement, ranks) for group in groups if moves and verify
        ]

    def after_step(self, is_prefill: bool) -> Rebalance | None:
        """After each step of the model, also one without rows on this rank. Collective at its times."""
        done: Rebalance | None = None
        if self.active:
            verdict = self.trigger.step(is_prefill)
            if verdict.record:
                for group in self.groups:
                    group.window.record(group.counters.counts, group.tables.local_experts)
            if verdict.rebalance:
                done = self._rebalance()
            gathered = self.meter.record([group.counters.counts for group in self.groups], self.ranks)
            if gathered is not None:
                self.load += gathered
        for group in self.groups:
            group.counters.reset()
        return done

    def take_load(self) -> LoadBalance:
        """Load-balance sums since the last call; `.ratio` is the figure of the log."""
        load, self.load = self.load, LoadBalance(0.0, 0.0)
        return load

    def _rebalance(self) -> Rebalance:
        """Rank 0 decides and sends its maps; every rank plans alike, moves its weights, then its tables."""
        start = self.clock()
        before: list[float] = []
        after: list[float] = []
        placements = []
        for group in self.groups:
            tokens = group.window.total(self.ranks)
            old = group.placement
            flat = torch.from_numpy(old.flat())
            # Without a token in the window there is nothing to learn: nothing moves.
            if self.ranks.rank == 0 and tokens.any():
                flat = torch.from_numpy(balance(tokens, old.ep_size, old.num_extra).flat())
            self.ranks.broadcast(flat)
            new = old.like(flat.numpy())
            placements.append(new)
            before.append(rank_balance(rank_loads(tokens, old)))
            after.append(rank_balance(rank_loads(tokens, new)))
            if self.verbose and self.ranks.rank == 0:
                logger.info("mean tokens of a step by layer and expert:\n%s", load_table(tokens, new))
        decided = self.clock()
        slots = sent = received = 0
        for group, shuffle, new in zip(self.groups, self.shuffles, placements, strict=True):
            moved = shuffle.run(ShufflePlan.between(group.placement, new))
            group.placement = new
            group.tables.update(new)
            slots, sent, received = (
                slots + moved.slots,
                sent + moved.sent_bytes,
                received + moved.received_bytes,
            )
        for group, ledger in zip(self.groups, self.ledgers, strict=False):
            ledger.check(group.slots, group.placement, self.ranks)
            self._check_agreement(group)
        self.rebalances += 1
        result = Rebalance(
            self.rebalances, slots, sent, received,
            decide_s=decided - start, shuffle_s=self.clock() - decided,
            balance_before=min(before), balance_after=min(after),
        )  # fmt: skip
        if self.ranks.rank == 0:
            logger.info(
                "rebalance %d: rank_balance %.3f -> %.3f, %d slots of rank 0 changed, %.1f MB received, "
                "decided in %.0f ms, moved in %.0f ms",
                result.number, result.balance_before, result.balance_after, slots, received / 1e6,
                1e3 * result.decide_s, 1e3 * result.shuffle_s,
            )  # fmt: skip
        return result

    def _check_agreement(self, group: LayerGroup) -> None:
        """`RankFailure` unless the tables on all devices are those of rank 0."""
        tables = (
            group.tables.physical_to_logical,
            group.tables.logical_to_physical,
            group.tables.logical_count,
        )
        mine = torch.cat([table.flatten() for table in tables]).cpu()
        everyone = self.ranks.gather(mine)
        for rank in range(self.ranks.size):
            if not torch.equal(everyone[rank], everyone[0]):
                raise RankFailure(
                    f"expert rank {rank} has other maps than rank 0 after a rebalance; rebuild the gang"
                )


def load_table(tokens_WYL: np.ndarray, placement: ExpertMap) -> str:
    """A line a layer: mean tokens a step of each expert in expert order, `×n` where it has n replicas."""
    lines = []
    for layer, means in enumerate(tokens_WYL.mean(0)):
        cells = [
            f"{mean:.1f}" + (f"×{count}" if count > 1 else "")
            for mean, count in zip(means.tolist(), placement.logical_count[layer].tolist(), strict=True)
        ]
        lines.append(f"layer {layer}: {' '.join(cells)}")
    return "\n".join(lines)
