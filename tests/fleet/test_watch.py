"""Verdicts on silent and stuck ranks, on an invented clock."""

from __future__ import annotations

from deepinfer_ray.fleet.messages import Heartbeat
from deepinfer_ray.fleet.watch import Patience, Watch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(phase: str = "step", age_s: float = 0.0, step: int = 7) -> Heartbeat:
    return Heartbeat(rank=0, generation=0, phase=phase, step=step, age_s=age_s, in_flight=1)


def watch() -> tuple[Watch, Clock]:
    clock = Clock()
    return Watch(Patience(ping_after=5, silent=30, step=300), clock), clock


def pass_time(watcher: Watch, clock: Clock, seconds: float) -> None:
    """The driver looks at its mail once a second."""
    for _ in range(int(seconds)):
        clock.now += 1
        watcher.looking()


def test_silence_leads_to_a_ping_and_then_to_a_verdict() -> None:
    watcher, clock = watch()
    watcher.looking()
    watcher.heard(0, beat())
    pass_time(watcher, clock, 4)
    assert not watcher.wants_ping(0)
    pass_time(watcher, clock, 2)
    assert watcher.wants_ping(0)
    assert watcher.verdict(0) is None
    pass_time(watcher, clock, 25)
    verdict = watcher.verdict(0)
    assert verdict is not None
    assert "no answer for 31 s (limit 30 s), last seen in phase step, step 7" in verdict


def test_an_answer_is_a_sign_of_life() -> None:
    watcher, clock = watch()
    watcher.looking()
    watcher.heard(0, beat())
    for _ in range(10):
        pass_time(watcher, clock, 20)
        watcher.heard(0)
    assert watcher.verdict(0) is None


def test_the_drivers_own_absence_is_nobodys_silence() -> None:
    watcher, clock = watch()
    watcher.looking()
    watcher.heard(0, beat())
    clock.now += 3600  # the driver was stopped, or wrote for an hour
    watcher.looking()
    assert watcher.verdict(0) is None
    assert not watcher.wants_ping(0)
    pass_time(watcher, clock, 31)
    assert watcher.verdict(0) is not None


def test_a_step_that_never_ends_is_told_apart_from_idleness() -> None:
    watcher, _ = watch()
    watcher.heard(0, beat("idle", age_s=10_000))
    assert watcher.verdict(0) is None
    watcher.heard(0, beat("step", age_s=301))
    verdict = watcher.verdict(0)
    assert verdict is not None
    assert "one step takes longer than 300 s" in verdict
    assert "parallel.step_timeout_s" in verdict


def test_a_new_actor_starts_with_a_clean_record() -> None:
    watcher, clock = watch()
    watcher.looking()
    watcher.heard(0, beat(age_s=301))
    watcher.forget(0)
    assert watcher.beat(0) is None
    pass_time(watcher, clock, 100)
    assert watcher.verdict(0) is None, "a rank that is not up yet is not watched"
