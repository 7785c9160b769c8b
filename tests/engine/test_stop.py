"""Stop strings: found wherever the stream is cut, never leaked in part, text cut before the match."""

from __future__ import annotations

import random

import pytest

from deepinfer_ray.engine.detokenizer import TextStream, TokenTable
from deepinfer_ray.engine.stop import StopScanner

SAMPLES = {
    "ascii": (
        "The quick brown fox\n\nUser: jumps over the lazy dog. END of it",
        ["\n\nUser:", "END", "lazy cat"],
    ),
    "cjk": (
        "深度学习模型在推理时需要停止字符串。终わり、それから続く文章。",
        ["终わり", "停止字节", "文章。"],
    ),
    "emoji": ("ok 👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 thumb 🇩🇪 end", ["👩‍👩‍👧‍👦 fam", "👍🏾", "🇩🇪"]),
    "combining": (
        "e\u0301a\u0300o\u0302 u\u0308ber n\u0303 i\u0304 o\u0328\u0304 x\u0336y\u0336",
        ["u\u0308b", "n\u0304", "x\u0336y"],
    ),
}


def cut(data: bytes, generator: random.Random, pieces: int) -> list[bytes]:
    places = sorted(generator.sample(range(1, len(data)), min(pieces, len(data) - 1)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def expected_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first stop to be completed when the text is read character by character."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("name", list(SAMPLES))
def test_thousand_random_splits(name: str) -> None:
    text, pool = SAMPLES[name]
    generator = random.Random(name)
    for _ in range(1000):
        stops = generator.sample(pool, generator.randint(1, len(pool)))
        include = generator.random() < 0.3
        want, stop = expected_text(text, stops, include)
        pieces = cut(text.encode(), generator, generator.randint(1, 40))
        stream = TextStream(TokenTable(pieces), stops, include)
        seen = ""
        for token in range(len(pieces)):
            seen += stream.push(token)
            assert "\ufffd" not in seen
            assert want.startswith(seen), "text past the stop, or part of a stop string, leaked"
            if stream.stopped:
                break
        assert stream.stopped == (stop is not None)
        seen += stream.finish()
        assert seen == stream.text == want
        if stop is not None:
            completing = next(i for i in range(1, len(pieces) + 1) if stop.encode() in b"".join(pieces[:i]))
            assert token == completing - 1


def test_overlapping_candidates_first_to_end_wins() -> None:
    scanner = StopScanner([b"abcd", b"bc"])
    assert scanner.push(b"xab") == b"x"
    assert scanner.push(b"cd") == b"a"
    assert scanner.matched == b"bc"
    assert scanner.push(b"more") == b""


def test_same_end_the_longer_stop_is_cut() -> None:
    scanner = StopScanner([b"cd", b"abcd"])
    assert scanner.push(b"xabcd") == b"x"
    assert scanner.matched == b"abcd"


def test_repeated_prefix_is_not_lost() -> None:
    scanner = StopScanner([b"aab"])
    assert scanner.push(b"a") + scanner.push(b"a") + scanner.push(b"a") == b"a"
    assert scanner.push(b"b") == b""
    assert scanner.matched == b"aab"


def test_withheld_bytes_come_out_at_the_end() -> None:
    scanner = StopScanner([b"\n\nUser:"])
    assert scanner.push(b"hi\n\nUse") == b"hi"
    assert scanner.finish() == b"\n\nUse"


def test_unarmed_matches_pass_and_a_straddling_one_counts() -> None:
    scanner = StopScanner([b"END"])
    assert scanner.push(b"END.E", armed=False) == b"END."
    assert scanner.push(b"ND", armed=True) == b""
    assert scanner.matched == b"END"


def test_invalid_bytes_before_a_stop_are_replaced_once() -> None:
    stream = TextStream(TokenTable([b"a\xe4\xb8", b"STOP", b"z"]), ["STOP"])
    assert stream.push(0) == "a"
    assert stream.push(1) == "\ufffd"
    assert stream.stopped
    assert stream.text == "a\ufffd"
