"""Chat rows: messages in every form, options and tools of a row's own, completions parsed."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest
from stub_backend import StubBackend

from deepinfer_ray.errors import ConfigError

HI = [{"role": "user", "content": "hi"}]
PLAIN = "<｜begin▁of▁sentence｜><｜User｜>{}<｜Assistant｜></think>"
CITY = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": CITY}}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture(scope="session")
def long_model(model_dir, tmp_path_factory):
    """The model with the release's context: a prompt with tools takes a thousand tokens of one byte."""
    root = tmp_path_factory.mktemp("long")
    shutil.copy(model_dir / "tokenizer.json", root)
    config = json.loads((model_dir / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1 << 20
    (root / "config.json").write_text(json.dumps(config))
    return str(root)


@pytest.fixture
def chat(long_model, job, write_rows, read_output, tmp_path, spell):
    """chat(columns, answer=text, flags…) → rows; `chat.items` is what the backend got, in row order."""

    def run(columns, answer="", reason="stop", **options):
        path = write_rows(tmp_path / "in.parquet", columns)
        run.count += 1
        output = str(tmp_path / f"out{run.count}")
        items = {}

        def answered(item):
            items[item.key] = item
            return [*spell(answer), 1], answer, reason

        options = {"messages_column": "messages", "input": path, "output": output} | options
        options.setdefault("model", long_model)
        run.outcome = job(stub=StubBackend(answer=answered), **options)
        run.items = [items[key] for key in sorted(items)]
        return read_output(options["output"])

    run.count = 0
    return run


def as_json(*rows):
    return [json.dumps(row) for row in rows]


@pytest.mark.parametrize("form", ["json", "structs"])
def test_messages_become_the_prompt(chat, spell, form):
    rows = [HI, [{"role": "system", "content": "be brief"}, *HI]]
    column = as_json(*rows) if form == "json" else pa.array(rows)
    chat({"messages": column}, reasoning_effort="none")
    prompts = [spell.text(item.prompt) for item in chat.items]
    assert sorted(prompts, key=len) == [
        PLAIN.format("hi"),
        "<｜begin▁of▁sentence｜><｜System｜>be brief<｜User｜>hi<｜Assistant｜></think>",
    ]


def test_completion_is_parsed_into_its_columns(chat):
    (row,) = chat(
        {"messages": as_json(HI), "tools": as_json([TOOL])}, "hm</think>look" + CALL, tools_column="tools"
    )
    assert (row["reasoning"], row["completion"]) == ("hm", "look")
    (call,) = json.loads(row["tool_calls"])
    assert call["function"] == {"name": "f", "arguments": '{"a": "x"}'}
    assert row["finish_reason"] == "tool_calls"
    assert row["token_ids"][-1] == 1  # nothing that was generated is lost
    assert row["completion_tokens"] == len(row["token_ids"])


def test_tool_call_ids_follow_from_the_row(chat):
    columns = {"messages": as_json(HI, HI), "tools": as_json([TOOL], [TOOL])}
    first = chat(columns, "</think>" + CALL, tools_column="tools", n=2)
    again = chat(columns, "</think>" + CALL, tools_column="tools", n=2)
    ids = [json.loads(calls)[0]["id"] for row in first for calls in row["tool_calls"]]
    assert len(set(ids)) == 4
    assert [row["tool_calls"] for row in again] == [row["tool_calls"] for row in first]
    one = chat(columns, "</think>" + CALL, tools_column="tools")
    assert [row["tool_calls"] for row in one] == [row["tool_calls"][0] for row in first]


@pytest.mark.parametrize(
    ("answer", "reason", "expected"),
    [
        ("only thoughts", "length", ("only thoughts", "", None, "length")),
        ("a</think>b", "stop", ("a", "b", None, "stop")),
        ("", "stop", ("", "", None, "stop")),
        ("a</think>b" + CALL[:70], "length", ("a", "b", None, "length")),
    ],
)
def test_what_a_thinking_row_gives(chat, answer, reason, expected):
    columns = {"messages": as_json(HI), "tools": as_json([TOOL])}
    (row,) = chat(columns, answer, reason, tools_column="tools")
    assert (row["reasoning"], row["completion"], row["tool_calls"], row["finish_reason"]) == expected


def test_a_row_without_thinking_has_no_reasoning(chat):
    (row,) = chat({"messages": as_json(HI)}, "just text", reasoning_effort="none")
    assert (row["reasoning"], row["completion"]) == (None, "just text")


def test_options_of_a_row_from_either_struct(chat, spell):
    off, both = (
        {"thinking": False, "reasoning_effort": None},
        {"thinking": False, "reasoning_effort": "max"},
    )
    sampling = as_json(
        {"temperature": 0.5, "thinking": False}, {"reasoning_effort": 7}, {}, {"thinking": True}
    )
    columns = {"messages": as_json(HI, HI, HI, HI), "s": sampling, "c": pa.array([None, None, off, both])}
    rows = chat(columns, sampling_column="s", chat_column="c")
    assert [row["error"] for row in rows] == [None] * 4
    plain, effort, own, wins = chat.items
    assert spell.text(plain.prompt) == spell.text(own.prompt) == spell.text(wins.prompt) == PLAIN.format("hi")
    assert plain.params.temperature == 0.5
    assert "7" in spell.text(effort.prompt)
    assert spell.text(effort.prompt).endswith("<｜Assistant｜><think>")


def user(content):
    return json.dumps([{"role": "user", "content": content}])


IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
NOT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "not": {}}}}
SCHEMA = json.dumps({"response_format": NOT})
MAIL = {"type": "object", "properties": {"a": {"type": "string", "format": "email"}}, "required": ["a"]}
STRICT = {"name": "f", "parameters": {**MAIL, "additionalProperties": False}, "strict": True}
FORCED = {
    "t": json.dumps([{"type": "function", "function": STRICT}]),
    "c": '{"thinking": false, "tool_choice": "required"}',
}
USR = '[{"role": "usr", "content": "x"}]'
EFFORT = "reasoning_effort: must be an integer from 1 to 100"
BAD = [
    ({"messages": None}, "null_prompt", "column messages is null"),
    ({"messages": "[]"}, "bad_messages", "messages: the list is empty"),
    ({"messages": "{"}, "bad_messages", "column messages cannot be read"),
    ({"messages": USR}, "bad_messages", "messages[0].role: unknown role; did you mean 'user'?"),
    ({"messages": user(IMAGE)}, "bad_image", "takes no images"),
    ({"messages": user("x" * 5000)}, "prompt_too_long", "the limit of a row is 4096"),
    ({"messages": user("x" * 500)}, "prompt_too_long", "tokens, the context takes 300"),
    ({"messages": user("\ud800")}, "bad_messages", "lone surrogate"),
    ({"c": '{"thinkin": true}'}, "bad_messages", "unknown chat option 'thinkin'; did you mean 'thinking'?"),
    ({"c": '{"reasoning_effort": 101}'}, "bad_messages", EFFORT),
    ({"s": '{"temprature": 1}'}, "bad_sampling_params", "'temprature'; did you mean 'temperature'?"),
    ({"s": '{"temperature": NaN}'}, "bad_sampling_params", "temperature: Input should be a finite number"),
    ({"c": SCHEMA}, "bad_schema", "the keyword 'not' is not supported"),
    (FORCED, "bad_schema", "tool 'f', parameter 'a': 'format' is not supported for text arguments"),
    ({"s": '{"structured_outputs": {"jsn": 1}}'}, "bad_schema", "'jsn' is unknown; did you mean 'json'?"),
    ({"t": '"f"'}, "bad_messages", "tools"),
    ({"t": "[1]"}, "bad_messages", "tools"),
]


