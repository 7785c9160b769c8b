"""The rank engine on a CUDA device: plain and overlapped loop give the same bits, and the CPU's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, SamplingParams

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "prompt_logprobs": 0},
    {"temperature": 0.8, "top_k": 40, "logprobs": 1, "repetition_penalty": 1.1, "min_tokens": 3},
    {"temperature": 0.0, "logit_bias": {7: 2.0}},
]
LENGTHS = (1, 2, 17, 40, 63, 90, 126, 128, 5, 200, 33)


def run(
    engine: Engine,
    kinds: list[dict[str, Any]] = KINDS,
    head: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Any]:
    """Everything of every result, in request order. head: tokens that all prompts begin with."""
    random = np.random.default_rng(11)
    shared = random.integers(3, 509, head)
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=int(random.integers(4, 20)), **kinds[number % len(kinds)])
        prompt = np.concatenate([shared, random.integers(3, 509, length)])[:200]
        engine.add(Request(prompt.astype(np.int32), params, seed=number))
    results = sorted(engine.run(), key=lambda result: result.request_id)
    engine.check_integrity()
    assert [result.error for result in results] == [None] * len(lengths)
    return [
        (
            result.token_ids.tolist(),
            [] if result.logprobs is None else result.logprobs.tolist(),
            None if result.prompt_logprobs is None else result.prompt_logprobs.tolist(),
            result.top_logprobs,
            result.finish_reason,
            result.cached_tokens,
        )
        for result in results
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_seqs": 3}, {"max_batched_tokens": 33}, {"num_blocks": 9, "max_seqs": 9}],
    ids=["all at once", "queue", "chunks", "preempted"],
)
@pytest.mark.parametrize(("kind", "mode"), [("tinyB", "exact"), ("tinyB", "released"), ("tinyA", "released")])
def test_overlapped_equals_plain(
    rank_of: Callable[..., Any], kind: str, mode: str, settings: dict[str, Any]
) -> None:
    rank = rank_of(kind, mode)
    plain = run(rank.engine(zos=False, **settings))
    overlapped = run(rank.engine(zos=True, **settings))
    assert overlapped == plain
    assert sum(len(result[0]) for result in plain) > 40


@pytest.mark.parametrize("max_seqs", [40, 64])
@pytest.mark.parametrize("mode", ["exact", "released"])
def test_overlapped_equals_plain_in_large_batches(
    rank_of: Callable[..., Any], mode: str, max_seqs: int
) -> None:
    """Sequences end and begin all the time, and the two loops never run the same batches: products choose by
    their number of rows how they add up, so all steps must have one number."""
    lengths = tuple(np.random.default_rng(5).integers(1, 120, 90).tolist())
    rank = rank_of("tinyB", mode).configured("runtime", batch_invariant=True)
    settings = {
        "max_seqs": max_seqs,
        "num_blocks": 200,
        "prefill_all_interval": 3,
        "max_batched_tokens": 5120,
    }
    plain = run(rank.engine(zos=False, **settings), lengths=lengths)
    overlapped = run(rank.engine(zos=True, **settings), lengths=lengths)
    different = [number for number, (a, b) in enumerate(zip(plain, overlapped, strict=True)) if a != b]
    assert not different
    assert len(plain) == 90


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_overlapped_equals_plain_with_kept_prefixes(rank_of: Callable[..., Any], mode: str) -> None:
    """Window and compression states are copied from slot to slot between steps."""
    settings = {"max_seqs": 3, "prefix_snapshots": 4, "prefix_min_saved_tokens": 1}
    no_scores = [{**kind, "prompt_logprobs": None} for kind in KINDS]
    rank = rank_of("tinyB", mode)
    plain = run(rank.engine(zos=False, **settings), no_scores, head=135)
    overlapped = run(rank.engine(zos=True, **settings), no_scores, head=135)
    assert overlapped == plain
    assert sum(result[-1] for result in plain) >= 128 * 5


def test_the_engine_of_a_directory_runs_on_the_device(device: str) -> None:
    """Capacity from the device's memory, weights and caches there, results like everybody's."""
    config = EngineConfig.model_validate({"scheduler": {"max_seqs": 4, "max_model_len": 256}})
    engine = build_engine(GOLDEN / "tinyB", config, device)
    assert engine.pools.device.type == device
    assert engine.pools.num_blocks >= 4 * 2 + 1
    assert all(parameter.device.type == device for parameter in engine.model.parameters())
    first = run(engine)
    assert run(engine) == first
    assert engine.stats["steps"] > 20


@pytest.mark.parametrize("kind", ["tinyB", "tinyA"])
def test_exact_greedy_tokens_are_those_of_the_cpu(
    rank_of: Callable[..., Any], figures: dict[str, Any], kind: str
) -> None:
    greedy = [{"temperature": 0.0, "logprobs": 0}]
    cuda = run(rank_of(kind, "exact").engine(zos=True), greedy)
    cpu = run(rank_of(kind, "exact", on="cpu").engine(zos=True), greedy)
    assert [result[0] for result in cuda] == [result[0] for result in cpu]
    worst = max(abs(np.subtract(a[1], b[1])).max() for a, b in zip(cuda, cpu, strict=True))
    figures[f"engine {kind} exact: worst difference of a greedy logprob, CUDA to CPU"] = float(worst)
    assert worst < 1e-3
