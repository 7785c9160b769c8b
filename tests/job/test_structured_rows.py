"""What rows may promise of their completions, and what of it reaches the backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from engine_backend import EngineBackend
from stub_backend import StubBackend

from deepinfer_ray.config.engine import EngineConfig

TINY = Path(__file__).parents[1] / "data/golden/tinyB"
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
END_OF_REASONING = "</think>"
HI = [{"role": "user", "content": "say json"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": AGE}}


@pytest.fixture
def ask(model_dir, job, write_rows, read_output, tmp_path):
    """ask(columns, flags…) → rows; `ask.constraints` is what the backend got of each good row, in order."""

    def run(columns, **options):
        path = write_rows(tmp_path / "in.parquet", columns)
        run.count += 1
        output = str(tmp_path / f"out{run.count}")
        items = {}

        def answered(item):
            items[item.key] = item
            return [1], "", "stop"

        model = tmp_path / "model"
        if not model.exists():  # the context of the release: tools take a thousand tokens of one byte
            model.mkdir()
            shutil.copy(model_dir / "tokenizer.json", model)
            config = json.loads((model_dir / "config.json").read_text())
            config["text_config"]["max_position_embeddings"] = 1 << 20
            (model / "config.json").write_text(json.dumps(config))
        job(stub=StubBackend(answer=answered), input=path, output=output, model=str(model), **options)
        run.constraints = [items[key].params.structured_outputs for key in sorted(items)]
        return read_output(output)

    run.count = 0
    return run


def as_json(*rows):
    return [json.dumps(row) for row in rows]


def test_a_column_of_schemas(ask):
    texts = [json.dumps(AGE), None, "{", '{"type": "object", "uniqueItems": true}', "[" * 100_000]
    rows = ask({"prompt": list("abcde"), "s": texts}, schema_column="s")
    assert [row["error_code"] for row in rows] == [None, None, "bad_schema", "bad_schema", "bad_schema"]
    assert "no JSON" in rows[2]["error"]
    assert "schema: 'uniqueItems' has no effect on type object" in rows[3]["error"]
    assert [constraint and json.loads(constraint["json"]) for constraint in ask.constraints] == [AGE, None]


def test_schemas_as_structs(ask):
    column = pa.array([{"type": "integer", "minimum": 3}, {"type": "string", "minimum": None}, None])
    rows = ask({"prompt": list("abc"), "s": column}, schema_column="s")
    assert [row["error"] for row in rows] == [None] * 3
    expected = [{"json": {"type": "integer", "minimum": 3}}, {"json": {"type": "string"}}, None]
    assert ask.constraints == expected


def test_constraints_among_the_sampling_parameters(ask):
    own = [{"structured_outputs": {"regex": "a+"}}, {"structured_outputs": '{"choice": ["x", "y"]}'}, {}]
    rows = ask({"prompt": list("abc"), "s": as_json(*own)}, sampling_column="s")
    assert [row["error"] for row in rows] == [None] * 3
    assert ask.constraints == [{"regex": "a+"}, {"choice": ["x", "y"]}, None]


def test_one_constraint_a_row(ask):
    own = as_json({"structured_outputs": {"regex": "a"}}, {})
    columns = {"prompt": ["a", "b"], "s": own, "j": as_json(AGE, AGE)}
    both, one = ask(columns, sampling_column="s", schema_column="j")
    assert both["error_code"] == "bad_schema"
    assert both["error"] == "column j and structured_outputs both constrain this row; give one of them"
    assert one["error"] is None


def test_too_large_a_schema(ask):
    wide = {"enum": [f"value {number}" for number in range(200)]}
    columns = {"prompt": ["a", "b"], "j": as_json(wide, AGE)}
    big, small = ask(columns, schema_column="j", sets=["structured.max_schema_bytes=1000"])
    assert big["error_code"] == "bad_schema"
    assert "at most 1000" in big["error"]
    assert small["error"] is None


def test_a_chat_is_constrained_from_behind_its_reasoning(ask, spell):
    (end,) = spell(END_OF_REASONING)
    formats = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": AGE}}},
        {"response_format": {"type": "json_object"}, "thinking": False},
        {"response_format": {"type": "regex", "regex": "a+"}},
        {"response_format": {"type": "text"}},
    ]
    columns = {"messages": as_json(HI, HI, HI, HI), "c": as_json(*formats)}
    rows = ask(columns, messages_column="messages", chat_column="c")
    assert [row["error"] for row in rows] == [None] * 4
    schema, any_object, pattern, free = ask.constraints
    assert json.loads(schema["json"]) == AGE
    assert schema["trigger_token_ids"] == [end]
    assert any_object == {"json_object": True}
    assert pattern == {"regex": "a+", "trigger_token_ids": [end]}
    assert free is None


def test_a_column_of_schemas_beside_messages(ask, spell):
    (end,) = spell(END_OF_REASONING)
    columns = {"messages": as_json(HI, HI), "c": as_json({}, {"thinking": False}), "j": as_json(AGE, AGE)}
    ask(columns, messages_column="messages", chat_column="c", schema_column="j")
    assert [constraint.get("trigger_token_ids") for constraint in ask.constraints] == [[end], None]


def test_a_continued_message_cannot_have_a_format(ask):
    begun = [*HI, {"role": "assistant", "content": '{"a', "prefix": True}]
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": AGE}}}
    columns = {"messages": as_json(begun), "c": as_json({**schema, "thinking": False})}
    (row,) = ask(columns, messages_column="messages", chat_column="c")
    assert row["error_code"] == "bad_schema"
    assert "message that is being continued" in row["error"]


def test_tools_that_must_be_called(ask):
    options = [
        {"tool_choice": "required", "thinking": False},
        {"tool_choice": "auto", "thinking": False},
        {"tool_choice": "auto", "response_format": {"type": "json_object"}, "thinking": False},
    ]
    columns = {"messages": as_json(HI, HI, HI), "t": as_json(*[[TOOL]] * 3), "c": as_json(*options)}
    rows = ask(columns, messages_column="messages", chat_column="c", tools_column="t")
    assert [row["error"] for row in rows] == [None] * 3
    required, auto, answer_or_call = ask.constraints
    assert required["structural_tag"]["format"]["type"] == "sequence"
    assert auto is None
    assert answer_or_call["structural_tag"]["format"]["type"] == "or"


def test_rows_through_an_engine(job, write_rows, read_output, tmp_path):
    """Constrained, free and refused rows of one job; what the compiler refuses is that row's error."""
    wishes = [
        {"choice": ["the cafe", "Ray batch"]},
        {"grammar": "root ::= nowhere"},
        None,
        {"regex": "(the ){3}ray"},
    ]
    own = [None if wish is None else json.dumps({"structured_outputs": wish}) for wish in wishes]
    path = write_rows(tmp_path / "in.parquet", {"ids": [[5, 6, 7]] * 4, "s": own})
    backend = EngineBackend(TINY, EngineConfig().with_values(scheduler={"max_model_len": 64, "max_seqs": 4}))
    options = {"token_ids_column": "ids", "sampling_column": "s", "max_model_len": 64, "max_tokens": 12}
    try:
        job(input=path, stub=backend, model=str(TINY), **options)
    finally:
        backend.engine.close()
    choice, refused, free, pattern = read_output(tmp_path / "out")
    assert choice["completion"] in ("the cafe", "Ray batch")
    assert choice["finish_reason"] == "stop"
    assert refused["error_code"] == "bad_schema"
    assert 'Rule "nowhere" is not defined' in refused["error"]
    assert free["error"] is None
    assert pattern["completion"] == "the the the ray"
