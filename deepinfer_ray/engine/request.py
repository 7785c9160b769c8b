"""What goes into a rank's engine and what comes out: `SamplingParams`, `Request`, `RequestResult`.

Knows: the public sampling names and their rules (spec/speculative.md §5.1), finish reasons.
Does not know: rows, files, tensors, the scheduler.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.engine.diagnostics import Diagnostics
from deepinfer_ray.errors import RowError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this decode by argmax (spec/speculative.md §5.6)."""

MASK_64 = (1 << 64) - 1


class FinishReason(enum.StrEnum):
    """Why a request ended; the value is the output row's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ERROR = "error"
    ABORTED = "aborted"
    PREEMPTED = "preempted"


class SamplingParams(BaseModel):
    """How one request is sampled. Names are vLLM's; `seq_seed` is accepted as an alias of `seed`.

    Unknown names are errors. Unlike vLLM nothing is silently adjusted: an illegal value raises
    `pydantic.ValidationError` (a `ValueError`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, alias="seq_seed")
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(16, ge=1, le=2**31 - 1)
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=1000)
    prompt_logprobs: int | None = Field(None, ge=0, le=1000)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0)
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: Mapping[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: object) -> object:
        for name in values if isinstance(values, Mapping) else ():
            if name not in cls.model_fields and name != "seq_seed":
                nearest = nearest_name(str(name), cls.model_fields)
                hint = f"; did you mean {nearest!r}?" if nearest else ""
                raise ValueError(f"unknown parameter {name!r}{hint}")
        return values

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many_stops(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("a stop string is empty; it would stop every request at once")
        if not all(map(is_unicode, value)):
            raise ValueError("a stop string is no valid Unicode, it holds a lone surrogate")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _none_is_empty(cls, value: object) -> object:
        return () if value is None else value

    @field_validator("top_k")
    @classmethod
    def _top_k_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k is 0, which keeps no token; use -1 to switch it off")
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax (ties to the lowest id), without a random word."""
        return self.temperature < GREEDY_TEMPERATURE

    @classmethod
    def of_row(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a row's columns; any illegal value is `RowError("bad_sampling_params")`."""
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except (ValidationError, TypeError) as error:
            raise RowError("bad_sampling_params", describe_validation(error)) from None


def describe_validation(error: Exception) -> str:
    """One line for a person: every field that failed and why."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        (".".join(map(str, problem["loc"])) + ": ").removeprefix(": ")
        + problem["msg"].removeprefix("Value error, ")
        + ("" if isinstance(problem["input"], dict) else f" (got {problem['input']!r})")
        for problem in error.errors()
    )


def derived_seed(base: int | str, *parts: object) -> int:
    """First 8 bytes, little endian, of SHA-256 of `base ␟ part ␟ …` (spec/speculative.md §5.1)."""
    text = "\x1f".join(map(str, (base, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def completion_seed(job_seed: int, row_id: str, own_seed: int | None, index: int) -> int:
    """Seed of completion `index` of a row: its own seed if it names one, else derived from the job's."""
    if own_seed is None:
        return derived_seed(job_seed, row_id, index)
    return own_seed & MASK_64 if index == 0 else derived_seed(own_seed, index)


_request_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to complete. `seed` is final (n > 1 is expanded by the caller).

    prompt: int32 [prompt_len], ids in `[0, vocab_size)`, at least one. forced: int32 ids of the first
    outputs, which are then given whatever the model says (log-probabilities are still its own); -1 = free.
    """

    prompt: np.ndarray
    params: SamplingParams
    seed: int = 0
    request_id: int = field(default_factory=lambda: next(_request_numbers))
    arrival_time: float = 0.0
    forced: np.ndarray | None = None

    def __repr__(self) -> str:  # never the prompt itself
        return f"Request({self.request_id}, prompt_len={len(self.prompt)})"


@dataclass(slots=True)
class RequestResult:
    """The terminal record of one request; exactly one per request.

    token_ids: int32 [completion_len], the stop token included. logprobs: float32 [completion_len].
    prompt_logprobs: float32 [prompt_len - 1]. top_logprobs: per token a list of (id, logprob). diagnostics:
    with `sampling.diagnostics` only.
    `error` and `error_code` are set when `finish_reason` is `error`, `preempted` or `aborted` with a cause.
    """

    request_id: int
    token_ids: np.ndarray
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    diagnostics: Diagnostics | None = None
    error: str | None = None
    error_code: str | None = None
    completions: list[RequestResult] = field(default_factory=list)
    """All n completions of the prompt, this one first; filled by `LLM.generate` only."""

    def __repr__(self) -> str:  # never the text itself
        return (
            f"RequestResult({self.request_id}, {self.finish_reason}, prompt_tokens={self.prompt_tokens}, "
            f"completion_tokens={len(self.token_ids)}, error_code={self.error_code})"
        )

    @classmethod
    def failed(cls, request_id: int, prompt_tokens: int, code: str, message: str) -> RequestResult:
        """A request that ended without a token."""
        empty = np.empty(0, np.int32)
        return cls(
            request_id, empty, "", FinishReason.ERROR.value, prompt_tokens, error=message, error_code=code
        )

    @classmethod
    def refused(cls, request_id: int, prompt_tokens: int, error: Exception) -> RequestResult:
        """A request that an engine did not take; what is no `RowError` has the code `internal`."""
        if isinstance(error, RowError):
            return cls.failed(request_id, prompt_tokens, error.code, str(error))
        return cls.failed(request_id, prompt_tokens, "internal", f"{type(error).__name__}: {error}")


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON's escapes can spell lone surrogates, which cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def as_token_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 copy of `ids`; `RowError` (`empty_prompt`, `wrong_type`, `bad_token_id`) if it cannot be one."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise RowError("wrong_type", f"token ids must be a flat list of integers: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RowError(
            "wrong_type", f"token ids must be a flat list of integers, got {array.dtype} {array.shape}"
        )
    if array.size == 0:
        raise RowError("empty_prompt", "the prompt has no token")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise RowError(
            "bad_token_id",
            f"token id {int(array[bad[0]])} at position {int(bad[0])} is outside [0, {vocab_size})",
        )
    return np.ascontiguousarray(array, dtype=np.int32)
