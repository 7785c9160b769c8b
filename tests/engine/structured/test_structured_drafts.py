"""Grammars over verified drafts: a mask for each draft's place, and the bits of a loop without drafts."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from deepinfer_ray.bench.markov_twin import make_markov_twin
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.mock import EOS, byte_tokenizer
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.weights import load_text_model

TINY = Path(__file__).parents[2] / "data" / "golden" / "tinyB"
VOCAB, DRAFTS = 512, 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
ASKED = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": "[a-z]{10,20}"},
    {"choice": ["first choice", "second choice"]},
    {"regex": "[^b]{30}", "trigger_token_ids": [7]},
    None,
]


@pytest.fixture(scope="module")
def make_engine(pool):
    """The tiny model under byte tokens; its drafter knows a part of it."""
    parts = prepare(TINY, EngineConfig(numerics="released"), "cpu")
    with Checkpoint.open(TINY, drafter=True) as checkpoint:
        model = load_text_model(checkpoint, parts.numerics, max_positions=384, drafter=True)
    make_markov_twin(model, 0.3)

    def make(drafts, num_blocks=64, **values):
        settings = SchedulerSettings(
            num_blocks=num_blocks,
            vocab_size=VOCAB,
            eos_token_id=EOS,
            num_drafts=drafts,
            **{"max_model_len": 256, "max_seqs": 8, **values},
        )
        layout = CacheLayout.build(parts.model_config, parts.numerics, drafts)
        pools = CachePools(layout, num_blocks, settings.num_state_slots)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        tokenizer = byte_tokenizer(VOCAB)
        return Engine(
            model, pools, tokenizer, parts.config, compress=parts.compress, settings=settings, grammars=pool
        )

    return make


def requests(temperature):
    random = np.random.default_rng(3)
    made = []
    for number, asked in enumerate(ASKED * 2):
        prompt = random.integers(3, 259, 105 + number).astype(np.int32)
        bias = {EOS: 3.0, 3 + ord('"'): 6.0} | ({7: 9.0} if asked and "trigger_token_ids" in asked else {})
        params = SamplingParams(
            temperature=temperature,
            max_tokens=50,
            logit_bias=bias,
            structured_outputs=asked,
            logprobs=1,
        )
        made.append(Request(prompt, params, seed=number))
    return made


@pytest.fixture(scope="module")
def greedy(workshop, make_engine):
    asked = requests(0.0)
    results = workshop.run(make_engine(0), asked)
    assert {result.error for result in results} == {None}
    return asked, [bits(result) for result in results]


def bits(result):
    return result.token_ids.tolist(), result.logprobs.tolist(), result.top_logprobs, result.finish_reason


@pytest.mark.parametrize(("zos", "blocks"), [(False, 64), (True, 7)], ids=lambda value: str(value))
def test_greedy_with_drafts_is_greedy_without(workshop, make_engine, greedy, zos, blocks):
    asked, expected = greedy
    engine = make_engine(DRAFTS, num_blocks=blocks, zos=zos)
    assert [bits(result) for result in workshop.run(engine, asked)] == expected
    assert (engine.stats["preempted"] > 0) == (blocks == 7)
    assert sum(engine.stats["accepted_lengths"][1:]) > 0


def test_sampled_rows_follow_their_grammars(workshop, make_engine):
    asked = requests(1.0)
    engine = make_engine(DRAFTS)
    results = workshop.run(engine, asked)
    for request, result in zip(asked, results, strict=True):
        assert result.error is None
        constraint = request.params.structured_outputs
        if constraint and "json" in constraint and result.finish_reason == "stop":
            jsonschema.validate(json.loads(result.text), PERSON)
        if constraint and "choice" in constraint:
            assert result.text in constraint["choice"]
    assert sum(engine.stats["accepted_lengths"][1:]) > 0
