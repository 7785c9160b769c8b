"""Engines over the mock model and the golden tiny models, with and without prefix reuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from result_bits import Bits, bits_of
from threads import one_thread
from tokenizers import Tokenizer

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.mock import MockModel, byte_tokenizer, mock_config
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.step_loop import Model
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.numerics import Numerics

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
VOCAB = 512
MOCK_COMPRESS = (np.arange(VOCAB) * 31 % 103).astype(np.int32)


@dataclass
class Lab:
    """A model from which engines of any settings are made."""

    model: Model
    numerics: Numerics
    tokenizer: Tokenizer
    compress: np.ndarray | None

    def layout(self, max_backtracking: int = 0) -> CacheLayout:
        return CacheLayout.build(self.model.config, self.numerics, 0, max_backtracking=max_backtracking)

    def engine(self, *, snapshots: int = 8, num_blocks: int = 64, **settings: Any) -> Engine:
        """An engine over poisoned pools; keywords are of `SchedulerSettings` and of `Engine`."""
        own = {name: settings.pop(name) for name in {"hooks"} & settings.keys()}
        values = {
            "max_model_len": 640,
            "max_seqs": 8,
            "prefix_snapshots": snapshots,
            "prefix_min_saved_tokens": 1,
            **settings,
        }
        resolved = SchedulerSettings(num_blocks=num_blocks, vocab_size=VOCAB, eos_token_id=1, **values)
        num_slots = resolved.num_state_slots + resolved.prefix_snapshots
        pools = CachePools(self.layout(resolved.backtracking), num_blocks, num_slots)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        return Engine(
            self.model,
            pools,
            self.tokenizer,
            EngineConfig(),
            compress=self.compress,
            settings=resolved,
            **own,
        )

    @staticmethod
    def run(engine: Engine, requests: Sequence[Request]) -> list[RequestResult]:
        """Results in the order of the requests, books checked."""
        for request in requests:
            engine.add(request)
        by_id = {result.request_id: result for result in engine.run()}
        engine.check_integrity()
        assert len(by_id) == len(requests)
        return [by_id[request.request_id] for request in requests]


def family(
    heads: Sequence[int], tails: Sequence[int], *, seed: int = 0, max_tokens: int = 6, **params: Any
) -> list[Request]:
    """One prompt for each head length and tail length: its head is shared by all prompts of that head.

    Every third is greedy, the others are sampled; all ask for log-probabilities."""
    random = np.random.default_rng(seed)
    requests = []
    for head_len in heads:
        head = random.integers(3, VOCAB - 3, head_len)
        for tail_len in tails:
            index = len(requests)
            prompt = np.concatenate([head, random.integers(3, VOCAB - 3, tail_len)]).astype(np.int32)
            own = {"temperature": 0.0 if index % 3 == 0 else 1.0, "logprobs": index % 3, "ignore_eos": True}
            values = {"max_tokens": max_tokens, **own, **params}
            requests.append(Request(prompt, SamplingParams(**values), seed=seed * 1000 + index))
    return requests


def again(requests: Sequence[Request]) -> list[Request]:
    """The same requests under new ids."""
    return [Request(request.prompt, request.params, request.seed) for request in requests]


@dataclass(frozen=True)
class PrefixKit:
    """What the tests of this directory share: an engine maker per model, requests, results to compare."""

    lab: Callable[[str], Lab]
    family: Callable[..., list[Request]] = family
    again: Callable[[Sequence[Request]], list[Request]] = again
    bits: Callable[[RequestResult], Bits] = bits_of


@functools.cache
def make_lab(name: str) -> Lab:
    """`mock`, or `tinyA-released`, `tinyB-exact` and so on."""
    if name == "mock":
        model = MockModel(mock_config(VOCAB))
        return Lab(model, Numerics("exact"), byte_tokenizer(VOCAB), MOCK_COMPRESS)
    directory, numerics = name.split("-")
    parts = prepare(GOLDEN / directory, EngineConfig(numerics=numerics), "cpu")  # type: ignore[arg-type]
    with Checkpoint.open(GOLDEN / directory) as checkpoint:
        loaded = load_text_model(checkpoint, parts.numerics, max_positions=768)
    return Lab(loaded, parts.numerics, parts.tokenizer, parts.compress)


@pytest.fixture(scope="session")
def kit() -> Iterator[PrefixKit]:
    """One thread: the tiny models are too small for two."""
    with one_thread():
        yield PrefixKit(make_lab)
