"""What a fleet does when several things happen to its gangs in one turn; the gangs are no actors here."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray

from deepinfer_ray.engine.request import RequestResult, SamplingParams
from deepinfer_ray.errors import PlacementError, RankFailure
from deepinfer_ray.fleet import fleet as fleet_module
from deepinfer_ray.fleet import gang as gang_module
from deepinfer_ray.fleet.backend import WorkItem, WorkResult
from deepinfer_ray.fleet.elastic import SETTLE_S
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.gang import Gang
from deepinfer_ray.fleet.messages import Heartbeat, RankReport
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.fleet.watch import Patience


class FakeGang:
    """One rank. `fate`: what the next `advance` raises, or the stage that it reaches."""

    def __init__(self, index: int, numbers: Sequence[int], generation: int, now: float) -> None:
        self.index, self.numbers, self.generation = index, list(numbers), generation
        self.stage, self.leaving, self.late = "placing", False, False
        self.since = self.placed_at = now
        self.node_ids: list[str] = []
        self.calls: list[Any] = []
        self.fate: Exception | str | None = None
        self.placement = SimpleNamespace(name=f"gang{index}", plan=SimpleNamespace(describe=str))
        beat = Heartbeat(self.numbers[0], generation, "idle", 0, 0.0, 0)
        nothing = SimpleNamespace(remote=lambda *_: None)
        self.ranks = [
            SimpleNamespace(
                rank=number,
                report=RankReport(beat, received=0, wanted=4),
                where=SimpleNamespace(address="10.0.0.1", node_id="x", pid=1),
                actor=SimpleNamespace(ping=nothing, submit=nothing),
                pinging=None,
            )
            for number in self.numbers
        ]

    def advance(self) -> bool:
        if isinstance(self.fate, Exception):
            raise self.fate
        if self.fate:
            self.stage = self.fate
            self.node_ids = [f"machine {self.index}"]
        return self.stage == "up"

    def stop(self) -> list[Any]:
        self.stage = "stopping"
        return []

    def stopped(self) -> bool:
        return True

    def end(self, *, wait: bool = True) -> None:
        self.stage = "ended"


class Bench:
    """A fleet whose gangs are fakes, and the clock of both."""

    def __init__(self, dp: int, stub: ModuleType, **options: Any) -> None:
        self.now, self.launched, self.drains = 0.0, list[FakeGang](), dict[str, float]()
        self.stub = stub
        self.fleet = RayFleet(
            "m", None, dp, engine_factory=stub.make, clock=lambda: self.now,
            options=FleetOptions(patience=Patience(retry=30.0), **options),
        )  # fmt: skip
        any_fleet: Any = self.fleet
        any_fleet._launcher = SimpleNamespace(device="cpu", plan=lambda nodes: None, launch=self._launch)
        any_fleet._nodes = list
        any_fleet._collect = lambda gang, rank: None
        any_fleet._mail = SimpleNamespace(
            sent=lambda ref, letter: ref, forget=lambda gang: None, answered=list, wait=lambda refs, s: None
        )
        self.fleet._notices.ask = lambda: self.drains
        self.fleet._notices.now = lambda: 0.0
        self.fleet._started = True
        for number in range(dp):
            self.fleet._launch(number)

    def _launch(self, index: int, ranks: Sequence[int], generation: int, plan: Any) -> FakeGang:
        self.launched.append(FakeGang(index, ranks, generation, self.now))
        return self.launched[-1]

    def turn(self, seconds: float = 1.1) -> None:
        self.now += seconds
        self.fleet.poll(0)

    def up(self, *gangs: FakeGang) -> None:
        for gang in gangs:
            gang.fate = "up"
        self.turn()
        assert all(gang.stage == "up" for gang in gangs)

    def further(self) -> FakeGang:
        """A gang beyond those of the grid, asked for because ranks are full and rows wait."""
        self.fleet.expect(1000)
        while len(self.fleet._gangs) == self.fleet.grid.num_gangs:
            self.turn(SETTLE_S)
        return self.launched[-1]

    def state(self) -> list[tuple[int, int, str]]:
        gangs: list[Any] = list(self.fleet._gangs)
        return [(gang.index, gang.generation, gang.stage) for gang in gangs]

    def fill(self, *keys: int) -> None:
        """Rows for the ranks that are up."""
        self.fleet.submit([WorkItem(key, self.stub.prompt(0, 1), SamplingParams(), key) for key in keys])


@pytest.fixture
def bench(stub: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fleet_module, "lost_machine", lambda node_ids: None)
    return lambda dp, **options: Bench(dp, stub, **options)


def full(bench: Bench, dp: int) -> None:
    """All gangs up, no room at any."""
    bench.up(*bench.launched)
    for rank in range(dp):
        bench.fleet.router.credit(rank, 0, 0)


def test_a_gang_moves_in_the_turn_in_which_another_that_waits_leaves(bench: Any) -> None:
    made = bench(1, max_gangs=2)
    full(made, 1)
    waits = made.further()
    made.drains["machine 0"] = 600.0
    made.fleet.expect(0)
    made.turn()
    assert waits.stage == "ended"
    assert made.state() == [(0, 1, "placing")]


def test_a_lost_gang_gets_the_place_that_a_further_one_waits_for(bench: Any) -> None:
    made = bench(1, max_gangs=2, max_restarts=1)
    full(made, 1)
    waits = made.further()
    made.fleet._died(made.launched[0], None, "killed")
    assert waits.stage == "ended", "its placement group stood first in the queue"
    assert made.state() == [(0, 1, "placing")]
    for _ in range(10):
        made.turn()
    assert made.state() == [(0, 1, "placing")], "none is asked for while the fleet is not whole"


def test_two_machines_go_at_once(bench: Any) -> None:
    made = bench(2)
    full(made, 2)
    made.drains |= {"machine 0": 600.0, "machine 1": 600.0}
    made.turn()
    assert made.state() == [(0, 1, "placing"), (1, 1, "placing")]
    assert made.fleet._budget.deaths == 0


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), RankFailure("a peer is gone")])
def test_a_machine_that_dies_under_a_gang_that_loads(
    bench: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    made = bench(1, max_gangs=2, max_restarts=0)
    full(made, 1)
    coming = made.further()
    coming.fate = "loading"
    made.turn()
    coming.fate = error
    monkeypatch.setattr(fleet_module, "lost_machine", lambda node_ids: node_ids[0])
    made.turn()
    assert made.state() == [(0, 0, "up")]
    assert "gang 1 did not join; the others go on" in caplog.text
    assert "its machine machine 1 is gone; while loading: " in caplog.text
    made.turn(29.0)
    assert len(made.launched) == 2, "not at once again"
    made.turn(29.0)
    assert made.state()[1:] == [(1, 1, "placing")]


@pytest.mark.parametrize("machine", [None, "10.0.0.9"])
def test_an_error_at_the_start_ends_the_fleet_unless_its_machine_is_gone(
    bench: Any, monkeypatch: pytest.MonkeyPatch, machine: str | None
) -> None:
    """A machine that dies while its ranks are numbered shows as a bundle on a node that is not alive."""
    monkeypatch.setattr(fleet_module, "lost_machine", lambda node_ids: machine)
    made = bench(1, max_restarts=0)
    made.launched[0].fate = PlacementError("bundle 0 stands on node 'x', which is not alive")
    if machine is None:
        with pytest.raises(PlacementError, match="which is not alive"):
            made.turn()
    else:
        made.turn()
        assert made.state() == [(0, 1, "placing")]


def test_actors_whose_machine_is_gone_before_they_run_are_not_waited_for(
    stub: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps them pending until their bundle has a machine again, which may never be."""
    monkeypatch.setattr(gang_module, "Placement", lambda plan, name, clock: SimpleNamespace(name=name))
    monkeypatch.setattr(gang_module, "lost_machine", lambda node_ids: node_ids[0] if now[0] > 60 else None)
    now, spec = [0.0], SimpleNamespace(generation=0)
    gang = Gang(0, [0], spec, None, name="test", clock=lambda: now[0])  # type: ignore[arg-type]
    monkeypatch.setattr(gang, "_answered", lambda: False)
    gang.stage, gang.node_ids = "creating", ["a1b2"]
    for now[0] in (1.0, 30.0, 60.0):
        assert not gang.advance()
    now[0] = 62.0
    with pytest.raises(RankFailure, match="machine a1b2 was lost before the rank there had started"):
        gang.advance()


