"""Where one sequence stands in its grammar: `RowGrammar` (spec/speculative.md §7.3).

Knows: tokens in the order in which they were generated, triggers, the end of the grammar. Does not know:
sequences, batches, logits. It can go back over the last few tokens, so that drafts may be tried.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import numpy as np

from deepinfer_ray.engine.grammar_spec import GrammarSpec
from deepinfer_ray.engine.whitespace_limit import WhitespaceLimit


class Stage(enum.Enum):
    """What the next token may be."""

    FREE = "free"
    """Anything: the trigger is not complete, or the grammar has ended."""
    FORCED = "forced"
    """The next token of the trigger, the bound token having come."""
    GRAMMAR = "grammar"
    """What the grammar allows; once it is complete, a token that ends the completion."""


class RowGrammar:
    """State of one sequence. matcher: a fresh `xgrammar.GrammarMatcher`. allowed: int32 words of the tokens
    that the grammar may use at all. keep: tokens that `rollback` can take back. limit: of spaces in a row,
    None = none."""

    __slots__ = (
        "_after_end",
        "_bound_fired",
        "_failure",
        "_progress",
        "_undo",
        "allowed",
        "last_token",
        "limit",
        "matcher",
        "num_tokens",
        "run",
        "spec",
    )

    def __init__(
        self,
        spec: GrammarSpec,
        matcher: Any,
        allowed: np.ndarray,
        keep: int,
        limit: WhitespaceLimit | None = None,
    ) -> None:
        self.spec, self.matcher, self.allowed, self.limit = spec, matcher, allowed, limit
        self.num_tokens = 0
        """Tokens accepted so far."""
        self.last_token = -1
        """The last of them."""
        self.run = 0
        """Spaces that they end with; 0 without a limit."""
        self._failure = _failure_function(spec.trigger_token_ids)
        self._progress = 0
        self._bound_fired = False
        self._after_end = False
        self._undo: deque[tuple[bool, int, int, int, bool, bool]] = deque(maxlen=max(1, keep))
        """Of each late token: whether the matcher took it, and last token, run, progress, bound and end
        before it."""

    @property
    def stage(self) -> Stage:
        if self._progress < len(self.spec.trigger_token_ids):
            return Stage.FORCED if self._bound_fired else Stage.FREE
        return Stage.FREE if self._after_end else Stage.GRAMMAR

    @property
    def forced_token(self) -> int:
        """In stage FORCED."""
        return self.spec.trigger_token_ids[self._progress]

    def accept(self, token: int) -> bool:
        """Takes a token; False, and nothing changed, if it is not allowed here."""
        before = (self._progress, self._bound_fired, self._after_end)
        inner = False
        stage = self.stage
        if stage is Stage.GRAMMAR:
            if not self._allows(token) or not self._take(token):
                return False
            inner = True
            self._after_end = self.matcher.is_terminated()
        elif stage is Stage.FORCED:
            if token != self.forced_token:
                return False
            self._progress += 1
        elif self._progress < len(self.spec.trigger_token_ids):
            self._follow_trigger(token)
        self._undo.append((inner, self.last_token, self.run, *before))
        self.num_tokens += 1
        self.last_token = token
        if self.limit is not None:
            self.run = self.limit.after(self.run, token)
        return True

    def _allows(self, token: int) -> bool:
        word = token >> 5
        return 0 <= word < len(self.allowed) and bool(int(self.allowed[word]) >> (token & 31) & 1)

    def _take(self, token: int) -> bool:
        try:
            return bool(self.matcher.accept_token(token))
        except RuntimeError as error:
            if "special token" in str(error):
                return False
            raise

    def _follow_trigger(self, token: int) -> None:
        trigger, place = self.spec.trigger_token_ids, self._progress
        while place and trigger[place] != token:
            place = self._failure[place - 1]
        self._progress = place + (trigger[place] == token)
        if token == self.spec.bound_token_id and self._progress < len(trigger):
            self._bound_fired = True

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back. `ValueError` beyond what is kept."""
        if count > len(self._undo):
            raise ValueError(f"{count} tokens to take back, {len(self._undo)} are kept")
        inner = 0
        for _ in range(count):
            was_inner, self.last_token, self.run, *_ = before = self._undo.pop()
            self._progress, self._bound_fired, self._after_end = before[3:]
            inner += was_inner
        if inner:
            self.matcher.rollback(inner)
        self.num_tokens -= count

    def restart(self) -> None:
        """Back to before the first token."""
        self.matcher.reset()
        self._undo.clear()
        self.num_tokens, self.last_token, self.run, self._progress = 0, -1, 0, 0
        self._bound_fired = self._after_end = False


def _failure_function(words: tuple[int, ...]) -> list[int]:
    """Of each prefix: length of its longest proper suffix that is a prefix, too (Knuth, Morris, Pratt)."""
    table = [0] * len(words)
    length = 0
    for place in range(1, len(words)):
        while length and words[place] != words[length]:
            length = table[length - 1]
        length += words[place] == words[length]
        table[place] = length
    return table
