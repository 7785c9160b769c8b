"""Which input column holds what.

Knows: column names and which belong together. Does not know: values, rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_ray.config.job import JobConfig
from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.errors import ConfigError, InputError
from deepinfer_ray.job.openai_rows import BODY, CUSTOM_ID, METHOD, URL
from deepinfer_ray.job.plan import InputFile

SHOWN_COLUMNS = 20
"""Names that a message lists; a table may have thousands of columns."""


@dataclass(frozen=True)
class Columns:
    """Exactly one of `prompt`, `token_ids`, `messages` and `batch` is set; `chat`, `tools` need `messages`.

    id: unique row ids. sampling: a row's own sampling parameters, with messages its chat options too.
    chat: a row's own chat options. tools: a row's tools. schema: what a row's completion must match.
    batch: the bodies of an OpenAI batch.
    """

    prompt: str | None = None
    token_ids: str | None = None
    messages: str | None = None
    id: str | None = None
    sampling: str | None = None
    chat: str | None = None
    tools: str | None = None
    schema: str | None = None
    batch: str | None = None

    @classmethod
    def of_batch(cls, job: JobConfig) -> Columns:
        """Columns of an OpenAI batch file. Raises `ConfigError` for flags that name others."""
        given = {
            "--id-column": job.id_column,
            "--sampling-column": job.sampling_column,
            "--schema-column": job.schema_column,
            "--tools-column": job.tools_column,
            "--chat-column": job.chat_column,
            "--image-column": job.image_column,
        }
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} {value}: the input is an OpenAI batch, whose requests say all by themselves. "
                    "Leave the flag out, or name the column of prompts or messages"
                )
        return cls(id=CUSTOM_ID, batch=BODY)

    @classmethod
    def of(cls, job: JobConfig) -> Columns:
        """Raises `ConfigError` for columns that this version cannot use, or not together."""
        if job.image_column is not None:
            raise ConfigError(
                f"--image-column {job.image_column}: this version takes no images; run the rows without it"
            )
        kind, name = job.source_column
        for flag, value in (("--tools-column", job.tools_column), ("--chat-column", job.chat_column)):
            if value is not None and kind != "messages":
                raise ConfigError(
                    f"{flag} {value} belongs to chat messages; name their column with --messages-column"
                )
        return cls(
            prompt=name if kind == "prompt" else None,
            token_ids=name if kind == "token_ids" else None,
            messages=name if kind == "messages" else None,
            id=job.id_column,
            sampling=job.sampling_column,
            chat=job.chat_column,
            tools=job.tools_column,
            schema=job.schema_column,
        )

    @property
    def source(self) -> str:
        """The column that rows are made from."""
        return self.prompt or self.token_ids or self.messages or self.batch or ""

    @property
    def chats(self) -> bool:
        """Whether rows may be chats."""
        return self.messages is not None or self.batch is not None

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns of JSON lines in which anything but a string is wrong."""
        if self.batch is not None:
            return CUSTOM_ID, METHOD, URL
        return (self.prompt,) if self.prompt else ()

    def check(self, file: InputFile) -> None:
        """Raises `InputError` naming the missing column, those that are there and the flag for another."""
        for kind, name in self.__dict__.items():
            if name is not None and name not in file.schema.names:
                flag = "" if self.batch else f". Give another with --{kind.replace('_', '-')}-column"
                raise InputError(f"{file.name} {no_column(name, file.schema.names)}{flag}")


def no_column(name: str, there: Sequence[str]) -> str:
    """`has no column X; …`: the nearest name there is, and the first ones of those that are there."""
    nearest = nearest_name(name, there)
    meant = f"did you mean {nearest}? " if nearest else ""
    more = f" and {len(there) - SHOWN_COLUMNS:,} more" if len(there) > SHOWN_COLUMNS else ""
    return f"has no column {name}; {meant}its columns are: {', '.join(there[:SHOWN_COLUMNS]) or 'none'}{more}"
