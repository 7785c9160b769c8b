"""When a further gang is asked for and when it goes: decisions on a clock of the test, and real ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.config.load import load_config
from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.errors import CheckpointError, ConfigError
from deepinfer_ray.fleet import fleet as fleet_module
from deepinfer_ray.fleet.backend import Grows, WorkItem
from deepinfer_ray.fleet.elastic import MOST_DOUBLINGS, SETTLE_S, Elastic, Work
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.gang import Gang
from deepinfer_ray.fleet.options import FleetOptions, default_options, fleet_grid, most_gangs
from deepinfer_ray.fleet.watch import Patience
from deepinfer_ray.job.generate import generate
from deepinfer_ray.job.signals import StopSignals
from deepinfer_ray.job.stats_file import read_stats
from deepinfer_ray.job.store import Store
from deepinfer_ray.model.synthetic import make_checkpoint

BUSY = Work(waiting=1000, running=8, room=0, ended=0, up=1, coming=0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def elastic(clock: Clock) -> Elastic:
    """Three gangs at most, full ranks for long enough."""
    made = Elastic(3, Patience(idle=20.0, retry=30.0), clock)
    made.wants_another(BUSY)
    clock.now += SETTLE_S
    return made


def test_full_ranks_and_waiting_rows_want_another_gang(elastic: Elastic) -> None:
    assert elastic.wants_another(BUSY)
    assert elastic.wants_another(replace(BUSY, up=2))


@pytest.mark.parametrize(
    "why_not",
    [
        {"up": 3},
        {"coming": 1},
        {"waiting": 8},  # less than a gang's share of what runs
        {"waiting": 0},
        {"up": 2, "waiting": 4},
        {"room": 1},
    ],
)
def test_no_gang_is_asked_for(elastic: Elastic, why_not: dict[str, int]) -> None:
    assert not elastic.wants_another(replace(BUSY, **why_not))


def test_a_reader_that_cannot_keep_up_needs_no_ranks(elastic: Elastic, clock: Clock) -> None:
    assert not elastic.wants_another(replace(BUSY, room=3))
    clock.now += SETTLE_S / 2
    assert not elastic.wants_another(BUSY), "full again, but only just"
    clock.now += SETTLE_S
    assert elastic.wants_another(BUSY)


def test_rows_that_end_before_a_gang_is_up_are_no_reason(elastic: Elastic, clock: Clock) -> None:
    elastic.built(60.0)
    elastic.built(12.0)  # a later one found the weights in memory: do not count on it
    clock.now = 100.0 + 50.0
    work = replace(BUSY, ended=500)  # 10 rows a second
    assert not elastic.wants_another(replace(work, waiting=599))
    assert elastic.wants_another(replace(work, waiting=600))


def test_pauses_after_failures_grow_and_end_when_one_stands(elastic: Elastic, clock: Clock) -> None:
    for pause in (30.0, 60.0, 120.0):
        assert elastic.failed() == pause
        clock.now += pause - 1
        assert not elastic.wants_another(BUSY)
        clock.now += 1
        assert elastic.wants_another(BUSY)
    pauses = [elastic.failed() for _ in range(9)]
    assert pauses[-1] == 30.0 * 2**MOST_DOUBLINGS
    elastic.joined(1)
    assert elastic.failed() == 30.0


def test_a_gang_leaves_after_an_idle_time(elastic: Elastic, clock: Clock) -> None:
    elastic.joined(1)
    clock.now += 19
    assert elastic.may_leave(1, 0, BUSY) is None
    assert elastic.may_leave(1, 2, BUSY) is None, "it got rows"
    clock.now += 19
    assert elastic.may_leave(1, 0, BUSY) is None
    clock.now += 1
    assert elastic.may_leave(1, 0, BUSY) == "it had no rows for 20 s"
    assert elastic.left(1)


def test_a_gang_leaves_at_the_end_of_the_rows(elastic: Elastic, clock: Clock) -> None:
    tail = replace(BUSY, waiting=0)
    assert elastic.may_leave(1, 0, tail) == "no rows are left for it", "one that is only coming, too"
    assert not elastic.left(1), "it had not joined"
    elastic.joined(1)
    assert elastic.may_leave(1, 1, tail) is None
    assert elastic.may_leave(1, 0, tail) == "no rows are left for it"


def test_a_gang_that_waits_for_its_place_is_not_idle(elastic: Elastic, clock: Clock) -> None:
    clock.now += 500
    assert elastic.may_leave(1, 0, BUSY) is None


def test_fewer_gangs_than_the_grid_asks_for_are_refused() -> None:
    grid = fleet_grid(None, 3)
    assert (most_gangs(grid, None), most_gangs(grid, 3), most_gangs(grid, 5)) == (3, 3, 5)
    with pytest.raises(ConfigError, match="--max-gangs 2 is less than --dp 3 asks for, 3 gangs"):
        most_gangs(grid, 2)


def feed(
    fleet: RayFleet, stub: ModuleType, row_ms: int, enough: Callable[[list[dict[str, Any]]], bool]
) -> dict[int, int]:
    """Feed as the job does, rows without end until what is known of the ranks of gang 1 is `enough`; the
    attempts of each row, all of which came back once and without an error."""
    todo = [WorkItem(key, stub.prompt(stub.SLOW, row_ms), SamplingParams(), key) for key in range(20_000)]
    attempts: dict[int, int] = {}
    submitted, deadline = 0, time.monotonic() + 90
    while todo or len(attempts) < submitted:
        assert time.monotonic() < deadline, f"{len(attempts)} of {submitted} rows, {fleet.status()}"
        fleet.expect(len(todo))
        room = min(fleet.wanted(), len(todo))
        fleet.submit([todo.pop() for _ in range(room)])
        submitted += room
        for done in fleet.poll(0.2):
            assert done.key not in attempts
            assert done.result.error is None
            attempts[done.key] = done.attempts
        if enough([rank for rank in fleet.status()["ranks"] if rank["gang"] == 1]):
            todo.clear()
    fleet.router.check_integrity()
    return attempts


def run(fleet: RayFleet, stub: ModuleType, enough: Callable[[set[str]], bool]) -> tuple[int, set[str]]:
    """`feed` until `enough` of the stages in which gang 1 was seen; how many rows there were, each of which
    came back at its first attempt, and those stages."""
    seen: set[str] = set()

    def look(ranks: list[dict[str, Any]]) -> bool:
        seen.update(rank["stage"] for rank in ranks)
        return enough(seen)

    attempts = feed(fleet, stub, 30, look)
    assert attempts == dict.fromkeys(attempts, 1)
    return len(attempts), seen


@pytest.mark.ray
def test_gangs_that_never_come_up_cost_nothing(
    cluster: Any, stub: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is missing where they land, again and again; the first gang runs all rows."""
    advance = Gang.advance

    def missing(gang: Gang) -> bool:
        if gang.index and gang.stage == "creating":
            raise CheckpointError("/models/v41 is missing on this machine")
        return advance(gang)

    monkeypatch.setattr(Gang, "advance", missing)
    patience = Patience(retry=0.1)
    options = FleetOptions(cpus_per_rank=0.5, max_restarts=0, max_gangs=2, patience=patience)
    with RayFleet("m", {"room": 4}, 1, device="cpu", engine_factory=stub.make, options=options) as fleet:
        assert isinstance(fleet, Grows)
        run(fleet, stub, lambda seen: caplog.text.count("did not join") >= 2)
        status = fleet.status()
    assert status["gangs"] == {"up": 1, "least": 1, "most": 2, "joined": 0, "left": 0}
    assert status["restarts"] == 0
    told = [r.getMessage() for r in caplog.records if "did not join" in r.getMessage()]
    assert len(told) >= 2
    assert told[0].startswith("gang 1 did not join; the others go on, and it may be asked for again in 0 s: ")
    assert told[0].endswith("while creating: /models/v41 is missing on this machine")


