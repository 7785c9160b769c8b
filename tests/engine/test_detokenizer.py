"""Bytes of tokens and incremental text against `tokenizers` itself."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_ray.engine.detokenizer import TextStream, TokenTable, piece_bytes

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 12345 times.\n\n\tdef f(x):\r\n return x",
    "深度学习模型，停止字符串。終わり、それから。",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 🇩🇪",
    "e\u0301a\u0300o\u0302 u\u0308ber n\u0303 i\u0304 o\u0328\u0304",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()

    def corpus() -> Iterator[str]:
        yield from CORPUS * 3

    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    built.train_from_iterator(corpus(), trainer)
    built.add_special_tokens([AddedToken("<｜end▁of▁sentence｜>", special=True)])
    built.add_tokens([AddedToken("<think>"), AddedToken("a b")])
    return built


def test_table_equals_the_tokenizers_own_decoding(tokenizer: Tokenizer) -> None:
    table = TokenTable.of(tokenizer, 512)
    generator = random.Random(1)
    size = tokenizer.get_vocab_size()
    for _ in range(200):
        ids = [generator.randrange(size) for _ in range(generator.randint(1, 12))]
        assert table.text(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert table.pieces[511] == b""


@pytest.mark.parametrize("text", CORPUS)
def test_incremental_text_is_valid_at_every_token(tokenizer: Tokenizer, text: str) -> None:
    table = TokenTable.of(tokenizer, tokenizer.get_vocab_size())
    stream, seen = TextStream(table), ""
    for token in tokenizer.encode(text).ids:
        seen += stream.push(token)
        assert text.startswith(seen)
    assert seen + stream.finish() == text


def test_invalid_bytes_are_replaced_only_at_the_end() -> None:
    stream = TextStream(TokenTable([b"\xf0\x9f", b"\x91\x8d", b"\xf0\x9f"]))
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["", "👍", "", "\ufffd"]


def test_pieces_of_tokenizers_without_bytes() -> None:
    assert piece_bytes("Ġx", byte_level=True) == b" x"
    assert piece_bytes("Ġx", byte_level=False) == "Ġx".encode()
    assert piece_bytes("<｜User｜>", byte_level=True) == "<｜User｜>".encode()
