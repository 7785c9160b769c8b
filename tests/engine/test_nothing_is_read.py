"""A step reads no value of its device but through the one copy that is waited for.

The engine runs on torch's `meta` device, whose tensors have shapes and no values: reading one on the host
(`item`, `tolist`, `nonzero`, a boolean mask as index, a copy to the CPU) raises. Tokens come from a stand-in
for that one copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.host_copy import HostCopy
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.parallel.engram_store import LocalEngramStore

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NUMPY = {torch.int64: np.int64, torch.float32: np.float32, torch.bool: np.bool_}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "min_tokens": 2},
]


def engine_on_meta(kind: str, mode: str, zos: bool, budget: int, drafts: int = 0) -> Engine:
    parts = prepare(GOLDEN / kind, EngineConfig(numerics=mode), "cpu")  # type: ignore[arg-type]
    with Checkpoint.open(GOLDEN / kind, drafter=drafts > 0) as checkpoint:
        config = checkpoint.config.with_text(hc_sinkhorn_iters=2)  # 20 in truth, all alike
        model = load_text_model(
            checkpoint,
            parts.numerics,
            config=config,
            max_positions=512,
            dequant_budget_bytes=budget,
            drafter=drafts > 0,
        )
    assert isinstance(model.engram_store, LocalEngramStore)
    store = model.engram_store
    model.to("meta")
    model.engram_store = LocalEngramStore(
        [codes.to("meta") for codes in store.codes], [scales.to("meta") for scales in store.scales]
    )
    model.prepare("meta")
    settings = SchedulerSettings(
        num_blocks=32,
        vocab_size=512,
        max_model_len=300,
        max_seqs=6,
        max_batched_tokens=160,
        zos=zos,
        num_drafts=drafts,
    )
    layout = CacheLayout.build(config, parts.numerics, drafts)
    pools = CachePools(layout, 32, settings.num_state_slots, "meta")
    return Engine(model, pools, parts.tokenizer, parts.config, compress=parts.compress, settings=settings)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[HostCopy]:
    """Every copy that was waited for; it brings zeros, and token 7."""
    seen: list[HostCopy] = []

    def wait(self: HostCopy) -> dict[str, np.ndarray]:
        seen.append(self)
        host = {
            name: np.zeros(tuple(tensor.shape), NUMPY[tensor.dtype]) for name, tensor in self._tensors.items()
        }
        if "tokens" in host:
            host["tokens"][:] = 7
        if "accepted" in host:
            host["accepted"][:] = -1
        return host

    monkeypatch.setattr(HostCopy, "wait", wait)
    return seen


@pytest.mark.parametrize(
    ("kind", "mode", "zos", "budget", "drafts"),
    [
        ("tinyB", "exact", True, 1 << 31, 0),
        ("tinyB", "released", False, 1 << 31, 0),
        ("tinyB", "released", True, 0, 0),
        ("tinyB", "released", True, 1 << 31, 3),
    ],
    ids=["exact-overlapped", "released-plain", "packed-experts", "drafts-overlapped"],
)
def test_a_whole_run_waits_once_a_step(
    kind: str, mode: str, zos: bool, budget: int, drafts: int, waits: list[HostCopy]
) -> None:
    engine = engine_on_meta(kind, mode, zos, budget, drafts)
    for number, length in enumerate((5, 200, 130, 40, 17)):
        params = SamplingParams(max_tokens=4, ignore_eos=True, **PARAMS[number % len(PARAMS)])
        engine.add(Request(np.full(length, 9, np.int32), params, seed=number))
    results = engine.run()
    engine.check_integrity()
    assert [result.error for result in results] == [None] * 5
    assert {tuple(result.token_ids.tolist()) for result in results} == {(7,) * 4}
    assert 5 <= len(waits) <= engine.loop.num_steps
    assert len({id(copy) for copy in waits}) == len(waits)


def test_reading_a_value_of_the_device_would_raise() -> None:
    value = torch.ones(3, device="meta")
    for read in (value.sum().item, value.tolist, value.nonzero, value.cpu, lambda: value[value > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
