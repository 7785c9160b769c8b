"""Constraints of chat rows: what a grammar made of them lets through is what the parser reads back."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from xgrammar import GrammarCompiler, GrammarMatcher

from deepinfer_ray.chat.constraint import structured_outputs
from deepinfer_ray.chat.encoding import ChatEncoder, EncodedChat
from deepinfer_ray.chat.options import ChatOptions
from deepinfer_ray.chat.parsing import parse_text
from deepinfer_ray.chat.tokens import DSML
from deepinfer_ray.engine.grammar_spec import GrammarSpec
from deepinfer_ray.engine.grammar_worker import Job, Vocabulary, compile_job
from deepinfer_ray.errors import RowError

MARK, EOS = 256, 257
PIECES = (*(bytes([value]) for value in range(256)), DSML.encode(), b"")
CLOSING = frozenset({*b'"<}]>', MARK, EOS})
HURRY = {ord("<"): {ord("/"), MARK}, ord("/"): {MARK}}
"""What likely comes next, so that a random text comes to its end."""

USER = {"role": "user", "content": "as json, please"}
CALLS, END_CALLS = f"<{DSML} calls>\n", f"</{DSML} calls>"

Walk = Callable[[dict[str, Any], int], str | None]


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


def of(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **more,
    }


def asked(chat: ChatEncoder, **options: Any) -> tuple[EncodedChat, dict[str, Any] | None]:
    made = ChatOptions.of_row({"thinking": False, **options})
    encoded = chat.encode([USER], made)
    return encoded, structured_outputs(encoded, made)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(PIECES, (EOS,)).tokenizer_info(), max_threads=1, cache_enabled=False)


@pytest.fixture(scope="module")
def matcher(compiler: GrammarCompiler) -> Callable[[dict[str, Any]], GrammarMatcher]:
    def make(constraint: dict[str, Any]) -> GrammarMatcher:
        spec = GrammarSpec.of(constraint)
        return GrammarMatcher(compile_job(compiler, Job(0, spec.kind, spec.text, spec.any_whitespace)))

    return make


@pytest.fixture(scope="module")
def walk(matcher: Callable[[dict[str, Any]], GrammarMatcher]) -> Walk:
    """(constraint, seed) -> a random text of it, None if it grew too long."""

    def run(constraint: dict[str, Any], seed: int) -> str | None:
        state, random, tokens = matcher(constraint), Random(seed), []
        words = np.zeros((1, -(-len(PIECES) // 32)), np.int32)
        while len(tokens) < 600:
            state.fill_next_token_bitmask(words, 0)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(PIECES)]
            allowed = np.flatnonzero(bits).tolist()
            likely = CLOSING if not tokens or tokens[-1] not in HURRY else HURRY[tokens[-1]]
            weights = [60 if token in likely else 0.02 if 126 < token < MARK else 1 for token in allowed]
            token = random.choices(allowed, weights)[0]
            assert state.accept_token(token)
            if token == EOS:
                return b"".join(PIECES[token] for token in tokens).decode(errors="replace")
            tokens.append(token)
        return None

    return run


def accepts(state: GrammarMatcher, text: str) -> bool:
    return bool(state.accept_string(text)) and bool(state.is_completed())


CITY = of({"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}})
NODE = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}},
    "required": ["v"],
    "additionalProperties": False,
}
RICH = of(
    {
        "kind": {"type": "string", "enum": ["a b", "<c>", "é"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{0,3}$"}, "maxItems": 2},
        "node": {"$ref": "#/$defs/node"},
        "either": {"type": ["integer", "null"], "minimum": 0, "maximum": 7},
    },
    **{"$defs": {"node": NODE}},
)


@pytest.mark.parametrize("schema", [CITY, RICH], ids=["city", "rich"])
def test_strict_tools_get_arguments_of_their_schema(chat: ChatEncoder, walk: Walk, schema: Any) -> None:
    tools = [tool("f", schema, strict=True), tool("no_arguments", of({}), strict=True)]
    encoded, constraint = asked(chat, tools=tools, tool_choice="required")
    assert constraint is not None
    read = 0
    for seed in range(25):
        text = walk(constraint, seed)
        if text is None:
            continue
        parsed = parse_text(text, encoded.parse)
        assert parsed.content == ""
        assert parsed.tool_calls
        for call in parsed.tool_calls:
            expected = schema if call.name == "f" else of({})
            jsonschema.Draft202012Validator(expected).validate(json.loads(call.arguments))
            read += 1
    assert read >= 20


def test_other_tools_get_well_formed_calls(chat: ChatEncoder, walk: Walk) -> None:
    encoded, constraint = asked(chat, tools=[tool("f", CITY), tool("g")], tool_choice="required")
    assert constraint is not None
    names = set()
    for seed in range(25):
        text = walk(constraint, seed)
        if text is not None:
            calls = parse_text(text, encoded.parse).tool_calls
            assert calls
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
            names |= {call.name for call in calls}
    assert names == {"f", "g"}


def test_a_named_tool_is_the_only_one(chat: ChatEncoder, matcher: Any) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    _, constraint = asked(chat, tools=[tool("f"), tool("g")], tool_choice=choice)
    assert constraint is not None
    call = f'<{DSML} invoke name="%s">\n\n</{DSML} invoke>\n'
    assert accepts(matcher(constraint), call % "g" + END_CALLS)
    assert not matcher(constraint).accept_string(call % "f")


def test_auto_leaves_text_free_and_calls_of_strict_tools_well_formed(chat: ChatEncoder, matcher: Any) -> None:
    _, free = asked(chat, tools=[tool("f", CITY)])
    assert free is None
    _, constraint = asked(chat, tools=[tool("f", CITY, strict=True)])
    assert constraint is not None
    head = f'<{DSML} invoke name="f">\n'
    city = f'<{DSML} parameter name="city" string="true">a < b</{DSML} parameter>\n'
    days = f'<{DSML} parameter name="days" string="false">3</{DSML} parameter>\n'
    block = f"{CALLS}{head}{city}{days}</{DSML} invoke>\n{END_CALLS}"
    for text in ("plain <text>", "", f"first this\n\n{block}"):
        assert accepts(matcher(constraint), text), text
    for text in (f"\n\n{CALLS}{head}{days}", f"x <{DSML} anything", f"\n\n{block} and more"):
        assert not accepts(matcher(constraint), text), text


def test_a_format_beside_tools_allows_either(chat: ChatEncoder, matcher: Any) -> None:
    formats = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}},
    ]
    for response_format in formats:
        _, constraint = asked(chat, tools=[tool("f")], response_format=response_format)
        assert constraint is not None
        call = f'\n\n{CALLS}<{DSML} invoke name="f">\n\n</{DSML} invoke>\n{END_CALLS}'
        for text in ('{"city": "x", "days": 2}', call):
            assert accepts(matcher(constraint), text)
        assert not matcher(constraint).accept_string("Sure")


REFUSED = [
    (of({"a": {"type": "string", "format": "email"}}), "parameter 'a': 'format' is not supported for text"),
    (of({"a": {"$ref": "#/$defs/s"}}, **{"$defs": {"s": {"type": "string", "format": "uuid"}}}), "'format'"),
    (of({'a"b': {"type": "integer"}}), "the parameter name 'a\"b' cannot be written in a call"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_strict_schemas_that_calls_cannot_keep(chat: ChatEncoder, schema: Any, message: str) -> None:
    with pytest.raises(RowError) as caught:
        asked(chat, tools=[tool("f", schema, strict=True)], tool_choice="required")
    assert caught.value.code == "bad_schema"
    assert message in str(caught.value)


def test_a_continued_message_cannot_be_constrained(chat: ChatEncoder) -> None:
    options = ChatOptions.of_row(
        {
            "thinking": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}},
        }
    )
    encoded = chat.encode([USER, {"role": "assistant", "content": "{", "prefix": True}], options)
    with pytest.raises(RowError, match="message that is being continued"):
        structured_outputs(encoded, options)
