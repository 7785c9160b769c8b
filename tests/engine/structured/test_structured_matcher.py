"""A row's place in its grammar: triggers, the end, and going back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher

from deepinfer_ray.engine.grammar_matcher import RowGrammar, Stage
from deepinfer_ray.engine.grammar_spec import GrammarSpec

EOS, T, U = 1, 300, 301
A, B, C = (3 + ord(char) for char in "abc")


@pytest.fixture(scope="module")
def compiled(vocabulary) -> CompiledGrammar:
    return GrammarCompiler(vocabulary.tokenizer_info(), max_threads=1).compile_regex("a+b")


def grammar(compiled, trigger=(), bound=None, keep=6, forbidden=()) -> RowGrammar:
    allowed = np.full(16, -1, np.int32)
    for token in forbidden:
        allowed[token >> 5] &= np.int32(~(1 << (token & 31)))
    return RowGrammar(
        GrammarSpec("regex", "a+b", True, trigger, bound), GrammarMatcher(compiled), allowed, keep
    )


def test_constrained_from_the_start_without_a_trigger(compiled):
    row = grammar(compiled)
    assert row.stage is Stage.GRAMMAR
    assert not row.accept(B)
    assert [row.accept(token) for token in (A, A, B)] == [True] * 3
    assert not row.accept(A)
    assert row.accept(EOS)
    assert row.stage is Stage.FREE  # behind the end anything goes
    assert row.accept(C)
    assert row.num_tokens == 5


def test_the_trigger_is_found_wherever_it_begins(compiled):
    """The token sequence T T U, in T T T U, too."""
    row = grammar(compiled, trigger=(T, T, U))
    for token, stage in [
        (C, Stage.FREE),
        (T, Stage.FREE),
        (T, Stage.FREE),
        (T, Stage.FREE),
        (U, Stage.GRAMMAR),
    ]:
        assert row.accept(token)
        assert row.stage is stage
    assert not row.accept(C)
    assert row.accept(A)


def test_a_bound_token_forces_the_trigger(compiled):
    row = grammar(compiled, trigger=(T, U), bound=C)
    assert row.accept(A)
    assert row.accept(C)
    assert (row.stage, row.forced_token) == (Stage.FORCED, T)
    assert not row.accept(U)
    assert row.accept(T)
    assert row.forced_token == U
    assert row.accept(U)
    assert row.stage is Stage.GRAMMAR


def test_tokens_that_no_grammar_may_use(compiled):
    row = grammar(compiled, forbidden=(A,))
    assert not row.accept(A)
    assert not row.accept(-1)
    assert not row.accept(1 << 20)


def test_going_back_is_as_never_having_gone(compiled):
    """Random walks with rollbacks equal a fresh row that took the tokens that stayed."""
    rng = random.Random(3)
    for _ in range(60):
        trigger = rng.choice([(), (T,), (T, T, U)])
        bound = C if trigger and rng.random() < 0.5 else None
        row, kept = grammar(compiled, trigger, bound, keep=4), []
        for _ in range(25):
            if rng.random() < 0.3:
                count = rng.randint(0, min(4, len(row._undo)))
                row.rollback(count)
                del kept[len(kept) - count :]
            else:
                token = rng.choice([A, A, B, C, T, U, EOS])
                if row.accept(token):
                    kept.append(token)
            fresh = grammar(compiled, trigger, bound)
            assert all(fresh.accept(token) for token in kept)
            assert (fresh.stage, fresh.num_tokens) == (row.stage, row.num_tokens)
            assert [masked(each) for each in (fresh, row)] in ([None, None], [masked(fresh)] * 2)
        row.restart()
        assert row.stage is grammar(compiled, trigger, bound).stage


def masked(row: RowGrammar) -> list[int] | None:
    if row.stage is not Stage.GRAMMAR:
        return None
    words = np.zeros((1, 16), np.int32)
    row.matcher.fill_next_token_bitmask(words, 0)
    return words[0].tolist()


def test_going_back_further_than_kept_is_an_error(compiled):
    row = grammar(compiled, keep=2)
    for token in (A, A, A):
        row.accept(token)
    with pytest.raises(ValueError, match="3 tokens to take back, 2 are kept"):
        row.rollback(3)
