"""How long a stop in order may take: `ray job stop` and drain notices set limits, Ctrl-C does not."""

from __future__ import annotations

import math
import os
import signal

import pytest
from stub_backend import StubBackend

from deepinfer_ray.job.signals import StopNow, StopSignals, stop_wait_s

SMALL = ("job.rows_per_part=10",)


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "60"}, 60.0),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 3.0),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "8"}, 8.0),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "soon"}, None),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "-1"}, 0.0),
    ],
)
def test_the_limit_is_that_of_ray_job_stop(environment, seconds):
    assert stop_wait_s(environment) == seconds


def test_finished_parts_get_the_last_quarter_of_the_time():
    clock = Clock()
    with StopSignals(wait_s=8, clock=clock) as signals:
        signals.arm()
        assert not signals.stopping
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stopping
        clock.now += 5.9
        assert not signals.time_is_up
        clock.now += 0.2
        assert signals.time_is_up


def test_at_most_ten_seconds_are_kept_for_writing():
    clock = Clock()
    signals = StopSignals(wait_s=math.inf, clock=clock)
    signals.announce(120)
    clock.now += 109
    assert not signals.time_is_up
    clock.now += 1
    assert signals.time_is_up


def test_a_signal_after_a_notice_is_the_first_one():
    with StopSignals(wait_s=60) as signals:
        signals.arm()
        signals.announce(60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested == signal.SIGTERM
        with pytest.raises(StopNow):
            os.kill(os.getpid(), signal.SIGTERM)


class Slow(StubBackend):
    """A row of more than 90 tokens does not end; after 40 results the process is asked to stop."""

    def __init__(self, ask):
        super().__init__(capacity=16, delay_s=0.01)
        self.ask = ask

    def poll(self, timeout_s):
        if self._given > 40 and self.ask is not None:
            ask, self.ask = self.ask, None
            ask()
        return [result for result in super().poll(timeout_s) if result.result.prompt_tokens < 90]

    def status(self):
        return {"restarts": 0, "notice_s": self.notice_s}

    notice_s = None


def test_ray_job_stop_does_not_wait_for_a_long_row_until_the_kill(job, write_rows, read_output, tmp_path):
    """One row of an open part never ends: the part is left, all others that were begun are committed."""
    prompts = [f"row number {row}" for row in range(200)]
    prompts[15] = "x" * 90
    path = write_rows(tmp_path / "in.parquet", {"prompt": prompts}, group=100)
    slow = Slow(lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome = job(input=path, stub=slow, sets=SMALL, signals=StopSignals(wait_s=1.0))
    assert outcome.exit_code == 143
    assert slow.closed == [False], "no time for a graceful end"
    committed = read_output(tmp_path / "out")
    assert outcome.summary.counts.rows == len(committed) >= 40
    assert not [row for row in committed if row["row_id"].endswith(":15")]
    assert len(committed) % 10 == 0
    assert outcome.summary.rows_left == 200 - len(committed)
    job(input=path, sets=SMALL)
    assert len({row["row_id"] for row in read_output(tmp_path / "out")}) == 200


def test_the_drivers_machine_is_announced_to_go(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": [f"row {row}" for row in range(3000)]}, group=100)
    slow = Slow(None)
    slow.delay_s, slow.notice_s = 0.2, 30.0
    outcome = job(input=path, stub=slow, sets=SMALL)
    assert outcome.exit_code == 143
    assert slow.closed == [True]
    committed = len(read_output(tmp_path / "out"))
    assert 0 < committed < 3000
    assert outcome.summary.rows_left == 3000 - committed


def test_a_backend_that_may_grow_is_told_at_once_that_a_stopping_run_needs_no_more(job, write_rows, tmp_path):
    """Rows that were read ahead still run, but are no reason to ask for another gang."""

    class Growing(Slow):
        told, stopped_at = [], None

        def expect(self, items):
            self.told.append(items)

    def ask():
        os.kill(os.getpid(), signal.SIGTERM)
        growing.stopped_at = len(growing.told)

    growing = Growing(ask)
    path = write_rows(tmp_path / "in.parquet", {"prompt": [f"row {row}" for row in range(400)]}, group=100)
    outcome = job(input=path, stub=growing, sets=("job.rows_per_part=100",))
    assert outcome.exit_code == 143
    assert outcome.summary.counts.rows == 100, "the open part was completed"
    before, after = growing.told[: growing.stopped_at], growing.told[growing.stopped_at :]
    assert all(items > 0 for items in before)
    assert len(after) >= 2, "at once, not only at the next look"
    assert set(after) == {0}
