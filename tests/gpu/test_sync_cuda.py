"""A decode step waits for the device once: where the results of the step before are read.

Four witnesses: torch's debug mode raises at every other wait that it knows; a host that launches a whole step
while the device sleeps cannot have waited at all; the profiler's record of the driver's calls; a graph, whose
capture no wait survives, replayed over the metadata of later steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.ops.sync_guard import allow_sync, forbid_sync

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}
WARM_STEPS = 6
SEQUENCES = 10


def decoding(rank: Any, params: dict[str, Any], *, model: Any = None, **settings: Any) -> Engine:
    """An engine whose requests are all decoding, well warmed up."""
    engine = rank.engine(model=model, **settings)
    random = np.random.default_rng(3)
    for number in range(SEQUENCES):
        prompt = random.integers(3, 509, int(random.integers(5, 60))).astype(np.int32)
        engine.add(Request(prompt, SamplingParams(max_tokens=64, ignore_eos=True, **params), seed=number))
    for _ in range(WARM_STEPS):
        engine.step()
    assert engine.loop.last_plan is not None
    assert not engine.loop.last_plan.is_prompt
    return engine


@contextmanager
def every_wait_raises() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_the_guard_raises_and_allows() -> None:
    value = torch.ones(3, device="cuda")
    with forbid_sync():
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            value.sum().item()
        with allow_sync():
            assert value.sum().item() == 3
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            value.nonzero()
    assert value.sum().item() == 3


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("mode", ["exact", "released"])
def test_whole_decode_steps_under_the_debug_mode(
    rank_of: Callable[..., Any], mode: str, zos: bool, params: dict[str, Any]
) -> None:
    engine = decoding(rank_of("tinyB", mode), params, zos=zos)
    with every_wait_raises():
        for _ in range(8):
            engine.step()


def test_a_step_that_reads_the_device_is_caught(rank_of: Callable[..., Any]) -> None:
    rank = rank_of("tinyB")

    class Reading:
        """A model that looks at a value of the device."""

        config, max_positions, logits = rank.model.config, rank.model.max_positions, rank.model.logits

        @staticmethod
        def forward(meta: Any, pools: Any) -> Any:
            assert meta.positions.max().item() >= 0
            return rank.model.forward(meta, pools)

    request = Request(np.arange(3, 20, dtype=np.int32), SamplingParams(max_tokens=4), seed=0)
    engine = rank.engine(model=Reading())
    engine.add(request)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        engine.run()
    switched_off = rank.configured("debug", disable_sync_guard=True).engine(model=Reading())
    switched_off.add(request)
    assert [result.error for result in switched_off.run()] == [None]


def sleeping_cycles(seconds: float) -> int:
    """How long the device must be told to sleep; the clock is measured."""
    probe = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        torch.cuda._sleep(probe)
        end.record()
        end.synchronize()
    return int(probe * seconds * 1e3 / start.elapsed_time(end))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_step_is_launched_while_the_device_sleeps(
    rank_of: Callable[..., Any], figures: dict[str, Any], params: dict[str, Any]
) -> None:
    """Few Sinkhorn iterations, so that all launches of a step fit the queue (a full one blocks as well)."""
    rank = rank_of("tinyB", "exact", 2)
    cycles = sleeping_cycles(0.3)

    def ahead(engine: Engine) -> tuple[bool, float]:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        awake = torch.cuda.Event()
        awake.record()
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        answer = not awake.query(), seconds
        awake.synchronize()
        return answer

    steps = [ahead(engine) for engine in [decoding(rank, params, zos=True)] for _ in range(6)]
    assert [was_ahead for was_ahead, _ in steps] == [True] * 6, steps
    name = "greedy" if params is GREEDY else "sampled"
    host = float(np.median([seconds for _, seconds in steps]))
    figures[f"sync {name}: host ms of an overlapped step, launched while the device slept 300 ms"] = round(
        1e3 * host, 2
    )
    # The plain loop reads its own results within the step: it must have waited.
    plain = decoding(rank, params, zos=False)
    assert [ahead(plain)[0] for _ in range(2)] == [False] * 2


def driver_calls(engine: Engine, steps: int) -> tuple[Counter[str], Counter[str]]:
    """(calls of the CUDA runtime inside `steps` steps, copies on the device in all)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            with torch.profiler.record_function("one decode step"):
                engine.step()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() == "one decode step" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    assert len(spans) == steps
    calls: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for event in events:
        name = event.name()
        if name.startswith("Memcpy"):
            copies[name] += 1
        elif name.startswith(("cuda", "cu")) and any(a <= event.start_ns() <= b for a, b in spans):
            calls[name] += 1
    return calls, copies


