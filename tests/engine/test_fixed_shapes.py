"""Steps as a device runs them, on a CPU: filled-up rows and fixed shapes change no bit of any result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from threads import one_thread

from deepinfer_ray.cache.metadata import StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.step_inputs import DEVICE_ROWS, RowMultiples
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.weights import load_text_model

SIXTEEN = RowMultiples(DEVICE_ROWS, DEVICE_ROWS, DEVICE_ROWS)
TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny() -> Any:
    parts = prepare(TINY, EngineConfig(), "cpu")
    with Checkpoint.open(TINY) as checkpoint:
        return parts, load_text_model(checkpoint, parts.numerics, max_positions=384)


def make_engine(tiny: Any, model: Any = None, **settings: Any) -> Engine:
    parts, loaded = tiny
    values = {"max_model_len": 300, "max_seqs": 8, "max_batched_tokens": 300, **settings}
    resolved = SchedulerSettings(num_blocks=64, vocab_size=512, eos_token_id=1, **values)
    pools = CachePools(parts.layout, 64, resolved.num_state_slots)
    pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
    return Engine(
        model or loaded, pools, parts.tokenizer, parts.config, compress=parts.compress, settings=resolved
    )


def run(engine: Engine, max_tokens: int = 9) -> list[Any]:
    random = np.random.default_rng(4)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "prompt_logprobs": 0},
        {"temperature": 0.8, "logprobs": 1, "repetition_penalty": 1.1},
    ]
    for number, length in enumerate((3, 126, 17, 250, 40)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kinds[number % 3])
        engine.add(Request(random.integers(3, 509, length).astype(np.int32), params, seed=number))
    results = sorted(engine.run(), key=lambda result: result.request_id)
    engine.check_integrity()
    return [
        (
            result.error,
            result.token_ids.tolist(),
            None if result.logprobs is None else result.logprobs.tolist(),
            result.top_logprobs,
            None if result.prompt_logprobs is None else result.prompt_logprobs.tolist(),
        )
        for result in results
    ]


@pytest.mark.parametrize("invariant", [False, True], ids=["multiples", "one number"])
@pytest.mark.parametrize("settings", [{"zos": False}, {"zos": True, "max_seqs": 2}], ids=str)
def test_filled_up_steps_give_the_same_bits(tiny: Any, settings: dict[str, Any], invariant: bool) -> None:
    plain = run(make_engine(tiny, zos=False))
    assert [len(result[1]) for result in plain] == [9] * 5
    engine = make_engine(tiny, **settings)
    device = torch.device("cuda")
    engine.loop.inputs.multiples = RowMultiples.of(device, engine.scheduler.settings, invariant)
    assert run(engine) == plain


def test_what_steps_are_filled_up_to(tiny: Any) -> None:
    settings = make_engine(tiny).scheduler.settings
    assert RowMultiples.of(torch.device("cpu"), settings, True) == RowMultiples(1, 1, 1)
    assert RowMultiples.of(torch.device("cuda"), settings) == SIXTEEN
    # 8 sequences, 300 tokens.
    assert RowMultiples.of(torch.device("cuda"), settings, True) == RowMultiples(16, 304, 16, True)


class Watch:
    """A model that also keeps the shapes of the decode metadata that it is given."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.max_positions = model, model.config, model.max_positions
        self.shapes: list[dict[str, Any]] = []

    def forward(self, meta: StepMetadata, pools: CachePools) -> Any:
        if not meta.is_prefill:
            shapes: dict[str, Any] = {"max_klen": dict(meta.max_klen)}
            for owner in (meta, *meta.ratios.values()):
                for name in owner.__dataclass_fields__:
                    value = getattr(owner, name)
                    if isinstance(value, torch.Tensor):
                        ratio = getattr(owner, "ratio", 0)
                        shapes[f"{ratio}.{name}"] = tuple(value.shape)
            self.shapes.append(shapes)
        return self.model.forward(meta, pools)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.model.logits(hidden))


def test_decode_shapes_depend_on_the_batch_alone(tiny: Any) -> None:
    watch = Watch(tiny[1])
    engine = make_engine(tiny, watch, zos=True)
    engine.loop.inputs.multiples = SIXTEEN
    run(engine, max_tokens=30)
    tables = [shapes["0.block_tables"] for shapes in watch.shapes]
    assert len(watch.shapes) >= 29
    assert set(tables) == {(DEVICE_ROWS, 2), (DEVICE_ROWS, 3)}  # 250 + 30 tokens cross a block: 2, then all 3
    for before, after in zip(watch.shapes, watch.shapes[1:], strict=False):
        if before["0.block_tables"] == after["0.block_tables"]:
            assert before == after


def test_placeholders_are_marked(tiny: Any) -> None:
    seen: list[SimpleNamespace] = []

    class Keep(Watch):
        def forward(self, meta: StepMetadata, pools: CachePools) -> Any:
            seen.append(SimpleNamespace(valid=meta.valid.clone(), all=meta.all_valid, rows=meta.num_rows))
            return super().forward(meta, pools)

    engine = make_engine(tiny, Keep(tiny[1]), zos=False)
    engine.loop.inputs.multiples = SIXTEEN
    run(engine)
    assert {step.rows % DEVICE_ROWS for step in seen} == {0}
    assert [int(step.valid.sum()) for step in seen][:3] == [300, 136, 5]
    assert [step.all for step in seen][:3] == [False, False, False]


@pytest.mark.parametrize("multiples", [RowMultiples(), SIXTEEN], ids=["as they come", "sixteen"])
@pytest.mark.parametrize("is_prompt", [False, True], ids=["decode", "prompt"])
def test_a_step_without_sequences_is_placeholders_alone(
    tiny: Any, multiples: RowMultiples, is_prompt: bool
) -> None:
    engine = make_engine(tiny)
    engine.loop.inputs.multiples = multiples
    plan = engine.scheduler.schedule()
    assert plan.is_empty
    plan.is_prompt = is_prompt
    none = np.empty(0, np.int64)
    with torch.inference_mode():
        step = engine.loop.inputs.build(plan, none, None)
        before = [engine.pools.blocks[1:].clone(), engine.pools.slots[1:].clone()]
        hidden = tiny[1].forward(step.meta, engine.pools).hidden
    assert step.meta.is_prefill == is_prompt
    assert hidden.shape[0] == multiples.decode
    assert not step.meta.valid.any()
    assert len(step.sample_rows) == 0
    assert torch.equal(engine.pools.blocks[1:], before[0])
    assert torch.equal(engine.pools.slots[1:], before[1])
