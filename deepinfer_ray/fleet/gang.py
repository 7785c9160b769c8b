"""A gang: ranks that live and die together, from the demand for bundles to the last kill.

Knows: one placement group, its actors, the stages of coming up. Does not know: rows, credits, other gangs.

    placing → creating → meeting → loading → up → stopping → ended      (`advance` moves on without blocking;
    `end` from anywhere; a rank on its own meets nobody; only a gang that leaves in order is stopping)

A gang is never repaired. When one of its ranks dies it is ended whole and a new one, of the next generation,
with a new placement group, takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_ray.errors import CheckpointError, ConfigError, RankFailure
from deepinfer_ray.fleet.machines import lost_machine
from deepinfer_ray.fleet.messages import RankFault, RankReport, RankSpec, RankWhere
from deepinfer_ray.fleet.placement import Placement, cluster_nodes
from deepinfer_ray.fleet.rank_actor import RankActor
from deepinfer_ray.fleet.topology import PlacementPlan, rank_order
from deepinfer_ray.parallel.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

CALL_THREADS = 8
STOP_TIMEOUT_S = 10.0
GONE_TIMEOUT_S = 10.0
LOOK_SHARE, LOOK_MOST_S = 0.1, 1.0
"""A gang that waits for its place looks again after this share of the time it has waited, at most so long."""


@dataclass(slots=True)
class Rank:
    """One actor that has its number. report: its answer to `start`. pinging: a ping without answer."""

    rank: int
    actor: Any
    where: RankWhere
    report: RankReport | None = None
    pinging: Any = None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.where.pid} on {self.where.address})"


class Gang:
    """The actors of `ranks` (global numbers) in one placement group, one bundle each."""

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        spec: RankSpec,
        plan: PlacementPlan,
        *,
        name: str,
        cp: int = 1,
        environment: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.numbers = list(ranks)
        self.spec = spec
        self.stage = "placing"
        self.ranks: list[Rank] = []
        self.since = self.placed_at = clock()
        self.late = False
        self.leaving = False
        self.node_ids: list[str] = []
        self._cp = cp
        self._clock = clock
        self._environment = environment or {}
        self._actors: list[Any] = []
        self._calls: list[Any] = []  # one call an actor while creating or loading
        self._waiting: list[Any] = []  # those of them without an answer
        self._look_at = 0.0
        self.placement = Placement(plan, f"{name}-gang{index}-g{spec.generation}", clock=clock)

    @property
    def generation(self) -> int:
        """How often this gang was built anew."""
        return self.spec.generation

    @property
    def calls(self) -> list[Any]:
        """Object references without an answer yet; `advance` may move on when one has it."""
        return list(self._waiting)

    def advance(self) -> bool:
        """Move on as far as possible without blocking; True once up.

        Raises what a rank's engine raised at its construction, and Ray's errors when an actor dies.
        """
        import ray

        if self.stage == "placing" and self._placed():
            self._create()
        if self.stage == "creating":
            if self._answered():
                self._number(ray.get(self._calls))
            else:
                self._check_machines()
        if self.stage == "meeting" and self._answered():
            self._load(ray.get(self._calls[0]))
        if self.stage == "loading" and self._answered():
            self._stand(ray.get(self._calls))
        return self.stage == "up"

    def _placed(self) -> bool:
        """A look at the placement group, which is a call to the cluster, if it is time for one."""
        now = self._clock()
        if now < self._look_at:
            return False
        self._look_at = now + min(LOOK_MOST_S, LOOK_SHARE * (now - self.since))
        return self.placement.placed()

    def _check_machines(self) -> None:
        """`RankFailure` when one of them is gone before its actor ran: Ray would keep the actor pending until
        its bundle has a machine again, which may never be."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_MOST_S
        machine = lost_machine(self.node_ids)
        if machine is not None:
            raise RankFailure(f"machine {machine} was lost before the rank there had started")

    def _answered(self) -> bool:
        """Whether every pending call is done; a failed one raises at once, whatever the others do."""
        import ray

        done, self._waiting = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        ray.get(done)
        return not self._waiting

    def _create(self) -> None:
        import ray

        for index, bundle in enumerate(self.placement.plan.bundles):
            options: dict[str, Any] = {
                "num_cpus": bundle.get("CPU", 0),
                "num_gpus": bundle.get("GPU", 0),
                "max_restarts": 0,
                "max_task_retries": 0,
                "max_concurrency": CALL_THREADS,
                "scheduling_strategy": self.placement.bundle_strategy(index),
            }
            if self._environment:
                options["runtime_env"] = {"env_vars": self._environment}
            self._actors.append(ray.remote(RankActor).options(**options).remote(self._environment))
        self._calls = self._waiting = [actor.where.remote() for actor in self._actors]
        self.node_ids = self.placement.node_ids()
        self.placed_at = self._clock()
        self._enter("creating")

    def _number(self, places: Sequence[RankWhere]) -> None:
        """Number the actors by where they really stand; the first one then serves the rendezvous."""
        order = rank_order(
            [where.node_id for where in places],
            cluster_nodes(),
            cp=self._cp,
            device_of_bundle=[where.device_index for where in places],
        )
        self.ranks = [
            Rank(number, self._actors[bundle], places[bundle])
            for number, bundle in zip(self.numbers, order, strict=True)
        ]
        if len(self.ranks) == 1:
            self._load(None)
            return
        self._calls = self._waiting = [self.ranks[0].actor.serve.remote(self.placement.name)]
        self._enter("meeting")

    def _load(self, rendezvous: Rendezvous | None) -> None:
        """Let the ranks build their engines."""
        self._calls = self._waiting = [
            rank.actor.start.remote(replace(self.spec, rank=rank.rank, place=place, rendezvous=rendezvous))
            for place, rank in enumerate(self.ranks)
        ]
        self._enter("loading")

    def _stand(self, reports: Sequence[RankReport]) -> None:
        for rank, report in zip(self.ranks, reports, strict=True):
            rank.report = report
        faults = [(rank, rank.report.fault) for rank in self.ranks if rank.report and rank.report.fault]
        # One rank's failure ends the others' collectives: theirs is no news.
        for rank, fault in sorted(faults, key=lambda pair: pair[1].kind == "RankFailure"):
            raise start_error(rank, fault)
        self._calls = self._waiting = []
        self._enter("up")

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self.since = self._clock()

    def stop(self) -> list[Any]:
        """Ask the loops to end after their step; references to wait for, at most `STOP_TIMEOUT_S`."""
        if self.stage == "up":
            self._calls = self._waiting = [rank.actor.stop.remote(STOP_TIMEOUT_S) for rank in self.ranks]
            self._enter("stopping")
        return self.calls if self.stage == "stopping" else []

    def stopped(self) -> bool:
        """Whether the loops have ended since `stop`, however, or had time enough."""
        import ray

        self._waiting = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)[1]
        return not self._waiting or self._clock() - self.since > STOP_TIMEOUT_S

    def end(self, *, wait: bool = True) -> None:
        """Leave nothing: actors killed, the placement group removed. Legal in any stage, and twice.

        wait: until Ray knows the actors dead, which takes long for those whose machine is gone.
        """
        if self.stage == "ended":
            return
        self._kill()
        self.placement.remove()
        if wait:
            self._wait_gone()
        self._enter("ended")

    def _kill(self) -> None:
        import ray

        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)

    def _wait_gone(self) -> None:
        """A killed actor's next call fails once Ray knows it is dead."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            pings = [actor.ping.remote() for actor in self._actors]
            if pings:
                ray.wait(pings, num_returns=len(pings), timeout=GONE_TIMEOUT_S)


def end_all(gangs: Sequence[Gang], *, graceful: bool) -> None:
    """End gangs, all at once if their loops may end first; one that does not answer in time is killed.

    On Ctrl-C there is no more patience, but still nothing is left.
    """
    import ray

    try:
        with contextlib.suppress(ray.exceptions.RayError):
            stops = [ref for gang in gangs for ref in gang.stop()] if graceful else []
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for gang in gangs:
            gang.end()
    except KeyboardInterrupt:
        for gang in gangs:
            gang.end()
        raise


def describe_death(error: Exception) -> str:
    """The telling part of a Ray error: its class and its first lines."""
    text = str(error).strip() or repr(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:12])}"


def start_error(rank: Rank, fault: RankFault) -> Exception:
    """The error of a rank that could not build its engine; the user's own mistakes keep their class."""
    known = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
    if fault.kind in known:
        return known[fault.kind](fault.message)
    return RankFailure(f"{rank} could not build its engine: {fault.kind}: {fault.message}\n{fault.trace}")
