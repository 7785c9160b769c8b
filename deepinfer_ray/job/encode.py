"""A row becomes token ids and sampling parameters, or the row's own error.

Knows: columns, the text encoder, the context length, per-row sampling. Does not know: files, results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.engine.request import SamplingParams, as_token_ids, completion_seed
from deepinfer_ray.errors import InputError, RowError
from deepinfer_ray.job import values
from deepinfer_ray.job.plan import InputFile, Part
from deepinfer_ray.job.source import id_strings


@dataclass(frozen=True)
class Columns:
    """Which input column holds what; exactly one of `prompt` and `token_ids` is set."""

    prompt: str | None = "prompt"
    token_ids: str | None = None
    id: str | None = None
    sampling: str | None = None

    def check(self, file: InputFile) -> None:
        """Raises `InputError` naming the missing column and those that are there."""
        for name in (self.prompt, self.token_ids, self.id, self.sampling):
            if name is not None and name not in file.schema.names:
                there = ", ".join(file.schema.names) or "none"
                raise InputError(f"{file.name} has no column {name}; its columns are: {there}")


@dataclass(frozen=True)
class RowRules:
    """What holds for every row of a job.

    max_prompt: tokens of the longest prompt that fits the context. sampling: parameters by name, which a
    row's own override; `n` completions a row. seed: the job's.
    """

    vocab_size: int
    max_prompt: int
    max_row_bytes: int
    on_too_long: Literal["error", "truncate-left"] = "error"
    seed: int = 0
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class EncodedRow:
    """A row ready to run, or with the `error` that it will carry. prompt: int32 [prompt_tokens]."""

    row_id: str
    prompt: np.ndarray | None = None
    params: SamplingParams | None = None
    seeds: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    error: RowError | None = None

    def __repr__(self) -> str:  # never the prompt itself
        return f"EncodedRow({self.row_id}, prompt_tokens={self.prompt_tokens}, error={self.error!r})"


class Encoder:
    """Encodes the rows of a part, one at a time and in order."""

    def __init__(self, columns: Columns, rules: RowRules, text: TextEncoder | None) -> None:
        if columns.prompt is not None and text is None:
            raise ValueError("text prompts need a text encoder")
        self.columns = columns
        self.rules = rules
        self._text = text
        self._base = SamplingParams(**rules.sampling)

    def encode(self, part: Part, table: pa.Table) -> Iterator[EncodedRow]:
        """One `EncodedRow` for each row of `table`, lazily."""
        name = self.columns.prompt or self.columns.token_ids
        assert name is not None
        prompt_of = values.getter(table[name])
        sampling_of = values.getter(table[self.columns.sampling]) if self.columns.sampling else None
        ids = id_strings(table[self.columns.id]) if self.columns.id else None
        for row in range(table.num_rows):
            row_id = ids[row] if ids else part.row_name(row)
            assert row_id is not None
            yield self._row(row_id, row, prompt_of, sampling_of)

    def _row(
        self, row_id: str, row: int, prompt_of: values.Getter, sampling_of: values.Getter | None
    ) -> EncodedRow:
        encoded = EncodedRow(row_id)
        try:
            prompt = self._prompt(prompt_of(row), encoded)
            params = self._params(sampling_of(row)) if sampling_of else self._base
            seeds = tuple(
                completion_seed(self.rules.seed, row_id, params.seed, index) for index in range(self.rules.n)
            )
        except RowError as error:
            encoded.error = error
        except Exception as error:  # one row must never cost another
            encoded.error = RowError("internal", f"encoding the row failed: {type(error).__name__}: {error}")
        else:
            encoded.prompt, encoded.params, encoded.seeds = prompt, params, seeds
        return encoded

    def _prompt(self, raw: Any, encoded: EncodedRow) -> np.ndarray:
        rules = self.rules
        if values.size(raw) > rules.max_row_bytes:
            raise RowError(
                "prompt_too_long",
                f"the prompt takes {values.size(raw)} bytes, the limit of a row is {rules.max_row_bytes}",
            )
        if self.columns.prompt is not None:
            assert self._text is not None
            ids = self._text.encode_prompt(values.text(raw, self.columns.prompt))
        else:
            assert self.columns.token_ids is not None
            ids = values.token_ids(raw, self.columns.token_ids)
        checked = as_token_ids(ids, rules.vocab_size)
        if len(checked) > rules.max_prompt:
            if rules.on_too_long == "error":
                encoded.prompt_tokens = len(checked)
                raise RowError(
                    "prompt_too_long",
                    f"the prompt has {len(checked)} tokens, the context takes {rules.max_prompt}",
                )
            checked = self._truncated(checked)
        encoded.prompt_tokens = len(checked)
        return checked

    def _truncated(self, ids: np.ndarray) -> np.ndarray:
        """The newest tokens, with room for the completion (half the context at most); text keeps its BOS."""
        limit = self.rules.max_prompt
        keep = max(1, limit - min(self._base.max_tokens or limit, limit // 2))
        if self.columns.prompt is None or keep == 1:
            return ids[len(ids) - keep :].copy()
        return np.concatenate((ids[:1], ids[len(ids) - keep + 1 :]))

    def _params(self, raw: Any) -> SamplingParams:
        assert self.columns.sampling is not None
        own = values.sampling(raw, self.columns.sampling)
        if not own:
            return self._base
        if own.pop("n", self.rules.n) != self.rules.n:
            raise RowError(
                "bad_sampling_params",
                f"n is set for the whole job (--n {self.rules.n}), a row cannot change it",
            )
        params = SamplingParams.of_row({**self.rules.sampling, **own})
        if params.structured_outputs is not None:
            raise RowError(
                "bad_schema", "this version does not constrain completions; leave structured_outputs out"
            )
        return params
