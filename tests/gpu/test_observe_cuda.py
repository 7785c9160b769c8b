"""What is seen of an engine on a device: its own time of each part, MFU, memory, a profile with kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.flops import peak_tflops
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.stats_log import memory_outside_torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def running(rank_of: Callable[..., Any]) -> Engine:
    """Eight sequences, twenty steps behind them."""
    engine: Engine = rank_of("tinyB").engine(zos=True)
    random = np.random.default_rng(3)
    for number in range(8):
        prompt = random.integers(3, 509, 20).astype(np.int32)
        engine.add(Request(prompt, SamplingParams(max_tokens=80, ignore_eos=True), seed=number))
    for _ in range(20):
        engine.step()
    return engine


def test_device_time_of_a_step(running: Engine, figures: dict[str, Any]) -> None:
    torch.cuda.synchronize()
    taken = running.loop.timers.take()
    assert set(taken.cuda) == {"forward", "sample"}
    assert set(taken.cpu) >= {"schedule", "prepare", "forward", "sample", "wait", "commit"}
    for name, timing in taken.cuda.items():
        assert timing.calls == 20
        assert 0 < timing.mean < 1
        figures[f"observe tinyB exact, 8 sequences: device ms of {name}, mean"] = round(1e3 * timing.mean, 3)
    assert running.loop.timers.take().cuda == {}


def test_mfu_is_known_where_the_peak_is(running: Engine) -> None:
    name = torch.cuda.get_device_name()
    stats = running.stats
    assert stats["tflops"] > 0
    if peak_tflops(name) is None:
        assert stats["mfu"] is None
    else:
        assert 0 < stats["mfu"] < 0.01  # a tiny model
        assert running.pulse()["mfu"] == pytest.approx(stats["mfu"], rel=0.5)


def test_memory_outside_torch() -> None:
    outside = memory_outside_torch(torch.device("cuda"))
    assert outside is not None
    assert outside > 50 << 20  # at least the driver's own context


def test_a_profile_shows_kernels(running: Engine, tmp_path: Path) -> None:
    future = running.profile(3, tmp_path)
    for _ in range(4):
        running.step()
    events = json.loads(future.result(60).read_text())["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) > 100
    assert sum(event.get("name", "").startswith("forward ") and "dur" in event for event in events) >= 3
