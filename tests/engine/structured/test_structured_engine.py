"""Constrained requests in an engine: what fails alone, control tokens, triggers, ends, other engines."""

from __future__ import annotations

import json
import re

import pytest
from xgrammar import GrammarCompiler

from deepinfer_ray.engine.grammar_pool import GrammarPool
from deepinfer_ray.engine.grammar_worker import Reply, compile_job
from deepinfer_ray.engine.handover import PromptSender, SplitEngine
from deepinfer_ray.engine.mock import EOS, PAD

FILLER = 400
"""A token of more than one byte."""


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD = [
    ({"json": '{"type": "object", '}, "no JSON"),
    ({"json": {"type": "array", "uniqueItems": True}}, "the keyword 'uniqueItems' is not supported"),
    ({"json": nested(200)}, "more than 64 levels deep (structured.max_nesting)"),
    ({"json": "[" * 100_000}, "no JSON"),
    ({"json": {"enum": ["x" * 300_000]}}, "at most 262144 are allowed (structured.max_schema_bytes)"),
    ({"grammar": "root ::= nowhere"}, 'Rule "nowhere" is not defined'),
    ({"regex": "(a"}, "The parenthesis is not closed"),
    ({"choice": ["€"], "trigger_token_ids": [512]}, "trigger token 512 is outside [0, 512)"),
]


def test_a_bad_constraint_fails_its_own_row(workshop):
    good = [workshop.request({"regex": "[a-c]{9}"}, seed) for seed in range(len(BAD))]
    bad = [workshop.request(asked) for asked, _ in BAD]
    mixed = [request for pair in zip(bad, good, strict=True) for request in pair]
    results = workshop.run(workshop.engine(max_seqs=4), mixed)
    for result, (asked, message) in zip(results[::2], BAD, strict=True):
        assert (result.finish_reason, result.error_code) == ("error", "bad_schema"), asked
        assert message in result.error.replace("\\", "")
        assert len(result.token_ids) == 0
    alone = workshop.run(workshop.engine(), good)
    assert [result.text for result in results[1::2]] == [result.text for result in alone]


def test_a_slow_grammar_is_its_rows_own_time_out(workshop, tight_pool):
    engine = workshop.engine(grammars=tight_pool, structured={"max_nesting": 200})
    slow, fine = workshop.run(
        engine, [workshop.request({"json": workshop.slow_schema()}), workshop.request({"regex": "ab"})]
    )
    assert (slow.finish_reason, slow.error_code) == ("error", "schema_timeout")
    assert fine.text == "ab"


def test_a_request_may_end_before_its_grammar_is_there(workshop):
    engine = workshop.engine()
    request = workshop.request({"regex": "not yet seen [0-9]{3}"})
    engine.add(request)
    assert engine.has_unfinished()
    assert engine.structured.num_waiting == 1
    assert engine.abort(request.request_id)
    (result,) = engine.run()
    assert result.finish_reason == "aborted"
    engine.check_integrity()


class HeldPool(GrammarPool):
    """Compiles nothing before the test says so, and then here."""

    def _send(self) -> None:
        pass

    def release(self) -> None:
        info = self.vocabulary.tokenizer_info()
        for build in list(self._by_number.values()):
            payload = compile_job(GrammarCompiler(info, max_threads=1), build.job).serialize_json()
            self._take(Reply(build.job.number, "ok", payload), info)


def test_free_rows_do_not_wait_for_grammars(workshop, vocabulary):
    held = HeldPool(vocabulary)
    engine = workshop.engine(grammars=held)
    engine.add(workshop.request({"regex": "ab"}))
    engine.add(workshop.request(None, max_tokens=3, ignore_eos=True, logit_bias=None))
    first = engine.step()
    while not first:
        first = engine.step()
    assert [result.finish_reason for result in first] == ["length"]
    assert engine.structured.num_waiting == 1
    steps = engine.loop.num_steps
    assert engine.step() == []
    assert engine.loop.num_steps <= steps + 1  # the flight of the free row is cleared away, then it waits
    held.release()
    assert [result.text for result in engine.run()] == ["ab"]


