"""What constrained rows produce: 300 random schemas on a model of random tokens, alone and under pressure."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from xgrammar import GrammarMatcher

from deepinfer_ray.engine.grammar_spec import GrammarSpec

NUM_SCHEMAS = 300


def validate(text: str, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def constraint(schema: Any, number: int) -> dict[str, Any]:
    return {"json": schema, "disable_any_whitespace": number % 2 == 0}


def matcher_after(pool: Any, asked: dict[str, Any], tokens: list[int]) -> Any:
    """A fresh matcher that took the tokens, all of them allowed."""
    matcher = GrammarMatcher(pool.get(GrammarSpec.of(asked)).compiled)
    for place, token in enumerate(tokens):
        assert matcher.accept_token(token), f"token {place} of {len(tokens)} is refused"
    return matcher


def test_random_schemas_hold(workshop, random_schemas):
    """Rows that stop are valid, rows that were cut are prefixes of something valid."""
    schemas = random_schemas(11)
    asked = [constraint(schemas.schema(), number) for number in range(NUM_SCHEMAS)]
    requests = [workshop.request(each, number) for number, each in enumerate(asked)]
    cut = asked[::3]
    requests += [workshop.request(each, number, max_tokens=1 + number % 9) for number, each in enumerate(cut)]
    results = workshop.run(workshop.engine(), requests)
    stopped = 0
    for each, result in zip(asked + cut, results, strict=True):
        assert result.error is None, (each, result.error)
        tokens = result.token_ids.tolist()
        if result.finish_reason == "stop":
            stopped += 1
            validate(result.text, each["json"])
            assert matcher_after(workshop.pool, each, tokens).is_terminated()
        else:
            assert result.finish_reason == "length"
            assert not matcher_after(workshop.pool, each, tokens).is_terminated()
    whole = sum(result.finish_reason == "stop" for result in results[:NUM_SCHEMAS])
    assert whole >= 0.95 * NUM_SCHEMAS
    assert stopped < len(results)  # some rows were cut


def test_64_grammars_in_one_batch(workshop):
    """Patterns and schemas, all of them compiled before the first step."""
    asked = [
        {"regex": f"<{number}:[a-c]{{3}}>"} if number % 2 else {"json": {"const": f"value {number}"}}
        for number in range(64)
    ]
    requests = [workshop.request(each, number) for number, each in enumerate(asked)]
    builds = [workshop.pool.get(GrammarSpec.of(each)) for each in asked]
    while not all(build.done for build in builds):
        workshop.pool.wait(0.2)
        workshop.pool.collect()
    engine = workshop.engine(max_seqs=64)
    most = 0
    results = {}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished():
        results |= {result.request_id: result for result in engine.step()}
        most = max(most, engine.scheduler.num_running)
    assert most == 64
    for number, request in enumerate(requests):
        text = results[request.request_id].text
        pattern = f"<{number}:[a-c]{{3}}>" if number % 2 else f'"value {number}"'
        assert re.fullmatch(pattern, text), text


KINDS = [
    ({"regex": r"[a-c]{2,5}(,\d+){2}"}, r"[a-c]{2,5}(,\d+){2}"),
    ({"regex": r"^a.b$"}, r"a.b"),
    ({"choice": ["yes", "no", 'may"be\n']}, r'yes|no|may"be\n'),
    ({"choice": ["only"]}, "only"),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
    ({"json_object": True, "disable_any_whitespace": True}, r"\{.*\}"),
    ({"json": '{"type": "integer", "minimum": 7, "maximum": 9}'}, "[789]"),
    (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<n>",
                    "content": {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 1}},
                    "end": "</n>",
                },
            }
        },
        r'<n>"[^"\\\x00-\x1f]?"</n>',
    ),
]


@pytest.mark.parametrize(("asked", "pattern"), KINDS, ids=lambda value: str(value)[:20])
def test_every_kind_of_constraint(workshop, asked, pattern):
    requests = [workshop.request(asked, seed, temperature=seed % 2) for seed in range(6)]
    for result in workshop.run(workshop.engine(), requests):
        assert result.finish_reason in ("stop", "length"), result.error
        if result.finish_reason == "stop":
            assert re.fullmatch(pattern, result.text, re.DOTALL), result.text
    if "grammar" in asked:
        assert all(text.count("(") == text.count(")") for text in (result.text,))


def test_log_probabilities_are_of_what_is_allowed(workshop):
    request = workshop.request({"choice": ["a", "b"]}, logprobs=3, logit_bias=None)
    (result,) = workshop.run(workshop.engine(), [request])
    first, *_ = result.top_logprobs
    assert {token for token, logprob in first if logprob > -9999} == {3 + ord("a"), 3 + ord("b")}
    assert sum(2.718281828**logprob for _, logprob in first) == pytest.approx(1.0, abs=1e-4)


def listed(schema):
    """Several values of a schema: longer outputs."""
    schema = dict(schema)
    root = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
    return {**root, "type": "array", "items": schema, "minItems": 3, "maxItems": 8}


@pytest.fixture(scope="module")
def crowd(workshop, random_schemas):
    """Requests whose outputs cross from one cache block into the next, and what they give when there is room;
    some are free."""
    schemas = random_schemas(5)
    requests = [
        workshop.request(
            None if number % 5 == 4 else constraint(listed(schemas.schema()), number),
            seed=number,
            prompt_len=90 + number,
            temperature=0.0 if number % 3 == 0 else 1.0,
            logprobs=number % 3,
            max_tokens=60,
            ignore_eos=number % 5 == 4,
        )
        for number in range(20)
    ]
    return requests, bits(workshop.run(workshop.engine(zos=False), requests))


def bits(results):
    assert {result.error for result in results if result.finish_reason == "error"} == set()
    return [
        (result.token_ids.tolist(), result.logprobs.tolist(), result.top_logprobs, result.finish_reason)
        for result in results
    ]


@pytest.mark.parametrize(
    ("zos", "blocks"), [(True, 200), (False, 7), (True, 7)], ids=["overlapped", "storm", "overlapped-storm"]
)
def test_preempted_rows_are_replayed_to_the_same_bits(workshop, crowd, zos, blocks):
    requests, expected = crowd
    engine = workshop.engine(zos=zos, num_blocks=blocks, max_seqs=10)
    assert bits(workshop.run(engine, requests)) == expected
    assert (engine.stats["preempted"] > 0) == (blocks < 200)


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_preempted_rows_end_if_so_configured(workshop, crowd, zos):
    requests, expected = crowd
    engine = workshop.engine(zos=zos, num_blocks=12, max_seqs=10, on_preempt="finish")
    results = workshop.run(engine, requests)
    ended = [result for result in results if result.finish_reason == "preempted"]
    assert 0 < len(ended) < len(requests)
    for request, result, (tokens, *_) in zip(requests, results, expected, strict=True):
        if result.finish_reason == "preempted":
            assert request.params.structured_outputs is not None
            assert result.error_code == "out_of_blocks"
            assert result.token_ids.tolist() == tokens[: len(result.token_ids)]
        else:
            assert result.token_ids.tolist() == tokens