def test_no_gang_is_asked_for_while_one_moves(bench: Any) -> None:
    """It takes no rows, which is not because it is full; its successor wants the free place."""
    made = bench(1, max_gangs=2)
    made.up(*made.launched)
    made.fill(1, 2)
    made.fleet.expect(1000)
    made.drains["machine 0"] = 600.0
    for _ in range(4):
        made.turn(SETTLE_S)
    assert made.state() == [(0, 0, "up")], "its rows have not ended"


def test_rows_of_a_gang_that_dies_while_it_leaves_run_again_unsuspected(bench: Any) -> None:
    made = bench(2, max_restarts=0)
    made.up(*made.launched)
    made.fill(7, 8, 9, 10)
    made.drains["machine 1"] = 600.0
    made.turn()
    leaving = made.launched[1]
    assert (leaving.stage, leaving.leaving) == ("up", True), "its rows may end first"
    held = made.fleet.router.load(1)
    assert held is not None
    rows = len(held.in_flight)
    assert rows
    made.fleet._died(leaving, leaving.ranks[0], "killed")
    assert made.fleet.router.num_pending == rows
    assert len(made.fleet.router._suspects) == 0
    assert made.state() == [(0, 0, "up"), (1, 1, "placing")]
    made.fleet.router.check_integrity()


