"""Figures of the engine on a CUDA device with the torch reference operations: measured, not promised."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.model.synthetic import make_checkpoint

pytestmark = pytest.mark.gpu

OUTPUT = 32


@pytest.fixture(scope="module")
def tiny_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny-gpu") / "model", "tiny-gpu", seed=0)


def measure(engine: Engine, sequences: int, prompt: int) -> tuple[dict[str, float], list[list[int]]]:
    """Tokens a second of the decode steps after the first few, median step; the tokens themselves."""
    random = np.random.default_rng(0)
    for number in range(sequences):
        ids = random.integers(3, 490, prompt).astype(np.int32)
        engine.add(
            Request(ids, SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True), seed=number)
        )
    results, times, tokens = [], [], 0
    start = time.perf_counter()
    while engine.has_unfinished():
        before = time.perf_counter()
        results += engine.step()
        plan = engine.loop.last_plan
        assert plan is not None
        if not plan.is_prompt and plan.num_seqs == sequences:
            times.append(time.perf_counter() - before)
            tokens += sequences
    whole = time.perf_counter() - start
    timed = times[4:-2]
    ids = [result.token_ids.tolist() for result in sorted(results, key=lambda result: result.request_id)]
    return {
        "decode tokens/s": round(sequences * len(timed) / sum(timed), 1),
        "ms a decode step, median": round(1e3 * float(np.median(timed)), 2),
        "tokens/s of the whole run, prompts included": round(sequences * OUTPUT / whole, 1),
    }, ids


@pytest.mark.parametrize(("name", "sequences", "prompt"), [("tinyB", 64, 48), ("tiny-gpu", 64, 128)])
def test_tokens_a_second_plain_and_overlapped(
    rank_of: Callable[..., Any],
    figures: dict[str, Any],
    tiny_gpu: Path,
    name: str,
    sequences: int,
    prompt: int,
) -> None:
    rank = rank_of(tiny_gpu if name == "tiny-gpu" else name, "released")
    settings = {"num_blocks": 3 * sequences, "max_seqs": sequences}
    measure(rank.engine(zos=True, **settings), sequences, prompt)  # allocations and library handles
    plain, tokens = measure(rank.engine(zos=False, **settings), sequences, prompt)
    overlapped, same = measure(rank.engine(zos=True, **settings), sequences, prompt)
    assert same == tokens
    figures[f"speed {name} released, {sequences} sequences"] = {"plain": plain, "overlapped": overlapped}
    assert min(plain["decode tokens/s"], overlapped["decode tokens/s"]) > 0
