"""Engine statistics: each figure on a made-up history, the log lines, the collector's policy."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.engine.flops import FlopModel
from deepinfer_ray.engine.gc_policy import GcPolicy
from deepinfer_ray.engine.mock import mock_config
from deepinfer_ray.engine.plan import CommitResult, StepPlan
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Sequence, Status, Terminal
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.stats import EngineStats, at_least, balance
from deepinfer_ray.engine.stats_log import StatsLog, memory_outside_torch, stats_line, timing_line
from deepinfer_ray.engine.timers import StepTimers

MODEL = FlopModel.build(mock_config())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduler(**settings: Any) -> Scheduler:
    return Scheduler(SchedulerSettings(num_blocks=17, max_seqs=8, max_model_len=512, **settings))


def plan(is_prompt: bool, q: list[int], k: list[int]) -> StepPlan:
    count = len(q)
    return StepPlan(
        step=1,
        is_prompt=is_prompt,
        rows=np.arange(1, count + 1),
        seq_ids=np.arange(count),
        q=np.array(q, np.int32),
        k=np.array(k, np.int32),
        last_chunk=np.ones(count, np.bool_),
        num_tokens=sum(q),
        remap=np.full(count, -1, np.int32),
        draft_read=np.zeros(count, np.int32),
        draft_write=np.zeros(count, np.int32),
    )


def commit(counts: list[int], verified: list[int] | None = None, accepted: list[int] | None = None) -> Any:
    rows = np.arange(1, len(counts) + 1)
    result = CommitResult(rows, np.zeros(len(counts), np.int32), np.array(counts, np.int32))
    if verified is not None:
        result.verified_each, result.accepted_each = np.array(verified), np.array(accepted)
    return result


def ending(status: Status, wait: float, prompt: int, output: int, cached: int = 0) -> Terminal:
    request = Request(np.zeros(prompt, np.int32), SamplingParams())
    sequence = Sequence(request, 1, prompt, None, arrival_time=1.0, cached_tokens=cached)
    sequence.first_token_time = 1.0 + wait
    return Terminal(sequence, status, np.zeros(output, np.int32), np.zeros(output, np.float32))


def history(stats: EngineStats, clock: Clock) -> None:
    """Three steps of 0.5 s with pauses of 0.5 s: a prompt step, two decode steps."""
    for step, commits in (
        (plan(True, [30, 10], [30, 60]), [commit([1, 1])]),
        (plan(False, [1, 1], [31, 61]), [commit([1, 1])]),
        (plan(False, [1, 1], [32, 62]), [commit([1, 1])]),
    ):
        started = clock.now
        clock.now += 0.5
        stats.record_step(step, commits, started)
        clock.now += 0.5


def test_rates_leave_out_the_first_step_and_reach_to_now() -> None:
    clock = Clock()
    stats = EngineStats(clock, flops=MODEL, peak_tflops=2.0, cp=2)
    history(stats, clock)  # the first step ended at 100.5, the last at 102.5, now is 103
    figures = stats.snapshot(scheduler())
    assert figures["steps"] == 3
    assert figures["prompt_steps"] == 1
    assert figures["steps_per_second"] == 2 / 2.5
    assert figures["completion_tokens_per_second"] == 4 / 2.5
    assert figures["prompt_tokens_per_second"] == 0  # its only prompt step is the first sample
    assert figures["prompt_tokens"] == 40
    assert (figures["prompt_seconds"], figures["decode_seconds"]) == (0.5, 1.0)
    assert figures["prompt_time_share"] == pytest.approx(1 / 3)
    work = MODEL.decode(np.array([1, 1, 1, 1]), np.array([31, 61, 32, 62]))
    assert figures["tflops"] == pytest.approx(work.total / 1e12 / 2.0 / 2)
    assert figures["attention_tflops"] == pytest.approx(work.attention / 1e12 / 2.0 / 2)
    assert figures["mfu"] == pytest.approx(work.total / 1e12 / 2.0 / 2 / 2.0)
    assert stats.pulse(scheduler())["mfu"] == figures["mfu"]
    for _ in range(40):  # a pulse looks at the last steps only
        clock.now += 1.0
        stats.record_step(plan(False, [1], [9]), [commit([1])], clock.now)
    step = MODEL.decode(np.array([1]), np.array([9]))
    assert stats.pulse(scheduler())["mfu"] == pytest.approx(step.total / 1e12 / 2 / 2.0)


def test_last_step() -> None:
    clock = Clock()
    stats = EngineStats(clock)
    history(stats, clock)
    figures = stats.snapshot(scheduler())
    assert figures["is_prompt"] is False
    assert figures["last_steps_per_second"] == 2
    assert figures["last_tokens_per_second"] == 4
    assert figures["batch_usage"] == 2 / 8
    assert figures["sum_seqlen_qxk"] == 32 + 62
    assert (figures["min_seqlen_k"], figures["max_seqlen_k"]) == (32, 62)
    stats.record_step(plan(True, [256, 256], [256, 300]), [], clock.now)
    figures = stats.snapshot(scheduler())
    assert figures["is_prompt"] is True
    assert figures["batch_usage"] == 512 / 4096


def test_device_that_is_not_known_has_no_mfu() -> None:
    clock = Clock()
    stats = EngineStats(clock, flops=MODEL)
    history(stats, clock)
    figures = stats.snapshot(scheduler())
    assert figures["mfu"] is None
    assert figures["tflops"] > 0
    assert "MFU=unknown" in stats_line(figures)
    assert "mfu" not in stats.pulse(scheduler())


def test_overlapped_steps_last_until_the_next_one_begins() -> None:
    clock = Clock()
    stats = EngineStats(clock)
    for goes_on in (True, True, False):
        started = clock.now
        clock.now += 0.25
        stats.record_step(plan(False, [1], [9]), [commit([1])], started, goes_on=goes_on)
        clock.now += 0.75
    assert stats.decode_seconds == 1.0 + 1.0 + 0.25
    clock.now += 60  # idle time belongs to no step
    stats.record_step(plan(False, [1], [9]), [commit([1])], clock.now)
    assert stats.decode_seconds == 2.25


def test_empty_steps_are_neither_prefill_nor_decode() -> None:
    clock = Clock()
    stats = EngineStats(clock)
    for is_prompt in (True, False):
        stats.record_step(plan(is_prompt, [], []), [], clock.now)
    figures = stats.snapshot(scheduler())
    assert (figures["steps"], figures["empty_steps"], figures["prompt_steps"]) == (2, 2, 0)
    assert figures["max_seqlen_k"] == 0


def test_acceptance_by_position() -> None:
    clock = Clock()
    stats = EngineStats(clock)
    wants = scheduler(num_drafts=3)
    stats.record_step(plan(False, [4, 4, 2], [9, 9, 9]), [commit([4, 2, 1], [3, 3, 1], [3, 1, 0])], clock.now)
    stats.record_step(plan(False, [4, 1, 1], [9, 9, 9]), [commit([1, 1, 1], [3, 0, 0], [0, 0, 0])], clock.now)
    figures = stats.snapshot(wants)
    assert figures["draft_accept_rates"] == [2 / 4, 1 / 3, 1 / 3]
    assert figures["draft_accept_rate"] == 4 / 10
    assert figures["mean_verified_length"] == 10 / 6
    assert (figures["verified_tokens"], figures["accepted_tokens"]) == (3, 0)
    assert figures["mean_confidence_error"] is None
    assert stats.pulse(wants)["accepted_lengths"] == [4, 1, 0, 1]
    assert stats.pulse(wants)["verified_lengths"] == [2, 1, 0, 3]
    assert at_least(np.array([4, 1, 0, 1]), 3) == [2, 1, 1]
    sure = commit([1], [2], [0])
    sure.confidence_error = 3.0
    stats.record_step(plan(False, [3], [9]), [sure], clock.now)
    assert stats.snapshot(wants)["mean_confidence_error"] == 3.0 / 12
    line = stats_line(stats.snapshot(wants))
    assert "nextn_accept_rate=[40.0%,25.0%,33.3%]" in line
    assert "avg_confidence_error=0.250" in line


def test_endings() -> None:
    stats = EngineStats(Clock())
    stats.record_terminal(ending(Status.STOPPED, 0.5, 100, 10, cached=60))
    stats.record_terminal(ending(Status.LENGTH_CAPPED, 1.5, 50, 30))
    stats.record_terminal(ending(Status.ABORTED, 99.0, 7, 3))
    figures = stats.snapshot(scheduler())
    assert (figures["ttft_mean_s"], figures["ttft_max_s"]) == (1.0, 1.5)
    assert (figures["mean_input_length"], figures["mean_output_length"]) == (75, 20)
    assert figures["prefill_caching_rate"] == 60 / 150
    assert figures["finished"] == {"stop": 1, "length": 1, "aborted": 1}
    assert "finished=3" in stats_line(figures)
    assert "aborted=1" in stats_line(figures)


def test_expert_load_balance() -> None:
    stats = EngineStats(Clock(), load_window=2)
    for load in ([9, 0], [3, 1], [2, 2]):
        stats.record_expert_load(np.array(load))
    assert stats.snapshot(scheduler())["expert_load_balance"] == (3 + 2) / (2 + 2)
    assert stats.pulse(scheduler())["expert_load_balance"] == 1.25
    assert "moe_lb=1.250" in stats_line(stats.snapshot(scheduler()))
    assert balance([]) is None


def test_half_prefilled_sequences_count_as_chunked() -> None:
    wants = scheduler(max_batched_tokens=128)
    for length in (300, 20):
        wants.add(Request(np.ones(length, np.int32), SamplingParams(max_tokens=1)))
    step = wants.schedule()
    assert step.q.tolist() == [128]
    figures = EngineStats(Clock()).snapshot(wants)
    assert (figures["running"], figures["waiting"], figures["chunked"]) == (0, 1, 0)  # still in the step
    from deepinfer_ray.engine.plan import StepOutputs

    wants.commit(step, StepOutputs(np.zeros(1, np.int32)))
    figures = EngineStats(Clock()).snapshot(wants)
    assert (figures["waiting"], figures["chunked"]) == (2, 1)
    assert figures["kv_cache_usage"] > 0


# ---- log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "deepinfer_ray.stats"):
        yield caplog


def test_a_line_every_interval_on_a_thread_of_its_own(lines: pytest.LogCaptureFixture) -> None:
    clock, slept = Clock(), []
    stats = EngineStats(clock, flops=MODEL)
    timers = StepTimers()
    memory = iter([5 << 20, 5 << 20, 9 << 20])
    log = StatsLog(
        2, rank=11, memory_interval=2, memory=lambda: next(memory), sleep=lambda s: slept.append(s)
    )
    for _ in range(16):
        with timers.span("forward", 1):
            pass
        stats.record_step(plan(False, [1], [5]), [commit([1])], clock.now)
        if log.due(stats.steps):
            log.put(stats.capture(scheduler()), timers.take())
    log.close()
    texts = [record.getMessage() for record in lines.records]
    assert sum(text.startswith("[stats] rank=11 steps=") for text in texts) == 8 - log.dropped
    assert any("[cpu] ms: forward=cur:" in text and "calls:2" in text for text in texts)
    assert slept == [0.015] * (8 - log.dropped)
    assert {record.threadName for record in lines.records} == {"stats-log"}
    assert threading.current_thread().name != "stats-log"
    outside = [text for text in texts if "[nccl_memory]" in text]  # from step 10 on, only when it changed
    assert outside == [f"[nccl_memory] rank=11 MiB outside torch: {mib}" for mib in (5, 9)]


def test_logging_can_be_off() -> None:
    assert not any(StatsLog(0).due(step) for step in range(1, 300))
    log = StatsLog(0)
    log.close()
    log.close()


def test_a_slow_writer_drops_lines_and_delays_nobody() -> None:
    gate = threading.Event()
    log = StatsLog(1, sleep=lambda _: gate.wait(5) and None)
    stats = EngineStats(Clock())
    for _ in range(20):
        log.put(stats.capture(scheduler()), StepTimers().take())
    assert log.dropped >= 20 - 9
    gate.set()
    log.close()


def test_timing_line() -> None:
    times = iter([0.0, 0.002, 0.010, 0.014])
    timers = StepTimers(clock=lambda: next(times))
    for step in (1, 2):
        with timers.span("commit", step):
            pass
    taken = timers.take()
    assert (
        timing_line("cpu", taken.cpu, 0.060)
        == "[cpu] ms: commit=cur:4.000,mean:3.000,max:4.000,calls:2,share:10.0%"
    )
    assert taken.cuda == {}
    assert timers.take().cpu == {}


def test_memory_outside_torch_is_a_figure_of_gpus() -> None:
    assert memory_outside_torch(torch.device("cpu")) is None


# ---- collector


def test_garbage_is_collected_by_steps_in_a_process_of_a_rank() -> None:
    gc.enable()
    policy = GcPolicy(3)
    policy.step()
    assert gc.isenabled()  # somebody else's process
    policy.own_process()
    try:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        for _ in range(7):
            policy.step()
        assert policy.collections == 2
    finally:
        policy.release_process()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    policy.release_process()


def test_ranks_that_only_decode_collect_less_often() -> None:
    assert GcPolicy(1000, "completion").interval == 10_000
    assert GcPolicy(1000, "normal").interval == 1000
