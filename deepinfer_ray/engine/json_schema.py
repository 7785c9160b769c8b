"""JSON schemas that a grammar keeps: checked, and rewritten into the forms that xgrammar compiles right.

Knows: JSON Schema 2020-12 and which parts of it xgrammar 0.2.9 honours. Does not know: grammars, tokens.
The compiler drops what it cannot express (`not`, `uniqueItems`, siblings of `$ref`, `maxLength` beside
`pattern`, …), mostly in silence, so a schema passes only if every keyword in it is kept; any other is an
error that names its place. What is produced may be narrower than the schema, never wider:

    an object with `properties` has no other members unless `additionalProperties` asks for them
    a string with `pattern`, `minLength` or `maxLength` is written without escapes
    a `pattern` matches the whole string
    a number with bounds is written without exponent
    members come in the order of `properties`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.engine import schema_values as values
from deepinfer_ray.engine.regex_check import check_regex
from deepinfer_ray.engine.schema_values import refused
from deepinfer_ray.errors import RowError

ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$comment",
    }
)
"""Keywords that constrain nothing; `x-…` are such, too."""

_ROOT_ONLY = frozenset({"$schema", "$id", "$defs", "definitions"})
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        }
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""A schema with one of these has no other keyword beside annotations (and `type` beside values)."""
_KNOWN = ANNOTATIONS | _ROOT_ONLY | {"type", *_WHOLE} | frozenset().union(*_OF_TYPE.values())

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]{0,1}[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
"""Formats whose syntax is kept; that a date exists is not checked."""

SAFE = r'[^"\\\u0000-\u001f]'
"""Characters of a JSON string that need no escape."""

Schema = dict[str, Any] | bool


def normalise(schema: object, max_nesting: int) -> dict[str, Any]:
    """The same schema, or a narrower one, in forms that the compiler keeps.

    schema: the JSON value. max_nesting: levels of schemas and of values in them. Raises `RowError`
    (`bad_schema`) naming place and keyword.
    """
    try:
        return _Normaliser(schema, max_nesting).run()
    except RecursionError:
        raise refused("schema", "nested too deep to be read") from None


class _Normaliser:
    """One schema document. Definitions are renamed d0, d1, … in the order of their first use; d0 is the
    root."""

    def __init__(self, root: object, max_nesting: int) -> None:
        self._root, self._limit = root, max_nesting
        self._names: dict[str, str] = {}
        self._defs: dict[str, Schema] = {}
        self._queue: list[str] = []
        self._one_of: list[tuple[list[Schema], str]] = []

    def run(self) -> dict[str, Any]:
        top = self._schema(self._root, "schema", 0, root=True)
        if top is True:
            return {}
        while self._queue:
            reference = self._queue.pop()
            name = self._names[reference]
            place = "schema" if reference == "#" else f"schema{reference[1:].replace('/', '.')}"
            self._defs[name] = self._schema(self._target(reference), place, 0, root=reference == "#")
        assert isinstance(top, dict)
        for branches, where in self._one_of:
            self._check_disjoint(branches, where)
        self._check_finite(top)
        return {**top, "$defs": self._defs} if self._defs else top

    # -- any schema -------------------------------------------------------------------------------------

    def _schema(self, raw: object, where: str, depth: int, root: bool = False) -> Schema:
        if depth > self._limit:
            raise refused(where, f"more than {self._limit} levels deep (structured.max_nesting)")
        if raw is True:
            return True
        if raw is False:
            raise refused(where, "false allows no value")
        if not isinstance(raw, Mapping):
            raise refused(where, f"a schema is an object or true, not {type(raw).__name__}")
        given = {name: value for name, value in raw.items() if not _says_nothing(name)}
        self._check_names(given, where, root)
        given = {name: value for name, value in given.items() if name not in _ROOT_ONLY}
        for name in _WHOLE:
            if name in given:
                beside = given.keys() - {name} - ({"type"} if name in ("const", "enum") else set())
                if beside:
                    raise refused(where, f"{sorted(beside)[0]!r} beside {name!r} is not supported")
                return self._whole(name, given, where, depth)
        return self._typed(given, where, depth)

    def _check_names(self, given: Mapping[str, Any], where: str, root: bool) -> None:
        for name in given:
            if name in _ROOT_ONLY and not root:
                raise refused(where, f"{name!r} is supported at the root only")
            if name not in _KNOWN:
                near = nearest_name(str(name), _KNOWN, cutoff=0.75)
                hint = f"; did you mean {near!r}?" if near else ""
                raise refused(where, f"the keyword {name!r} is not supported{hint}")

    def _whole(self, name: str, given: dict[str, Any], where: str, depth: int) -> Schema:
        value = given[name]
        if name == "$ref":
            return self._reference(value, where)
        if name in ("const", "enum"):
            listed = [value] if name == "const" else value
            kinds = self._types(given["type"], where) if "type" in given else None
            return {"enum": values.choices(listed, kinds, f"{where}.{name}", self._limit)}
        if not isinstance(value, list) or not value:
            raise refused(f"{where}.{name}", "a list of at least one schema is needed")
        if name == "allOf":
            if len(value) > 1:
                raise refused(where, "'allOf' of several schemas is not supported; merge them into one")
            return self._schema(value[0], f"{where}.allOf[0]", depth + 1)
        branches = [
            self._schema(each, f"{where}.{name}[{index}]", depth + 1)
            for index, each in enumerate(value)
            if each is not False
        ]
        if not branches:
            raise refused(f"{where}.{name}", "no branch allows a value")
        if name == "oneOf":
            self._one_of.append((branches, f"{where}.oneOf"))  # their references are read later
        if True in branches:
            return True
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _types(self, value: object, where: str) -> list[str]:
        kinds = [value] if isinstance(value, str) else value
        if not isinstance(kinds, list) or not kinds:
            raise refused(f"{where}.type", "a type or a list of at least one type is needed")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _OF_TYPE:
                raise refused(
                    f"{where}.type", f"{kind!r} is no type; the types are {', '.join(sorted(_OF_TYPE))}"
                )
        unique = dict.fromkeys(kinds)
        if "number" in unique:  # every integer is a number
            unique.pop("integer", None)
        return list(unique)

    def _typed(self, given: dict[str, Any], where: str, depth: int) -> Schema:
        """A schema of types: one for each type, with the keywords of that type."""
        rest = given.keys() - {"type"}
        if "type" in given:
            kinds = self._types(given["type"], where)
        elif not rest:
            return True
        else:
            kinds = [kind for kind, names in _OF_TYPE.items() if rest <= names and kind != "integer"]
            if not kinds and rest <= _OF_TYPE["integer"]:
                kinds = ["integer"]
            if not kinds:
                raise refused(where, "keywords of several types, but no 'type' to say which is meant")
        own = {kind: {name: given[name] for name in rest & _OF_TYPE[kind]} for kind in kinds}
        idle = rest - frozenset().union(*(names.keys() for names in own.values()))
        if idle:
            raise refused(where, f"{sorted(idle)[0]!r} has no effect on type {' or '.join(kinds)}")
        build = {"string": self._string, "array": self._array, "object": self._object}
        results: list[Schema] = []
        for kind in kinds:
            if kind in build:
                results.append(build[kind](own[kind], where, depth))
            else:
                results.append(values.number(kind, own[kind], where))
        return results[0] if len(results) == 1 else {"anyOf": results}

    # -- references -------------------------------------------------------------------------------------

    def _reference(self, value: object, where: str) -> Schema:
        if not isinstance(value, str):
            raise refused(f"{where}.$ref", f"a reference is a string, not {type(value).__name__}")
        seen = [value]
        target = self._target(value)
        while isinstance(target, Mapping) and isinstance(target.get("$ref"), str):
            seen.append(target["$ref"])
            if seen[-1] in seen[:-1]:
                raise refused(f"{where}.$ref", f"{value!r} leads back to itself without a schema between")
            target = self._target(seen[-1])
        if value not in self._names:
            self._names[value] = f"d{len(self._names)}"
            self._queue.append(value)
        return {"$ref": f"#/$defs/{self._names[value]}"}

    def _target(self, reference: str) -> object:
        if reference == "#":
            return self._root
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference)
        if found is None:
            raise refused(
                "schema",
                f"$ref {reference!r} is not supported; only '#', '#/$defs/NAME' and '#/definitions/NAME' are",
            )
        group, name = found.groups()
        name = name.replace("~1", "/").replace("~0", "~")
        definitions = self._root.get(group) if isinstance(self._root, Mapping) else None
        if not isinstance(definitions, Mapping) or name not in definitions:
            raise refused("schema", f"$ref {reference!r} names no definition")
        return definitions[name]

    # -- strings, arrays, objects -----------------------------------------------------------------------

    def _string(self, own: dict[str, Any], where: str, depth: int) -> Schema:
        """At most one of pattern, format and lengths: the compiler keeps only one of them."""
        lengths = own.keys() & {"minLength", "maxLength"}
        kinds = [name for name in ("pattern", "format") if name in own] + ["lengths"] * bool(lengths)
        if len(kinds) > 1:
            names = [name for name in ("pattern", "format", "minLength", "maxLength") if name in own]
            raise refused(where, f"{names[0]!r} together with {names[1]!r} is not supported")
        if "pattern" in own:
            pattern = check_regex(own["pattern"], f"{where}.pattern", in_json=True)
            return {"type": "string", "pattern": pattern}
        if "format" in own:
            if own["format"] not in FORMATS:
                raise refused(
                    f"{where}.format",
                    f"{own['format']!r} is not supported; supported are {', '.join(sorted(FORMATS))}",
                )
            if own["format"] == "ipv4":  # the compiler's allows leading zeros
                return {"type": "string", "pattern": _IPV4}
            return {"type": "string", "format": own["format"]}
        low, high = values.counts(own, "minLength", "maxLength", where)
        if not low and high is None:
            return {"type": "string"}
        bounds = {"minLength": low} if low else {}
        return {"type": "string", **bounds, **({} if high is None else {"maxLength": high})}

    def _array(self, own: dict[str, Any], where: str, depth: int) -> Schema:
        low, high = values.counts(own, "minItems", "maxItems", where)
        if own.get("uniqueItems", False) is not False:
            raise refused(where, "the keyword 'uniqueItems' is not supported")
        prefix: list[Schema] = []
        raw = own.get("prefixItems", [])
        if not isinstance(raw, list):
            raise refused(f"{where}.prefixItems", "a list of schemas is needed")
        for index, each in enumerate(raw[:high]):
            prefix.append(self._schema(each, f"{where}.prefixItems[{index}]", depth + 1))
        items: Schema
        if "items" in own:
            if isinstance(own["items"], list):
                raise refused(f"{where}.items", "a list of schemas is called 'prefixItems'")
            closed = own["items"] is False
            items = False if closed else self._schema(own["items"], f"{where}.items", depth + 1)
        else:
            items = not raw or low > len(prefix)
        if items is False and low > len(prefix):
            raise refused(where, f"minItems {low}, but only {len(prefix)} items are allowed")
        result: dict[str, Any] = {"type": "array", "items": items}
        if high == 0:
            return {"type": "array", "items": False}
        if high is not None and high <= len(prefix):
            result["items"], high = False, None
        if prefix:
            result["prefixItems"] = prefix
        if low:
            result["minItems"] = low
        if high is not None:
            result["maxItems"] = high
        return result

    def _object(self, own: dict[str, Any], where: str, depth: int) -> Schema:
        low, high = values.counts(own, "minProperties", "maxProperties", where)
        declared = values.members(own, "properties", where)
        patterns = values.members(own, "patternProperties", where)
        required = values.names(own, where)
        open_to = self._additional(own, where, depth, bool(declared or patterns))
        members: dict[str, Schema] = {
            name: self._schema(each, f"{where}.properties.{name}", depth + 1)
            for name, each in declared.items()
            if each is not False
        }
        for name in required:
            if name not in members:
                if name in declared or open_to is False or patterns:
                    raise refused(where, f"{name!r} is required, but 'properties' allows no such member")
                members[name] = open_to
        result: dict[str, Any] = {"type": "object", "properties": members, "additionalProperties": False}
        if required:
            result["required"] = required
        if patterns:
            if open_to is not False and "additionalProperties" in own:
                raise refused(where, "'additionalProperties' beside 'patternProperties' must be false")
            if "propertyNames" in own:
                raise refused(where, "'propertyNames' beside 'patternProperties' is not supported")
            result["patternProperties"] = self._pattern(patterns, declared, where, depth)
        elif "propertyNames" in own:
            self._name_rules(result, own["propertyNames"], open_to, bool(declared or required), where)
        elif open_to is not False:
            result["additionalProperties"] = open_to
            taken = members.keys() | declared.keys()
            if taken:
                result["propertyNames"] = {"pattern": values.none_of(taken, SAFE)}
        is_open = result["additionalProperties"] is not False or "patternProperties" in result
        self._count_rules(result, low, high, is_open, where)
        return result

    def _additional(self, own: dict[str, Any], where: str, depth: int, has_members: bool) -> Schema:
        """What other members may be: not given, none beside declared ones, else anything."""
        raw = own.get("additionalProperties", not has_members)
        if raw is False:
            return False
        return self._schema(raw, f"{where}.additionalProperties", depth + 1)

    def _pattern(
        self, patterns: Mapping[str, Any], declared: Iterable[str], where: str, depth: int
    ) -> dict[str, Schema]:
        """One pattern that no declared name matches: a member of two schemas cannot be kept."""
        if len(patterns) > 1:
            raise refused(where, "'patternProperties' of several patterns is not supported")
        ((pattern, each),) = patterns.items()
        place = f"{where}.patternProperties[{pattern!r}]"
        told = check_regex(pattern, place, in_json=True)
        try:
            clash = next((name for name in declared if re.search(pattern, name)), None)
        except re.error as error:
            raise refused(place, f"the pattern is broken: {error}") from None
        if clash is not None:
            raise refused(place, f"the declared member {clash!r} matches it, too, which is not supported")
        return {told: self._schema(each, place, depth + 1)}

    def _name_rules(
        self, result: dict[str, Any], rules: object, open_to: Schema, has_members: bool, where: str
    ) -> None:
        if has_members:
            raise refused(where, "'propertyNames' beside 'properties' or 'required' is not supported")
        if open_to is False:
            return
        place = f"{where}.propertyNames"
        given = (
            {name: value for name, value in rules.items() if not _says_nothing(name)}
            if isinstance(rules, Mapping)
            else None
        )
        if given is None or (given.get("type", "string") != "string"):
            raise refused(place, "a schema of strings is needed")
        given.pop("type", None)
        if given.keys() == {"enum"}:  # each name is an optional member
            names = values.choices(given["enum"], ["string"], f"{place}.enum", self._limit)
            result["properties"] = dict.fromkeys(names, open_to)
            return
        if not given.keys() <= {"pattern", "minLength", "maxLength"}:
            raise refused(place, "only 'enum', 'pattern', 'minLength' and 'maxLength' are supported")
        rule = self._string(given, place, 0)
        assert isinstance(rule, dict)
        result["additionalProperties"] = open_to
        if rule.keys() != {"type"}:
            result["propertyNames"] = {name: value for name, value in rule.items() if name != "type"}

    @staticmethod
    def _count_rules(result: dict[str, Any], low: int, high: int | None, is_open: bool, where: str) -> None:
        """Bounds of the number of members. Names outside `properties` may come twice, which counts once."""
        must = len(result.get("required", ()))
        if low > must:
            if is_open and low > must + 1:
                raise refused(
                    where,
                    f"minProperties {low} cannot be kept for members that are not declared; require them by "
                    "name",
                )
            if not is_open and low > len(result["properties"]):
                raise refused(where, f"minProperties {low}, but there are {len(result['properties'])}")
            result["minProperties"] = low
        if high is not None:
            if high < must:
                raise refused(where, f"maxProperties {high}, but {must} members are required")
            if high == 0:
                result.clear()
                result.update({"type": "object", "properties": {}, "additionalProperties": False})
            else:
                result["maxProperties"] = high

    # -- properties of the whole ------------------------------------------------------------------------

    def _check_disjoint(self, branches: list[Schema], where: str) -> None:
        """oneOf is written as anyOf, which is the same only if no value fits two branches."""
        resolved = [self._followed(branch) for branch in branches]
        for index, one in enumerate(resolved):
            for other in resolved[:index]:
                if not values.disjoint(one, other):
                    raise refused(
                        where,
                        "that no value fits two branches cannot be shown; use 'anyOf', or give every branch "
                        "another type or a required member with another 'const'",
                    )

    def _followed(self, branch: Schema) -> Schema:
        """A branch behind its reference; chains without a schema were refused."""
        while isinstance(branch, dict) and "$ref" in branch:
            branch = self._defs[branch["$ref"].rpartition("/")[2]]
        return branch

    def _check_finite(self, top: dict[str, Any]) -> None:
        """A schema that needs itself inside itself has no finite value."""
        finite: set[str] = set()
        while True:
            more = {name for name, each in self._defs.items() if values.ends(each, finite)}
            if more == finite:
                break
            finite = more
        endless = next((key for key, name in self._names.items() if name not in finite), None)
        if endless is not None or not values.ends(top, finite):
            raise refused("schema", f"{endless or 'it'} needs itself inside itself, so no value is finite")


def _says_nothing(name: object) -> bool:
    return name in ANNOTATIONS or str(name).startswith("x-")


def parse(text: str | bytes, where: str) -> Any:
    """JSON text as a value; `RowError` (`bad_schema`) if it is none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_schema", f"{where}: no JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
