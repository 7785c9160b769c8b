"""Small questions about the values inside a JSON schema: bounds, counts, names, choices, disjointness.

Knows: values of keywords. Does not know: how schemas nest (json_schema.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepinfer_ray.errors import RowError

MAX_STEP = 1000
"""Largest `multipleOf`, and most multiples between bounds, which are listed one by one."""

MAX_COUNT = 100_000
"""Largest length or count; what is beyond cannot be meant for one completion."""

Schema = dict[str, Any] | bool


def refused(where: str, reason: str) -> RowError:
    return RowError("bad_schema", f"{where}: {reason}")


def counts(own: Mapping[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
    """(lower bound, upper bound or None) of a length or number."""
    found: list[int | None] = []
    for name in (least, most):
        value = own.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise refused(f"{where}.{name}", f"{value!r} is no count")
        if value is not None and value > MAX_COUNT:
            raise refused(f"{where}.{name}", f"{value} is more than {MAX_COUNT}")
        found.append(value)
    low, high = found[0] or 0, found[1]
    if high is not None and high < low:
        raise refused(where, f"{least} {low} exceeds {most} {high}")
    return low, high


def number(kind: str, own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A schema of `integer` or `number` (or of a type without keywords)."""
    result = {"type": kind, **_bounds(kind, own, where)}
    if "multipleOf" not in own:
        return result
    step = own["multipleOf"]
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= MAX_STEP:
        raise refused(f"{where}.multipleOf", f"{step!r} is no integer from 1 to {MAX_STEP}")
    if len(result) == 1:
        return {**result, "multipleOf": step}
    low = result.get("minimum", result.get("exclusiveMinimum", -math.inf - 1) + 1)
    high = result.get("maximum", result.get("exclusiveMaximum", math.inf + 1) - 1)
    if not (high - low) / step <= MAX_STEP:
        raise refused(where, f"'multipleOf' between bounds is supported for up to {MAX_STEP} values")
    listed = list(range(-(-low // step) * step, high + 1, step))
    if not listed:
        raise refused(where, f"no multiple of {step} is between the bounds")
    return {"enum": listed}


def _bounds(kind: str, own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The bounds; the tighter of an inclusive and an exclusive one stays."""
    result: dict[str, Any] = {}
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if name in own:
            result[name] = _bound(kind, name, own[name], f"{where}.{name}")
    for plain, strict, tighter in (
        ("minimum", "exclusiveMinimum", max),
        ("maximum", "exclusiveMaximum", min),
    ):
        if plain in result and strict in result:
            loose = plain if tighter(result[strict], result[plain]) == result[strict] else strict
            del result[loose]
    low = result.get("minimum", result.get("exclusiveMinimum"))
    high = result.get("maximum", result.get("exclusiveMaximum"))
    if low is not None and high is not None:
        num_strict = sum(name.startswith("exclusive") for name in result)
        gap = high - low - (num_strict if kind == "integer" else 0)
        if gap < 0 or (kind == "number" and gap == 0 and num_strict):
            raise refused(where, f"no {kind} is between the bounds")
    return result


def _bound(kind: str, name: str, value: object, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refused(where, f"{value!r} is no number")
    if kind == "integer":
        return _whole_bound(name, value)
    if isinstance(value, float) and "e" in repr(value):
        raise refused(where, f"{value!r} needs an exponent, which bounds cannot have")
    return value


def _whole_bound(name: str, value: int | float) -> int:
    """The integer bound that says the same."""
    if name in ("minimum", "exclusiveMaximum"):
        return math.ceil(value)
    return math.floor(value)


def members(own: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = own.get(name, {})
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused(f"{where}.{name}", "an object of schemas by name is needed")
    return value


def names(own: Mapping[str, Any], where: str) -> list[str]:
    """The required names, each once."""
    value = own.get("required", [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused(f"{where}.required", "a list of names is needed")
    return list(dict.fromkeys(value))


def choices(listed: object, kinds: Sequence[str] | None, where: str, max_nesting: int) -> list[Any]:
    """The values of an enum that have one of the types; each once."""
    if not isinstance(listed, list) or not listed:
        raise refused(where, "a list of at least one value is needed")
    kept: dict[str, Any] = {}
    for value in listed:
        _check_value(value, where, max_nesting)
        if kinds is None or any(kind in kinds for kind in _types_of(value)):
            kept[json.dumps(value, sort_keys=True)] = value
    if not kept:
        raise refused(where, f"no value is of type {' or '.join(kinds or ())}")
    return list(kept.values())


def _check_value(value: object, where: str, left: int) -> None:
    if left < 0:
        raise refused(where, "a value is nested too deep (structured.max_nesting)")
    if isinstance(value, Mapping):
        for name, each in value.items():
            if not isinstance(name, str):
                raise refused(where, "a name is no string")
            _check_value(each, where, left - 1)
    elif isinstance(value, list):
        for each in value:
            _check_value(each, where, left - 1)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise refused(where, f"{type(value).__name__} is no JSON value")
    elif isinstance(value, float) and not math.isfinite(value):
        raise refused(where, f"{value!r} is no JSON value")


def _types_of(value: object) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return ("integer", "number")
    if isinstance(value, float):
        return ("number",)
    return ("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",)


def disjoint(one: Schema, other: Schema) -> bool:
    """Whether no value can fit both (normalised) schemas, as far as types and constants show."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    for left, right in ((one, other), (other, one)):
        if "anyOf" in left:
            return all(disjoint(branch, right) for branch in left["anyOf"])
    if "enum" in one and "enum" in other:
        seen = [_comparable(value) for value in other["enum"]]
        return not any(_comparable(value) in seen for value in one["enum"])
    kinds = [_kinds(each) for each in (one, other)]
    if not kinds[0] or not kinds[1]:
        return False
    if not kinds[0] & kinds[1]:
        return True
    if kinds[0] != {"object"} or kinds[1] != {"object"} or "enum" in one or "enum" in other:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        disjoint(one["properties"].get(name, True), other["properties"].get(name, True)) for name in shared
    )


def _comparable(value: object) -> str:
    """Equal for values that JSON Schema calls equal: 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """JSON types of a schema's values, numbers all one; empty = not known."""
    if "enum" in schema:
        found = {_types_of(value)[-1] for value in schema["enum"]}
    else:
        found = {schema["type"]} if "type" in schema else set()
    return {"number" if kind == "integer" else kind for kind in found}


def ends(schema: Schema, finite: set[str]) -> bool:
    """Whether a (normalised) schema has a finite value, given the definitions that have one."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in finite
    if "anyOf" in schema:
        return any(ends(branch, finite) for branch in schema["anyOf"])
    if schema.get("type") == "object":
        needed = [schema["properties"][name] for name in schema.get("required", ())]
        return all(ends(each, finite) for each in needed)
    if schema.get("type") == "array" and schema.get("minItems"):
        return all(ends(each, finite) for each in [*schema.get("prefixItems", ()), schema["items"]])
    return True


def none_of(words: Iterable[str], safe: str) -> str:
    """A pattern of all texts over `safe` (a negated class) except the words."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _other_than(tree, safe)


def _other_than(node: Mapping[str, Any], safe: str) -> str:
    chars = [char for char in node if char]
    other = f"{safe[:-1]}{''.join(_in_class(char) for char in chars)}]{safe}*"
    parts = [other]
    for char in chars:
        if char in '"\\' or char < " ":  # never written without an escape
            continue
        parts.append(f"{_literal(char)}{_other_than(node[char], safe)}")
    body = "|".join(parts)
    return f"({body})" if "" in node else f"({body}){{0,1}}"


def _literal(char: str) -> str:
    return char if char.isalnum() or ord(char) > 0x7F else f"\\u{ord(char):04x}"


def _in_class(char: str) -> str:
    return _literal(char)
