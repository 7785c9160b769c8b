"""Tool calls out of markup that the library's parser takes literally (spec/chat.md §8.2).

Knows: the calls block and our policies for malformed ones. Does not know: reasoning, answers, token ids.

Used beside the library's parser: it finds the block; this reader says whether the block is regular, and gives
the calls when it is not, so that arguments are always a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_ray.chat.tokens import DSML

_INVOKE = re.compile(r'invoke name="([^"]*)"')
_PARAMETER = re.compile(r'parameter name="([^"]*)"(?:\s+string="([^"]*)")?[^>]*>')
_END_OF_BLOCK = re.compile(r"\s*(?:tool_)?calls>")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(slots=True)
class CallsBlock:
    """calls: the closed ones, in order. regular: written as the format asks, so any parser reads it alike.
    incomplete: a call was opened and never closed, and is not in `calls`."""

    calls: list[ToolCall] = field(default_factory=list)
    regular: bool = True
    incomplete: bool = False


@dataclass(slots=True)
class _OpenCall:
    name: str
    arguments: dict[str, str] = field(default_factory=dict)  # key → JSON text


@dataclass(slots=True)
class _OpenValue:
    key: str
    attribute: str | None  # what stands in string="…"
    text: str


def read_calls(pieces: Sequence[str], *, starts_inside: bool = False) -> CallsBlock:
    """Calls of a completion given as the texts between its DSML markers.

    starts_inside: the prompt opened the block. Rules: only a closing tag ends a value; an invoke that is not
    closed is dropped; a value that is declared JSON but is none, or declares nothing, is taken as JSON if it
    parses and as a string if not; a value in the `string` attribute counts when the body is empty; the last
    of two equal keys wins; text between calls and after the block is dropped.
    """
    block = CallsBlock()
    call: _OpenCall | None = None
    value: _OpenValue | None = None
    inside = starts_inside
    for closing, body in _tags(pieces):
        if value is not None and not closing:  # nothing but a closing tag ends a value
            value.text += f"<{DSML}{body}"
        elif value is not None and call is not None:
            text, regular = _json_value(value)
            block.regular &= regular and value.key not in call.arguments and _plain(value.key)
            call.arguments.pop(value.key, None)
            call.arguments[value.key] = text
            value = None
        elif not closing:
            inside = True
            if call is not None and (parameter := _PARAMETER.search(body)):
                value = _OpenValue(parameter[1], parameter[2], body[parameter.end() :])
            elif invoke := _INVOKE.search(body):
                block.incomplete |= call is not None
                call = _OpenCall(invoke[1])
            else:
                block.regular &= call is None
        elif call is not None:
            block.calls.append(ToolCall(call.name, _object(call.arguments)))
            call = None
        elif inside and _END_OF_BLOCK.match(body):
            break
    block.incomplete |= call is not None
    block.regular &= not block.incomplete
    return block


def unwrapped(call: ToolCall, schema: Any) -> ToolCall:
    """The call without a wrapper argument `arguments` or `input` that its schema does not have.

    Only when the wrapped value is an object with the schema's required and no foreign properties.
    """
    arguments = json.loads(call.arguments)
    if not isinstance(schema, Mapping) or len(arguments) != 1:
        return call
    (key, inner) = next(iter(arguments.items()))
    properties = schema.get("properties") or {}
    if key not in ("arguments", "input") or key in properties or not isinstance(inner, dict):
        return call
    if not set(schema.get("required") or ()) <= inner.keys() <= set(properties):
        return call
    return ToolCall(call.name, json.dumps(inner, ensure_ascii=False))


def _tags(pieces: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """(is closing, text up to the next tag) of every tag; a marker without `<` before it is text."""
    closing: bool | None = None
    body = ""
    for i, piece in enumerate(pieces):
        body += piece
        if i == len(pieces) - 1:
            break
        start = "</" if body.endswith("</") else "<" if body.endswith("<") else ""
        if not start:
            body += DSML
            continue
        if closing is not None:
            yield closing, body.removesuffix(start)
        closing, body = start == "</", ""
    if closing is not None:
        yield closing, body


def _json_value(value: _OpenValue) -> tuple[str, bool]:
    """(JSON text of the value, whether it was written as the format asks)."""
    if value.attribute == "true":
        return json.dumps(value.text, ensure_ascii=False), True
    if is_json(value.text):
        return value.text, value.attribute == "false"
    text = value.text or ("" if value.attribute in (None, "false") else value.attribute)
    return json.dumps(text, ensure_ascii=False), False


def _plain(key: str) -> bool:
    """Whether other parsers read the name right: deepseek-recipe 0.2.0 loses a name's end behind a space and
    writes it without escapes."""
    return " " not in key and json.dumps(key, ensure_ascii=False) == f'"{key}"'


def _object(arguments: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items()) + "}"


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value (NaN and Infinity are none)."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(name)
