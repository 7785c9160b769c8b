"""Engines of a tiny model whose drafter was made to know part of its target, and requests for them.

About half of the first drafts are accepted, so that every length of accepted prefix occurs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_bits import bits_of

from deepinfer_ray.bench.markov_twin import make_markov_twin
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import RankParts, prepare
from deepinfer_ray.engine.cost_curve import CostCurve, StepCosts
from deepinfer_ray.engine.draft_length import ScheduledLengths
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
VOCAB, EOS, DRAFTS = 512, 1, 5

SIZES = (1, 2, 4, *range(8, 513, 8))
JAGGED = StepCosts(CostCurve(SIZES, tuple(1 + 0.04 * size + 0.3 * (size % 24 == 0) for size in SIZES)))
"""A cost curve under which lengths vary all the time."""


@dataclass
class Lab:
    """A loaded model from which engines of any settings are made."""

    parts: RankParts
    model: TextModel

    @classmethod
    def load(cls, numerics: str = "released", share: float = 0.3) -> Lab:
        parts = prepare(TINY, EngineConfig(numerics=numerics), "cpu")  # type: ignore[arg-type]
        with Checkpoint.open(TINY, drafter=True) as checkpoint:
            model = load_text_model(checkpoint, parts.numerics, max_positions=384, drafter=True)
        make_markov_twin(model, share)
        assert model.drafter is not None
        generator = torch.Generator().manual_seed(1)
        model.drafter.confidence.copy_(torch.randn(model.drafter.confidence.shape, generator=generator))
        return cls(parts, model)

    def engine(
        self,
        drafts: int = DRAFTS,
        *,
        num_blocks: int = 64,
        varlen: bool = False,
        hooks: Any = None,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> Engine:
        values: dict[str, Any] = {"max_model_len": 200, "max_seqs": 8, **more}
        settings = SchedulerSettings(
            num_blocks=num_blocks, vocab_size=VOCAB, eos_token_id=EOS, num_drafts=drafts, **values
        )
        layout = CacheLayout.build(self.parts.model_config, self.parts.numerics, drafts)
        pools = CachePools(layout, num_blocks, settings.num_state_slots + settings.prefix_snapshots)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        parts = self.parts
        engine = Engine(
            self.model,
            pools,
            parts.tokenizer,
            parts.config.with_values(sampling=sampling or {}),
            compress=parts.compress,
            settings=settings,
            hooks=hooks,
        )
        if varlen:
            engine.loop.inputs.varlen = True
            engine.scheduler.draft_lengths = ScheduledLengths(JAGGED)
        return engine


def run(engine: Engine, requests: list[Request]) -> list[RequestResult]:
    for request in requests:
        engine.add(Request(request.prompt, request.params, request.seed, forced=request.forced))
    results = sorted(engine.run(), key=lambda result: result.request_id)
    engine.check_integrity()
    assert [result.error for result in results] == [None] * len(requests)
    return results


def bits(results: list[RequestResult]) -> list[Any]:
    return [bits_of(result) for result in results]


def prompt(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(3, 509, length).astype(np.int32)


KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "prompt_logprobs": 0},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {EOS: 2.0, 17: 1.5}, "min_tokens": 4},
    {"stop": "from what comes out", "logprobs": 1},
    {"stop_token_ids": "from what comes out"},
    {"stop": "from what comes out", "include_stop_str_in_output": True, "min_tokens": 3},
]


def greedy_requests(lab: Lab, count: int, seed: int) -> list[Request]:
    """Random prompts, many of which outgrow a block; stops are taken from what each gives without them."""
    random = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        length = int(random.choice([1, 2, 16, 17, 60, 118, 124, 127, int(random.integers(1, 128))]))
        kind = {
            name: value
            for name, value in KINDS[index % len(KINDS)].items()
            if name not in ("stop", "stop_token_ids")
        }
        max_tokens = max(int(random.integers(2, 26)), kind.get("min_tokens", 0))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **kind)
        requests.append(Request(prompt(random, length), params, seed=index))
    free = run(lab.engine(0), requests)
    for index, (request, result) in enumerate(zip(requests, free, strict=True)):
        kind = KINDS[index % len(KINDS)]
        inner = result.token_ids[len(result.token_ids) // 2 :].tolist()
        if "stop_token_ids" in kind:
            request.params = request.params.model_copy(update={"stop_token_ids": (inner[0], inner[-1])})
        if "stop" in kind and len(result.text) > 6:
            middle = len(result.text) // 2
            request.params = request.params.model_copy(update={"stop": (result.text[middle : middle + 3],)})
    return requests


MODES = list(itertools.product([False, True], [False, True]))


def sampled_requests(count: int, seed: int) -> list[Request]:
    random = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
        {"temperature": 1.2, "top_k": 20},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
    ]
    return [
        Request(
            prompt(random, int(random.integers(1, 100))),
            SamplingParams(max_tokens=int(random.integers(2, 20)), **kinds[index % len(kinds)]),
            seed=index,
        )
        for index in range(count)
    ]
