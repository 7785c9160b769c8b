"""Malformed rows: the error names the message, the field and what to do, and quotes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_ray.chat.encoding import ChatEncoder
from deepinfer_ray.chat.options import ChatOptions, ParseOptions
from deepinfer_ray.chat.tokens import IMAGE
from deepinfer_ray.errors import RowError

USER = {"role": "user", "content": "secret"}
ASSISTANT = {"role": "assistant", "content": "secret"}
FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
CALLS = {**ASSISTANT, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "secret"}
TOOL = {"type": "function", "function": {"name": "f"}}


def calls(**change: Any) -> list[dict[str, Any]]:
    return [USER, {**ASSISTANT, "tool_calls": [{**CALL, **change}]}, RESULT]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "messages: expected a list of messages, got null"),
        (5, "messages: expected a list of messages, got int"),
        (USER, "messages: expected a list of messages, got dict"),
        ("secret", "messages: a string that is no JSON"),
        ('"secret"', "messages: expected a list of messages, got str"),
        ([], "messages: the list is empty"),
        (["secret"], "messages[0]: expected an object with role and content, got str"),
        ([{"content": "secret"}], "messages[0].role: missing; one of system, user"),
        ([USER, {"role": "asistant"}], "messages[1].role: unknown role; did you mean 'assistant'?"),
        ([{"role": 5, "content": "x"}], "messages[0].role: unknown role; one of system"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role: unknown role; one of system"),
        ([{"role": "user"}], "messages[0].content: missing"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content: expected a string or a list of parts, got int",
        ),
        ([{"role": "user", "content": ["secret"]}], "messages[0].content[0]: expected an object with a type"),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            "messages[0].content[0].type: unknown kind of part",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: missing"),
        (
            [{"role": "user", "content": f"secret {IMAGE}"}],
            "messages[0].content: the text spells the image place",
        ),
        ([USER, {**ASSISTANT, "reasoning": IMAGE}, USER], "messages[1].reasoning: the text spells the image"),
        (
            [{**USER, "reasoning_contnet": "secret"}],
            "messages[0].reasoning_contnet: unknown field; did you mean",
        ),
        ([{**USER, "reasoning": "secret"}], "messages[0].reasoning: only an assistant message may have it"),
        ([{**USER, "tool_call_id": "c"}], "messages[0].tool_call_id: only a tool message may have it"),
        ([USER, {**ASSISTANT, "reasoning": 5}, USER], "messages[1].reasoning: expected a string, got int"),
        (
            [USER, {**ASSISTANT, "reasoning": "a", "reasoning_content": "b"}, USER],
            "messages[1].reasoning: give reasoning or reasoning_content, not both",
        ),
        ([USER, ASSISTANT], "messages[1].role: an assistant message is last"),
        ([USER, ASSISTANT, ASSISTANT, USER], "messages[2].role: two assistant messages in a row"),
        ([{"role": "system", "content": "s"}], "messages[0].role: nothing to answer"),
        (
            [USER, {"role": "latest_reminder", "content": "s"}, USER],
            "messages[1].role: a reminder may only follow",
        ),
        ([{"role": "latest_reminder", "content": "s"}], "messages[0].role: nothing to answer"),
        (
            [USER, {**ASSISTANT, "prefix": True}, USER],
            "messages[1].prefix: only the last message can be a prefix",
        ),
        ([USER, {**ASSISTANT, "prefix": "yes"}], "messages[1].prefix: must be true or false, got str"),
        (
            [USER, {**CALLS, "prefix": True}],
            "messages[1].tool_calls: a prefix message cannot have tool calls",
        ),
        ([{**USER, "task": "sing"}], "messages[0].task: unknown task; one of action, query"),
        ([{**USER, "task": ["query"]}], "messages[0].task: unknown task; one of action, query"),
        ([{**USER, "task": "query"}, USER], "messages[0].task: only the last message may have a task"),
        (
            [USER, {**ASSISTANT, "task": "query"}],
            "messages[1].task: a assistant message cannot have this task",
        ),
        ([USER, {**ASSISTANT, "function_call": FUNCTION}], "messages[1].function_call: the old form"),
        ([USER, {**ASSISTANT, "tool_calls": "x"}, USER], "messages[1].tool_calls: expected a list, got str"),
        ([USER, {**ASSISTANT, "tool_calls": ["x"]}, USER], "messages[1].tool_calls[0]: expected an object"),
        (calls(id=None), "messages[1].tool_calls[0].id: missing"),
        (calls(type="custom"), "messages[1].tool_calls[0].type: only function calls"),
        (
            calls(function=None),
            "messages[1].tool_calls[0].function: expected an object with name and arguments",
        ),
        (calls(function={"name": "f"}), "messages[1].tool_calls[0].function.arguments: missing"),
        (
            calls(function={"name": 3, "arguments": ""}),
            "messages[1].tool_calls[0].function.name: expected a string",
        ),
        (
            calls(function={"name": "f", "arguments": {"x": float("nan")}}),
            "messages[1].tool_calls[0].function.arguments: cannot be written as JSON",
        ),
        ([USER, CALLS, USER], "messages[1].tool_calls: 1 call(s) have no tool message right after"),
        ([USER, CALLS], "messages[1].role: an assistant message is last"),
        (
            [USER, CALLS, {**RESULT, "tool_call_id": "d"}],
            "messages[2].tool_call_id: answers no open tool call of mess",
        ),
        ([USER, CALLS, RESULT, RESULT], "messages[3].tool_call_id: answers no open tool call of messages[1]"),
        ([RESULT], "messages[0].tool_call_id: answers no open tool call of any message"),
        ([USER, CALLS, {"role": "tool", "content": "r"}], "messages[2].tool_call_id: missing"),
        (
            [USER, {**ASSISTANT, "tool_calls": [CALL, CALL]}, RESULT],
            "messages[1].tool_calls: two calls have the same",
        ),
    ],
)
def test_malformed_messages(chat: ChatEncoder, messages: object, complaint: str) -> None:
    with pytest.raises(RowError) as caught:
        chat.encode(messages)
    assert caught.value.code == "bad_messages"
    assert str(caught.value).startswith(complaint)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            {"role": "assistant", "content": [{"type": "image", "image": "u"}]},
            "a assistant message cannot hold",
        ),
        ({"role": "user", "content": [{"type": "image_url"}]}, "an image needs a url"),
        ({"role": "user", "content": [{"type": "image", "image": b"x"}]}, "an image needs a url"),
        ({"role": "user", "content": [{"type": "image", "image": "/x.png"}]}, "the image's url is neither"),
    ],
)
def test_malformed_images(chat: ChatEncoder, message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RowError) as caught:
        chat.encode([message, USER])
    assert caught.value.code == "bad_image"
    assert f"messages[0].content[0]: {complaint}" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"reasoning_efort": "low"},
            "unknown chat option 'reasoning_efort'; did you mean 'reasoning_effort'?",
        ),
        ({"zzz": 1}, "unknown chat option 'zzz'; valid: thinking, reasoning_effort"),
        ({"thinking": "yes"}, "chat option thinking: must be true or false"),
        ({"thinking": {"type": "on"}}, 'chat option thinking: must be true, false or {"type"'),
        (
            {"reasoning_effort": "huge"},
            "chat option reasoning_effort: must be an integer from 1 to 100 or one of",
        ),
        ({"reasoning_effort": 0}, "chat option reasoning_effort: must be an integer from 1 to 100"),
        ({"reasoning_effort": 101}, "chat option reasoning_effort: must be an integer from 1 to 100"),
        ({"reasoning_effort": True}, "chat option reasoning_effort: must be an integer from 1 to 100"),
        ({"reasoning_effort": 50.0}, "chat option reasoning_effort: must be an integer from 1 to 100"),
        ({"reasoning_effort": [5]}, "chat option reasoning_effort: must be an integer from 1 to 100"),
        ({"tools": {"name": "f"}}, "chat option tools: must be a list of function tools"),
        ({"tools": "f"}, "chat option tools: is a string but no JSON"),
        ({"tools": [5]}, "chat option tools.0: Input should be a valid dictionary"),
        ({"response_format": []}, "chat option response_format: Input should be a valid dictionary"),
    ],
)
def test_malformed_options(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RowError) as caught:
        ChatOptions.of_row(options)
    assert caught.value.code == "bad_messages"
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tools": [{"type": "function"}]}, "missing field `function`"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "Invalid 'tools[0].function.name'"),
        ({"tools": [TOOL, TOOL]}, "Tool names must be unique"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "messages, tools or format: "),
        ({"response_format": {"type": "xml"}}, "unknown variant `xml`"),
        ({"response_format": {"type": "json_object"}}, "must contain the word 'json'"),
        (
            {"continue_final_message": True},
            "messages[0].role: continue_final_message needs a final assistant",
        ),
    ],
)
def test_options_that_do_not_fit(chat: ChatEncoder, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RowError) as caught:
        chat.encode([USER], ChatOptions.of_row(options))
    assert caught.value.code == "bad_messages"
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_foreign_fields_of_data_sets_are_ignored(chat: ChatEncoder) -> None:
    extra = {"weight": 1, "timestamp": 3, "name": "bob", "metadata": {"a": 1}}
    assert chat.render([{**USER, **extra}]).text == chat.render([USER]).text


def test_column_types_of_efforts() -> None:
    assert ChatOptions.of_row({"reasoning_effort": np.int64(7), "tools": None}).reasoning_effort == 7


def test_parse_options_are_checked_too() -> None:
    with pytest.raises(RowError, match="unknown parse option 'strat'; did you mean 'start'"):
        ParseOptions.of_row({"strat": "chat"})
