"""Options of a batch job: what is read, what is written, how rows are treated (interface of `generate`).

Knows: names, ranges, rules between them. Does not know: files, Ray, the engine.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from deepinfer_ray.config.base import Section
from deepinfer_ray.config.engine import EngineConfig

PROMPT_MAX_TOKENS = 256
"""Output tokens of prompt and token-id rows when `max_tokens` is unset."""

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


class JobSampling(Section):
    """Sampling of rows that bring no parameters of their own; None = the default of `SamplingParams`."""

    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    """None = 256 for prompts and token ids, for messages the chat default."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int = 0
    """Job seed: a row's default seed is a hash of it and the row id."""
    n: int = Field(1, ge=1, le=128)
    stop: tuple[str, ...] = ()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("a stop string is empty; it would stop every row at once")
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("top_k = 0 keeps no token; use -1 to switch it off")
        return value


class JobChat(Section):
    """Chat options of rows that bring none of their own (spec/chat.md §2, §10)."""

    thinking: bool = True
    reasoning_effort: int | str | None = None
    """1 to 100 or a name; `none` switches thinking off."""
    drop_thinking: bool = True
    """Leave the reasoning of earlier turns out of the prompt."""
    api_sampling: bool = False
    """Sample as the public API does: thinking at temperature 1 and top_p of at least 0.95, else top_p 1."""

    @field_validator("reasoning_effort")
    @classmethod
    def _number(cls, value: int | str | None) -> int | str | None:
        return int(value) if isinstance(value, str) and value.isdecimal() else value


class JobConfig(Section):
    """One run of `generate`."""

    input: tuple[str, ...] = ()
    """Files, directories, globs or URIs."""
    output: str | None = None
    prompt_column: str | None = None
    """Column of prompt texts; None = `prompt` unless another kind of column is named."""
    messages_column: str | None = None
    token_ids_column: str | None = None
    id_column: str | None = None
    sampling_column: str | None = None
    schema_column: str | None = None
    tools_column: str | None = None
    chat_column: str | None = None
    """Column of a row's own chat options, e.g. {"thinking": false}."""
    image_column: str | None = None
    sampling: JobSampling = JobSampling()
    chat: JobChat = JobChat()
    rows_per_part: int = Field(256, ge=1)
    """Rows of an output part at most; a kill costs the rows of the open parts. Fixed at the first start."""
    part_bytes: int = Field(64 << 20, ge=1)
    """Uncompressed input bytes of a part at most (one row at least): wide rows go into smaller parts."""
    max_row_bytes: int = Field(16 << 20, ge=1)
    """A longer prompt (bytes of its text or ids) is an error row, `prompt_too_long`, and not tokenized."""
    max_open_bytes: int = Field(1 << 30, ge=1)
    """Input bytes of parts that are open at a time; more is not read ahead."""
    max_open_rows: int | None = Field(None, ge=1)
    """Rows of parts that are open at a time, which is what a kill costs at most; None = as many as
    `max_open_bytes` allow. Few leave ranks idle: every part with one long row stays open."""
    max_gangs: int | None = Field(None, ge=1)
    """Gangs of ranks that run at once at most: those beyond what `parallel` asks for join while there is work
    for them and a place on the cluster, and leave when there is none. None = no further ones."""
    gang_idle_s: float = Field(60.0, gt=0)
    """How long such a gang may be without rows before it leaves."""
    max_error_rate: float = Field(1.0, ge=0, le=1)
    """Share of rows that may end in an error before the job stops; 1 = never stop."""
    min_rows_for_error_rate: int = Field(100, ge=1)
    """Rows that must have ended before that share can stop the job; the end of a job always looks at it."""
    allow_changed: bool = False
    """Resume although inputs changed since the job was planned."""
    limit: int | None = Field(None, ge=0)
    """Only the first rows of the input."""
    deadline_s: float | None = Field(None, gt=0)
    """Stop and drain after this long; a number of seconds, or a text such as `90m` or `1h30m`."""
    on_too_long: Literal["error", "truncate-left"] = "error"
    retry_errors: bool = False
    """Run rows again that a former run ended with an error."""
    output_prefix: str | None = None
    """Prefix of our columns, for inputs whose own columns collide."""

    @field_validator("input", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("deadline_s", mode="before")
    @classmethod
    def _duration(cls, value: object) -> object:
        if not isinstance(value, str) or not value.strip():
            return value
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"'{value}' is not a duration; write seconds, or e.g. 90m, 1h30m")
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return hours * 3600 + minutes * 60 + seconds

    @property
    def source_column(self) -> tuple[Literal["prompt", "messages", "token_ids"], str]:
        """Which kind of rows, and their column."""
        if self.messages_column is not None:
            return "messages", self.messages_column
        if self.token_ids_column is not None:
            return "token_ids", self.token_ids_column
        return "prompt", self.prompt_column or "prompt"

    @model_validator(mode="after")
    def _one_source(self) -> JobConfig:
        named = [
            name
            for name in ("prompt_column", "messages_column", "token_ids_column")
            if getattr(self, name) is not None
        ]
        if len(named) > 1:
            raise ValueError(
                f"give only one of prompt_column, messages_column, token_ids_column; got {', '.join(named)}"
            )
        return self


class RunConfig(EngineConfig):
    """The whole tree of a run: the engine's options and, under `job`, the job's."""

    job: JobConfig = JobConfig()

    @property
    def engine(self) -> EngineConfig:
        """The engine's part alone: what a rank gets."""
        return EngineConfig.model_validate(self.model_dump(exclude={"job"}))
