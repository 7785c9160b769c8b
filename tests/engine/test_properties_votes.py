"""Random schedules of 2 to 4 ranks: nobody hangs, all take the same steps, every request ends once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import lockstep_runs
import pytest

from deepinfer_ray.engine.phase_vote import InProcessGroup

SCRIPT = Path(lockstep_runs.__file__)
BATCH = 50


def run_on_threads(seed: int) -> list[str]:
    size = lockstep_runs.scenario(seed).size
    group = InProcessGroup(size)
    phases = [""] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            phases[rank] = lockstep_runs.run_rank(seed, rank, group.member(rank))
        except BaseException as error:
            failures.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return phases


def check_batch(first: int) -> None:
    for seed in range(first, first + BATCH):
        phases = run_on_threads(seed)
        assert len(set(phases)) == 1, f"seed {seed}: ranks took different steps"


@pytest.mark.parametrize("first", range(0, 500, BATCH))
def test_ranks_take_the_same_steps(first: int) -> None:
    check_batch(first)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(500, 10_500, BATCH))
def test_ranks_take_the_same_steps_soak(first: int) -> None:
    check_batch(first)


def check_gloo(tmp_path: Path, first: int, count: int) -> None:
    world = 4
    out = tmp_path / "phases"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(world), str(tmp_path / "store"), str(first), str(count), str(out)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    phases = [json.loads((tmp_path / f"phases.{rank}").read_text()) for rank in range(world)]
    for seed in range(first, first + count):
        size = lockstep_runs.scenario(seed).size
        taken = {phases[rank][str(seed)] for rank in range(size)}
        assert len(taken) == 1, f"seed {seed}: ranks took different steps"
        assert taken == set(run_on_threads(seed)), f"seed {seed}: gloo and threads took different steps"


def test_real_gloo_ranks_take_the_same_steps(tmp_path: Path) -> None:
    check_gloo(tmp_path, 0, 20)


@pytest.mark.soak
def test_real_gloo_ranks_take_the_same_steps_soak(tmp_path: Path) -> None:
    check_gloo(tmp_path, 20, 200)
