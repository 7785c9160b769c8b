"""`RayFleet`: launch the ranks, feed them, watch them, rebuild what dies, leave nothing behind.

Knows: gangs, the router's books, Ray's object references. Does not know: files, prompts as text, models.

Everything happens on the caller's thread, inside `start`, `submit` and `poll`:

    assign waiting rows → wait for mail → read it (results, credits, pulses, deaths) → rebuild

A gang that the grid asks for is replaced when it is lost. A further one (`FleetOptions.max_gangs`) joins
while there is work for it and leaves when there is none; without it the fleet goes on.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_ray.errors import DeepInferError
from deepinfer_ray.fleet.backend import RankStats, WorkItem, WorkResult
from deepinfer_ray.fleet.cluster import Connection, connect
from deepinfer_ray.fleet.elastic import Elastic, Work
from deepinfer_ray.fleet.engines import DEFAULT_FACTORY, EngineFactory
from deepinfer_ray.fleet.gang import Gang, Rank, describe_death, end_all
from deepinfer_ray.fleet.launch import Launcher
from deepinfer_ray.fleet.machines import DrainNotices, lost_machine
from deepinfer_ray.fleet.mail import Letter, Mail
from deepinfer_ray.fleet.messages import RankReport, in_calls, own_arrays
from deepinfer_ray.fleet.options import FleetOptions, default_options, fleet_grid, most_gangs
from deepinfer_ray.fleet.placement import cluster_nodes
from deepinfer_ray.fleet.roster import Roster
from deepinfer_ray.fleet.router import Router
from deepinfer_ray.fleet.status import rank_entries
from deepinfer_ray.fleet.suspects import RestartBudget
from deepinfer_ray.fleet.topology import Node, num_held
from deepinfer_ray.fleet.vigil import Vigil
from deepinfer_ray.fleet.watch import Watch

logger = logging.getLogger(__name__)

MAX_STATS = 10_000
"""Pulses of ranks that wait to be taken; the oldest are dropped."""

COLLECT_WAIT_S = 2.0
"""Long poll of a rank without news; also the pulse of an idle fleet."""
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
        self.restarts = self.joined = self.left = 0
        self._clock = clock
        self._launcher = Launcher(
            self.grid,
            self.options,
            os.path.abspath(model_dir),  # ranks run in other directories
            engine_config,
            device.partition(":")[0],  # of a rank's own GPU, which is always its first
            engine_factory,
            f"deepinfer-{uuid.uuid4().hex[:8]}",
            clock,
        )
        self._budget = RestartBudget(self.options.max_restarts)
        self._watch = Watch(self.options.patience, clock)
        self._notices = DrainNotices(clock=clock)
        self._connection: Connection | None = None
        self._gangs = Roster(self.grid)
        self._elastic = Elastic(most_gangs(self.grid, self.options.max_gangs), self.options.patience, clock)
        self._expected = self._ended = 0
        self._ready: list[WorkResult] = []
        self._stats: deque[RankStats] = deque(maxlen=MAX_STATS)
        self._mail = Mail()
        self._vigil = Vigil(self._watch, self._mail, clock)
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
            for number in range(self.grid.num_gangs):
                self._launch(number)
            while len(self._gangs.up) < len(self._gangs):
                self._turn(BUILD_POLL_S)
        except BaseException:
            self._failed = True
            self.close(graceful=False)
            raise

    def wanted(self) -> int:
        """Rows that ranks announced room for, less those that already wait here."""
        return self.router.wanted()

    def expect(self, items: int) -> None:
        """About how many rows will be submitted from now on; further gangs come and go by it."""
        self._expected = items

    def submit(self, items: Sequence[WorkItem]) -> None:
        """Queue rows and hand out what ranks have room for."""
        self._must_run()
        self.router.add(items)
        self._expected = max(0, self._expected - len(items))
        self._assign()

    def poll(self, timeout_s: float) -> list[WorkResult]:
        """Finished rows; waits for the first up to `timeout_s`. Gangs come, die and are rebuilt in here."""
        self._must_run()
        deadline = self._clock() + timeout_s
        try:
            self._resize()
            while True:
                self._turn(max(0.0, deadline - self._clock()))
                if self._ready or self._clock() >= deadline:
                    results, self._ready = self._ready, []
                    self._ended += len(results)
                    return results
        except DeepInferError:
            self._failed = True
            raise

    def status(self) -> dict[str, Any]:
        """Ranks with stage, place and pulse; gangs; rows waiting and in flight; restarts."""
        gangs, connection = list(self._gangs), self._connection
        return {
            "ranks": [entry for gang in gangs for entry in rank_entries(gang, self.router, self._watch)],
            "gangs": {
                "up": len(self._gangs.up),
                "least": self.grid.num_gangs,
                "most": self._elastic.most,
                "joined": self.joined,
                "left": self.left,
            },
            "pending": self.router.num_pending,
            "in_flight": self.router.num_in_flight,
            "restarts": self.restarts,
            "address": connection.address if connection else None,
            "local_cluster": bool(connection and connection.own),
            "ray_files": str(connection.scratch.path) if connection and connection.scratch else None,
            "placement": gangs[0].placement.plan.describe() if gangs else None,
            "notice_s": self._notices.seconds_left([connection.node_id]) if connection else None,
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
        try:
            end_all(list(self._gangs), graceful=graceful and not self._failed)
        finally:
            if self._connection is not None:
                self._connection.close(keep_logs=self._failed and self.restarts > 0)

    # ---- launch

    def _connect(self) -> None:
        cpus = math.ceil(self.options.cpus_per_rank * self.grid.world_size)
        self._connection = connect(
            self.options.address,
            num_cpus=max(os.cpu_count() or 1, cpus),
            num_gpus=0 if self._launcher.device == "cpu" else None,
        )
        cores = len(os.sched_getaffinity(0))
        if self._connection.own and self.grid.world_size > cores:
            logger.warning(
                "%d ranks share the %d cores of this machine and take turns: %d are ready sooner and no "
                "slower; lower --dp",
                self.grid.world_size, cores, cores,
            )  # fmt: skip

    def _nodes(self) -> list[Node]:
        """The machines that will stay."""
        return [node for node in cluster_nodes() if self._notices.seconds_left([node.node_id]) is None]

    def _launch(self, number: int) -> Gang:
        """Ask for a gang, in the place of the one that had its number."""
        nodes = self._nodes()
        plan = self._launcher.plan(nodes)
        gang = self._launcher.launch(
            number, self._gangs.numbers(number), self._gangs.next_generation(number), plan
        )
        self._gangs.put(gang)
        if self._connection is not None and self._connection.own:
            held = num_held(plan, nodes)
            if held < self.grid.num_gangs:
                raise gang.placement.failure(0, hopeless=True, copies=self.grid.num_gangs)
            self._elastic.most = min(self._elastic.most, held)  # no machine can join
        return gang

    # ---- one turn

    def _turn(self, wait_s: float) -> None:
        """Assign, wait for mail at most `wait_s`, read it, look after gangs that come up or went down."""
        self._watch.looking()
        self._assign()
        moving = [gang for gang in self._gangs if gang.stage != "up"]
        # Far below what the watch takes for an absence of the driver, which it forgives all ranks.
        wait_s = min(wait_s, BUILD_POLL_S if moving else self._watch.patience.ping_after / 4)
        self._mail.wait([ref for gang in moving for ref in gang.calls], 0 if self._ready else wait_s)
        self._watch.looking()
        for letter, answer in self._mail.answered():
            self._read(letter, answer)
        for gang in moving:
            if gang in self._gangs and not gang.leaving:
                self._build_on(gang)
        for dead in self._vigil.dead(self._gangs):
            self._died(*dead)
        self._heed_notices()
        self._see_off()
        self._assign()

    def _assign(self) -> None:
        for rank, items in self.router.assign().items():
            gang, member = self._gangs.member(rank)
            for batch in in_calls(items):
                self._mail.sent(member.actor.submit.remote(batch), Letter("submit", gang, member))

    def _read(self, letter: Letter, answer: Any) -> None:
        """One answer of a rank; an exception in its place is a death."""
        rank = letter.rank
        if isinstance(answer, Exception):
            self._died(letter.gang, rank, describe_death(answer))
        elif letter.kind == "collect":
            self._collected(letter.gang, rank, answer)
        elif letter.kind == "ping":
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
                self._vigil.bereft(gang, f"{rank}: {cause}")
            else:
                self._died(gang, rank, cause, own_fault=True)
            return
        self._collect(gang, rank)

    def _collect(self, gang: Gang, rank: Rank) -> None:
        self._mail.sent(rank.actor.collect.remote(COLLECT_WAIT_S), Letter("collect", gang, rank))

    def _build_on(self, gang: Gang) -> None:
        """Bring a gang up further; its first ranks start to be fed the moment it stands."""
        import ray

        try:
            if gang.advance():
                self._stands(gang)
                return
        except ray.exceptions.RayError as error:
            self._died(gang, None, f"while {gang.stage}: {describe_death(error)}")
            return
        except DeepInferError as error:
            if not self._gangs.is_further(gang) and lost_machine(gang.node_ids) is None:
                raise
            self._died(gang, None, f"while {gang.stage}: {error}")
            return
        overdue = self._vigil.overdue(gang, self._gangs)
        if overdue is not None:
            self._died(gang, None, overdue)

    def _stands(self, gang: Gang) -> None:
        for rank in gang.ranks:
            assert rank.report is not None
            if self._takes_rows(rank):
                self.router.rank_up(rank.rank)
                self.router.credit(rank.rank, rank.report.wanted, rank.report.received)
            self._watch.heard(rank.rank, rank.report.heartbeat)
            self._collect(gang, rank)
        self._elastic.built(self._clock() - gang.placed_at)
        if self._gangs.is_further(gang):
            self._elastic.joined(gang.index)
            self.joined += 1
            logger.warning("gang %d joined: %s", gang.index, ", ".join(map(str, gang.ranks)))

    # ---- further gangs

    def _resize(self) -> None:
        """Ask for one more gang if it is worth it, and let those go that have nothing to do."""
        up = sum(not gang.leaving for gang in self._gangs.up)
        work = Work(
            waiting=self.router.num_pending + self._expected,
            running=self.router.num_in_flight,
            room=self.router.wanted(),
            ended=self._ended,
            up=up,
            coming=len(self._gangs) - up,
        )
        for gang in self._gangs.further:
            why = self._elastic.may_leave(gang.index, self._rows_of(gang), work)
            if why and not gang.leaving:
                self._withdraw(gang, why)
        if self._elastic.wants_another(work):
            gang = self._launch(self._gangs.free_number())
            logger.info("asked for gang %d, %s: %d rows wait", gang.index, gang.placement.name, work.waiting)

    def _withdraw(self, gang: Gang, why: str) -> None:
        """No more rows for a gang; `_see_off` does the rest."""
        gang.leaving = True
        for rank in gang.ranks:
            self.router.withdraw(rank.rank)
        does, rows = "leaves" if self._gangs.is_further(gang) else "moves", self._rows_of(gang)
        first = f"; its {rows} rows in flight may end first" if rows else ""
        logger.warning("gang %d %s: %s%s", gang.index, does, why, first)

    def _heed_notices(self) -> None:
        """A gang whose machine will be taken away goes somewhere else."""
        if not self._notices.look():
            return
        for gang in self._gangs:
            left = self._notices.seconds_left(gang.node_ids)
            if left is not None and not gang.leaving:
                when = "" if math.isinf(left) else f" in {left:.0f} s"
                self._withdraw(gang, f"a machine of it will be taken away{when}")

    def _see_off(self) -> None:
        """Gangs that leave end the rows they have, then their loops, then themselves.

        When a machine goes earlier than that, the rows that are left run elsewhere.
        """
        for gang in self._gangs:
            if not gang.leaving or gang not in self._gangs:  # one before it may have taken its place
                continue
            left = self._notices.seconds_left(gang.node_ids)
            if left is None or left > FLUSH_S:
                if gang.stage == "up" and self._rows_of(gang):
                    continue
                if gang.stage == "up":
                    self._take_back(gang, guilty=None)  # no row: its mail, which loops that ended answer
                    gang.stop()
                if gang.stage == "stopping" and not gang.stopped():
                    continue
            self._take_back(gang, guilty=None)
            gang.end(wait=False)
            self._succeed(gang)

    def _rows_of(self, gang: Gang) -> int:
        """Rows in flight at a gang."""
        loads = [self.router.load(rank.rank) for rank in gang.ranks]
        return sum(len(load.in_flight) for load in loads if load)

    # ---- death

    def _died(self, gang: Gang, rank: Rank | None, cause: str, *, own_fault: bool = False) -> None:
        """End what is left of the gang, take its rows back, start its successor.

        A lost machine is nobody's fault: neither the rows nor the budget pay for it, nor for a gang that was
        leaving or never took a row though the fleet can do without it. In a gang of several ranks the rows of
        the engine that failed are suspects; those of the others merely run again.
        own_fault: the rank lives and reported it, so its machine does.
        """
        who = str(rank) if rank else f"gang {gang.index}"
        machine = None if own_fault else lost_machine(gang.node_ids)
        excused = machine is not None or gang.leaving
        further, stood = self._gangs.is_further(gang), gang.stage == "up"
        rows = self._take_back(gang, guilty=None if excused else rank)
        gone = f"its machine {machine} is gone; " if machine else ""
        if further and not stood:
            pause = self._elastic.failed()
            logger.warning(
                "gang %d did not join; the others go on, and it may be asked for again in %.0f s: %s%s",
                gang.index, pause, gone, cause,
            )  # fmt: skip
        else:
            logger.warning(
                "%s of generation %d died with %d rows in flight, which are redone: %s%s",
                who, gang.generation, rows, gone, cause,
            )  # fmt: skip
        gang.end(wait=machine is None and not further)
        if not excused and stood and further:
            self._elastic.failed()
        if not excused and (stood or not further):
            self._budget.death(rows, f"{who}: {cause}")
        self._succeed(gang)

    def _take_back(self, gang: Gang, guilty: Rank | None) -> int:
        """Forget a gang's ranks; how many rows they had, which wait again. Those of `guilty` are suspects."""
        self._mail.forget(gang)
        self._vigil.forget(gang)
        rows = self._rows_of(gang)
        for member in gang.ranks:
            blame = guilty is not None and guilty.rank // self.grid.cp == member.rank // self.grid.cp
            for result in self.router.lost(member.rank, blame_rows=blame):
                self._ready.append(result)
                self._budget.progress()
            self._watch.forget(member.rank)
        return rows

    def _succeed(self, gang: Gang) -> None:
        """After a gang's end: another in its place if the fleet stands on it."""
        if self._gangs.is_further(gang):
            self.left += self._elastic.left(gang.index)
            self._gangs.drop(gang)
            return
        for other in self._gangs.further:
            if other.stage == "placing":  # it would stand first in the queue for a place
                other.end(wait=False)
                self._gangs.drop(other)
        self.restarts += 1
        self._launch(gang.index)

    # ---- small things

    def _takes_rows(self, rank: Rank) -> bool:
        """Whether the rank is its engine's driver; followers get everything from theirs."""
        return rank.rank % self.grid.cp == 0

    def _must_run(self) -> None:
        if not self._started or self._closed:
            raise RuntimeError("the fleet is not running; call start() first and nothing after close()")