def test_a_gang_that_joins_after_the_last_row_leaves_at_once(bench: Any) -> None:
    made = bench(1, max_gangs=2)
    full(made, 1)
    late = made.further()
    made.fleet.expect(0)
    late.fate = "up"
    made.fleet._build_on(late)
    assert made.fleet.joined == 1
    made.turn()
    made.turn()
    assert made.state() == [(0, 0, "up")]
    assert made.fleet.status()["gangs"] == {"up": 1, "least": 1, "most": 2, "joined": 1, "left": 1}


def test_a_number_that_is_used_again_starts_with_clean_books(bench: Any) -> None:
    """Credits, pulses and rows of the rank that had it are not the new one's."""
    made = bench(1, max_gangs=2)
    full(made, 1)
    first = made.further()
    made.up(first)
    made.fill(1)
    (held,) = made.fleet.router.load(1).in_flight.values()
    result = WorkResult(held.key, RequestResult.failed(held.key, 2, "internal", "x"), 1)
    assert made.fleet.router.finished(1, result) is result
    made.fleet._died(first, None, "killed")
    assert made.fleet._watch.beat(1) is None
    made.now += Patience().retry
    again = made.further()
    assert (again.index, again.generation, again.numbers) == (1, 1, [1])
    made.up(again)
    load = made.fleet.router.load(1)
    assert (load.sent, load.received, load.done, load.credits) == (0, 0, 0, 4)
    assert made.fleet._watch.beat(1).generation == 1


def test_waiting_for_mail_is_no_absence_of_the_driver(bench: Any) -> None:
    """A rank that says nothing counts as dead after its time, also when nobody else writes meanwhile."""
    made = bench(1)
    made.up(*made.launched)

    def wait(refs: list[Any], timeout_s: float) -> None:
        made.now += timeout_s + 0.01

    made.fleet._mail.wait = wait
    started = made.now
    while made.launched[0].stage == "up":
        made.fleet.poll(10.0)
        assert made.now - started < 2 * Patience().silent, "its silence was forgiven"
    assert made.state() == [(0, 1, "placing")]
