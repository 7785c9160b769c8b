"""`RayFleet`: launch the ranks, feed them, watch them, rebuild what dies, leave nothing behind.

Knows: gangs, the router's books, Ray's object references. Does not know: files, prompts as text, models.

Everything happens on the caller's thread, inside `start`, `submit` and `poll`:

    assign waiting rows → wait for mail → read it (results, credits, pulses, deaths) → rebuild
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepinfer_ray.errors import DeepInferError
from deepinfer_ray.fleet.backend import RankStats, WorkItem, WorkResult
from deepinfer_ray.fleet.cluster import Connection, connect
from deepinfer_ray.fleet.engines import DEFAULT_FACTORY, EngineFactory
from deepinfer_ray.fleet.gang import STOP_TIMEOUT_S, Gang, Rank
from deepinfer_ray.fleet.machines import DrainNotices, lost_machine
from deepinfer_ray.fleet.messages import RankReport, RankSpec, in_calls
from deepinfer_ray.fleet.options import FleetOptions, default_options, fleet_grid, rank_environment
from deepinfer_ray.fleet.placement import cluster_nodes
from deepinfer_ray.fleet.router import Router
from deepinfer_ray.fleet.suspects import RestartBudget
from deepinfer_ray.fleet.topology import can_ever_hold, plan_placement, rank_bundle
from deepinfer_ray.fleet.watch import Watch

logger = logging.getLogger(__name__)

MAX_STATS = 10_000
"""Pulses of ranks that wait to be taken; the oldest are dropped."""

COLLECT_WAIT_S = 2.0
"""Long poll of a rank without news; also the pulse of an idle fleet."""
BEREFT_S = 3.0
"""How long a rank that lost another one waits for the news of that one's death."""
FLUSH_S = 5.0
"""How long before its machine goes a gang gives its unfinished rows back."""
BUILD_POLL_S = 0.05
"""How often a gang that is coming up is looked at."""