def test_control_tokens_are_no_text(workshop):
    """A string of JSON may spell anything, but a control token is not text, however likely it is."""
    bias = {PAD: 30.0, 0: 30.0}
    asked = {"json": {"type": "string", "minLength": 20, "maxLength": 30}}
    for result in workshop.run(
        workshop.engine(), [workshop.request(asked, seed, logit_bias=bias) for seed in range(4)]
    ):
        assert result.finish_reason == "stop"
        assert not {0, PAD} & set(result.token_ids.tolist())
        assert 20 <= len(json.loads(result.text)) <= 30


def test_control_tokens_that_a_grammar_spells(workshop):
    request = workshop.request({"grammar": 'root ::= "<pad>x"'}, logit_bias={PAD: 30.0})
    (result,) = workshop.run(workshop.engine(), [request])
    assert result.token_ids.tolist() == [PAD, 3 + ord("x"), EOS]


def test_free_until_the_trigger(workshop):
    asked = {"choice": ["yes", "no"], "trigger_token_ids": [FILLER, FILLER]}
    requests = [workshop.request(asked, seed, logit_bias={FILLER: 6.0, EOS: -20.0}) for seed in range(6)]
    for result in workshop.run(workshop.engine(), requests):
        assert result.finish_reason == "stop"
        tokens = result.token_ids.tolist()
        place = next(at for at in range(len(tokens)) if tokens[at : at + 2] == [FILLER, FILLER])
        answer = bytes(token - 3 for token in tokens[place + 2 : -1]).decode()
        assert answer in ("yes", "no")


def test_the_bound_token_brings_the_trigger(workshop):
    asked = {"choice": ["yes"], "trigger_token_ids": [401, 402], "bound_token_id": FILLER}
    requests = [workshop.request(asked, seed, logit_bias={FILLER: 6.0, EOS: -20.0}) for seed in range(4)]
    for result in workshop.run(workshop.engine(), requests):
        tokens = result.token_ids.tolist()
        assert tokens[tokens.index(FILLER) :] == [FILLER, 401, 402, *(3 + ord(char) for char in "yes"), EOS]


def test_a_grammar_that_ends_too_early_for_the_row(workshop):
    short = workshop.request({"choice": ["abc"]}, min_tokens=9)
    long = workshop.request({"regex": "[ab]+"}, min_tokens=9)
    failed, fine = workshop.run(workshop.engine(), [short, long])
    assert (failed.finish_reason, failed.error_code) == ("error", "bad_sampling_params")
    assert failed.error == "the grammar is complete after 3 tokens, min_tokens asks for 9; lower it"
    assert fine.finish_reason == "stop"
    assert len(fine.token_ids) >= 9


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_ignored_ends_leave_the_rest_free(workshop, zos):
    request = workshop.request({"choice": ["abc"]}, ignore_eos=True, max_tokens=20, logit_bias=None)
    (result,) = workshop.run(workshop.engine(zos=zos), [request])
    assert result.finish_reason == "length"
    assert result.token_ids.tolist()[:4] == [*(3 + ord(char) for char in "abc"), EOS]
    assert len(result.token_ids) == 20


def test_stop_strings_and_stop_tokens_end_constrained_rows(workshop):
    by_text = workshop.request({"regex": "[ab]{5}x[ab]{5}"}, stop="x")
    by_token = workshop.request({"regex": "[ab]{5}x[ab]{5}"}, stop_token_ids=[3 + ord("x")])
    for result in workshop.run(workshop.engine(), [by_text, by_token]):
        assert result.finish_reason == "stop"
        assert re.fullmatch("[ab]{5}", result.text)


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_a_grammar_without_a_next_token_fails_its_row(workshop, zos):
    engine = workshop.engine(zos=zos)
    fine = workshop.request({"regex": "abc"})
    stuck = workshop.request({"regex": "xyz"})
    engine.add(stuck)
    while not engine.scheduler.num_running:
        engine.step()
    sequence = engine.scheduler.state.live[stuck.request_id]
    sequence.grammar.allowed = engine.structured._words([3 + ord("x"), 3 + ord("y")])
    results = {result.request_id: result for result in engine.run()}
    assert results[stuck.request_id].error_code == "bad_schema"
    assert results[stuck.request_id].error == "after 2 tokens the grammar allows none of this vocabulary"
    assert [result.text for result in workshop.run(engine, [fine])] == ["abc"]


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_a_matcher_that_breaks_fails_its_row(workshop, zos, monkeypatch):
    class Broken:
        def __init__(self, matcher):
            self.matcher = matcher

        def fill_next_token_bitmask(self, *args):
            raise RuntimeError("out of order\nat line 7")

        def __getattr__(self, name):
            return getattr(self.matcher, name)

    engine = workshop.engine(zos=zos)
    requests = [workshop.request({"regex": "[ab]{30}"}, seed) for seed in range(3)]
    for request in requests:
        engine.add(request)
    while engine.scheduler.num_running < 3:
        engine.step()
    broken = engine.scheduler.state.live[requests[1].request_id]
    broken.grammar.matcher = Broken(broken.grammar.matcher)
    results = {result.request_id: result for result in engine.run()}
    first, second, third = (results[request.request_id] for request in requests)
    assert second.error == "the grammar matcher failed: out of order"
    assert second.error_code == "internal"
    assert [len(result.text) for result in (first, third)] == [30, 30]
    engine.check_integrity()


