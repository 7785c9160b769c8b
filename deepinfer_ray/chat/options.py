"""How one chat row is rendered and its completion parsed: `ChatOptions`, `ParseOptions`.

Knows: the request options of spec/chat.md §2 and §4.1 and the parser's start states (§8.1).
Does not know: messages, tokens.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.errors import RowError

Options = TypeVar("Options", bound=BaseModel)
Effort = int | str | None

EFFORT_NAMES = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
"""Accepted spellings of `reasoning_effort`; the renderer maps them to 50, 75 or 100 (spec/chat.md §4.1)."""


class ChatOptions(BaseModel):
    """Options of one chat request; names of the OpenAI body and of the released encoder.

    thinking: reason before answering (`reasoning_effort="none"` switches it off too).
    reasoning_effort: a name of `EFFORT_NAMES` or an integer 1..100; `None` is `high`.
    drop_thinking: remove the reasoning of earlier turns (never with tools).
    tools, tool_choice, response_format: as in a Chat Completions body.
    continue_final_message: treat the last assistant message as a prefix to continue.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    thinking: bool = True
    reasoning_effort: int | str | None = None
    drop_thinking: bool = True
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    response_format: dict[str, Any] | None = None
    continue_final_message: bool = False

    @field_validator("thinking", mode="before")
    @classmethod
    def _thinking_switch(cls, value: object) -> object:
        if isinstance(value, Mapping):
            switch = {"enabled": True, "disabled": False}.get(str(value.get("type")))
            if switch is None:
                raise ValueError('must be true, false or {"type": "enabled" | "disabled"}')
            return switch
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value

    @field_validator("reasoning_effort", mode="before")
    @classmethod
    def _effort(cls, value: object) -> object:
        if value is None or value in EFFORT_NAMES:
            return value
        if isinstance(value, numbers.Integral) and not isinstance(value, bool) and 1 <= int(value) <= 100:
            return int(value)
        raise ValueError(f"must be an integer from 1 to 100 or one of {', '.join(EFFORT_NAMES)}")

    @field_validator("tools", mode="before")
    @classmethod
    def _tools(cls, value: object) -> object:
        value = _from_json(value)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError("must be a list of function tools")
        return tuple(_from_json(tool) for tool in value)

    @field_validator("response_format", mode="before")
    @classmethod
    def _response_format(cls, value: object) -> object:
        return _from_json(value)

    @property
    def thinks(self) -> bool:
        """Whether the model reasons: asked for and not switched off by the effort."""
        return self.thinking and self.reasoning_effort != "none"

    @property
    def active_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools that are rendered and parsed; none under `tool_choice="none"`."""
        return () if self.tool_choice == "none" else self.tools

    @classmethod
    def of_row(cls, values: Mapping[str, Any]) -> Self:
        """Options from a row's columns or a request body; nulls count as absent.

        Raises `RowError("bad_messages")` naming the option and, for an unknown one, the nearest valid name.
        """
        return _build(cls, values, "chat option")


class ParseOptions(BaseModel):
    """How a completion is read.

    start: where the prompt left off: in a new turn's reasoning (`thinking`), in the answer (`chat`), or in a
    continued text, whose leading newlines are kept. stop: cut the answer at the first of these strings.
    schemas: tool name → its parameters' JSON schema, where known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: Literal["thinking", "chat", "reasoning_continuation", "content_continuation"] = "chat"
    parse_tool_calls: bool = True
    parse_json_output: bool = False
    starts_in_tool_calls: bool = False
    stop: tuple[str, ...] = ()
    schemas: Mapping[str, Any] = {}

    @classmethod
    def of_row(cls, values: Mapping[str, Any]) -> Self:
        """As `ChatOptions.of_row`."""
        return _build(cls, values, "parse option")


def _build(kind: type[Options], values: Mapping[str, Any], noun: str) -> Options:
    for name in values:
        if name not in kind.model_fields:
            nearest = nearest_name(str(name), kind.model_fields)
            hint = f"did you mean {nearest!r}?" if nearest else f"valid: {', '.join(kind.model_fields)}"
            raise RowError("bad_messages", f"unknown {noun} {name!r}; {hint}")
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(
            f"{noun} {'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False)
        )
        raise RowError("bad_messages", problems) from None


def _from_json(value: object) -> object:
    """A column may hold JSON text where a body holds the structure."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is a string but no JSON ({error})") from None
