"""A job before it has an output: configuration, model directory, input and sampling checked as a whole.

Knows: what can be refused without starting anything. Does not know: the output directory, backends, rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.job import PROMPT_MAX_TOKENS, JobConfig, RunConfig
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.job.encode import Columns, Encoder, RowRules
from deepinfer_ray.job.plan import InputPlan, plan_input
from deepinfer_ray.job.schema import check_names
from deepinfer_ray.job.store import resolve

Say = Callable[[str], None]
"""Takes a line for a person; never a prompt."""


@dataclass(frozen=True)
class RowSetup:
    """How rows of a job become requests, whatever brings the rows."""

    job: JobConfig
    engine: EngineConfig
    model: ModelConfig
    model_dir: Path
    columns: Columns
    rules: RowRules

    def encoder(self) -> Encoder:
        """Reads the tokenizer if rows need it. `CheckpointError`."""
        text = None
        if self.columns.prompt is not None:
            tokenizer = self.engine.model.tokenizer_path or self.model_dir
            text = TextEncoder.load(tokenizer, bos_id=self.model.bos_token_id)
        return Encoder(self.columns, self.rules, text)


@dataclass(frozen=True)
class Prepared(RowSetup):
    """A job that passed every check that needs no output directory."""

    plan: InputPlan

    def settings(self) -> dict[str, Any]:
        """What the rows of an output depend on, besides input and model."""
        job, engine, columns = self.job, self.engine, self.columns
        return {
            "columns": dict(columns.__dict__),
            "sampling": dict(self.rules.sampling),
            "seed": job.sampling.seed,
            "n": job.sampling.n,
            "output_prefix": job.output_prefix,
            "on_too_long": job.on_too_long,
            "max_row_bytes": job.max_row_bytes,
            "max_prompt": self.rules.max_prompt,
            "max_model_len": engine.max_model_len,
            "numerics": engine.numerics,
            "num_drafts": engine.num_drafts,
        }


def prepare(config: RunConfig, say: Say) -> Prepared:
    """Check everything and say what is defaulted. Raises `ConfigError`, `CheckpointError`, `InputError`."""
    job = config.job
    if not job.input:
        raise ConfigError("no input: give --input with Parquet files, directories or globs")
    if not job.output:
        raise ConfigError("no output: give --output with a directory")
    setup = prepare_rows(config, say)
    _refuse_nested(job)
    plan = checked_plan(setup, say)
    return Prepared(**setup.__dict__, plan=plan)


def checked_plan(setup: RowSetup, say: Say) -> InputPlan:
    """The input, its columns checked against the setup. Raises `InputError`."""
    job = setup.job
    plan = plan_input(job.input, rows_per_part=job.rows_per_part, limit=job.limit, part_bytes=job.part_bytes)
    for file in plan.files:
        setup.columns.check(file)
        check_names(file.schema.names, job.output_prefix or "", file.name)
    if plan.ignored_files:
        say(f"{plan.ignored_files} files in the input directories do not end in .parquet and are left out")
    return plan


def prepare_rows(config: RunConfig, say: Say) -> RowSetup:
    """Model, columns and sampling, without an input. Raises `ConfigError`, `CheckpointError`."""
    job = config.job
    columns = _columns(job)
    if config.model.path is None:
        raise ConfigError("no model: give --model with a checkpoint directory")
    model_dir = Path(config.model.path)
    model = ModelConfig.load(model_dir)
    engine = config.engine.resolve(model)
    sampling = _sampling(job, model_dir, say)
    rules = RowRules(
        vocab_size=model.text.vocab_size,
        max_prompt=engine.prompt_limit,
        max_row_bytes=job.max_row_bytes,
        on_too_long=job.on_too_long,
        seed=job.sampling.seed,
        n=job.sampling.n,
        sampling=sampling,
    )
    return RowSetup(job, engine, model, model_dir, columns, rules)


def _columns(job: JobConfig) -> Columns:
    later = {
        "--messages-column": job.messages_column,
        "--schema-column": job.schema_column,
        "--tools-column": job.tools_column,
        "--image-column": job.image_column,
    }
    for flag, value in later.items():
        if value is not None:
            raise ConfigError(
                f"{flag} {value}: this version takes texts (--prompt-column) and token ids "
                "(--token-ids-column); chat messages, schemas, tools and images are not supported yet"
            )
    kind, name = job.source_column
    return Columns(
        prompt=name if kind == "prompt" else None,
        token_ids=name if kind == "token_ids" else None,
        id=job.id_column,
        sampling=job.sampling_column,
    )


def _refuse_nested(job: JobConfig) -> None:
    """An output inside an input directory would be read as input by the next run."""
    _, output = resolve(str(job.output))
    for location in job.input:
        _, source = resolve(location)
        if f"{output.rstrip('/')}/".startswith(f"{source.rstrip('/')}/"):
            raise ConfigError(
                f"the output {job.output} lies inside the input {location}: its parts would become input. "
                "Give an output beside it"
            )


def _sampling(job: JobConfig, model_dir: Path, say: Say) -> dict[str, Any]:
    """Parameters by name for rows without their own: flags, else the checkpoint's defaults, else ours."""
    own = job.sampling
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p")
        if (value := getattr(own, name)) is not None
    }
    if own.stop:
        sampling["stop"] = list(own.stop)
    defaults, plain = GenerationDefaults.load(model_dir), GenerationDefaults()
    for name in ("temperature", "top_p"):
        if name not in sampling and (value := getattr(defaults, name)) != getattr(plain, name):
            sampling[name] = value
            say(f"{name} {value} (generation_config.json of the model)")
    if own.max_tokens is None:
        say(f"max_tokens {PROMPT_MAX_TOKENS} a row (the default; --max-tokens changes it)")
    sampling["max_tokens"] = own.max_tokens or PROMPT_MAX_TOKENS
    return sampling
