"""What a chat row's response format and tools promise about the completion, as a grammar.

Knows: the calls block (spec/chat.md §5.2), what the renderer says must hold (`EncodedChat.constraint`).
Does not know: grammars' compilers, tokenizers. The result has the names of
`SamplingParams.structured_outputs`.

    response_format             JSON of the schema, or of any object, or the pattern
    tool_choice required, named a block of calls of the tools
    tool_choice auto            free text; a block of calls is well formed if a tool is `strict`
    both a format and auto      an answer of the format, or a block of calls

Arguments follow the tool's schema if the tool is `strict`; else their names and values are free, as the
schema is then only a description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_ray.chat.encoding import EncodedChat
from deepinfer_ray.chat.options import ChatOptions
from deepinfer_ray.chat.tokens import DSML
from deepinfer_ray.errors import RowError

Format = dict[str, Any]

_CALLS, _END_CALLS = f"<{DSML} calls>\n", f"</{DSML} calls>"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
_KINDS = ("string", "number", "boolean", "null", "array", "object")
MAX_REFERENCES = 16
"""References and unions within each other, in one parameter of a tool."""

_NAME = r'[^"<\\\x00-\x1f]+'
"""Names of arguments: what the parser carries over into JSON as it is."""

_TEXT: Format = {"type": "any_text", "excludes": [f"</{DSML}"]}
"""A string argument: raw text up to the next closing tag."""


def structured_outputs(chat: EncodedChat, options: ChatOptions) -> dict[str, Any] | None:
    """The constraint of a row's completion, None = it is free. `RowError` (`bad_schema`) for a promise that
    cannot be kept."""
    if chat.constraint is None:
        return None
    kind, schema = chat.constraint
    if kind == "tool_call_required":
        names = {tool["function"]["name"] for tool in json.loads(schema)}
        chosen = [tool for tool in options.active_tools if tool["function"]["name"] in names]
        return _tag({"type": "sequence", "elements": [_calls(chosen), _const(_END_CALLS)]})
    if kind == "tool_call":
        return _with_auto_tools(options)
    if chat.continues:
        raise RowError("bad_schema", "response_format cannot hold for a message that is being continued")
    if kind == "json":
        return {"json": schema} if schema else {"json_object": True}
    if kind == "regex":
        return {"regex": schema}
    raise RowError("bad_schema", f"a constraint of kind {kind!r} is not supported")


def _with_auto_tools(options: ChatOptions) -> dict[str, Any] | None:
    tools = options.active_tools
    block = [_const("\n\n" + _CALLS), _calls(tools), _const(_END_CALLS)]
    answer = _answer(options.response_format or {})
    if answer is not None:
        return _tag({"type": "or", "elements": [answer, {"type": "sequence", "elements": block}]})
    if not any(_is_strict(tool) for tool in tools):
        return None
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": [f"<{DSML}"],
            "tags": [{"type": "tag", "begin": _CALLS, "content": _calls(tools), "end": _END_CALLS}],
            "stop_after_first": True,
        }
    )


def _answer(response_format: Mapping[str, Any]) -> Format | None:
    kind = response_format.get("type", "text")
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": response_format["json_schema"].get("schema", True)}
    if kind == "regex":
        return {"type": "regex", "pattern": response_format["regex"]}
    return None


def _calls(tools: Sequence[Mapping[str, Any]]) -> Format:
    """One call or several; each ends its line."""
    tags = [
        {
            "type": "tag",
            "begin": f'<{DSML} invoke name="{tool["function"]["name"]}">\n',
            "content": _strict_arguments(tool["function"]) if _is_strict(tool) else _free_arguments(),
            "end": f"</{DSML} invoke>\n",
        }
        for tool in tools
    ]
    return {"type": "tags_with_separator", "tags": tags, "separator": "", "at_least_one": True}


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _free_arguments() -> Format:
    argument = {
        "type": "sequence",
        "elements": [
            _const(f'<{DSML} parameter name="'),
            {"type": "regex", "pattern": _NAME},
            {
                "type": "or",
                "elements": [
                    _ended('" string="true">', _TEXT),
                    _ended('" string="false">', {"type": "json_schema", "json_schema": True}),
                ],
            },
        ],
    }
    return {"type": "or", "elements": [_const("\n"), {"type": "plus", "content": argument}]}


def _strict_arguments(function: Mapping[str, Any]) -> Format:
    """One tag for each property, in their order."""
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title"}
    unknown = sorted(schema.keys() - known - {"description", "$schema"})
    where = f"tool {function['name']!r}"
    if unknown or not isinstance(properties, Mapping) or schema.get("additionalProperties", False):
        reason = (
            f"{unknown[0]!r} is not supported" if unknown else "it must list its 'properties' and no others"
        )
        raise RowError("bad_schema", f"{where}: parameters of a strict tool: {reason}")
    if not properties:
        return _const("\n")
    defs = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    elements: list[Format] = []
    for name, each in properties.items():
        if not re.fullmatch(_NAME, name):
            raise RowError("bad_schema", f"{where}: the parameter name {name!r} cannot be written in a call")
        argument = _argument(name, each, defs, f"{where}, parameter {name!r}")
        elements.append(argument if name in required else {"type": "optional", "content": argument})
    arguments: Format = {"type": "sequence", "elements": elements}
    return arguments if required else {"type": "or", "elements": [_const("\n"), arguments]}


def _argument(name: str, schema: Any, defs: Mapping[str, Any], where: str) -> Format:
    """Strings are raw text, everything else is JSON; a schema of both becomes two tags."""
    texts: list[Format] = []
    others: list[Any] = []
    for branch in _branches(schema, defs, where):
        if isinstance(branch, Mapping) and branch.get("type") == "string":
            texts += _raw_text(branch, where)
        else:
            others.append(branch)
    begin = f'<{DSML} parameter name="{name}" string='
    tags = [_ended(f'{begin}"true">', text) for text in texts]
    if others:
        value = others[0] if len(others) == 1 else {"anyOf": others}
        whole = {**value, **defs} if isinstance(value, Mapping) else value
        tags.append(_ended(f'{begin}"false">', {"type": "json_schema", "json_schema": whole}))
    return tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}


def _branches(raw: Any, defs: Mapping[str, Any], where: str, depth: int = 0) -> list[Any]:
    """The alternatives of a schema, each of texts only or of no text."""
    if not isinstance(raw, Mapping) or depth > MAX_REFERENCES:
        raise RowError("bad_schema", f"{where}: a strict tool needs a schema with a type here")
    schema = {name: value for name, value in raw.items() if name not in _ANNOTATIONS}
    if not _may_be_text(schema, defs):
        return [schema]
    if "$ref" in schema:
        _nothing_beside({"$ref"}, schema, where)
        return _branches(_definition(schema["$ref"], defs), defs, where, depth + 1)
    if "anyOf" in schema:
        _nothing_beside({"anyOf"}, schema, where)
        return [one for each in schema["anyOf"] for one in _branches(each, defs, where, depth + 1)]
    if "enum" in schema or "const" in schema:
        _nothing_beside({"type", "enum", "const"}, schema, where)
        listed = schema["enum"] if "enum" in schema else [schema["const"]]
        kinds = schema.get("type", [*_KINDS])
        others = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "string"]
        texts = [value for value in listed if isinstance(value, str)] if "string" in kinds else []
        rest = [value for value in listed if not isinstance(value, str)] if others else []
        return [{"type": "string", "enum": texts}] * bool(texts) + [{"type": others, "enum": rest}] * bool(
            rest
        )
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    if schema.get("type") == "string":
        return [schema]
    raise RowError("bad_schema", f"{where}: say with 'type', 'enum' or 'anyOf' whether it is text")


def _may_be_text(schema: Any, defs: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a string may fit; for everything else JSON is written."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return True
    if "$ref" in schema:
        return _may_be_text(_definition(schema["$ref"], defs), defs, depth + 1)
    if "type" in schema:
        kinds = schema["type"]
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    if "enum" in schema or "const" in schema:
        return any(isinstance(value, str) for value in schema.get("enum", [schema.get("const")]))
    branches = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(branches, list):
        return any(_may_be_text(each, defs, depth + 1) for each in branches)
    return True


def _definition(reference: Any, defs: Mapping[str, Any]) -> Any:
    group, _, name = str(reference).removeprefix("#/").partition("/")
    named = defs.get(group)
    return named.get(name) if isinstance(named, Mapping) else None


def _nothing_beside(names: set[str], schema: Mapping[str, Any], where: str) -> None:
    beside = sorted(schema.keys() - names)
    if beside:
        raise RowError("bad_schema", f"{where}: {beside[0]!r} beside {sorted(names)[0]!r} is not supported")


def _raw_text(schema: Mapping[str, Any], where: str) -> list[Format]:
    """Formats of a string that is written without quotes."""
    rules = schema.keys() - {"type"}
    if rules == {"enum"}:
        return [_const(value) for value in schema["enum"]]
    if rules == {"pattern"}:
        return [{"type": "regex", "pattern": schema["pattern"]}]
    if rules and rules <= {"minLength", "maxLength"}:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        return [{"type": "regex", "pattern": f"[^<]{{{low},{high}}}"}]
    if rules:
        raise RowError("bad_schema", f"{where}: {sorted(rules)[0]!r} is not supported for text arguments")
    return [_TEXT]


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _ended(begin: str, content: Format) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": f"</{DSML} parameter>\n"}


def _tag(format_: Format) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": format_}}
