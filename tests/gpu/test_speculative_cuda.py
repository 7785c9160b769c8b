"""Drafting on a CUDA device: golden drafts, both loops, greedy output as without drafts, nothing waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.bench.markov_twin import make_markov_twin
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import build_engine, prepare
from deepinfer_ray.engine.cost_curve import CostCurve, StepCosts
from deepinfer_ray.engine.draft_length import ScheduledLengths
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.drafter import DraftRequest
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.numerics import Numerics

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DRAFTS = 5
SIZES = (1, 2, 4, *range(8, 129, 8))
JAGGED = StepCosts(CostCurve(SIZES, tuple(1 + 0.04 * size + 0.3 * (size % 24 == 0) for size in SIZES)))
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "logprobs": 1}
PENALIZED = {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 0, "min_tokens": 2}


def load(kind: str, mode: str, device: str) -> Any:
    with Checkpoint.open(GOLDEN / kind, drafter=True) as checkpoint:
        return load_text_model(
            checkpoint,
            Numerics(mode),  # type: ignore[arg-type]
            max_positions=512,
            device=device,
            drafter=True,
        )


def test_golden_drafts(harness: Any, device: str) -> None:
    tensors = harness.expected("tinyB", "exact")
    model = load("tinyB", "exact", device)
    driver = harness.Driver(model, token_map=harness.expected_map("tinyB"), num_drafts=DRAFTS, device=device)
    ids, length = tensors["input_ids"].numpy(), int(tensors["prompt_len"])
    sequence = driver.add(ids)
    driver.prefill(sequence, length)
    for t, want in enumerate(tensors["sparse.decode.draft_ids"].tolist()):
        driver.decode([sequence])
        token, position, slot = (
            torch.tensor([value], device=device)
            for value in (int(ids[length + t + 1]), sequence.length - 1, sequence.slot)
        )
        with torch.inference_mode():
            block = model.draft_block(DraftRequest(token, position, slot, 200), driver.pools, DRAFTS)
            got, logits = [int(token)], []
            for place in range(DRAFTS):
                row, _ = model.draft_step(block, place, token)
                token = row.argmax(-1)
                got.append(int(token))
                logits.append(row[0].cpu())
        assert got == want, t
        errors = harness.relative_errors(torch.stack(logits), tensors["sparse.decode.draft_logits"][t])
        assert errors.max() <= 2e-5


class Lab:
    """A model whose drafter knows part of it, and engines of any settings around it."""

    def __init__(self, mode: str, device: str) -> None:
        config = EngineConfig.model_validate({"numerics": mode, "runtime": {"batch_invariant": True}})
        self.parts = prepare(GOLDEN / "tinyB", config, device)
        self.model = load("tinyB", mode, device)
        make_markov_twin(self.model, 0.3)
        confidence = self.model.drafter.confidence
        random = torch.randn(confidence.shape, generator=torch.Generator().manual_seed(1))
        confidence.copy_(random)

    def engine(
        self,
        drafts: int,
        *,
        varlen: bool = False,
        num_blocks: int = 64,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> Engine:
        settings = SchedulerSettings(
            num_blocks=num_blocks,
            vocab_size=512,
            eos_token_id=1,
            num_drafts=drafts,
            **{"max_model_len": 200, "max_seqs": 8, "max_batched_tokens": 256, **more},
        )
        parts = self.parts
        layout = CacheLayout.build(parts.model_config, parts.numerics, drafts)
        pools = CachePools(layout, num_blocks, settings.num_state_slots, parts.device)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        config = parts.config.with_values(sampling=sampling or {})
        engine = Engine(
            self.model, pools, parts.tokenizer, config, compress=parts.compress, settings=settings
        )
        if varlen:
            engine.loop.inputs.varlen = True
            engine.scheduler.draft_lengths = ScheduledLengths(JAGGED)
        return engine


def results_of(engine: Engine, kinds: list[dict[str, Any]], count: int = 16) -> list[RequestResult]:
    random = np.random.default_rng(6)
    for number in range(count):
        params = SamplingParams(
            max_tokens=int(random.integers(2, 24)), ignore_eos=True, **kinds[number % len(kinds)]
        )
        prompt = random.integers(3, 509, int(random.integers(1, 128))).astype(np.int32)
        engine.add(Request(prompt, params, seed=number))
    results = sorted(engine.run(), key=lambda result: result.request_id)
    engine.check_integrity()
    assert [result.error for result in results] == [None] * count
    return results


def run(engine: Engine, kinds: list[dict[str, Any]], count: int = 16) -> list[Any]:
    results = results_of(engine, kinds, count)
    return [
        (r.token_ids.tolist(), None if r.logprobs is None else r.logprobs.tolist(), r.top_logprobs)
        for r in results
    ]


def test_greedy_tokens_are_those_without_drafts(device: str) -> None:
    """Steps with drafts have other numbers of rows, so low bits may differ; in mode exact tokens do not."""
    lab = Lab("exact", device)
    without = [tokens for tokens, *_ in run(lab.engine(0), [{"temperature": 0.0}, PENALIZED])]
    for varlen in (False, True):
        engine = lab.engine(DRAFTS, varlen=varlen, num_blocks=9)
        assert [tokens for tokens, *_ in run(engine, [{"temperature": 0.0}, PENALIZED])] == without
        assert engine.stats["preempted"] > 0
        assert engine.stats["accepted_lengths"][2] > 0


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_overlapped_equals_plain(device: str, mode: str) -> None:
    lab = Lab(mode, device)
    kinds = [{"temperature": 0.0}, SAMPLED, PENALIZED, {"temperature": 1.0}]
    assert run(lab.engine(DRAFTS, zos=True), kinds) == run(lab.engine(DRAFTS, zos=False), kinds)


def test_few_candidates_and_diagnostics(device: str) -> None:
    """`sampling.force_topk` changes no greedy token; diagnostics change none and are alike in both loops."""
    lab = Lab("exact", device)
    kinds = [{"temperature": 0.0}, SAMPLED]
    without = run(lab.engine(DRAFTS), kinds)
    few = run(lab.engine(DRAFTS, sampling={"force_topk": 4}), kinds)
    assert [tokens for tokens, *_ in few[::2]] == [tokens for tokens, *_ in without[::2]]
    told = [
        results_of(lab.engine(DRAFTS, zos=zos, sampling={"diagnostics": True}), kinds)
        for zos in (False, True)
    ]
    for plain, overlapped, (tokens, *_) in zip(*told, without, strict=True):
        assert plain.token_ids.tolist() == overlapped.token_ids.tolist() == tokens
        assert plain.diagnostics == overlapped.diagnostics
        assert plain.diagnostics is not None
        assert len(plain.diagnostics.sum_smaller_probs) == len(tokens)
        assert all(0 < mass <= 1 + 1e-6 for mass in plain.diagnostics.sum_smaller_probs)


def test_the_engine_of_a_directory_measures_and_drafts(device: str) -> None:
    config = EngineConfig.model_validate(
        {
            "scheduler": {"max_seqs": 4, "max_model_len": 256},
            "speculative": {"num_drafts": 3, "varlen": True},
        }
    )
    engine = build_engine(GOLDEN / "tinyB", config, device)
    lengths = engine.scheduler.draft_lengths
    assert isinstance(lengths, ScheduledLengths)
    run(engine, [{"temperature": 0.0}, SAMPLED], count=8)
    assert isinstance(lengths.cost, StepCosts)
    assert lengths.cost.sampler(4) > 0
