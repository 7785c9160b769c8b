"""Constrained requests over the mock model: one compiling process for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from random_schemas import RandomSchemas
from threads import one_thread

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.detokenizer import TokenTable
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.grammar_pool import GrammarPool, PoolOptions
from deepinfer_ray.engine.grammar_worker import Vocabulary
from deepinfer_ray.engine.mock import EOS, MockModel, byte_tokenizer, mock_config
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.ops.numerics import Numerics

VOCAB = 512
COMPRESS = (np.arange(VOCAB) * 31 % 103).astype(np.int32)


def byte(char: str) -> int:
    """Token of an ASCII character."""
    return 3 + ord(char)


EAGER = {**{byte(char): 5.0 for char in '"}]'}, **{byte(char): -4.0 for char in " \n\r\t"}, EOS: 5.0}
"""Biases under which random text comes to its end."""


def slow_schema() -> dict[str, Any]:
    """Takes the compiler seconds; more than 64 levels deep."""
    towers: list[Any] = [{"type": "integer"}] * 16
    for _ in range(110):
        towers = [
            {"type": "object", "properties": {f"p{number}": tower}, "required": [f"p{number}"]}
            for number, tower in enumerate(towers)
        ]
    return {"anyOf": towers}


@dataclass
class Workshop:
    """Makes engines over one mock model and requests with a constraint."""

    pool: GrammarPool
    model: MockModel = field(default_factory=lambda: MockModel(mock_config(VOCAB)))

    def engine(
        self, *, num_blocks: int = 200, structured: dict[str, Any] | None = None, **values: Any
    ) -> Engine:
        """values: of `SchedulerSettings`. structured: of the section."""
        own = {name: values.pop(name) for name in {"hooks", "grammars"} & values.keys()}
        settings = SchedulerSettings(
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            eos_token_id=EOS,
            **{"max_model_len": 512, "max_seqs": 64, **values},
        )
        layout = CacheLayout.build(
            self.model.config, Numerics("exact"), 0, max_backtracking=settings.backtracking
        )
        pools = CachePools(layout, num_blocks, settings.num_state_slots)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        config = EngineConfig(structured=structured or {})  # type: ignore[arg-type]
        return Engine(
            self.model,
            pools,
            byte_tokenizer(VOCAB),
            config,
            compress=COMPRESS,
            settings=settings,
            **{"grammars": self.pool, **own},
        )

    @staticmethod
    def request(
        constraint: dict[str, Any] | None, seed: int = 0, prompt_len: int = 4, **params: Any
    ) -> Request:
        prompt = np.random.default_rng(seed).integers(3, VOCAB, prompt_len).astype(np.int32)
        values = {"max_tokens": 200, "logit_bias": EAGER, "structured_outputs": constraint, **params}
        return Request(prompt, SamplingParams(**values), seed=seed)

    slow_schema = staticmethod(slow_schema)

    @staticmethod
    def run(engine: Engine, requests: Sequence[Request]) -> list[RequestResult]:
        """Results in the order of the requests, books checked."""
        copies = [Request(each.prompt, each.params, each.seed) for each in requests]
        for copy in copies:
            engine.add(copy)
        by_id = {result.request_id: result for result in engine.run()}
        engine.check_integrity()
        assert len(by_id) == len(requests)
        return [by_id[copy.request_id] for copy in copies]


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Of the byte tokenizer."""
    pieces = TokenTable.of(byte_tokenizer(VOCAB), VOCAB, hidden=(EOS,)).pieces
    return Vocabulary(pieces, (EOS,))


@pytest.fixture(scope="session")
def pool(vocabulary: Vocabulary) -> Iterator[GrammarPool]:
    made = GrammarPool(vocabulary, PoolOptions(workers=1))
    yield made
    made.close()


@pytest.fixture(scope="session")
def tight_pool(vocabulary: Vocabulary) -> Iterator[GrammarPool]:
    """Little time for a grammar."""
    made = GrammarPool(vocabulary, PoolOptions(workers=1, timeout_s=0.8))
    yield made
    made.close()


@pytest.fixture
def make_pool(vocabulary: Vocabulary) -> Iterator[Callable[..., GrammarPool]]:
    """Pools of a test's own; each costs the start of a process."""
    made: list[GrammarPool] = []

    def make(**options: Any) -> GrammarPool:
        made.append(GrammarPool(vocabulary, PoolOptions(**{"workers": 1, **options})))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def workshop(pool: GrammarPool) -> Iterator[Workshop]:
    with one_thread():
        yield Workshop(pool)


@pytest.fixture(scope="session")
def random_schemas() -> Callable[[int], Any]:
    """Seed -> `RandomSchemas`."""
    return RandomSchemas
