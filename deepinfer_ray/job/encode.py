"""A row becomes token ids and sampling parameters, or the row's own error.

Knows: limits of a row, per-row sampling, seeds. Does not know: where a prompt comes from, files, results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from deepinfer_ray.chat.options import ParseOptions
from deepinfer_ray.engine.grammar_spec import GrammarLimits, GrammarSpec
from deepinfer_ray.engine.json_schema import parse
from deepinfer_ray.engine.request import SamplingParams, as_token_ids, completion_seed
from deepinfer_ray.errors import RowError
from deepinfer_ray.job import values
from deepinfer_ray.job.ids import id_strings
from deepinfer_ray.job.prompts import Ask, Asked, PromptKind


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
    grammars: GrammarLimits = field(default_factory=GrammarLimits)


@dataclass(slots=True, eq=False)
class EncodedRow:
    """A row ready to run, or with the `error` that it will carry. prompt: int32 [prompt_tokens].

    parse: how its completions are read; None = they stay text.
    """

    row_id: str
    prompt: np.ndarray | None = None
    params: SamplingParams | None = None
    seeds: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    error: RowError | None = None
    parse: ParseOptions | None = None

    def __repr__(self) -> str:  # never the prompt itself
        return f"EncodedRow({self.row_id}, prompt_tokens={self.prompt_tokens}, error={self.error!r})"


class RowNames(Protocol):
    """Names rows that bring no id of their own: a part of an input, a batch of a pipeline."""

    def row_name(self, row: int) -> str:
        """Id of the row at that place of the table."""
        ...


class Encoder:
    """Encodes the rows of a part, one at a time and in order.

    id_column: unique ids of rows; without it a row is named after its place. schema_column: JSON schemas
    that completions must match, null = no constraint.
    """

    def __init__(
        self,
        kind: PromptKind,
        rules: RowRules,
        *,
        id_column: str | None = None,
        schema_column: str | None = None,
    ) -> None:
        self.rules = rules
        self._kind = kind
        self._id_column = id_column
        self._schema_column = schema_column
        self._base = SamplingParams(**rules.sampling)

    def encode(
        self, part: RowNames, table: pa.Table, errors: Mapping[int, RowError] | None = None
    ) -> Iterator[EncodedRow]:
        """One `EncodedRow` for each row of `table`, lazily. errors: of rows that could not even be read."""
        ask = self._kind.of(table)
        schema_of = values.getter(table[self._schema_column]) if self._schema_column else None
        ids = id_strings(table[self._id_column]) if self._id_column else None
        for row in range(table.num_rows):
            own = ids[row] if ids is not None else None
            row_id = part.row_name(row) if own is None else own
            if errors and row in errors:
                yield EncodedRow(row_id, error=errors[row])
            else:
                yield self._row(row_id, row, ask, schema_of)

    def _row(self, row_id: str, row: int, ask: Ask, schema_of: values.Getter | None) -> EncodedRow:
        encoded = EncodedRow(row_id)
        try:
            asked = ask(row)
            self._constrain(asked, schema_of(row) if schema_of is not None else None)
            prompt = self._prompt(asked, encoded)
            params = self._params(asked)
            seeds = tuple(
                completion_seed(self.rules.seed, row_id, params.seed, index) for index in range(self.rules.n)
            )
        except RowError as error:
            encoded.error = error
        except Exception as error:  # one row must never cost another
            encoded.error = RowError("internal", f"encoding the row failed: {type(error).__name__}: {error}")
        else:
            encoded.prompt, encoded.params, encoded.seeds = prompt, params, seeds
            encoded.parse = asked.parse
        return encoded

    def _prompt(self, asked: Asked, encoded: EncodedRow) -> np.ndarray:
        rules = self.rules
        ids = as_token_ids(asked.ids, rules.vocab_size)
        if len(ids) > rules.max_prompt:
            if rules.on_too_long == "error":
                encoded.prompt_tokens = len(ids)
                raise RowError(
                    "prompt_too_long",
                    f"the prompt has {len(ids)} tokens, the context takes {rules.max_prompt}",
                )
            ids = as_token_ids(asked.shortened(self._room()), rules.vocab_size)
        encoded.prompt_tokens = len(ids)
        return ids

    def _room(self) -> int:
        """Tokens of a shortened prompt: what the completion leaves, half the context at least."""
        limit = self.rules.max_prompt
        return max(1, limit - min(self.rules.sampling.get("max_tokens") or limit, limit // 2))

    def _constrain(self, asked: Asked, schema: Any) -> None:
        """The row's one constraint, checked, among its sampling parameters."""
        name = f"column {self._schema_column}"
        wishes = {
            name: None if schema is None else {"json": _schema(schema, str(self._schema_column))},
            "structured_outputs": asked.sampling.pop("structured_outputs", None),
            "response_format or tools": asked.constraint,
        }
        given = [wish for wish in wishes if wishes[wish] is not None]
        if not given:
            return
        if len(given) > 1:
            raise RowError("bad_schema", f"{' and '.join(given)} both constrain this row; give one of them")
        constraint = wishes[given[0]]
        if isinstance(constraint, str):
            constraint = parse(constraint, given[0])
        if not isinstance(constraint, Mapping):
            raise RowError("bad_schema", f"{given[0]} must be an object, not {type(constraint).__name__}")
        if asked.begins_after and "trigger_token_ids" not in constraint:
            constraint = {**constraint, "trigger_token_ids": list(asked.begins_after)}
        GrammarSpec.of(constraint, self.rules.grammars)
        asked.sampling["structured_outputs"] = constraint

    def _params(self, asked: Asked) -> SamplingParams:
        own = {name: value for name, value in asked.sampling.items() if value is not None}
        default = {} if asked.max_tokens is None else {"max_tokens": asked.max_tokens}
        if not own:
            lacks_length = default and "max_tokens" not in self.rules.sampling
            return self._base.model_copy(update=default) if lacks_length else self._base
        if own.pop("n", self.rules.n) != self.rules.n:
            raise RowError(
                "bad_sampling_params",
                f"n is set for the whole job (--n {self.rules.n}), a row cannot change it",
            )
        return SamplingParams.of_row({**default, **self.rules.sampling, **own})


def _schema(raw: Any, column: str) -> Any:
    """A JSON schema: its text as it is, or the structure that a column holds."""
    return (
        raw.decode(errors="replace")
        if isinstance(raw, bytes)
        else values.structure(raw, column, "bad_schema")
    )
