"""What a row's `structured_outputs` asks for, checked and in one canonical form: `GrammarSpec`.

Knows: vLLM's names (json, regex, grammar, choice, structural_tag, json_object) and ours for triggers
(spec/speculative.md §7.1). Does not know: tokenizers, compilers, sequences. Everything that can be refused by
reading alone is refused here, before a process compiles anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.engine.json_schema import normalise, parse
from deepinfer_ray.engine.regex_check import check_regex
from deepinfer_ray.errors import RowError

KINDS = ("json", "regex", "grammar", "choice", "structural_tag", "json_object")
OPTIONS = ("disable_any_whitespace", "trigger_token_ids", "bound_token_id")

FORMATS: dict[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style"}),
    "any_text": frozenset({"excludes", "max_chars"}),
    "regex": frozenset({"pattern"}),
    "grammar": frozenset({"grammar"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
}
"""Formats of a structural tag and their fields; the compiler would skip a field that it does not know."""


@dataclass(frozen=True)
class GrammarLimits:
    """max_bytes: of the canonical text. max_nesting: levels of schemas and formats."""

    max_bytes: int = 256 * 1024
    max_nesting: int = 64


@dataclass(frozen=True)
class GrammarSpec:
    """One constraint.

    kind: what `text` is: `json` (a normalised schema), `regex`, `grammar` (EBNF, rule `root`) or
    `structural_tag` (JSON). any_whitespace: of JSON between its tokens. trigger_token_ids: the completion is
    free until these were generated in this order; empty = constrained from the start. bound_token_id: once
    it is generated the trigger must follow at once.
    """

    kind: str
    text: str
    any_whitespace: bool = True
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None

    @cached_property
    def key(self) -> str:
        """Hash of what is compiled; triggers do not belong to it."""
        head = f"{self.kind}\x1f{self.any_whitespace}\x1f"
        return hashlib.sha256(head.encode() + self.text.encode("utf-8", "surrogatepass")).hexdigest()

    def __repr__(self) -> str:  # a schema may quote a prompt
        return f"GrammarSpec({self.kind}, {len(self.text)} characters)"

    @classmethod
    def of(cls, asked: Mapping[str, Any], limits: GrammarLimits | None = None) -> GrammarSpec:
        """From `SamplingParams.structured_outputs`; `RowError` (`bad_schema`) for whatever is not kept."""
        limits = limits or GrammarLimits()
        given = {name: value for name, value in asked.items() if value is not None}
        for name in given:
            if name not in KINDS and name not in OPTIONS:
                near = nearest_name(str(name), KINDS + OPTIONS)
                hint = f"did you mean {near!r}?" if near else f"valid: {', '.join(KINDS + OPTIONS)}"
                raise _refused(f"the key {name!r} is unknown; {hint}")
        if given.get("json_object") is False:
            del given["json_object"]
        kinds = [name for name in KINDS if name in given]
        if len(kinds) != 1:
            raise _refused(f"exactly one of {', '.join(KINDS)} is needed, got {', '.join(kinds) or 'none'}")
        kind, text = _READ[kinds[0]](given[kinds[0]], limits)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > limits.max_bytes:
            raise _refused(
                f"{kinds[0]} takes {size} bytes, at most {limits.max_bytes} are allowed "
                "(structured.max_schema_bytes)"
            )
        spaces = given.get("disable_any_whitespace", False)
        if not isinstance(spaces, bool) or (spaces and kind != "json"):
            raise _refused("disable_any_whitespace is true or false and belongs to json or json_object")
        trigger = _token_ids(given.get("trigger_token_ids", ()))
        bound = given.get("bound_token_id")
        if bound is not None and (not trigger or not _is_id(bound)):
            raise _refused("bound_token_id is a token id and needs trigger_token_ids")
        return cls(kind, text, not spaces, trigger, bound)


def _json(value: Any, limits: GrammarLimits) -> tuple[str, str]:
    if isinstance(value, str):
        _check_size(value, limits)
        value = parse(value, "structured_outputs.json")
    return "json", _dump(normalise(value, limits.max_nesting))


def _json_object(value: Any, limits: GrammarLimits) -> tuple[str, str]:
    if value is not True:
        raise _refused("json_object is true or false")
    return _json({"type": "object"}, limits)


def _regex(value: Any, limits: GrammarLimits) -> tuple[str, str]:
    return "regex", check_regex(value, "regex")


def _grammar(value: Any, limits: GrammarLimits) -> tuple[str, str]:
    if not isinstance(value, str):
        raise _refused("grammar is EBNF text")
    return "grammar", value


def _choice(value: Any, limits: GrammarLimits) -> tuple[str, str]:
    listed = isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value)
    if not listed or not all(value):
        raise _refused("choice is a list of texts, none of them empty")
    texts = [{"type": "const_string", "value": text} for text in dict.fromkeys(value)]
    format_ = texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
    return "structural_tag", _dump({"type": "structural_tag", "format": format_})


def _structural_tag(value: Any, limits: GrammarLimits) -> tuple[str, str]:
    if isinstance(value, str):
        _check_size(value, limits)
        value = parse(value, "structured_outputs.structural_tag")
    if not isinstance(value, Mapping) or value.keys() != {"type", "format"}:
        raise _refused("structural_tag: an object of 'type' and 'format' is needed")
    if value["type"] != "structural_tag":
        raise _refused("structural_tag.type must be 'structural_tag'")
    checked = _format(value["format"], "structural_tag.format", limits, 0)
    return "structural_tag", _dump({"type": "structural_tag", "format": checked})


_READ: dict[str, Callable[[Any, GrammarLimits], tuple[str, str]]] = {
    "json": _json,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
    "structural_tag": _structural_tag,
    "json_object": _json_object,
}


def _format(value: Any, where: str, limits: GrammarLimits, depth: int) -> dict[str, Any]:
    """One format of a structural tag, with the schemas inside normalised."""
    if depth > limits.max_nesting:
        raise _refused(f"{where}: more than {limits.max_nesting} levels deep (structured.max_nesting)")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise _refused(f"{where}: the type must be one of {', '.join(FORMATS)}")
    unknown = [str(name) for name in value if name != "type" and name not in FORMATS[kind]]
    if unknown:
        raise _refused(f"{where}: {kind} has no field {unknown[0]!r}; it has {', '.join(FORMATS[kind])}")
    result = dict(value)
    if kind == "json_schema":
        if value.get("style", "json") != "json":
            raise _refused(f"{where}.style: only 'json' is supported")
        result["json_schema"] = normalise(value.get("json_schema"), limits.max_nesting)
    elif kind == "regex":
        result["pattern"] = check_regex(value.get("pattern"), f"{where}.pattern")
    elif kind == "tag":
        ends = value["end"] if isinstance(value.get("end"), list) else [value.get("end")]
        if not all(isinstance(text, str) for text in (value.get("begin"), *ends)):
            raise _refused(f"{where}: begin is a text, end a text or a list of texts")
    if "content" in value:
        result["content"] = _format(value["content"], f"{where}.content", limits, depth + 1)
    for name in ("elements", "tags"):
        if name in value:
            if not isinstance(value[name], list):
                raise _refused(f"{where}.{name}: a list of formats is needed")
            result[name] = [
                _format(each, f"{where}.{name}[{index}]", limits, depth + 1)
                for index, each in enumerate(value[name])
            ]
    return result


def _check_size(text: str, limits: GrammarLimits) -> None:
    """Before anything is parsed; what is kept afterwards is measured, too."""
    if len(text) > 4 * limits.max_bytes:
        raise _refused(
            f"the text has {len(text)} characters, at most {limits.max_bytes} bytes are allowed "
            "(structured.max_schema_bytes)"
        )


def _dump(value: Any) -> str:
    """Canonical JSON; member order is kept, it decides the order of the output."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_is_id(token) for token in value):
        raise _refused("trigger_token_ids is a list of token ids")
    return tuple(value)


def _refused(reason: str) -> RowError:
    return RowError("bad_schema", f"structured_outputs: {reason}")