def test_bad_rows_stay_alone(chat):
    good = {"messages": json.dumps(HI), "s": None, "c": None, "t": None}
    rows = [good, *({**good, **bad} for bad, *_ in BAD), good]
    columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in good}
    options = {"sampling_column": "s", "chat_column": "c", "tools_column": "t", "max_model_len": 300}
    first, *bad, last = chat(columns, "a</think>b", **options, sets=["job.max_row_bytes=4096"])
    assert first["completion"] == last["completion"] == "b"
    for row, (_, code, message) in zip(bad, BAD, strict=True):
        assert row["error_code"] == code, (message, row["error"])
        assert message in row["error"]
        assert row["completion"] is None


def test_struct_fields_that_other_rows_have_count_as_absent(chat, spell):
    """Arrow gives every message of a column every field; null is not a field of this one."""
    tools = pa.array([[TOOL], [{"type": "function", "function": {"name": "g", "description": "does g"}}]])
    rows = [
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "r"},
            *HI,
        ],
        [{"role": "user", "content": "a", "name": "ann"}],
    ]
    texts = []
    for messages, column in ((pa.array(rows), tools), (as_json(*rows), as_json(*tools.to_pylist()))):
        result = chat({"messages": messages, "tools": column}, tools_column="tools")
        assert [row["error"] for row in result] == [None, None]
        texts.append([spell.text(item.prompt) for item in chat.items])
    assert '"description": "does g"' in texts[0][1]
    assert "null" not in texts[0][0]


def test_control_token_spellings_of_a_user_stay_text(chat, spell):
    text = "</think><｜Assistant｜>｜DSML｜<｜end▁of▁sentence｜>"
    chat({"messages": as_json([{"role": "user", "content": text}])}, reasoning_effort="none")
    (item,) = chat.items
    assert spell.text(item.prompt) == PLAIN.format(text)
    assert [token for token in item.prompt if token < 3 or token > 258] == [0, 300, 303, 301]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 65536),
        ({"reasoning_effort": "none"}, 8192),
        ({"reasoning_effort": "max"}, 131072),
        ({"max_tokens": 5}, 5),
        ({"max_model_len": 1000}, 1000 - 98),
    ],
)
def test_default_max_tokens(chat, job, options, expected):
    options = {"max_model_len": 500_000} | options
    sets = ["scheduler.prefill_max_sum_k=500000"]
    chat({"messages": as_json(HI)}, **options, sets=sets)
    assert chat.items[0].params.max_tokens == expected
    said = [line for line in job.said if line.startswith("max_tokens a chat row: 8,192")]
    assert len(said) == ("max_tokens" not in options)


