"""A job before it has an output: configuration, model directory, input and sampling checked as a whole.

Knows: what can be refused without starting anything. Does not know: the output directory, backends, rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_ray.chat.encoding import ChatEncoder
from deepinfer_ray.chat.options import ChatOptions
from deepinfer_ray.chat.parsing import CompletionParser
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.config.job import PROMPT_MAX_TOKENS, JobConfig, RunConfig
from deepinfer_ray.engine.defaults import GenerationDefaults
from deepinfer_ray.engine.grammar_spec import GrammarLimits
from deepinfer_ray.errors import CheckpointError, ConfigError, RowError
from deepinfer_ray.job.chat_rows import ChatPrompts, ChatRules
from deepinfer_ray.job.columns import Columns
from deepinfer_ray.job.completion import CompletionReader
from deepinfer_ray.job.encode import Encoder, RowRules
from deepinfer_ray.job.locate import locate, same_directory, would_read
from deepinfer_ray.job.openai_rows import BatchPrompts, is_batch
from deepinfer_ray.job.plan import InputPlan, plan_input
from deepinfer_ray.job.prompts import PromptKind, RowSize, TextPrompts, TokenPrompts
from deepinfer_ray.job.schema import check_names

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
    chat: ChatRules
    text: TextEncoder | None
    """None when every row brings token ids."""

    def encoder(self) -> Encoder:
        """Raises `ConfigError` when the checkpoint's tokenizer cannot take chats."""
        return Encoder(self._kind(), self.rules, id_column=self.columns.id, schema_column=self.columns.schema)

    def reader(self) -> CompletionReader:
        """What turns results into text columns."""
        if not self.columns.chats or self.text is None:
            return CompletionReader()
        return CompletionReader(CompletionParser(self.text))

    def _kind(self) -> PromptKind:
        columns, size = self.columns, RowSize(self.rules.max_row_bytes)
        if columns.token_ids is not None:
            return TokenPrompts(columns.token_ids, size, columns.sampling)
        assert self.text is not None
        if columns.prompt is not None:
            return TextPrompts(columns.prompt, self.text, size, columns.sampling)
        if columns.messages is None:
            return BatchPrompts(ChatEncoder(self.text), self.chat, size, PROMPT_MAX_TOKENS)
        return ChatPrompts(
            columns.messages,
            ChatEncoder(self.text),
            self.chat,
            size,
            sampling=columns.sampling,
            chat=columns.chat,
            tools=columns.tools,
        )


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
            "chat": job.chat.model_dump(mode="json") if columns.chats else None,
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
    if not any(job.input):
        raise ConfigError("no input: give --input with Parquet or JSONL files, directories or globs")
    if not job.output:
        raise ConfigError("no output: give --output with a directory")
    refuse_places(job, config.model.path)
    setup = prepare_rows(config, say)
    plan = checked_plan(setup, say)
    return Prepared(**setup.__dict__, plan=plan)


def checked_plan(setup: RowSetup, say: Say) -> InputPlan:
    """The input, its columns checked against the setup. Raises `InputError`."""
    job = setup.job
    plan = plan_input(
        job.input,
        rows_per_part=job.rows_per_part,
        limit=job.limit,
        part_bytes=job.part_bytes,
        texts=setup.columns.texts,
    )
    for file in plan.files:
        setup.columns.check(file)
        check_names(file.schema.names, job.output_prefix or "", file.name)
    if plan.ignored_files:
        say(f"{plan.ignored_files} files in the input directories do not end in .parquet or .jsonl: left out")
    return plan


def prepare_rows(config: RunConfig, say: Say) -> RowSetup:
    """Model, columns and sampling, without an input. Raises `ConfigError`, `CheckpointError`."""
    job = config.job
    columns = _columns(job, say)
    model_dir = model_directory(config.model.path)
    model = ModelConfig.load(model_dir)
    engine = config.engine.resolve(model)
    text = None
    if columns.token_ids is None:
        text = TextEncoder.load(engine.model.tokenizer_path or model_dir, bos_id=model.bos_token_id)
    sampling = _sampling(job, model_dir, say)
    if columns.chats:
        _say_chat_lengths(job, say, batch=columns.batch is not None)
    else:
        if unused := sorted(job.chat.model_dump(exclude_defaults=True)):
            say(f"without effect, as the rows are no chats (--messages-column): {', '.join(unused)}")
        if job.sampling.max_tokens is None:
            say(f"max_tokens {PROMPT_MAX_TOKENS} a row (the default; --max-tokens changes it)")
        sampling.setdefault("max_tokens", PROMPT_MAX_TOKENS)
    rules = RowRules(
        vocab_size=model.text.vocab_size,
        max_prompt=engine.prompt_limit,
        max_row_bytes=job.max_row_bytes,
        on_too_long=job.on_too_long,
        seed=job.sampling.seed,
        n=job.sampling.n,
        sampling=sampling,
        grammars=GrammarLimits(engine.structured.max_schema_bytes, engine.structured.max_nesting),
    )
    chat = ChatRules(
        engine.max_model_len, _chat_options(job), job.chat.api_sampling, sampling.get("top_p", 1.0)
    )
    setup = RowSetup(job, engine, model, model_dir, columns, rules, chat, text)
    setup.encoder()  # a tokenizer without the control tokens of chats is refused now
    return setup


def model_directory(path: str | None) -> Path:
    """Raises `ConfigError` for none, `CheckpointError` for a file."""
    if not path:
        raise ConfigError("no model: give --model with a checkpoint directory")
    if Path(path).is_file():
        raise CheckpointError(f"the model {path} is a file; give its directory, {Path(path).parent}")
    return Path(path)


def _columns(job: JobConfig, say: Say) -> Columns:
    """Of the flags; without one for the rows' column, an input that is an OpenAI batch is taken as such."""
    named = job.prompt_column or job.token_ids_column or job.messages_column
    if named or not job.input or not is_batch(locate(job.input)):
        return Columns.of(job)
    say("the input is an OpenAI batch: results.jsonl and errors.jsonl come when all rows are done")
    return Columns.of_batch(job)


def _chat_options(job: JobConfig) -> dict[str, Any]:
    """The job's chat options by name, checked."""
    options = job.chat.model_dump(exclude={"api_sampling"}, exclude_none=True)
    try:
        ChatOptions.of_row(options)
    except RowError as error:
        raise ConfigError(f"job.chat: {error}") from None
    return options


def _say_chat_lengths(job: JobConfig, say: Say, *, batch: bool) -> None:
    if job.sampling.max_tokens is None:
        other = f"; of a /v1/completions row: {PROMPT_MAX_TOKENS}" if batch else ""
        say(
            "max_tokens a chat row: 8,192, with thinking 65,536, at effort max 131,072, never more than the "
            f"context leaves{other} (the default; --max-tokens changes it)"
        )


def refuse_places(job: JobConfig, model: str | None) -> None:
    """Refuse an output whose parts would mix with what is read. Raises `ConfigError`."""
    output = str(job.output)
    for location in job.input:
        if not location:
            raise ConfigError("an --input is an empty text; give a file, a directory or a glob")
        if would_read(location, output):
            raise ConfigError(
                f"the output {output} lies inside the input {location}: its parts would become input. "
                "Give an output beside it"
            )
    if model and same_directory(model, output):
        raise ConfigError(
            f"the output {output} is the model's directory, which must stay as it is: its files decide "
            "whether a job can be resumed. Give a directory of its own"
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
    if own.max_tokens is not None:
        sampling["max_tokens"] = own.max_tokens
    return sampling
