"""The rank's loop as a plain object, no Ray: threads of this process play the callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.fleet.backend import WorkItem
from deepinfer_ray.fleet.engines import resolve_factory
from deepinfer_ray.fleet.messages import RankReport, RankSpec
from deepinfer_ray.fleet.rank_actor import RankActor

PARAMS = SamplingParams()


@pytest.fixture
def make_rank(stub: ModuleType) -> Iterator[Callable[..., RankActor]]:
    """A started rank around an engine; stopped at the end."""
    ranks: list[RankActor] = []

    def build(engine: Any = None, **config: Any) -> RankActor:
        factory = stub.make if engine is None else lambda spec: engine
        rank = RankActor()
        ranks.append(rank)
        report = rank.start(RankSpec(0, 1, 0, 0, "m", config, "cpu", 1, factory))
        assert report.fault is None
        return rank

    yield build
    for rank in ranks:
        assert rank.stop(5.0), "the loop did not end"


def work(key: int, prompt: np.ndarray) -> WorkItem:
    return WorkItem(key, prompt, PARAMS, seed=0)


def gather(rank: RankActor, count: int) -> tuple[dict[int, Any], list[RankReport]]:
    results: dict[int, Any] = {}
    reports = []
    deadline = time.monotonic() + 10
    while len(results) < count:
        assert time.monotonic() < deadline
        reports.append(rank.collect(1.0))
        results |= {result.key: result for result in reports[-1].results}
    return results, reports


def test_rows_go_through_and_credits_return(make_rank: Callable[..., RankActor], stub: ModuleType) -> None:
    rank = make_rank(room=4)
    assert rank.collect(0.0).wanted == 4
    rank.submit([work(key, stub.prompt(stub.ECHO, key)) for key in range(3)])
    results, _ = gather(rank, 3)
    assert sorted(results) == [0, 1, 2]
    report = rank.collect(0.5)
    assert (report.received, report.wanted, report.heartbeat.in_flight) == (3, 4, 0)
    assert report.heartbeat.phase == "idle"


def test_rows_the_engine_has_not_seen_reduce_the_appetite(stub: ModuleType) -> None:
    class Held(stub.StubEngine):  # type: ignore[name-defined,misc]
        gate = threading.Event()

        def step(self) -> Any:
            self.gate.wait(10)
            return super().step()

    engine = Held(room=4)
    rank = RankActor()
    rank.start(RankSpec(0, 1, 0, 0, "m", None, "cpu", 1, lambda spec: engine))
    rank.submit([work(0, stub.prompt(stub.ECHO))])
    time.sleep(0.1)
    rank.submit([work(1, stub.prompt(stub.ECHO)), work(2, stub.prompt(stub.ECHO))])
    report = rank.collect(0.0)
    assert (report.received, report.wanted) == (3, 1)
    engine.gate.set()
    gather(rank, 3)
    assert rank.stop()


def test_ping_answers_during_a_step(make_rank: Callable[..., RankActor], stub: ModuleType) -> None:
    rank = make_rank()
    rank.submit([work(0, stub.prompt(stub.SLOW, 1500))])
    time.sleep(0.2)
    started = time.monotonic()
    pulse = rank.ping()
    assert time.monotonic() - started < 0.7
    assert (pulse.phase, pulse.step, pulse.in_flight) == ("step", 0, 1)
    assert 0.05 < pulse.age_s < 1.5
    gather(rank, 1)
    assert rank.ping().step == 1


def test_collect_waits_no_longer_than_asked(make_rank: Callable[..., RankActor]) -> None:
    rank = make_rank()
    rank.collect(0.0)
    started = time.monotonic()
    assert rank.collect(0.2).results == []
    assert 0.15 < time.monotonic() - started < 5.0


def test_appetite_that_grows_without_a_result_is_news(
    make_rank: Callable[..., RankActor], stub: ModuleType
) -> None:
    """Admission frees room before any row ends; the driver must hear of it at once."""

    class Growing(stub.StubEngine):  # type: ignore[name-defined,misc]
        def step(self) -> Any:
            time.sleep(0.02)
            self.room += 1
            return super().step() if self.room > 40 else []

    rank = make_rank(Growing(room=2))
    assert rank.collect(0.0).wanted == 2
    rank.submit([work(0, stub.prompt(stub.ECHO)), work(1, stub.prompt(stub.ECHO))])
    started = time.monotonic()
    report = rank.collect(5.0)
    assert time.monotonic() - started < 4.0
    assert report.results == []
    assert report.wanted >= 1


def test_stop_drops_what_is_in_flight(make_rank: Callable[..., RankActor], stub: ModuleType) -> None:
    rank = make_rank()
    rank.submit([work(key, stub.prompt(stub.SLOW, 30)) for key in range(100)])
    assert rank.stop(5.0)
    report = rank.collect(5.0)
    assert report.heartbeat.phase == "stopped"
    assert report.wanted == 0
    assert len(report.results) < 100


def test_engine_exception_is_a_fault_with_traceback(
    make_rank: Callable[..., RankActor], stub: ModuleType
) -> None:
    rank = make_rank()
    rank.submit([work(0, stub.prompt(stub.BREAK))])
    report = rank.collect(5.0)
    assert report.fault is not None
    assert (report.fault.kind, report.fault.message) == ("FloatingPointError", "the stub engine broke")
    assert "in step" in report.fault.trace
    assert report.heartbeat.phase == "failed"
    assert report.heartbeat.in_flight == 1
    assert rank.collect(5.0).fault is not None, "asked again, it answers at once and the same"


def test_a_rows_exception_is_the_rows(make_rank: Callable[..., RankActor], stub: ModuleType) -> None:
    rank = make_rank()
    rank.submit([work(k, stub.prompt(kind)) for k, kind in enumerate((stub.REFUSE, stub.TRIP, stub.ECHO))])
    results, _ = gather(rank, 3)
    assert [results[key].result.error_code for key in range(3)] == ["prompt_too_long", "internal", None]


def test_prompts_are_copied_out_of_shared_memory(
    make_rank: Callable[..., RankActor], stub: ModuleType
) -> None:
    rank = make_rank()
    shared = stub.prompt(stub.SLOW, 50, 9)
    item = work(0, shared)
    rank.submit([item])
    assert item.prompt.base is None
    assert not np.shares_memory(item.prompt, shared)
    shared[:] = 0
    results, _ = gather(rank, 1)
    assert results[0].result.token_ids.tolist() == [9, 50, stub.SLOW]


def test_starting_twice_is_refused(make_rank: Callable[..., RankActor], stub: ModuleType) -> None:
    rank = make_rank()
    with pytest.raises(RuntimeError, match="rank 0 was started twice"):
        rank.start(RankSpec(0, 1, 0, 0, "m", {}, "cpu", 1, stub.make))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no.such.module:make", "cannot be imported"),
        ("deepinfer_ray.fleet.engines:nothing", "has no attribute 'nothing'"),
        ("deepinfer_ray.fleet.engines", "write it as module:attribute"),
        ("deepinfer_ray.fleet.engines:DEFAULT_FACTORY", "is a str, not a function"),
    ],
)
def test_factory_paths_are_checked(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_factory(path)
    assert resolve_factory("deepinfer_ray.fleet.engines:resolve_factory") is resolve_factory