@pytest.mark.parametrize(("params", "uploads"), [(GREEDY, 1), (SAMPLED, 2)], ids=["greedy", "sampled"])
def test_what_the_driver_was_asked(
    rank_of: Callable[..., Any], figures: dict[str, Any], params: dict[str, Any], uploads: int
) -> None:
    steps = 8
    engine = decoding(rank_of("tinyB"), params, zos=True)
    calls, copies = driver_calls(engine, steps)
    waits = {name: count for name, count in calls.items() if "Synchronize" in name}
    name = "greedy" if params is GREEDY else "sampled"
    figures[f"sync {name}: calls of {steps} overlapped steps that wait"] = waits
    figures[f"sync {name}: copies of {steps} overlapped steps"] = {
        kind: count for kind, count in sorted(copies.items()) if "DtoD" not in kind
    }
    launches = sum(count for call, count in calls.items() if "LaunchKernel" in call)
    figures[f"sync {name}: kernel launches a step"] = launches // steps
    assert waits == {"cudaEventSynchronize": steps}
    assert not [kind for kind in copies if "Pageable" in kind], copies
    assert sum(count for kind, count in copies.items() if "HtoD" in kind) == uploads * steps
    assert sum(count for kind, count in copies.items() if "DtoH" in kind) == steps
    assert not [call for call in calls if "Malloc" in call or "HostAlloc" in call], calls


class Recording:
    """A model that keeps the last decode metadata and what came out."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.max_positions = model, model.config, model.max_positions
        self.meta: Any = None
        self.hidden: Any = None

    def forward(self, meta: Any, pools: Any) -> Any:
        out = self.model.forward(meta, pools)
        if not meta.is_prefill:
            self.meta, self.hidden = meta, out.hidden
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_a_captured_step_replays_over_the_metadata_of_later_ones(
    rank_of: Callable[..., Any], figures: dict[str, Any], mode: str
) -> None:
    """The metadata of every step lies at the same addresses, in the same shapes: one graph serves them."""
    rank = rank_of("tinyB", mode)
    model = Recording(rank.model)
    engine = decoding(rank, GREEDY, model=model, zos=False)
    meta, pools = model.meta, engine.pools
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            meta.expand()
            rank.model.forward(meta, pools)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            meta.expand()
            replayed = rank.model.forward(meta, pools).hidden
        for _ in range(12):
            engine.step()
            assert model.meta.input_ids.data_ptr() == meta.input_ids.data_ptr()
            want = model.hidden[:SEQUENCES].clone()  # what placeholders behind them read is anything
            graph.replay()  # stores again what the step stored
            assert torch.equal(replayed[:SEQUENCES], want)
            assert want.abs().max() > 0
        figures[f"decode forward tinyB {mode}, 16 rows: ms eager"] = milliseconds(
            lambda: rank.model.forward(meta, pools), 5
        )
        figures[f"decode forward tinyB {mode}, 16 rows: ms as a graph"] = milliseconds(graph.replay, 30)


def milliseconds(work: Callable[[], Any], count: int) -> float:
    """Mean time of one call, back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) / count, 3)
