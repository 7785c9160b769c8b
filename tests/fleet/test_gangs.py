"""Gangs of several ranks as real actors over gloo: the bits of one process, deaths, silence, two fleets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.load import from_options
from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.errors import CheckpointError
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.generate import run_requests
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.fleet.watch import Patience

pytestmark = pytest.mark.ray

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
BASE: dict[str, Any] = {
    "max_model_len": 256,
    "scheduler": {"max_seqs": 4, "max_batched_tokens": 256},
    "cache.cpu_budget_bytes": 64 << 20,
}


def config(**sizes: Any) -> EngineConfig:
    parallel = {"timeout_s": 20.0} | {key: sizes.pop(key) for key in ("engram",) if key in sizes}
    return from_options(EngineConfig, {**BASE, "parallel": parallel, **sizes})


def requests(count: int, max_tokens: int = 8, seed: int = 0) -> list[Request]:
    random = np.random.default_rng(seed)
    return [
        Request(
            random.integers(3, 500, int(random.integers(1, 60))).astype(np.int32),
            SamplingParams(temperature=index % 2, max_tokens=max_tokens, logprobs=2, ignore_eos=True),
            seed=index,
            request_id=index,
        )
        for index in range(count)
    ]


def bits(results: list[RequestResult]) -> list[Any]:
    return [
        (r.error, r.token_ids.tolist(), None if r.logprobs is None else r.logprobs.tolist(), r.top_logprobs)
        for r in results
    ]


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., list[Any]]]:
    """The results of one process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank

    def run(work: list[Request], **options: Any) -> list[Any]:
        engine = build_engine(TINY, config(**options), "cpu")
        for request in work:
            engine.add(request)
        by_id = {result.request_id: result for result in engine.run()}
        engine.close()
        return bits([by_id[request.request_id] for request in work])

    yield run
    torch.set_num_threads(before)


def fleet_of(engine: EngineConfig, dp: int, **options: Any) -> RayFleet:
    return RayFleet(TINY, engine, dp, device="cpu", options=FleetOptions(**{"cpus_per_rank": 0.5, **options}))


def test_the_life_of_a_gang(
    cluster: Any, alone: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """(D, C, E) = (2, 1, 2) with redundant experts and a rebalance every 5 steps: the bits of one process
    before and after an idle time, beside a second fleet on the cluster, when a rank is killed in the middle
    of the work and when one is stopped (alive for the machine, silent for the fleet).

    The second fleet is (1, 2, 2): its driver gets rows, its follower repeats them."""
    balanced = config(dp=2, ep=2, eplb={"interval": 5, "window": 5, "extra_experts": 2, "verify": True})
    patience = Patience(ping_after=0.5, silent=3.0)
    short, long = requests(10), requests(12, max_tokens=40)
    expected, expected_long = alone(short), alone(long)
    with fleet_of(balanced, 2, patience=patience) as fleet:
        assert bits(run_requests(fleet, short)) == expected
        assert [rank["gang"] for rank in fleet.status()["ranks"]] == [0, 0]
        assert all(rank["done"] for rank in fleet.status()["ranks"])
        with fleet_of(config(dp=1, cp=2, ep=2), 1) as other:
            assert bits(run_requests(other, short)) == expected
            assert [bool(rank["done"]) for rank in other.status()["ranks"]] == [True, False]
            assert bits(run_requests(fleet, short)) == expected
        assert bits(run_requests(fleet, short)) == expected, "the other fleet's end is not this one's"
        assert fleet.restarts == 0

        for number, blow in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
            pid = fleet.status()["ranks"][1]["pid"]
            timer = threading.Timer(0.2, os.kill, (pid, blow))
            timer.start()
            started = time.monotonic()
            assert bits(run_requests(fleet, long)) == expected_long
            timer.join()
            assert fleet.restarts == number
            assert {rank["generation"] for rank in fleet.status()["ranks"]} == {number}
            assert time.monotonic() - started < 100
    killed, stopped = [r.getMessage() for r in caplog.records if "died with" in r.getMessage()]
    assert killed.startswith("rank 1 (pid ")
    assert stopped.startswith(f"rank 1 (pid {pid} on "), "the silent rank is blamed, not the one that waits"
    assert "no answer for" in stopped
    assert "rank 0 (pid" in stopped.split("the ranks of its gang:")[1]


def test_four_ranks_with_drafts_and_replayed_prompts(cluster: Any, alone: Callable[..., list[Any]]) -> None:
    """(D, C, E) = (2, 2, 4): two drivers and their followers."""
    options = {
        "prefill": {"truncation_mode": "compact", "keep_tokens": 24},
        "speculative": {"num_drafts": 3},
    }
    work = requests(8)
    with fleet_of(config(dp=2, cp=2, ep=4, **options), 2, cpus_per_rank=0.25) as fleet:
        assert bits(run_requests(fleet, work)) == alone(work, **options)
        ranks = fleet.status()["ranks"]
    assert [bool(rank["done"]) for rank in ranks] == [True, False, True, False]


def test_an_error_of_the_model_is_told_and_not_its_echo(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    fleet = RayFleet(tmp_path, config(dp=2, ep=2), 2, device="cpu", options=FleetOptions(cpus_per_rank=0.5))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        fleet.start()
