"""Encoders of the exact V4.1 tokenizer, a byte-level toy one, and the golden chat cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ray.chat.encoding import ChatEncoder
from deepinfer_ray.chat.parsing import CompletionParser
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.chat.tokens import CONTROL_TOKENS

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "golden" / "chat_cases.json").read_text(encoding="utf-8")
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`encode_case` and `parse_case` run over every golden case."""
    for kind in ("encode_case", "parse_case"):
        if kind in metafunc.fixturenames:
            cases = GOLDEN[f"{kind}s"]
            metafunc.parametrize(kind, cases, ids=[case["name"] for case in cases])


@pytest.fixture(scope="session")
def v41(v41_json: str) -> TextEncoder:
    return TextEncoder(v41_json)


@pytest.fixture(scope="session")
def chat(v41: TextEncoder) -> ChatEncoder:
    return ChatEncoder(v41, images=True)


@pytest.fixture(scope="session")
def parser(v41: TextEncoder) -> CompletionParser:
    return CompletionParser(v41)


@pytest.fixture(scope="session")
def toy_json() -> Callable[..., str]:
    """Builds a byte-level `tokenizer.json`; see `_toy_tokenizer`."""
    return _toy_tokenizer


def _toy_tokenizer(control_tokens: tuple[str, ...] = CONTROL_TOKENS, *, added: bool = True) -> str:
    """A byte-level tokenizer: 256 bytes, then the control tokens, added or reachable by merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(other))]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges: list[list[str]] = []
    if not added:
        for token in control_tokens:
            vocabulary[token] = len(vocabulary)
        for piece in ("<t", "<th", "<thi", "<thin", "<think", "<think>"):  # "<think>" by merging its letters
            vocabulary.setdefault(piece, len(vocabulary))
            merges.append([piece[:-1], piece[-1]])
    tokens: list[dict[str, Any]] = [
        {"id": 256 + i, "content": token, "special": i < 3, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, token in enumerate(control_tokens if added else ())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": tokens,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        }
    )
