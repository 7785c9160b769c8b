"""Messages to token ids: the golden cases, and what the golden file does not cover."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    DeepseekV41Encoding,
    SpecialTokens,
)
from deepseek_recipe import Tokenizer as LibraryTokenizer

from deepinfer_ray.chat.encoding import ChatEncoder, default_max_tokens
from deepinfer_ray.chat.options import ChatOptions
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.chat.tokens import CHAT_TOKENS, CONTROL_TOKENS, IMAGE
from deepinfer_ray.errors import ConfigError, RowError

USER = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def assistant(content: str = "a", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(call_id: str = "c1", arguments: Any = '{"x": 1}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def result(call_id: str = "c1", content: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def prompt(chat: ChatEncoder, messages: object, **options: Any) -> str:
    return chat.render(messages, ChatOptions.of_row(options)).text


def test_golden(chat: ChatEncoder, encode_case: dict[str, Any]) -> None:
    options = ChatOptions.of_row({**encode_case["options"], "tools": encode_case["tools"]})
    text = chat.render(encode_case["messages"], options).text
    if "prompt_text" in encode_case:
        assert text == encode_case["prompt_text"]
    assert hashlib.sha256(text.encode()).hexdigest() == encode_case["prompt_sha256"]
    encoded = chat.encode(encode_case["messages"], options)
    assert len(encoded.token_ids) == encode_case["token_count"]
    assert encoded.token_ids.tolist() == encode_case["token_ids"]


def test_ids_equal_the_librarys_own_safe_encoding(chat: ChatEncoder, v41_json: str) -> None:
    special_tokens = SpecialTokens(image=IMAGE)
    messages = [
        {"role": "system", "content": "Be <think>brief</think>. é世"},
        {"role": "user", "content": "".join(spelling for spelling in CONTROL_TOKENS if spelling != IMAGE)},
    ]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages, "tools": [TOOL]}
    request = ChatCompletionRequest(body).convert(ConversionOptions().with_special_tokens(special_tokens))
    library = DeepseekV41Encoding().with_special_tokens(special_tokens)
    expected = library.with_tokenizer(LibraryTokenizer.from_str(v41_json)).encode(request.conversation)
    assert chat.encode(messages, ChatOptions(tools=(TOOL,))).token_ids.tolist() == expected


def test_a_row_of_control_spellings_is_text(chat: ChatEncoder, v41_json: str) -> None:
    data = " ".join(spelling for spelling in CONTROL_TOKENS if spelling != IMAGE)
    messages = [
        {"role": "system", "content": data},
        {"role": "user", "content": [{"type": "text", "text": data}]},
        assistant(data, reasoning_content=data, tool_calls=[call(arguments={data: data})]),
        result(content=data),
    ]
    harmless = json.loads(json.dumps(messages, ensure_ascii=False).replace(data, "data"))
    added = {token["id"] for token in json.loads(v41_json)["added_tokens"]}

    def control_ids(rows: list[dict[str, Any]]) -> list[int]:
        return [i for i in chat.encode(rows, ChatOptions(tools=(TOOL,))).token_ids.tolist() if i in added]

    assert control_ids(messages) == control_ids(harmless)


def test_unicode_survives(chat: ChatEncoder) -> None:
    text = "naïve café — 東京タワー 👩‍👩‍👧 \u202eשלום\u202c \u0000\u2028 e\u0301"
    assert prompt(chat, [{"role": "user", "content": text}]).count(text) == 1
    with pytest.raises(
        RowError, match=r"messages\[0\]\.content: no valid Unicode, it holds a lone surrogate"
    ):
        chat.encode([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize("effort", [1, 42, 99, 100])
def test_integer_efforts(chat: ChatEncoder, effort: int) -> None:
    messages = [{"role": "system", "content": "Effort: 75"}, USER]
    expected = f"<｜begin▁of▁sentence｜><｜System｜>{EFFORT_LINE.format(effort)}Effort: 75<｜User｜>q"
    assert prompt(chat, messages, reasoning_effort=effort).startswith(expected)


@pytest.mark.parametrize(
    ("effort", "number"),
    [("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75), ("max", 100), ("ultra", 100)],
)
def test_named_efforts(chat: ChatEncoder, effort: str, number: int) -> None:
    assert EFFORT_LINE.format(number) in prompt(chat, [USER], reasoning_effort=effort)


def test_effort_none_switches_thinking_off(chat: ChatEncoder) -> None:
    text = "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>"
    assert prompt(chat, [USER], thinking=True, reasoning_effort="none") == text
    assert prompt(chat, [USER], thinking={"type": "disabled"}, reasoning_effort=42) == text


def test_drop_thinking_false_keeps_every_reasoning(chat: ChatEncoder) -> None:
    messages = [USER, assistant("a1", reasoning="r1"), USER, assistant("a2"), USER]
    text = prompt(chat, messages, drop_thinking=False)
    assert text.endswith(
        "<｜User｜>q<｜Assistant｜><think>r1</think>a1<｜end▁of▁sentence｜>"
        "<｜User｜>q<｜Assistant｜><think></think>a2<｜end▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>"
    )
    assert "r1" not in prompt(chat, messages)
    assert "r1" not in prompt(chat, messages, drop_thinking=False, thinking=False)


def test_reasoning_of_the_current_turn_is_kept_over_several_tool_results(chat: ChatEncoder) -> None:
    messages = [
        *(USER, assistant("a0", reasoning_content="r0"), USER),
        *(assistant("", reasoning_content="r1", tool_calls=[call("c1")]), result("c1")),
        *(assistant("", reasoning_content="r2", tool_calls=[call("c2")]), result("c2")),
    ]
    text = prompt(chat, messages)
    assert "r0" not in text
    assert "<｜Assistant｜><think>r1</think>\n\n<｜DSML｜ calls>" in text
    assert "<｜Assistant｜><think>r2</think>\n\n<｜DSML｜ calls>" in text


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_tasks_of_a_user_message(chat: ChatEncoder, task: str) -> None:
    text = f"<｜begin▁of▁sentence｜><｜User｜>q<｜{task}｜>"
    assert prompt(chat, [{**USER, "task": task}], thinking=False) == text


def test_task_action_when_thinking(chat: ChatEncoder) -> None:
    encoded = chat.encode([{**USER, "task": "action"}])
    assert encoded.token_ids[-3:].tolist() == [128804, 128821, 128829]
    assert (encoded.parse.start, encoded.parse.parse_tool_calls) == ("chat", False)


def test_task_title_of_an_assistant_message(chat: ChatEncoder) -> None:
    text = prompt(chat, [USER, assistant(task="title")], thinking=False)
    assert text.endswith("<｜Assistant｜></think>a<｜end▁of▁sentence｜><｜title｜>")


def test_developer_is_system(chat: ChatEncoder) -> None:
    rows = [[{"role": role, "content": "s"}, USER] for role in ("developer", "system")]
    assert prompt(chat, rows[0]) == prompt(chat, rows[1])


def test_null_fields_count_as_absent(chat: ChatEncoder) -> None:
    nulls = dict.fromkeys(("name", "reasoning_content", "tool_calls", "tool_call_id", "prefix", "task"))
    assert prompt(chat, [{**nulls, **USER}]) == prompt(chat, [USER])
    assert prompt(chat, [{"role": "user", "content": None}], thinking=False).endswith(
        "｜User｜><｜Assistant｜></think>"
    )
    assert prompt(chat, [USER, assistant(tool_calls=[]), USER]) == prompt(chat, [USER, assistant(), USER])


def test_json_text_in_place_of_structures(chat: ChatEncoder) -> None:
    assert prompt(chat, json.dumps([USER]), tools=json.dumps([TOOL])) == prompt(chat, [USER], tools=[TOOL])
    rows = [
        [USER, assistant("", tool_calls=[call(arguments=arguments)]), result()]
        for arguments in ({"x": "é"}, '{"x": "é"}')
    ]
    assert prompt(chat, rows[0]) == prompt(chat, rows[1])


def test_tool_choice(chat: ChatEncoder) -> None:
    assert prompt(chat, [USER], tools=[TOOL], tool_choice="none") == prompt(chat, [USER])
    required = chat.encode([USER], ChatOptions(tools=(TOOL,), tool_choice="required", thinking=False))
    assert required.token_ids[-5:].tolist() == [271, 30, 128825, 10699, 1018]
    assert required.parse.starts_in_tool_calls
    assert required.constraint is not None
    assert required.constraint[0] == "tool_call_required"
    with pytest.raises(RowError, match="Thinking mode does not support this tool_choice"):
        chat.encode([USER], ChatOptions(tools=(TOOL,), tool_choice="required"))


@pytest.mark.parametrize(
    ("messages", "options", "start"),
    [
        ([USER], {}, "thinking"),
        ([USER], {"thinking": False}, "chat"),
        ([USER, assistant("X", prefix=True)], {}, "content_continuation"),
        ([USER, assistant("X", prefix=True)], {"thinking": False}, "chat"),
        ([USER, assistant("", reasoning="R", prefix=True)], {}, "reasoning_continuation"),
        ([USER, assistant("X")], {"continue_final_message": True}, "content_continuation"),
    ],
)
def test_how_the_completion_will_be_read(
    chat: ChatEncoder, messages: list[dict[str, Any]], options: dict[str, Any], start: str
) -> None:
    parse = chat.encode(messages, ChatOptions.of_row(options)).parse
    assert (parse.start, parse.parse_tool_calls, parse.parse_json_output) == (start, False, False)


def test_json_object_gives_a_constraint_and_json_parsing(chat: ChatEncoder) -> None:
    row = [{"role": "user", "content": "as json"}]
    encoded = chat.encode(row, ChatOptions(response_format={"type": "json_object"}))
    assert encoded.parse.parse_json_output
    assert encoded.constraint == ("json", "")


def test_json_schema_gives_its_schema_as_constraint(chat: ChatEncoder) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    encoded = chat.encode([USER], ChatOptions(response_format=response_format))
    assert not encoded.parse.parse_json_output  # the constraint leaves nothing to strip
    assert encoded.constraint is not None
    assert encoded.constraint[0] == "json"
    assert json.loads(encoded.constraint[1]) == schema


def test_tools_give_their_schemas_to_the_parser(chat: ChatEncoder) -> None:
    parse = chat.encode([USER], ChatOptions(tools=(TOOL,))).parse
    assert parse.parse_tool_calls
    assert parse.schemas == {"f": {"type": "object"}}


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_tools_without_parameters(chat: ChatEncoder, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", **parameters}}
    assert '{"name": "f", "description": "", "parameters": {}}' in prompt(chat, [USER], tools=[tool])


def test_images_are_refused_until_asked_for(v41: TextEncoder) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    with pytest.raises(
        RowError, match=r"messages\[0\]\.content\[1\]: this build takes no images yet"
    ) as caught:
        ChatEncoder(v41).encode([{"role": "user", "content": parts}])
    assert caught.value.code == "bad_image"


def test_image_spellings_of_three_interfaces(chat: ChatEncoder) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "https://x/1.png", "detail": "low"}},
        {"type": "input_image", "image_url": "https://x/2.png"},
        {"type": "image", "image": "https://x/3.png"},
    ]
    encoded = chat.encode([{"role": "user", "content": parts}])
    assert encoded.token_ids.tolist().count(129264) == 3
    assert [source.url for source in encoded.image_sources] == [f"https://x/{i}.png" for i in (1, 2, 3)]


def test_toy_tokenizer_can_chat(toy_json: Callable[..., str]) -> None:
    chat = ChatEncoder(TextEncoder(toy_json()))
    encoded = chat.encode([{"role": "user", "content": "<think>"}], ChatOptions(thinking=False))
    assert [i for i in encoded.token_ids.tolist() if i >= 256] == [
        chat.text.control_id(spelling)
        for spelling in ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>")
    ]
    assert len(encoded.token_ids) == 4 + len("<think>")


def test_missing_control_tokens_are_named(toy_json: Callable[..., str]) -> None:
    lacking = tuple(token for token in CHAT_TOKENS if token not in ("<think>", "｜DSML｜"))
    with pytest.raises(
        ConfigError, match="lacks the control tokens <think>, ｜DSML｜, so this checkpoint cannot"
    ):
        ChatEncoder(TextEncoder(toy_json(lacking)))
    text = TextEncoder(toy_json(CHAT_TOKENS))
    with pytest.raises(ConfigError, match=f"lacks the control tokens {IMAGE}"):
        ChatEncoder(text, images=True)
    with pytest.raises(RowError, match="tokenizer lacks <｜query｜>, which the row needs"):
        ChatEncoder(text).encode([{**USER, "task": "query"}])


@pytest.mark.parametrize(
    ("thinking", "effort", "prompt_tokens", "context", "expected"),
    [
        (False, None, 100, 1_048_576, 8192),
        (False, "max", 100, 1_048_576, 8192),
        (True, None, 100, 1_048_576, 65536),
        (True, 99, 100, 1_048_576, 65536),
        (True, "max", 100, 1_048_576, 131072),
        (True, "ultra", 100, 1_048_576, 131072),
        (True, 100, 100, 1_048_576, 131072),
        (True, None, 1000, 4096, 3096),
        (False, None, 4095, 4096, 1),
        (False, None, 4096, 4096, 1),
        (False, None, 9000, 4096, 1),
    ],
)
def test_default_max_tokens(
    thinking: bool, effort: int | str | None, prompt_tokens: int, context: int, expected: int
) -> None:
    assert default_max_tokens(thinking, effort, prompt_tokens, context) == expected


def test_default_max_tokens_of_a_row(chat: ChatEncoder) -> None:
    encoded = chat.encode([USER])
    assert encoded.default_max_tokens(1000) == 1000 - len(encoded.token_ids)


def test_reprs_hide_the_prompt(chat: ChatEncoder) -> None:
    row = [{"role": "user", "content": "secret"}]
    assert "secret" not in repr(chat.encode(row)) + repr(chat.render(row)) + repr(chat)
