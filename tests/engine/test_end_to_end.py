"""The engine on real (tiny) models: the same bits whatever else is in the batch, however it is scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from threads import one_thread

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import RankParts, build_engine, prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
MAX_LEN = 200


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass
class Tiny:
    """A loaded model from which engines of any settings are made."""

    parts: RankParts
    model: TextModel

    def engine(self, num_blocks: int = 64, **settings: object) -> Engine:
        values: dict[str, object] = {"max_model_len": MAX_LEN, "max_seqs": 8, **settings}
        resolved = SchedulerSettings(
            num_blocks=num_blocks,
            vocab_size=512,
            eos_token_id=self.parts.model_config.eos_token_id,
            **values,  # type: ignore[arg-type]
        )
        pools = CachePools(self.parts.layout, num_blocks, resolved.num_state_slots)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        parts = self.parts
        return Engine(
            self.model, pools, parts.tokenizer, parts.config, compress=parts.compress, settings=resolved
        )


@pytest.fixture(scope="module", params=["released", "exact"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    parts = prepare(TINY, EngineConfig(numerics=request.param), "cpu")
    with Checkpoint.open(TINY) as checkpoint:
        return Tiny(parts, load_text_model(checkpoint, parts.numerics, max_positions=256))


def make_requests() -> list[Request]:
    generator = np.random.default_rng(11)
    kinds = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
        {"temperature": 0.7, "top_k": 30, "repetition_penalty": 1.2, "logprobs": 1},
    ]
    return [
        Request(
            generator.integers(3, 509, length).astype(np.int32),
            SamplingParams(max_tokens=int(generator.integers(4, 12)), **kinds[index % 3]),  # type: ignore[arg-type]
            seed=index,
        )
        for index, length in enumerate((1, 2, 17, 40, 63, 90, 126, 128, 5))
    ]


Bits = list[tuple[list[int], list[float], list[float] | None, object, str, str]]


def run(engine: Engine, order: list[int] | None = None) -> Bits:
    requests = make_requests()
    for index in order or range(len(requests)):
        engine.add(requests[index])
    by_id: dict[int, RequestResult] = {result.request_id: result for result in engine.run()}
    engine.check_integrity()
    results = [by_id[request.request_id] for request in requests]
    assert [result.error for result in results] == [None] * len(results)
    return [
        (
            result.token_ids.tolist(),
            [] if result.logprobs is None else result.logprobs.tolist(),
            None if result.prompt_logprobs is None else result.prompt_logprobs.tolist(),
            result.top_logprobs,
            result.finish_reason,
            result.text,
        )
        for result in results
    ]


@pytest.fixture(scope="module")
def one_at_a_time(tiny: Tiny) -> Bits:
    return run(tiny.engine(max_seqs=1, zos=False))


@pytest.mark.parametrize(
    "settings",
    [
        {"zos": True, "max_seqs": 1},
        {"zos": False, "max_seqs": 3},
        {"zos": True, "max_seqs": 16},
        {"zos": False, "max_seqs": 16, "max_batched_tokens": 16},
        {"zos": True, "max_seqs": 3, "max_batched_tokens": 33},
        {"zos": True, "max_seqs": 8, "idle_fast_path": False, "prefill_all_interval": 5},
    ],
    ids=lambda values: "-".join(f"{name}={value}" for name, value in values.items()),
)
def test_bitwise_equal_for_every_schedule(
    tiny: Tiny, one_at_a_time: Bits, settings: dict[str, object]
) -> None:
    assert run(tiny.engine(**settings)) == one_at_a_time  # type: ignore[arg-type]


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_bitwise_equal_shuffled_and_preempted(tiny: Tiny, one_at_a_time: Bits, zos: bool) -> None:
    order = np.random.default_rng(0).permutation(len(one_at_a_time)).tolist()
    engine = tiny.engine(zos=zos, num_blocks=9, max_seqs=9)
    assert run(engine, order) == one_at_a_time
    assert engine.stats["preempted"] > 0


def test_the_engine_of_a_directory_serves_and_reports() -> None:
    config = EngineConfig(scheduler={"max_seqs": 4, "max_model_len": MAX_LEN})  # type: ignore[arg-type]
    engine = build_engine(TINY, config, "cpu")
    run(engine)
    assert engine.stats["finished"] == {"length": 9}
    assert engine.settings.num_state_slots == 5
