"""Structured output of one engine: grammars of its sequences, masks of a step (spec/speculative.md §7.4).

Knows: which sequences are constrained, when their grammars are ready, which tokens may follow what is
committed. Does not know: how grammars are compiled (grammar_pool.py), one sequence's place in its grammar
(grammar_matcher.py), logits.

A sequence joins the queue once its grammar is compiled. Its matcher follows the committed outputs and nothing
else: a sequence that lost its cache, or came from another engine, catches up by itself, and the mask of a
step is the same in every loop. Whatever goes wrong ends that sequence alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_ray.config.sections import StructuredOptions
from deepinfer_ray.engine.grammar_matcher import RowGrammar, Stage
from deepinfer_ray.engine.grammar_pool import Build, GrammarPool, PoolOptions
from deepinfer_ray.engine.grammar_spec import GrammarLimits, GrammarSpec
from deepinfer_ray.engine.grammar_worker import Vocabulary
from deepinfer_ray.engine.logits_processors import TokenMasks
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.engine.scheduler import Scheduler
from deepinfer_ray.engine.sequence import Sequence
from deepinfer_ray.engine.utf8_guard import Utf8Guard, words_of
from deepinfer_ray.engine.whitespace_limit import WhitespaceLimit
from deepinfer_ray.errors import RowError

PARALLEL_FROM = 8
"""Masks of a step from which threads share them."""

Failures = dict[int, tuple[str, str]]
"""Plan index -> (error code, message)."""


@dataclass(slots=True)
class _Try:
    """One constrained sequence of a step. index: in the plan. first_row: its first logit row. drafts: those
    it verifies. taken: of them the matcher took."""

    index: int
    grammar: RowGrammar
    first_row: int
    drafts: list[int]
    outputs: int
    min_tokens: int
    ends: np.ndarray
    taken: int = 0


class StructuredOutputs:
    """The constrained sequences of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        pieces: Iterable[bytes],
        stop_ids: Iterable[int],
        special: dict[int, str],
        options: StructuredOptions | None = None,
        pool: GrammarPool | None = None,
    ) -> None:
        """pieces: bytes of every token id. stop_ids: tokens that end a completion. special: text of each
        control token, the stop ids left out: a grammar may use one only if its text spells it. pool: shared
        with others, by default its own."""
        options = options or StructuredOptions()
        self.scheduler, self.table = scheduler, scheduler.table
        self.limits = GrammarLimits(options.max_schema_bytes, options.max_nesting)
        self.vocabulary = vocabulary = Vocabulary(tuple(pieces), tuple(stop_ids))
        self._owns_pool = pool is None
        self.pool = pool or GrammarPool(
            vocabulary,
            PoolOptions(
                workers=options.threads,
                timeout_s=options.timeout_s,
                memory_bytes=options.memory_mb << 20,
                cache_bytes=0 if options.disable_cache else options.cache_bytes,
                debug=options.debug,
            ),
        )
        self.vocab_size = len(vocabulary.pieces)
        self._num_words = -(-self.vocab_size // 32)
        self._special = special
        self._guard = Utf8Guard(vocabulary.pieces)
        self._spaces = WhitespaceLimit(vocabulary.pieces, options.max_whitespace)
        usable = np.ones(self.vocab_size, np.bool_)
        usable[[*special, *self._guard.broken]] = False
        self._plain = self._words(np.flatnonzero(usable))
        self._keep = scheduler.settings.num_drafts + 2
        self._waiting: dict[int, tuple[Sequence, GrammarSpec, Build]] = {}
        self._threads = min(options.threads, os.cpu_count() or 1)
        self._batch: Any = None

    # -- requests ---------------------------------------------------------------------------------------

    def spec_of(self, params: SamplingParams) -> GrammarSpec | None:
        """What the request is constrained to; `RowError` (`bad_schema`) for a wish that cannot be kept."""
        if params.structured_outputs is None:
            return None
        spec = GrammarSpec.of(params.structured_outputs, self.limits)
        bound = () if spec.bound_token_id is None else (spec.bound_token_id,)
        for token in (*spec.trigger_token_ids, *bound):
            if token >= self.vocab_size:
                raise RowError(
                    "bad_schema",
                    f"structured_outputs: trigger token {token} is outside [0, {self.vocab_size})",
                )
        return spec

    def hold(self, sequence: Sequence, spec: GrammarSpec) -> None:
        """A sequence that was added with `ready=False`: it is queued once its grammar is there."""
        if not sequence.ended:
            self._waiting[sequence.request_id] = (sequence, spec, self.pool.get(spec))

    def pump(self, wait_s: float = 0.0) -> None:
        """Sequences whose grammar is done join the queue, or fail. Once a step, before the schedule. wait_s:
        how long to wait if there is nothing to do but wait."""
        if not self._waiting:
            return
        if wait_s and not any(build.done for _, _, build in self._waiting.values()):
            self.pool.wait(wait_s)
        for request_id, (sequence, spec, build) in list(self._waiting.items()):
            if sequence.ended:
                del self._waiting[request_id]
            elif build.done:
                del self._waiting[request_id]
                if build.error is not None:
                    self.scheduler.fail(request_id, build.error.code, str(build.error))
                else:
                    sequence.grammar = self._grammar(spec, build)
                    self.scheduler.make_ready(request_id)
        self.pool.collect()

    def supply(self, sequence: Sequence, spec: GrammarSpec) -> None:
        """A grammar for a sequence that has its place already (it comes from another engine); waits for it.
        Without one the sequence fails in its next step."""
        build = self.pool.get(spec)
        while not build.done:
            self.pool.wait(1.0)
        self.pool.collect()
        if build.error is None:
            sequence.grammar = self._grammar(spec, build)

    @property
    def num_waiting(self) -> int:
        """Sequences whose grammar is being compiled."""
        return len(self._waiting)

    def close(self) -> None:
        if self._owns_pool:
            self.pool.close()

    def _grammar(self, spec: GrammarSpec, build: Build) -> RowGrammar:
        from xgrammar import GrammarMatcher

        allowed = self._plain
        if spec.kind != "json":  # inside JSON a control token is never meant
            spelled = [token for token, text in self._special.items() if text and text in spec.text]
            if spelled:
                allowed = allowed | self._words(spelled)
        limit = self._spaces if spec.kind == "json" and spec.any_whitespace else None
        return RowGrammar(spec, GrammarMatcher(build.compiled), allowed, self._keep, limit)

    def _words(self, ids: Iterable[int] | np.ndarray) -> np.ndarray:
        return words_of(ids, self.vocab_size)

    # -- a step -----------------------------------------------------------------------------------------

    def masks(
        self, plan: StepPlan, members: np.ndarray, *, verifies: bool = False
    ) -> tuple[TokenMasks | None, Failures]:
        """The masks of a step's logit rows, and sequences that cannot go on.

        members: int64 plan indices that are sampled, one logit row each in this order; verifies: every
        sequence of the plan has `q` rows, the drafts of the table before all but the first. Everything before
        the step is committed by now.
        """
        rows = plan.rows[members]
        chosen = np.flatnonzero(self.table.has_grammar[rows])
        if not len(chosen):
            return None, {}
        first = (np.cumsum(plan.q) - plan.q)[members] if verifies else np.arange(len(members))
        tries: list[_Try] = []
        failures: Failures = {}
        for place in chosen.tolist():
            index = int(members[place])
            try:
                one = self._begin(plan, index, int(first[place]), verifies)
            except (RowError, RuntimeError, ValueError) as error:
                failures[index] = _failure(error)
            else:
                if one is not None:
                    tries.append(one)
        filled = self._fill(tries, failures)
        return filled, failures

    def _begin(self, plan: StepPlan, index: int, first_row: int, verifies: bool) -> _Try | None:
        """The sequence's matcher brought up to its last committed token; None if its sample is discarded."""
        table, row = self.table, int(plan.rows[index])
        sequence = table.sequences[row]
        if sequence is None or table.seq_id[row] != plan.seq_ids[index] or sequence.finished:
            return None
        grammar: RowGrammar | None = sequence.grammar
        if grammar is None:
            raise RowError("bad_schema", "the grammar of this request could not be compiled here")
        table.so_status[row] = 2
        start, end = int(table.prompt_len[row]), int(table.len[row])
        if grammar.num_tokens > end - start:
            grammar.restart()
        for token in table.tokens[row, start + grammar.num_tokens : end].tolist():
            if not grammar.accept(token):
                raise RowError("internal", f"the grammar refuses token {token}, which it allowed before")
        drafts = table.draft[row, : int(plan.q[index]) - 1].tolist() if verifies else []
        ends = [int(token) for token in table.stop_ids[row, : table.n_stop_ids[row]]]
        ends += [int(table.eos[row])] if table.eos[row] >= 0 else []
        minimum = int(table.min_tokens[row])
        return _Try(
            index,
            grammar,
            first_row,
            drafts,
            end - start,
            minimum,
            ~self._words(ends) if minimum > end - start else self._plain,
        )

    def _fill(self, tries: list[_Try], failures: Failures) -> TokenMasks | None:
        """Masks of all rows, one draft further in every round; the drafts are taken back in the end."""
        words = np.zeros((sum(len(one.drafts) + 1 for one in tries), self._num_words), np.int32)
        rows: list[int] = []
        alive = tries
        while alive:
            self._fill_round(alive, words, rows, failures)
            alive = [one for one in alive if one.index not in failures and self._next_draft(one, failures)]
        for one in tries:
            try:
                one.grammar.rollback(one.taken)
            except (RuntimeError, ValueError) as error:
                failures.setdefault(one.index, _failure(error))
        if not rows:
            return None
        return TokenMasks(np.asarray(rows, np.int64), words[: len(rows)])

    @staticmethod
    def _next_draft(one: _Try, failures: Failures) -> bool:
        """Whether there is a next draft and it may come: after a refused one nothing will be accepted."""
        if one.taken == len(one.drafts):
            return False
        try:
            if not one.grammar.accept(one.drafts[one.taken]):
                return False
        except RuntimeError as error:
            failures[one.index] = _failure(error)
            return False
        one.taken += 1
        return True

    def _fill_round(self, alive: list[_Try], words: np.ndarray, rows: list[int], failures: Failures) -> None:
        """One row of words for each sequence that is constrained now."""
        ready: list[tuple[_Try, int]] = []
        for one in alive:
            stage = one.grammar.stage
            if stage is Stage.FREE:
                continue
            place = len(rows)
            rows.append(one.first_row + one.taken)
            if stage is Stage.FORCED:
                words[place] = self._words([one.grammar.forced_token])
            else:
                ready.append((one, place))
        self._ask_matchers(ready, words, failures)
        for one, place in ready:
            if one.index in failures:
                words[place] = -1
                continue
            words[place] &= one.grammar.allowed
            whole = self._guard.allowed_after(one.grammar.last_token)
            if whole is not None:
                words[place] &= whole
            if one.grammar.limit is not None:
                one.grammar.limit.narrow(words[place], one.grammar.run)
            if one.taken:  # it may never come to this: the sampler finds a row without a token by itself
                continue
            if not words[place].any():
                failures[one.index] = (
                    "bad_schema",
                    f"after {one.outputs} tokens the grammar allows none of this vocabulary",
                )
            elif one.outputs < one.min_tokens and not (words[place] & one.ends).any():
                failures[one.index] = (
                    "bad_sampling_params",
                    f"the grammar is complete after {one.outputs} tokens, min_tokens asks for "
                    f"{one.min_tokens}; lower it",
                )

    def _ask_matchers(self, ready: list[tuple[_Try, int]], words: np.ndarray, failures: Failures) -> None:
        if len(ready) >= PARALLEL_FROM and self._threads > 1:
            if self._batch is None:
                from xgrammar import BatchGrammarMatcher

                self._batch = BatchGrammarMatcher(self._threads)
            try:
                self._batch.batch_fill_next_token_bitmask(
                    [one.grammar.matcher for one, _ in ready], words, [place for _, place in ready]
                )
                return
            except RuntimeError:
                pass  # one of them failed: ask each by itself
        for one, place in ready:
            try:
                one.grammar.matcher.fill_next_token_bitmask(words, place)
            except RuntimeError as error:
                failures[one.index] = _failure(error)


def _failure(error: Exception) -> tuple[str, str]:
    if isinstance(error, RowError):
        return error.code, str(error)
    return "internal", f"the grammar matcher failed: {str(error).splitlines()[0][:200]}"
