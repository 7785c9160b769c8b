"""`ProcessorConfig`: what a pipeline's rows mean, how they are sampled, how many actors run them.

Knows: names, ranges, how they become the options of a job. Does not know: Ray, engines, rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from deepinfer_ray.config.base import Section, nearest, validation_to_config_error
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.job import JobChat, JobConfig, JobSampling, RunConfig
from deepinfer_ray.config.load import OPTION_ALIASES, from_options
from deepinfer_ray.errors import ConfigError

NO_PROGRESS_S = 24 * 3600.0
"""How long a pipeline may wait for its next block: Ray Data's own 30 minutes may be shorter than one long
completion."""

_COLUMNS = (
    "prompt_column",
    "messages_column",
    "token_ids_column",
    "id_column",
    "sampling_column",
    "chat_column",
    "schema_column",
    "tools_column",
    "image_column",
)
_ROW_RULES = ("output_prefix", "on_too_long", "max_row_bytes")


class ProcessorConfig(Section):
    """Options of `build_processor` and `BatchPredictor`; names as those of a job.

    Sampling names (`max_tokens`, `temperature`, `seed`, …), chat names (`thinking`, …) and engine options
    (`max_num_seqs`, `numerics`, `device`, a block such as `scheduler={…}`) may be given flat, or in the
    blocks `sampling`, `chat` and `engine`.
    An unknown name is a `ConfigError` with the nearest valid one.
    """

    model: str
    """Checkpoint directory, readable on every node that runs an actor."""
    prompt_column: str | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    id_column: str | None = None
    """A row's id, from which its seed derives. None = the column `row_hash` where there is one
    (`read_parquet(include_row_hash=True)`), else a hash of what the row asks for."""
    sampling_column: str | None = None
    chat_column: str | None = None
    schema_column: str | None = None
    tools_column: str | None = None
    image_column: str | None = None
    sampling: JobSampling = JobSampling()
    """For rows without parameters of their own."""
    chat: JobChat = JobChat()
    """For rows of messages without chat options of their own."""
    output_prefix: str | None = None
    on_too_long: Literal["error", "truncate-left"] = "error"
    max_row_bytes: int = Field(16 << 20, ge=1)
    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, as keywords of `LLM`."""

    batch_size: int = Field(128, ge=1)
    """Rows of a batch, which is what a retry repeats at most. Batches share an actor's engine, so that the
    slowest row of one does not leave it idle."""
    piece_rows: int = Field(16, ge=1)
    """Rows that a batch gives back at a time, in input order."""
    concurrency: int | tuple[int, int] = 1
    """Actors, each with an engine of its own; a pair is the least and the most."""
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    """Of an actor; None = 1 when the device is `cuda`, or `auto` on a cluster with GPUs."""
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    no_progress_timeout_s: float = NO_PROGRESS_S
    """Ray Data's limit for a pipeline without a finished block, raised to this; -1 = none."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise validation_to_config_error(error, type(self), lambda path: None) from None

    @model_validator(mode="before")
    @classmethod
    def _blocks_from_flat_names(cls, data: Any) -> Any:
        """Names of sampling and engine options go to their blocks; a name given twice is refused."""
        if not isinstance(data, Mapping):
            return data
        blocks: dict[str, dict[str, Any]] = {"sampling": {}, "chat": {}, "engine": {}}
        values = {}
        for name, value in data.items():
            if name in cls.model_fields:
                values[name] = value
            elif name in JobSampling.model_fields:
                blocks["sampling"][name] = value
            elif name in JobChat.model_fields:
                blocks["chat"][name] = value
            elif name in OPTION_ALIASES or name in EngineConfig.model_fields or "." in name:
                blocks["engine"][name] = value
            else:
                raise ConfigError(f"unknown option '{name}'{nearest(cls, name)}")
        for block, flat in blocks.items():
            given = values.get(block, {})
            given = given.model_dump(exclude_unset=True) if isinstance(given, Section) else given
            twice = sorted(set(flat) & set(given))
            if twice:
                raise ConfigError(f"{twice[0]} is given twice: by itself and in {block}")
            if flat:
                values[block] = {**given, **flat}
        return values

    @model_validator(mode="after")
    def _is_consistent(self) -> ProcessorConfig:
        least, most = self.pool
        if not 1 <= least <= most:
            raise ValueError(
                f"concurrency = {self.concurrency} must be a number of actors from 1, or a pair least, most"
            )
        parallel = self.run_config.parallel
        if parallel.replicas * parallel.cp * parallel.ep != 1:
            raise ValueError(
                f"an actor runs one rank, not dp = {parallel.replicas}, cp = {parallel.cp}, "
                f"ep = {parallel.ep}; for more ranks set concurrency, for a model that needs several "
                "GPUs use the job (deepinfer-ray generate) or LLM"
            )
        return self

    @property
    def pool(self) -> tuple[int, int]:
        """Least and most actors."""
        return (
            self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency, self.concurrency)
        )

    @cached_property
    def run_config(self) -> RunConfig:
        """The same as options of a job without input and output. `ConfigError`."""
        job = {name: getattr(self, name) for name in (*_COLUMNS, *_ROW_RULES)}
        job = {name: value for name, value in job.items() if value is not None}
        try:
            checked = JobConfig(sampling=self.sampling, chat=self.chat, **job)
        except ValidationError as error:
            raise validation_to_config_error(error, JobConfig, lambda path: None) from None
        engine = from_options(EngineConfig, {**self.engine, "model": self.model})
        return RunConfig(**{name: getattr(engine, name) for name in EngineConfig.model_fields}, job=checked)