@pytest.mark.ray
def test_a_place_that_never_comes_holds_nobody_up(cluster: Any, stub: ModuleType) -> None:
    """The cluster has 4 CPUs and a gang takes 3: the second one waits until there is nothing left to do."""
    options = FleetOptions(cpus_per_rank=3.0, max_gangs=2, patience=Patience(placement=0.5))
    with RayFleet("m", {"room": 4}, 1, device="cpu", engine_factory=stub.make, options=options) as fleet:
        asked = [0.0]

        def waits_for_long(seen: set[str]) -> bool:
            asked[0] = asked[0] or ("placing" in seen and time.monotonic())
            return bool(asked[0]) and time.monotonic() - asked[0] > 1.5

        rows, seen = run(fleet, stub, waits_for_long)
        assert rows > 50, "the first gang went on"
        assert seen == {"placing"}, "three times as long as the first placement may take"
        fleet.expect(0)
        fleet.poll(0)
        assert [rank["gang"] for rank in fleet.status()["ranks"]] == [0]


@pytest.mark.ray
@pytest.mark.parametrize("machine", [None, "10.0.0.9"])
def test_a_further_gang_that_dies_is_only_replaced_later(
    cluster: Any, stub: ModuleType, monkeypatch: pytest.MonkeyPatch, machine: str | None
) -> None:
    """Its rows run again, as suspects only if its machine lives; the gang that the fleet stands on stays."""
    monkeypatch.setattr(fleet_module, "lost_machine", lambda node_ids: machine)
    options = FleetOptions(
        cpus_per_rank=0.5, max_gangs=2, max_restarts=0 if machine else 1, patience=Patience(retry=0.5)
    )
    killed = False

    def kill_once(ranks: list[dict[str, Any]]) -> bool:
        nonlocal killed
        further = [rank for rank in ranks if rank["done"] > 4]
        if further and not killed and further[0]["in_flight"]:
            killed = True
            os.kill(further[0]["pid"], signal.SIGKILL)
            return False
        return bool(further) and further[0]["generation"] == 1

    with RayFleet("m", {"room": 4}, 1, device="cpu", engine_factory=stub.make, options=options) as fleet:
        attempts = feed(fleet, stub, 20, kill_once)
        status = fleet.status()
    assert (status["gangs"]["joined"], status["restarts"]) == (2, 0)
    assert max(attempts.values()) == 2
    assert 1 <= sum(tries == 2 for tries in attempts.values()) <= 8


