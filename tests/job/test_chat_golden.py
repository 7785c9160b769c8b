"""The golden prompts of the chat encoding, through a whole job and with the release's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stub_backend import StubBackend

GOLDEN = Path(__file__).parents[1] / "data/golden/chat_cases.json"


@pytest.fixture(scope="session")
def v41_model(model_dir, v41_json, tmp_path_factory):
    root = tmp_path_factory.mktemp("v41")
    config = json.loads((model_dir / "config.json").read_text())
    config["image_token_id"] = 129264
    config["text_config"] |= {"vocab_size": 129280, "max_position_embeddings": 1 << 20}
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text(v41_json, encoding="utf-8")
    return str(root)


def test_every_golden_conversation_in_one_job(job, write_rows, read_output, v41_model, tmp_path):
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["encode_cases"]
    columns = {
        "name": [case["name"] for case in cases],
        "messages": [json.dumps(case["messages"]) for case in cases],
        "tools": [json.dumps(case["tools"]) if case["tools"] else None for case in cases],
        "options": [json.dumps(case["options"]) for case in cases],
    }
    path = write_rows(tmp_path / "in.parquet", columns)
    prompts = []
    stub = StubBackend(answer=lambda item: (prompts.append(item.prompt.tolist()) or [1], "", "stop"))
    flags = {"id_column": "name", "messages_column": "messages", "tools_column": "tools"}
    job(input=path, chat_column="options", model=v41_model, stub=stub, **flags)
    rows = {row["row_id"]: row for row in read_output(tmp_path / "out")}
    errors = {name: row["error_code"] for name, row in rows.items() if row["error"]}
    assert errors == {"images_interleaved": "bad_image"}
    expected = [case["token_ids"] for case in cases if case["name"] not in errors]
    assert sorted(prompts) == sorted(expected)
    for case in cases:
        if case["name"] not in errors:
            assert rows[case["name"]]["prompt_tokens"] == case["token_count"]