class RayFleet:
    """A `Backend` of gangs of ranks, each rank a Ray actor. Where ranks share nothing (E = C = N = 1) each is
    a gang of its own: no collective, and one death costs one rank."""

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        engine_config: Any = None,
        dp: int = 1,
        *,
        device: str = "auto",
        engine_factory: EngineFactory | str = DEFAULT_FACTORY,
        options: FleetOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grid = fleet_grid(engine_config, dp)
        self.options = options or default_options(engine_config)
        self.router = Router()
        self.restarts = 0
        self._model_dir = os.path.abspath(model_dir)  # ranks run in other directories
        self._engine_config = engine_config
        self._device = device.partition(":")[0]  # of a rank's own GPU, which is always its first
        self._factory = engine_factory
        self._clock = clock
        self._name = f"deepinfer-{uuid.uuid4().hex[:8]}"
        self._budget = RestartBudget(self.options.max_restarts)
        self._watch = Watch(self.options.patience, clock)
        self._notices = DrainNotices(clock=clock)
        self._connection: Connection | None = None
        self._gangs: list[Gang] = []
        self._ready: list[WorkResult] = []
        self._stats: deque[RankStats] = deque(maxlen=MAX_STATS)
        self._mail: dict[Any, tuple[str, Gang, Rank]] = {}
        self._bereft: dict[int, tuple[float, str]] = {}
        """Gangs of which a rank reported the loss of another one: since when, and what it said."""
        self._started = False
        self._closed = False
        self._failed = False

    def __enter__(self) -> RayFleet:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(graceful=kind is None)

    # ---- Backend

    def start(self) -> None:
        """Connect, place and build all ranks; returns when every one can take rows.

        On any failure, Ctrl-C included, nothing is left. Raises `PlacementError`, `ConfigError`,
        `CheckpointError`, `RankFailure`.
        """
        if self._started:
            raise RuntimeError("a fleet is started once; build a new one")
        self._started = True
        try:
            self._connect()
            for index in range(self.grid.num_gangs):
                self._gangs.append(self._new_gang(index, generation=0))
            while not all(gang.stage == "up" for gang in self._gangs):
                self._turn(BUILD_POLL_S)
        except BaseException:
            self._failed = True
            self.close(graceful=False)
            raise

    def wanted(self) -> int:
        """Rows that ranks announced room for, less those that already wait here."""
        return self.router.wanted()

    def submit(self, items: Sequence[WorkItem]) -> None:
        """Queue rows and hand out what ranks have room for."""
        self._must_run()
        self.router.add(items)
        self._assign()

    def poll(self, timeout_s: float) -> list[WorkResult]:
        """Finished rows; waits for the first up to `timeout_s`. Deaths and rebuilds happen in here."""
        self._must_run()
        deadline = self._clock() + timeout_s
        try:
            while True:
                self._turn(max(0.0, deadline - self._clock()))
                if self._ready or self._clock() >= deadline:
                    results, self._ready = self._ready, []
                    return results
        except DeepInferError:
            self._failed = True
            raise

    def status(self) -> dict[str, Any]:
        """Ranks with stage, place and pulse; rows waiting and in flight; restarts."""
        scratch = self._connection.scratch if self._connection else None
        return {
            "ranks": [entry for gang in self._gangs for entry in self._status_of(gang)],
            "pending": self.router.num_pending,
            "in_flight": self.router.num_in_flight,
            "restarts": self.restarts,
            "address": self._connection.address if self._connection else None,
            "local_cluster": bool(self._connection and self._connection.own),
            "ray_files": str(scratch.path) if scratch else None,
            "placement": self._gangs[0].placement.plan.describe() if self._gangs else None,
            "notice_s": self._notices.seconds_left([self._connection.node_id]) if self._connection else None,
        }

    def take_stats(self) -> list[RankStats]:
        """Pulses of the ranks' engines since the last call."""
        taken = list(self._stats)
        self._stats.clear()
        return taken

    def close(self, graceful: bool = True) -> None:
        """End ranks and placement groups, then leave the cluster, or end it if it was started here."""
        if self._closed:
            return
        self._closed = True
        self._mail.clear()
        try:
            if graceful and not self._failed:
                self._stop_loops()
            for gang in self._gangs:
                gang.end()
        except KeyboardInterrupt:  # a second Ctrl-C: no more patience, but still nothing left
            for gang in self._gangs:
                gang.end()
            raise
        finally:
            if self._connection is not None:
                self._connection.close(keep_logs=self._failed and self.restarts > 0)

    def _stop_loops(self) -> None:
        """All ranks at once; one that does not answer in time is killed like the others."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            stops = [ref for gang in self._gangs for ref in gang.stop()]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)

    # ---- launch

    def _connect(self) -> None:
        cpus = math.ceil(self.options.cpus_per_rank * self.grid.world_size)
        self._connection = connect(
            self.options.address,
            num_cpus=max(os.cpu_count() or 1, cpus),
            num_gpus=0 if self._device == "cpu" else None,
        )

    def _new_gang(self, index: int, generation: int) -> Gang:
        nodes = [node for node in cluster_nodes() if self._notices.seconds_left([node.node_id]) is None]
        gpus = self.options.gpus_per_rank
        if gpus is None:
            has_gpu = any(node.total.get("GPU", 0) for node in nodes)
            gpus = 1.0 if self._device == "cuda" or (self._device == "auto" and has_gpu) else 0.0
        bundle = rank_bundle(self.options.cpus_per_rank, gpus)
        plan = plan_placement([dict(bundle) for _ in range(self.grid.gang_size)], nodes)
        spec = RankSpec(
            rank=-1,
            world_size=self.grid.world_size,
            gang=index,
            generation=generation,
            model_dir=self._model_dir,
            engine_config=self._engine_config,
            device="cpu" if not gpus else self._device,  # without a GPU of its own Ray hides none
            num_threads=self.options.num_threads or max(1, int(self.options.cpus_per_rank)),
            engine_factory=self._factory,
            grid=self.grid.gang_grid(),
        )
        gang = Gang(
            index,
            self.grid.gangs()[index],
            spec,
            plan,
            name=self._name,
            cp=self.grid.cp,
            environment=rank_environment(self.grid, self.options.environment),
            clock=self._clock,
        )
        own = self._connection is not None and self._connection.own
        if own and not can_ever_hold(plan, nodes, self.grid.num_gangs):
            gang.placement.remove()
            raise gang.placement.failure(0, hopeless=True, copies=self.grid.num_gangs)
        return gang

    # ---- one turn

    def _turn(self, wait_s: float) -> None:
        """Assign, wait for mail at most `wait_s`, read it, look after gangs that come up or went down."""
        import ray

        self._watch.looking()
        self._assign()
        building = [gang for gang in self._gangs if gang.stage != "up"]
        refs = list(self._mail) + [ref for gang in building for ref in gang.calls]
        wait_s = min(wait_s, BUILD_POLL_S if building else self._watch.patience.ping_after / 2)
        if refs:
            ray.wait(refs, num_returns=1, timeout=0 if self._ready else wait_s, fetch_local=True)
        elif not self._ready:
            time.sleep(wait_s)
        self._watch.looking()
        done = ray.wait(list(self._mail), num_returns=len(self._mail), timeout=0)[0] if self._mail else []
        for ref in done:
            self._read(ref)
        for gang in building:
            self._build_on(gang)
        self._look_after_ranks()
        self._heed_notices()
        self._assign()

    def _assign(self) -> None:
        for rank, items in self.router.assign().items():
            gang, member = self._member(rank)
            for batch in in_calls(items):
                self._mail[member.actor.submit.remote(batch)] = ("submit", gang, member)

    def _read(self, ref: Any) -> None:
        """One answer of a rank; an exception in its place is a death."""
        import ray

        if ref not in self._mail:
            return  # its gang died earlier in this turn
        kind, gang, rank = self._mail.pop(ref)
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._died(gang, rank, describe_death(error))
            return
        if kind == "collect":
            self._collected(gang, rank, answer)
        elif kind == "ping":
            rank.pinging = None
            self._watch.heard(rank.rank, answer)

    def _collected(self, gang: Gang, rank: Rank, report: RankReport) -> None:
        self._watch.heard(rank.rank, report.heartbeat)
        if self._takes_rows(rank):
            self.router.credit(rank.rank, report.wanted, report.received)
        if report.stats is not None:
            self._stats.append(RankStats(rank.rank, gang.generation, report.stats))
        for result in report.results:
            passed = self.router.finished(rank.rank, own_arrays(result))
            if passed is not None:
                self._budget.progress()
                self._ready.append(passed)
        if report.fault is not None:
            cause = f"{report.fault.kind}: {report.fault.message}\n{report.fault.trace}"
            if report.fault.kind == "RankFailure" and len(gang.ranks) > 1:
                # It lost another rank: wait a moment for the one that really failed.
                self._bereft.setdefault(gang.index, (self._clock(), f"{rank}: {cause}"))
            else:
                self._died(gang, rank, cause, own_fault=True)
            return
        self._collect(gang, rank)

    def _collect(self, gang: Gang, rank: Rank) -> None:
        self._mail[rank.actor.collect.remote(COLLECT_WAIT_S)] = ("collect", gang, rank)

    def _build_on(self, gang: Gang) -> None:
        """Bring a gang up further; its first ranks start to be fed the moment it stands."""
        import ray

        try:
            if gang.advance():
                for rank in gang.ranks:
                    assert rank.report is not None
                    if self._takes_rows(rank):
                        self.router.rank_up(rank.rank)
                        self.router.credit(rank.rank, rank.report.wanted, rank.report.received)
                    self._watch.heard(rank.rank, rank.report.heartbeat)
                    self._collect(gang, rank)
                return
        except ray.exceptions.RayError as error:
            self._died(gang, None, f"while {gang.stage}: {describe_death(error)}")
            return
        waited = self._clock() - gang.since
        if gang.stage == "placing" and waited > self._watch.patience.placement:
            self._placement_is_late(gang, waited)
        elif gang.stage in ("creating", "meeting", "loading") and waited > self._watch.patience.start:
            self._died(gang, None, f"no engine after {waited:.0f} s of {gang.stage}")

    def _placement_is_late(self, gang: Gang, waited_s: float) -> None:
        """Fatal at the start; later a gang waits as long as others run, and else for a while."""
        others = any(other.stage == "up" for other in self._gangs)
        limit_s = self._watch.patience.replacement
        if gang.generation > 0 and (others or waited_s < limit_s):
            if not gang.late:
                gang.late = True
                now = "the other ranks go on" if others else f"the job waits for {limit_s:.0f} s in all"
                logger.warning("%s", gang.placement.failure(waited_s, now=now))
            return
        copies = sum(other.stage == "placing" for other in self._gangs)
        raise gang.placement.failure(waited_s, copies=copies)

    # ---- death

    def _look_after_ranks(self) -> None:
        for gang in [gang for gang in self._gangs if gang.stage == "up"]:
            since, cause = self._bereft.get(gang.index, (math.inf, ""))
            if self._clock() - since > BEREFT_S:
                self._died(gang, None, cause)
                continue
            for rank in gang.ranks:
                verdict = self._watch.verdict(rank.rank)
                if verdict is not None:
                    verdict += self._last_phases(gang)
                    self._died(gang, rank, verdict)
                    break
                if rank.pinging is None and self._watch.wants_ping(rank.rank):
                    rank.pinging = rank.actor.ping.remote()
                    self._mail[rank.pinging] = ("ping", gang, rank)

    def _died(self, gang: Gang, rank: Rank | None, cause: str, *, own_fault: bool = False) -> None:
        """End what is left of the gang, take its rows back, start its successor.

        A lost machine is nobody's fault: neither the rows nor the budget pay for it. In a gang of several
        ranks the rows of the engine that failed are suspects; those of the others merely run again.
        own_fault: the rank lives and reported it, so its machine does.
        """
        who = str(rank) if rank else f"gang {gang.index}"
        machine = None if own_fault else lost_machine(gang.node_ids)
        rows = self._take_back(gang, guilty=None if machine else rank)
        self._bereft.pop(gang.index, None)
        logger.warning(
            "%s of generation %d died with %d rows in flight, which are redone: %s%s",
            who, gang.generation, rows, f"its machine {machine} is gone; " if machine else "", cause,
        )  # fmt: skip
        gang.end(wait=machine is None)
        if machine is None:
            self._budget.death(rows, f"{who}: {cause}")
        self._succeed(gang)

    def _take_back(self, gang: Gang, guilty: Rank | None) -> int:
        """Forget a gang's ranks; how many rows they had, which wait again. Those of `guilty` are suspects."""
        self._mail = {ref: letter for ref, letter in self._mail.items() if letter[1] is not gang}
        rows = 0
        for member in gang.ranks:
            load = self.router.load(member.rank)
            rows += len(load.in_flight) if load else 0
            blame = guilty is not None and guilty.rank // self.grid.cp == member.rank // self.grid.cp
            for result in self.router.lost(member.rank, blame_rows=blame):
                self._ready.append(result)
                self._budget.progress()
            self._watch.forget(member.rank)
        return rows

    def _succeed(self, gang: Gang) -> None:
        self.restarts += 1
        self._gangs[gang.index] = self._new_gang(gang.index, gang.generation + 1)

    def _heed_notices(self) -> None:
        """A gang whose machine will be taken away gets no more rows, ends those it has, and moves."""
        if not self._notices.look():
            return
        for gang in list(self._gangs):
            left = self._notices.seconds_left(gang.node_ids)
            if left is None:
                continue
            loads = [self.router.load(rank.rank) for rank in gang.ranks]
            rows = sum(len(load.in_flight) for load in loads if load)
            if not gang.leaving:
                gang.leaving = True
                for rank in gang.ranks:
                    self.router.withdraw(rank.rank)
                logger.warning(
                    "a machine of gang %d will be taken away%s: its %d rows in flight may end, then it moves",
                    gang.index, "" if math.isinf(left) else f" in {left:.0f} s", rows,
                )  # fmt: skip
            if gang.stage != "up" or not rows or left <= FLUSH_S:
                self._take_back(gang, guilty=None)
                gang.end(wait=False)
                self._succeed(gang)

    # ---- small things

    def _takes_rows(self, rank: Rank) -> bool:
        """Whether the rank is its engine's driver; followers get everything from theirs."""
        return rank.rank % self.grid.cp == 0

    def _last_phases(self, gang: Gang) -> str:
        """What each rank of a gang last said about itself: who hangs, and who merely waits for it."""
        if len(gang.ranks) == 1:
            return ""
        beats = [(rank, self._watch.beat(rank.rank)) for rank in gang.ranks]
        lines = [f"\n  {rank}: {beat if beat else 'never heard of'}" for rank, beat in beats]
        return "; the ranks of its gang:" + "".join(lines)

    def _member(self, number: int) -> tuple[Gang, Rank]:
        gang = self._gangs[number // self.grid.gang_size]
        return gang, next(rank for rank in gang.ranks if rank.rank == number)

    def _must_run(self) -> None:
        if not self._started or self._closed:
            raise RuntimeError("the fleet is not running; call start() first and nothing after close()")

    def _status_of(self, gang: Gang) -> list[dict[str, Any]]:
        entries = []
        for number in gang.numbers:
            member = next((rank for rank in gang.ranks if rank.rank == number), None)
            load, beat = self.router.load(number), self._watch.beat(number)
            entries.append(
                {
                    "rank": number,
                    "gang": gang.index,
                    "generation": gang.generation,
                    "stage": gang.stage,
                    "node": member.where.address if member else None,
                    "pid": member.where.pid if member else None,
                    "phase": beat.phase if beat else None,
                    "step": beat.step if beat else None,
                    "in_flight": len(load.in_flight) if load else 0,
                    "done": load.done if load else 0,
                }
            )
        return entries


def describe_death(error: Exception) -> str:
    """The telling part of a Ray error: its class and its first lines."""
    text = str(error).strip() or repr(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:12])}"


def own_arrays(result: WorkResult) -> WorkResult:
    """The result with arrays of its own: large answers arrive as views that pin shared memory."""
    record = result.result
    for name in ("token_ids", "logprobs", "prompt_logprobs"):
        array = getattr(record, name)
        if isinstance(array, np.ndarray) and not array.flags.owndata:
            setattr(record, name, array.copy())
    return result
