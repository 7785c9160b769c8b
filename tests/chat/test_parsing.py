"""Completions to columns: the golden cases, and the policies for malformed output."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from deepinfer_ray.chat.calls import ToolCall, read_calls, unwrapped
from deepinfer_ray.chat.encoding import ChatEncoder
from deepinfer_ray.chat.options import ChatOptions, ParseOptions
from deepinfer_ray.chat.parsing import CompletionParser, ParsedCompletion, parse_text
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.chat.tokens import DSML, EOS
from deepinfer_ray.errors import ConfigError

CHAT = ParseOptions(start="chat")
THINKING = ParseOptions(start="thinking")
CALLS, END_CALLS = f"<{DSML} calls>\n", f"</{DSML} calls>"


def invoke(body: str, name: str = "f") -> str:
    return f'<{DSML} invoke name="{name}">\n{body}</{DSML} invoke>\n'


def parameter(key: str, value: str, attribute: str = ' string="true"') -> str:
    return f'<{DSML} parameter name="{key}"{attribute}>{value}</{DSML} parameter>\n'


def arguments(text: str, options: ParseOptions = CHAT) -> list[Any]:
    return [json.loads(call.arguments) for call in parse_text(text, options).tool_calls]


@pytest.fixture(scope="session")
def full(v41_json: str) -> Tokenizer:
    """Turns spellings into control tokens, as a model generates them."""
    return Tokenizer.from_str(v41_json)


def generated(full: Tokenizer, text: str) -> list[int]:
    return list(full.encode(text, add_special_tokens=False).ids)


def check(parsed: ParsedCompletion, case: dict[str, Any]) -> None:
    expected = case["expected"]
    strip = str.strip if case["options"]["parse_json_output"] else str
    assert parsed.reasoning == expected["reasoning"]
    assert strip(parsed.content) == strip(expected["content"])
    assert parsed.finish_reason == expected["finish_reason"]
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    assert calls == [(call["name"], json.loads(call["arguments"])) for call in expected["tool_calls"]]


def case_options(case: dict[str, Any]) -> tuple[ParseOptions, str]:
    options = dict(case["options"])
    finish_reason = options.pop("engine_finish")
    return ParseOptions.of_row(options), finish_reason


def test_golden_text(parse_case: dict[str, Any]) -> None:
    check(parse_text(parse_case["completion_text"], *case_options(parse_case)), parse_case)


def test_golden_ids(parser: CompletionParser, full: Tokenizer, parse_case: dict[str, Any]) -> None:
    ids = generated(full, parse_case["completion_text"] + EOS)
    check(parser.parse_ids(ids, *case_options(parse_case)), parse_case)


def test_reader_of_calls_agrees_with_the_library(parse_case: dict[str, Any]) -> None:
    """Where the block is regular both give the same calls, so it matters only where it is not."""
    options, finish_reason = case_options(parse_case)
    block = read_calls(parse_case["completion_text"].split(DSML), starts_inside=options.starts_in_tool_calls)
    if options.parse_tool_calls and block.regular:
        assert (
            tuple(block.calls) == parse_text(parse_case["completion_text"], options, finish_reason).tool_calls
        )


def test_markers_written_with_ordinary_tokens_are_text(parser: CompletionParser, v41: TextEncoder) -> None:
    spelled = f"a </think> b {CALLS}{invoke('')}{END_CALLS}"
    ids = v41.encode_text(spelled).tolist()
    parsed = parser.parse_ids([*ids, 128822, *ids], THINKING)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (spelled, spelled, ())


def test_exactly_one_trailing_eos_is_stripped(parser: CompletionParser, full: Tokenizer) -> None:
    assert parser.parse_ids([*generated(full, "x"), 1], CHAT).content == "x"
    assert parser.parse_ids([*generated(full, "x"), 1, 1], CHAT).content == f"x{EOS}"
    assert parser.parse_ids([1], CHAT).content == ""
    assert parser.parse_ids([], CHAT, "length").finish_reason == "length"


def test_reasoning_tokens(parser: CompletionParser, full: Tokenizer) -> None:
    assert parser.parse_ids(generated(full, "one two</think>three"), THINKING).reasoning_tokens == 2
    assert parser.parse_ids(generated(full, "one two"), THINKING, "length").reasoning_tokens == 2
    assert parser.parse_ids(generated(full, "three"), CHAT).reasoning_tokens == 0


def test_unicode_in_calls(parser: CompletionParser, full: Tokenizer) -> None:
    text = CALLS + invoke(parameter("clé", '東京 "x"\\ \n👩‍👧')) + END_CALLS
    parsed = parser.parse_ids(generated(full, text), CHAT)
    assert json.loads(parsed.tool_calls[0].arguments) == {"clé": '東京 "x"\\ \n👩‍👧'}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (parameter("a", "1", ' string="false"') + parameter("b", "{", ' string="false"'), {"a": 1, "b": "{"}),
        (parameter("a", "NaN", ' string="false"'), {"a": "NaN"}),
        (parameter("a", "[1", ""), {"a": "[1"}),
        (parameter("a", "[1]", ""), {"a": [1]}),
        (parameter("a", "", ' string="hello"'), {"a": "hello"}),
        (parameter("a", "x", ' string="hello"'), {"a": "x"}),
        (parameter("a", "") + parameter("b", "2", ""), {"a": "", "b": 2}),
        (parameter("a", "1") + parameter("b", "2") + parameter("a", "3"), {"b": "2", "a": "3"}),
        (parameter("a", "x", "") + parameter("b", "true", ' string="false"'), {"a": "x", "b": True}),
        (parameter("a", f"<{DSML} b>", ""), {"a": f"<{DSML} b>"}),
        (parameter("a", f"lone {DSML}", ""), {"a": f"lone {DSML}"}),
    ],
)
def test_malformed_parameters(body: str, expected: dict[str, Any]) -> None:
    assert arguments(CALLS + invoke(body) + END_CALLS) == [expected]


def test_a_call_that_is_not_closed_is_dropped() -> None:
    cut = CALLS + invoke(parameter("a", "1")) + f'<{DSML} invoke name="g">\n' + parameter("b", "2")
    parsed = parse_text(cut, CHAT, "length")
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert (parsed.finish_reason, parsed.incomplete) == ("length", True)
    only = parse_text(cut.replace(invoke(parameter("a", "1")), ""), CHAT)
    assert (only.tool_calls, only.finish_reason, only.incomplete) == ((), "stop", True)


def test_whole_calls_of_a_cut_block_are_kept() -> None:
    parsed = parse_text(CALLS + invoke("\n"), CHAT, "length")
    assert parsed.tool_calls == (ToolCall("f", "{}"),)
    assert (parsed.finish_reason, parsed.incomplete) == ("length", False)


def test_irregular_calls_stay_inside_their_block() -> None:
    text = invoke(parameter("a", "1", "")) + END_CALLS + invoke("", "late")
    assert arguments(CALLS + text) == [{"a": 1}]
    assert arguments(text, ParseOptions(starts_in_tool_calls=True)) == [{"a": 1}]


def test_wrapped_arguments() -> None:
    schema = {"properties": {"x": {}, "y": {}}, "required": ["x"]}

    def names(arguments: str, schema: Any = schema) -> list[str]:
        return list(json.loads(unwrapped(ToolCall("f", arguments), schema).arguments))

    assert names('{"arguments": {"x": 1}}') == ["x"]
    assert names('{"input": {"x": 1, "y": "é"}}') == ["x", "y"]
    assert names('{"arguments": {"y": 1}}') == ["arguments"]  # lacks the required x
    assert names('{"arguments": {"x": 1, "z": 1}}') == ["arguments"]  # z is foreign
    assert names('{"arguments": "x"}') == ["arguments"]
    assert names('{"arguments": {"x": 1}, "y": 2}') == ["arguments", "y"]
    assert names('{"arguments": {"x": 1}}', {"properties": {"arguments": {}, "x": {}}}) == ["arguments"]
    assert names('{"arguments": {"x": 1}}', None) == ["arguments"]
    text = CALLS + invoke(parameter("arguments", '{"x": 1}', ' string="false"')) + END_CALLS
    assert arguments(text, ParseOptions(schemas={"f": schema})) == [{"x": 1}]


@pytest.mark.parametrize("reason", ["error", "aborted", "preempted"])
def test_other_reasons_of_the_engine_stay(reason: str) -> None:
    assert parse_text(CALLS + invoke("") + END_CALLS, CHAT, reason).finish_reason == reason


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('prose\n```json\n{"a":1}\n```\nbye', '{"a":1}'),
        ("[1]", "[1]"),
        ("\nno JSON at all \n", "no JSON at all \n"),
    ],
)
def test_json_mode(parser: CompletionParser, full: Tokenizer, text: str, content: str) -> None:
    options = ParseOptions(parse_tool_calls=False, parse_json_output=True)
    assert parse_text(text, options).content == content
    assert parser.parse_ids(generated(full, text), options).content == content


def test_think_token_is_swallowed_only_when_first(parser: CompletionParser, full: Tokenizer) -> None:
    text = "<think>a<think>b</think>c"
    for parsed in (parse_text(text, THINKING), parser.parse_ids(generated(full, text), THINKING)):
        assert (parsed.reasoning, parsed.content) == ("a<think>b", "c")
    literal = parse_text("<think>a</think>b", CHAT)
    assert (literal.reasoning, literal.content) == ("", "<think>ab")


def test_any_mix_of_markup_parses_to_valid_calls(parser: CompletionParser, full: Tokenizer) -> None:
    fragments = [
        *(CALLS, END_CALLS, f'<{DSML} invoke name="f">\n', f"</{DSML} invoke>\n", f"</{DSML} parameter>\n"),
        *(f'<{DSML} parameter name="a" string="true">', f'<{DSML} parameter name="b" string="false">'),
        *(
            f'<{DSML} parameter name="c">',
            "</think>",
            "<think>",
            DSML,
            "<",
            "</",
            '"x',
            "{1}",
            "7",
            "\n\n",
            "é",
        ),
    ]
    choose = random.Random(0)
    seen = 0
    for _ in range(300):
        text = "".join(choose.choices(fragments, k=choose.randint(1, 14)))
        options = choose.choice([CHAT, THINKING, ParseOptions(starts_in_tool_calls=True)])
        reason = choose.choice(["stop", "length"])
        for parsed in (
            parse_text(text, options, reason),
            parser.parse_ids(generated(full, text), options, reason),
        ):
            assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.tool_calls)
            assert parsed.finish_reason == (
                "tool_calls" if parsed.tool_calls and reason == "stop" else reason
            )
            seen += len(parsed.tool_calls)
    assert seen > 50


def test_calls_column_is_an_assistant_message_again(chat: ChatEncoder) -> None:
    body = parameter("s", "x\ny") + parameter("o", '{"k": [1, "é"]}', ' string="false"')
    text = "Because.</think>Done.\n\n" + CALLS + invoke(body) + END_CALLS
    parsed = parse_text(text, THINKING)
    column = parsed.tool_calls_json("row 1")
    assert column is not None
    assert column == parsed.tool_calls_json("row 1")
    assert column != parsed.tool_calls_json("row 2")
    calls = json.loads(column)
    assert calls[0]["id"].startswith("call_")
    message = {
        "role": "assistant",
        "reasoning_content": parsed.reasoning,
        "content": parsed.content,
        "tool_calls": calls,
    }
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": ""}
    messages = [{"role": "user", "content": "q"}, message, result]
    assert f"<think>{text}{EOS}" in chat.render(messages, ChatOptions(tools=(tool,))).text


def test_no_calls_no_column() -> None:
    assert parse_text("x", CHAT).tool_calls_json("row") is None


def test_parser_needs_its_markers(toy_json: Any) -> None:
    with pytest.raises(
        ConfigError, match="lacks the control tokens <｜end▁of▁sentence｜>, <think>, ｜DSML｜"
    ):
        CompletionParser(TextEncoder(toy_json(())))


def test_repr_hides_the_text() -> None:
    assert repr(parse_text("secret", CHAT)) == "ParsedCompletion(stop, 0 tool calls)"


@pytest.mark.parametrize("key", ["a b", " a", "back\\slash", "tab\there"])
def test_names_that_need_care_stay_json(key: str) -> None:
    text = CALLS + invoke(parameter(key, "x") + parameter("n", "1", ' string="false"')) + END_CALLS
    assert arguments(text) == [{key: "x", "n": 1}]