@pytest.mark.ray
def test_a_job_with_a_gang_that_joins(cluster: Any, stub: ModuleType, tmp_path: Path) -> None:
    """From flags to rows: the ranks that were there are in the statistics, and every row is there once.

    Rows take their time until a second gang has run some.
    """
    joined = tmp_path / "joined"
    ids = [[stub.SLOW, 100, row % 500] for row in range(600)]
    pq.write_table(pa.table({"ids": ids}), tmp_path / "in.parquet")
    flags = {
        "--model": str(make_checkpoint(tmp_path / "model", "tiny", layers=6, experts=4)),
        "--input": [str(tmp_path / "in.parquet")],
        "--output": str(tmp_path / "out"),
        "--token-ids-column": "ids",
        "--max-gangs": 2,
    }
    config = load_config((), ["job.gang_idle_s=0.5"], flags, {})

    class Watched(RayFleet):
        def status(self) -> dict[str, Any]:
            status = super().status()
            if any(rank["gang"] == 1 and rank["done"] > 4 for rank in status["ranks"]):
                joined.touch()
            return status

    def make(engine: Any, model: Any) -> RayFleet:
        chosen = default_options(engine, max_gangs=config.job.max_gangs, idle_s=config.job.gang_idle_s)
        options = replace(chosen, cpus_per_rank=0.5)
        stubs = {"room": 8, "until": str(joined)}
        return Watched("m", stubs, 1, device="cpu", engine_factory=stub.make, options=options)

    said: list[str] = []
    with StopSignals() as signals:
        outcome = generate(config, make, said.append, signals)
    assert outcome.exit_code == 0
    assert "starting 1 rank for 600 rows; more may join, up to 2 gangs" in said
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["token_ids"] for row in rows] == [prompt[::-1] for prompt in ids]
    (run,) = read_stats(Store(str(tmp_path / "out")))
    ((rank, spans),) = run.extra["further"].items()
    assert rank == "1"
    assert spans[0][0] >= 1
