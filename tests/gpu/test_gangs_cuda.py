"""Gangs on CUDA: ranks that are threads on one GPU, and where there are two GPUs, processes over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gangs
import numpy as np
import pytest

from deepinfer_ray.fleet.options import GANG_ENVIRONMENT
from deepinfer_ray.parallel.groups import Store

pytestmark = pytest.mark.gpu

TWO = pytest.mark.gpu2
"""Deselected where there is one GPU only (conftest.py)."""
SCRIPT = Path(gangs.__file__)
ENVIRONMENT = {**GANG_ENVIRONMENT, "CUDA_SCALE_LAUNCH_QUEUES": "4x", "OMP_NUM_THREADS": "1"}
"""Of a rank's process, as a fleet sets it."""


def run_ranks(
    out: Path, grid: str, numerics: str, ranks: list[int], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each rank found, a process on a GPU of its own each; rank -1: all requests on one."""
    store = Store("127.0.0.1", "cuda")
    files = [out / f"{numerics}-{grid}-{rank}" for rank in ranks]
    path = os.pathsep.join([str(SCRIPT.parents[2]), *sys.path])
    port, own = str(store.rendezvous.port), json.dumps(options)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), port, str(file), grid, numerics, own],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )
        for rank, file in zip(ranks, files, strict=True)
    ]
    assert [process.wait(120) for process in processes] == [0] * len(ranks)
    return [json.loads(file.read_text()) for file in files]


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for rank in ranks for key, value in rank["answers"].items()}


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def compare(
    one: dict[str, Any], many: dict[str, Any], figures: dict[str, Any], name: str, numerics: str
) -> None:
    """Tokens of greedy requests and log-probabilities; libraries choose kernels by the number of rows, so low
    bits may differ where the rows of a step do."""
    assert sorted(one) == sorted(many)
    greedy = [key for key in one if int(key) % 2 == 0]
    worst = max(
        float(np.abs(floats(one[key]["logprobs"]) - floats(many[key]["logprobs"])).max()) for key in greedy
    )
    figures[f"{name} {numerics}: requests with equal bits of {len(one)}"] = sum(
        one[key] == many[key] for key in one
    )
    figures[f"{name} {numerics}: largest difference of a log-probability"] = worst
    assert [one[key]["tokens"] for key in greedy] == [many[key]["tokens"] for key in greedy]
    assert worst < (1e-4 if numerics == "exact" else 0.2)


@pytest.mark.parametrize("grid", [(2, 1, 2, 0), (1, 2, 2, 0)])
@pytest.mark.parametrize("numerics", ["exact", "released"])
def test_ranks_on_one_gpu(
    figures: dict[str, Any], device: str, grid: tuple[int, int, int, int], numerics: str
) -> None:
    """Threads with exchanges in device memory; what may not wait for the device does not."""
    case = gangs.Case(grid, numerics=numerics, seed=11)

    def body(case: Any, groups: Any, rank: int) -> Any:
        return gangs.work(case, groups, rank, device)

    many = gangs.merged(gangs.on_threads(case, body))
    compare(gangs.alone(case, device), many, figures, f"threads {grid}", numerics)


@TWO
@pytest.mark.parametrize("grid", ["2,1,2,0", "1,2,1,0", "1,2,2,0", "1,1,1,2"])
@pytest.mark.parametrize("numerics", ["exact", "released"])
def test_two_gpus_give_the_results_of_one(
    tmp_path: Path, figures: dict[str, Any], grid: str, numerics: str
) -> None:
    one = run_ranks(tmp_path, grid, numerics, [-1], {})
    two = run_ranks(tmp_path, grid, numerics, [0, 1], {})
    compare(merged(one), merged(two), figures, f"gang {grid}", numerics)


@TWO
@pytest.mark.parametrize("numerics", ["exact", "released"])
def test_drafts_and_experts_that_move_between_two_gpus(
    tmp_path: Path, figures: dict[str, Any], numerics: str
) -> None:
    """Redundant experts, a rebalance every 5 steps with every slot hashed right after it, 3 drafts a step."""
    drafts = {"speculative": {"num_drafts": 3}}
    moves = {"eplb": {"interval": 5, "window": 5, "extra_experts": 2, "stat_interval": 5, "verify": True}}
    one = run_ranks(tmp_path, "2,1,2,0", numerics, [-1], drafts)
    two = run_ranks(tmp_path, "2,1,2,0", numerics, [0, 1], {**drafts, **moves})
    assert min(rank["rebalances"] for rank in two) >= 1
    figures[f"gang 2,1,2,0 {numerics}: rebalances over NCCL"] = two[0]["rebalances"]
    compare(merged(one), merged(two), figures, "gang 2,1,2,0, drafts and rebalances", numerics)