def test_prompts_here_completions_there(workshop):
    """The second engine's grammar catches up with what the first one's sampled."""
    requests = [workshop.request({"regex": "[a-c]{12}"}, seed, prompt_len=20) for seed in range(5)]
    expected = [result.token_ids.tolist() for result in workshop.run(workshop.engine(), requests)]
    prompt = workshop.engine(role="prompt", hooks=PromptSender())
    split = SplitEngine(prompt, workshop.engine(role="completion", preemption="stop"))
    results = workshop.run(split, requests)
    assert [result.token_ids.tolist() for result in results] == expected


def test_characters_are_never_broken(workshop):
    """First bytes of characters are likely here; what follows them must make a character of them."""
    firsts, others = (0xE0, 0xED, 0xF0, 0xF4), range(0x80, 0xC0)
    bias = {**{3 + byte: 8.0 for byte in firsts}, **{3 + byte: 6.0 for byte in others}}
    asked = [
        {"json": {"type": "string", "minLength": 12, "maxLength": 12}},
        {"json": {"type": "string", "pattern": "^[^,]{12}$"}},
        {"regex": ".{12}"},
    ]
    requests = [workshop.request(each, seed, logit_bias=bias) for each in asked for seed in range(6)]
    for request, result in zip(requests, workshop.run(workshop.engine(), requests), strict=True):
        assert result.finish_reason == "stop"
        text = json.loads(result.text) if "json" in request.params.structured_outputs else result.text
        assert "\ufffd" not in text
        assert len(text) == 12


@pytest.mark.parametrize("limit", [3, 25])
def test_spaces_between_the_parts_of_json_come_to_an_end(workshop, limit):
    """Newlines and spaces are by far the likeliest here; inside a string they are text."""
    bias = {3 + ord("\n"): 30.0, 3 + ord(" "): 30.0, 3 + ord('"'): 5.0}
    schema = {"type": "array", "items": {"type": "string", "minLength": 30, "maxLength": 30}, "minItems": 2}
    engine = workshop.engine(structured={"max_whitespace": limit})
    request = workshop.request({"json": {**schema, "maxItems": 2}}, logit_bias=bias, max_tokens=400)
    (result,) = workshop.run(engine, [request])
    assert result.finish_reason == "stop"
    one, two = json.loads(result.text)
    assert one == two == " " * 30
    outside = re.findall(r"\s+", result.text.replace(one, ""))
    assert [len(run) for run in outside] == [limit] * 4


def test_spaces_of_drafts_are_taken_back(workshop):
    engine = workshop.engine(structured={"max_whitespace": 4})
    request = workshop.request({"json": {"type": "array", "items": {"type": "integer"}}})
    engine.add(request)
    while not engine.scheduler.num_running:
        engine.step()
    grammar = engine.scheduler.state.live[request.request_id].grammar
    grammar.restart()
    for char in "[ \n":
        assert grammar.accept(3 + ord(char))
    assert grammar.run == 2
    assert grammar.accept(3 + ord("7"))
    assert grammar.run == 0
    grammar.rollback(2)
    assert grammar.run == 1
