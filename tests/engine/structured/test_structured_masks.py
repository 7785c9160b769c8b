"""Masks on logit rows, and which control tokens of the real vocabulary they leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from xgrammar import GrammarCompiler

from deepinfer_ray.engine import logits_processors
from deepinfer_ray.engine.detokenizer import TokenTable
from deepinfer_ray.engine.grammar_pool import Build
from deepinfer_ray.engine.grammar_spec import GrammarSpec
from deepinfer_ray.engine.grammar_worker import Job, compile_job
from deepinfer_ray.engine.logits_processors import TokenMasks
from deepinfer_ray.engine.sampler import SampleRows, sample
from deepinfer_ray.engine.structured import StructuredOutputs
from deepinfer_ray.engine.utf8_guard import Utf8Guard, words_of

BOS, EOS, PAD, USER, THINK_END, DSML = 0, 1, 2, 128803, 128822, 128825
VOCAB = 129280


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100, 257])
@pytest.mark.parametrize("rows_at_a_time", [1, 2, 100])
def test_masks_are_applied_to_their_rows(vocab, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(logits_processors, "MASK_BYTES", rows_at_a_time * 4 * vocab)
    random = np.random.default_rng(vocab)
    rows = np.array([5, 0, 3])
    allowed = [np.flatnonzero(random.random(vocab) < 0.5) for _ in rows]
    words = np.stack([words_of(ids, vocab) for ids in allowed])
    before = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    after = before.clone()
    TokenMasks(rows, words).apply(after)
    for row in range(7):
        ids = allowed[rows.tolist().index(row)] if row in rows else np.arange(vocab)
        expected = torch.full((vocab,), float("-inf"))
        expected[ids] = before[row, ids]
        assert torch.equal(after[row], expected)


def test_the_sampler_masks_before_everything_else():
    """Neither a bias nor a filter brings back what a mask forbids; a row without any token is flagged."""
    vocab = 40
    words = np.stack([words_of([7, 33], vocab), words_of([], vocab)])

    def column(value, dtype):
        return np.full(3, value, dtype)

    rows = SampleRows(
        temperature=column(1.0, np.float32),
        top_p=column(0.9, np.float32),
        top_k=column(5, np.int32),
        min_p=column(0.0, np.float32),
        seeds=column(1, np.int64),
        positions=column(3, np.int64),
        top_logprobs=column(-1, np.int32),
        masks=TokenMasks(np.array([2, 0]), words),
    )
    drawn = sample(torch.zeros(3, vocab), rows.padded(3))
    assert drawn.bad.tolist() == [True, False, False]
    assert int(drawn.tokens[2]) in (7, 33)


@pytest.fixture(scope="module")
def structured(v41_json, workshop):
    """Over the exact vocabulary, compiled here."""
    tokenizer = Tokenizer.from_str(v41_json)
    pieces = TokenTable.of(tokenizer, VOCAB, hidden=(EOS,)).pieces
    added = {token: each.content for token, each in tokenizer.get_added_tokens_decoder().items()}
    special = {token: text for token, text in added.items() if token != EOS}
    scheduler = workshop.engine(max_seqs=2).scheduler
    return StructuredOutputs(scheduler, pieces, (EOS,), special, pool=workshop.pool)


@pytest.fixture(scope="module")
def allowed(structured):
    """(constraint, text that stands already) -> ids that may follow."""
    info = structured.vocabulary.tokenizer_info()

    def ask(constraint, text=""):
        spec = GrammarSpec.of(constraint)
        job = Job(0, spec.kind, spec.text, spec.any_whitespace)
        build = Build(job)
        build.compiled = compile_job(GrammarCompiler(info, max_threads=1), job)
        grammar = structured._grammar(spec, build)
        assert grammar.matcher.accept_string(text)
        words = np.zeros((1, VOCAB // 32), np.int32)
        grammar.matcher.fill_next_token_bitmask(words, 0)
        bits = np.unpackbits((words[0] & grammar.allowed).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    return ask


def test_control_tokens_of_the_release(structured, allowed):
    anything = allowed({"json": {"type": "string"}}, '"')
    assert len(anything) > 100_000
    assert not anything & {BOS, EOS, PAD, USER, THINK_END, DSML, *structured._special}
    assert allowed({"json": {"type": "integer", "maximum": 9, "minimum": 9}}, "9") == {EOS}
    spelled = allowed({"grammar": 'root ::= "<" ("｜DSML｜" | "x") ">"'}, "<")
    assert DSML in spelled
    assert not spelled & {BOS, EOS, PAD, USER, THINK_END}


def test_first_bytes_and_what_may_follow_them():
    pieces = [b"a", b"\xe2\xed", b"\x9f\x80", b"\xa0", b"\x85", "é".encode(), b"", b"\xf0"]
    guard = Utf8Guard(pieces)

    def after(token):
        words = guard.allowed_after(token)
        if words is None:
            return None
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:8]).tolist()

    assert [after(token) for token in (0, 2, 5, 6, -1)] == [None] * 5
    assert after(1) == [0, 1, 2, 4, 5, 6, 7]
    assert after(7) == [0, 1, 2, 3, 5, 6, 7]