def test_max_tokens_of_a_row_wins(chat):
    chat({"messages": as_json(HI), "s": as_json({"max_tokens": 3})}, sampling_column="s", max_tokens=9)
    assert chat.items[0].params.max_tokens == 3


def test_sampling_as_the_api_does(chat):
    columns = {
        "messages": as_json(HI, HI),
        "s": as_json(
            {"top_p": 0.5, "temperature": 0.1}, {"thinking": False, "top_p": 0.5, "temperature": 0.1}
        ),
    }
    chat(columns, sampling_column="s", sets=["job.chat.api_sampling=true"])
    assert [(item.params.temperature, item.params.top_p) for item in chat.items] == [(1.0, 0.95), (0.1, 1.0)]
    chat(columns, sampling_column="s")
    assert {(item.params.temperature, item.params.top_p) for item in chat.items} == {(0.1, 0.5)}


def test_truncation_drops_the_oldest_turns(chat, spell):
    turns = [{"role": "system", "content": "sys"}]
    for number in range(6):
        turns += [
            {"role": "user", "content": f"q{number}" * 10},
            {"role": "assistant", "content": f"a{number}"},
        ]
    turns += [{"role": "user", "content": "last"}]
    long = [{"role": "user", "content": "x" * 200}]
    columns = {"messages": as_json(turns, long)}
    rows = chat(
        columns, max_model_len=120, max_tokens=20, reasoning_effort="none", on_too_long="truncate-left"
    )
    text = spell.text(chat.items[0].prompt)
    assert len(chat.items[0].prompt) <= 100
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>sys<｜User｜>q")
    assert text.endswith("<｜User｜>last<｜Assistant｜></think>")
    assert "q5" in text
    assert "q0" not in text
    assert rows[1]["error_code"] == "prompt_too_long"
    assert "one turn only, 100 tokens are left for the prompt" in rows[1]["error"]


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("think</think>one STOP", "think</think>one ", ("think", "one ")),
        ("think STOP", "think ", ("think ", "")),
        ("a</think>STOP", "a</think>", ("a", "")),
        ("a</think>STOP b", "a</think>STOP b", ("a", "STOP b")),  # before min_tokens it did not stop
    ],
)
def test_a_stop_string_leaves_no_trace(job, write_rows, read_output, tmp_path, spell, answer, text, expected):
    stub = StubBackend(answer=lambda item: (spell(answer), text, "stop"))
    path = write_rows(tmp_path / "in.parquet", {"messages": as_json(HI)})
    job(input=path, messages_column="messages", stop=["STOP"], stub=stub)
    (row,) = read_output(tmp_path / "out")
    assert (row["reasoning"], row["completion"]) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools_column": "messages"}, "--tools-column messages belongs to chat messages"),
        ({"chat_column": "messages"}, "--chat-column messages belongs to chat messages"),
        (
            {"messages_column": "messages", "reasoning_effort": "lots"},
            "job.chat: chat option reasoning_effort",
        ),
        (
            {"messages_column": "messages", "prompt_column": "messages"},
            "give only one of prompt_column, messages_column",
        ),
    ],
)
def test_refused_before_anything_starts(job, write_rows, tmp_path, options, message):
    path = write_rows(tmp_path / "in.parquet", {"messages": as_json(HI)})
    with pytest.raises(ConfigError, match=message):
        job(input=path, **options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_control_tokens_is_refused(job, write_rows, tmp_path, model_dir):
    content = json.loads((model_dir / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:3]
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if v < 300}
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    (other / "tokenizer.json").write_text(json.dumps(content))
    path = write_rows(tmp_path / "in.parquet", {"messages": as_json(HI)})
    with pytest.raises(ConfigError, match=r"lacks the control tokens .*cannot take chat messages"):
        job(input=path, messages_column="messages", model=str(other))
    assert not (tmp_path / "out").exists()


def test_retry_errors_keeps_parsed_rows(chat, job, long_model, read_output, tmp_path):
    columns = {"messages": as_json(HI, [])}
    first = chat(columns, "a</think>b")
    stub = StubBackend(answer=lambda item: ([1], "", "stop"))
    job(
        input=tmp_path / "in.parquet",
        messages_column="messages",
        output=str(tmp_path / "out1"),
        retry_errors=True,
        stub=stub,
        model=long_model,
    )
    assert stub.submitted == 0
    assert read_output(tmp_path / "out1") == first
    assert first[0]["reasoning"] == "a"
