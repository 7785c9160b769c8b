"""Whole jobs over gangs of several ranks: their rows are those of one rank, whatever experts do meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.config.load import load_config
from deepinfer_ray.fleet.backend import Backend
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.options import FleetOptions
from deepinfer_ray.job.generate import generate
from deepinfer_ray.job.signals import StopSignals

pytestmark = pytest.mark.ray

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
ROWS = 24
EVERY = 20
"""Steps between two rebalances."""


def write_input(path: Path) -> Path:
    """Greedy and seeded rows of unequal lengths."""
    random = np.random.default_rng(3)
    ids = [random.integers(3, 500, int(random.integers(1, 50))).tolist() for _ in range(ROWS)]
    own = [
        {
            "temperature": float(row % 2),
            "max_tokens": 10 + row,
            "logprobs": 3,
            "prompt_logprobs": None if row % 3 else 0,
        }
        for row in range(ROWS)
    ]
    pq.write_table(
        pa.table({"id": [f"r{row}" for row in range(ROWS)], "ids": ids, "own": list(map(json.dumps, own))}),
        path,
    )
    return path


def run_job(input_: Path, output: Path, grid: tuple[int, int, int, int]) -> dict[str, dict[str, Any]]:
    """Rows by id, without `attempts` and `cached_tokens`. grid: D, C, E and the Engram world N."""
    dp, cp, ep, engram = grid
    flags = {
        "--model": str(TINY),
        "--input": [str(input_)],
        "--output": str(output),
        "--id-column": "id",
        "--token-ids-column": "ids",
        "--sampling-column": "own",
        "--max-num-seqs": 4,
        "--max-model-len": 256,
        "--device": "cpu",
        "--dp": dp,
        "--cp": cp,
        "--ep": ep,
        "--engram": engram,
    }
    sets = ["cache.cpu_budget_bytes=67108864", "job.rows_per_part=8"]
    if ep > 1:
        sets += [
            f"eplb.interval={EVERY}",
            f"eplb.window={EVERY}",
            f"eplb.extra_experts={ep}",
            "eplb.verify=true",
            "eplb.stat_interval=10",
        ]

    def make(engine: Any, model: Any) -> Backend:
        options = FleetOptions(cpus_per_rank=1 / (dp * cp * max(1, engram)))
        return RayFleet(TINY, engine, engine.parallel.replicas, device="cpu", options=options)

    with StopSignals() as signals:
        outcome = generate(load_config((), sets, flags, {}), make, lambda line: None, signals)
    assert outcome.exit_code == 0
    table = pq.read_table(output).drop_columns(["attempts", "cached_tokens"])
    return {row["row_id"]: row for row in table.to_pylist()}


def rank_0(output: Path) -> list[dict[str, Any]]:
    """What the job kept of rank 0's statistics."""
    lines = [
        json.loads(line)
        for file in (output / "_deepinfer" / "stats").glob("run-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return [line for line in lines if line.get("who") == "0"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("input") / "in.parquet")


@pytest.fixture(scope="module")
def alone(local_ray: Any, source: Path) -> dict[str, dict[str, Any]]:
    """The rows of one rank."""
    rows = run_job(source, source.parent / "out", (1, 1, 1, 0))
    assert len(rows) == ROWS
    return rows


def test_a_job_whose_experts_move_every_twenty_steps_gives_the_rows_of_one_rank(
    cluster: Any, source: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """(D, C, E) = (2, 1, 2), redundant experts; `eplb.verify` hashes every slot right after each move."""
    assert run_job(source, tmp_path / "out", (2, 1, 2, 0)) == alone
    lines = rank_0(tmp_path / "out")
    assert sum(line["sums"].get("rebalances", 0) for line in lines) >= 3
    balances = [line["means"].get("expert_load_balance") for line in lines]
    assert [balance for balance in balances if balance is not None and 1 < balance < 2], "the report's figure"


@pytest.mark.soak
@pytest.mark.parametrize(
    "grid", [(1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 4, 0), (1, 2, 1, 0), (2, 2, 2, 0), (3, 1, 3, 0), (1, 1, 1, 2)]
)
def test_jobs_over_all_grids(
    cluster: Any,
    source: Path,
    alone: dict[str, dict[str, Any]],
    tmp_path: Path,
    grid: tuple[int, int, int, int],
) -> None:
    """Tokens and log-probabilities of prompt and completion, bit for bit."""
    assert run_job(source, tmp_path / "out", grid) == alone
