"""What a row asks for: token ids and what belongs to them, from one kind of input column.

Knows: columns of texts and of token ids. Does not know: chat, limits, sampling rules, results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from deepinfer_ray.chat.options import ParseOptions
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.errors import RowError
from deepinfer_ray.job import values


@dataclass(slots=True, eq=False)
class Asked:
    """One row's wish, not yet held against any limit.

    ids: [prompt_tokens], any integer type. shortened: the prompt with at most so many tokens, newest first.
    sampling: the row's own parameters by name. parse: how the completion is read; None = it stays text.
    max_tokens: default when neither row nor job names one; None = the job's. constraint: what the row's
    options promise of the completion, as `structured_outputs`. begins_after: a constraint holds only from
    behind these tokens on, the end of the reasoning.
    """

    ids: np.ndarray
    shortened: Callable[[int], np.ndarray]
    sampling: dict[str, Any] = field(default_factory=dict)
    parse: ParseOptions | None = None
    max_tokens: int | None = None
    constraint: dict[str, Any] | None = None
    begins_after: tuple[int, ...] = ()

    def __repr__(self) -> str:  # never the prompt itself
        return f"Asked({len(self.ids)} tokens)"


Ask = Callable[[int], Asked]
"""Row number within a table → what the row asks for; raises `RowError`."""


class PromptKind(Protocol):
    """One way to make prompts from rows."""

    def of(self, table: pa.Table) -> Ask:
        """Rows of `table` by number."""


class TextPrompts:
    """A column of texts: BOS and the text."""

    def __init__(self, column: str, text: TextEncoder, limits: RowSize, sampling: str | None) -> None:
        self._column, self._text, self._limits, self._sampling = column, text, limits, sampling

    def of(self, table: pa.Table) -> Ask:
        prompt_of = values.getter(table[self._column])
        sampling_of = own_sampling(table, self._sampling)

        def ask(row: int) -> Asked:
            raw = prompt_of(row)
            self._limits.check(raw)
            ids = self._text.encode_prompt(values.text(raw, self._column))
            return Asked(ids, lambda limit: newest(ids, limit, keep_first=True), sampling_of(row))

        return ask


class TokenPrompts:
    """A column of token id lists, used as they are."""

    def __init__(self, column: str, limits: RowSize, sampling: str | None) -> None:
        self._column, self._limits, self._sampling = column, limits, sampling

    def of(self, table: pa.Table) -> Ask:
        prompt_of = values.getter(table[self._column])
        sampling_of = own_sampling(table, self._sampling)

        def ask(row: int) -> Asked:
            raw = prompt_of(row)
            self._limits.check(raw)
            ids = values.token_ids(raw, self._column)
            return Asked(ids, lambda limit: newest(ids, limit, keep_first=False), sampling_of(row))

        return ask


@dataclass(frozen=True)
class RowSize:
    """The longest prompt in bytes; a longer one is not even tokenized."""

    max_bytes: int

    def check(self, raw: Any) -> None:
        """Raises `RowError` (`prompt_too_long`)."""
        if values.size(raw) > self.max_bytes:
            raise RowError(
                "prompt_too_long",
                f"the prompt takes {values.size(raw)} bytes, the limit of a row is {self.max_bytes}",
            )


def own_sampling(table: pa.Table, column: str | None) -> Callable[[int], dict[str, Any]]:
    """A row's own parameters by name, none without a column."""
    if column is None:
        return lambda row: {}
    raw_of = values.getter(table[column])
    return lambda row: values.mapping(raw_of(row), column, "bad_sampling_params")


def newest(ids: np.ndarray, limit: int, *, keep_first: bool) -> np.ndarray:
    """The last `limit` ids; keep_first: the first one, a BOS, stays in place of the oldest kept."""
    if len(ids) <= limit:
        return ids
    if not keep_first or limit == 1:
        return ids[len(ids) - limit :].copy()
    return np.concatenate((ids[:1], ids[len(ids) - limit + 1 :]))


def split(given: Mapping[str, Any], names: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(entries whose name is in `names`, the others)."""
    inside = {name: value for name, value in given.items() if name in names}
    return inside, {name: value for name, value in given.items() if name not in names}
