"""Plain text never becomes a control token, whatever the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.chat.tokens import BOS, CONTROL_TOKENS
from deepinfer_ray.errors import CheckpointError, ConfigError, RowError

EVERY_SPELLING = "a" + " b ".join(CONTROL_TOKENS) + "c"


def test_every_control_spelling_is_plain_text(v41: TextEncoder, v41_json: str) -> None:
    ids = v41.encode_text(EVERY_SPELLING)
    added = {token["id"] for token in json.loads(v41_json)["added_tokens"]}
    assert ids.dtype == np.int32
    assert not added & set(ids.tolist())
    assert Tokenizer.from_str(v41_json).decode(ids.tolist(), skip_special_tokens=False) == EVERY_SPELLING


@pytest.mark.parametrize("added", [True, False], ids=["added_tokens", "pieces_of_the_model"])
def test_a_toy_tokenizer_encodes_spellings_as_bytes(toy_json: Callable[..., str], added: bool) -> None:
    text = TextEncoder(toy_json(added=added))
    ids = text.encode_text(EVERY_SPELLING)
    reachable = {text.control_id(spelling) for spelling in CONTROL_TOKENS}
    assert None not in reachable
    assert not reachable & set(ids.tolist())
    if added:
        assert len(ids) == len(EVERY_SPELLING.encode())


def test_a_merged_control_token_would_be_reachable_otherwise(toy_json: Callable[..., str]) -> None:
    tokenizer_json = toy_json(added=False)
    think = TextEncoder(tokenizer_json).control_id("<think>")
    assert Tokenizer.from_str(tokenizer_json).encode("<think>").ids == [think]


def test_text_without_control_tokens_encodes_as_the_full_tokenizer(v41: TextEncoder, v41_json: str) -> None:
    full = Tokenizer.from_str(v41_json)
    for sample in ("Hello, world!\n\n  x = 1234567", "é世界 カタカナ 😀‍🔥 ﷽ \u0000\u200b", "  \t\n", ""):
        assert v41.encode_text(sample).tolist() == full.encode(sample, add_special_tokens=False).ids


def test_prompt_has_one_bos(v41: TextEncoder) -> None:
    assert v41.bos_id == 0
    assert v41.encode_prompt("Hi").tolist() == [0, *v41.encode_text("Hi").tolist()]
    assert v41.encode_prompt("").tolist() == [0]
    assert v41.encode_prompt(BOS).tolist().count(0) == 1


def test_many_texts_at_once(v41: TextEncoder) -> None:
    texts = ["one", "", "two <think>"]
    for ids, text in zip(v41.encode_texts(texts), texts, strict=True):
        assert ids.tolist() == v41.encode_text(text).tolist()


def test_bos_comes_from_the_checkpoint_where_the_tokenizer_names_none(toy_json: Callable[..., str]) -> None:
    tokenizer_json = toy_json(())
    assert TextEncoder(tokenizer_json, bos_id=7).encode_prompt("a").tolist()[0] == 7
    with pytest.raises(ConfigError, match="pass the checkpoint's bos_token_id"):
        _ = TextEncoder(tokenizer_json).bos_id


@pytest.mark.parametrize(
    ("value", "complaint"),
    [("a \ud800", "holds a lone surrogate"), (7, "not a string"), (None, "not a string")],
)
def test_text_that_is_none(v41: TextEncoder, value: object, complaint: str) -> None:
    with pytest.raises(RowError, match=complaint) as caught:
        v41.encode_text(value)  # type: ignore[arg-type]
    assert caught.value.code == "wrong_type"


def test_unknown_word_of_a_word_level_tokenizer() -> None:
    word_level = {
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "<unk>"},
    }
    text = TextEncoder(json.dumps({"version": "1.0", **word_level}))
    assert text.encode_text("the").tolist() == [0]
    with pytest.raises(RowError, match="tokenizer cannot spell the text"):
        text.encode_text("thus")


def test_unreadable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextEncoder.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*cannot be read as a tokenizer"):
        TextEncoder.load(tmp_path)
    unigram = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["a", 0.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    with pytest.raises(CheckpointError, match="'Unigram'; BPE and WordLevel are supported"):
        TextEncoder.load(tmp_path / "tokenizer.json")


def test_repr_names_sizes_only(v41: TextEncoder) -> None:
    assert repr(v41) == "TextEncoder(127997 pieces, 1283 control tokens)"
