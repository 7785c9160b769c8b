"""Random JSON schemas that a random model finishes within a few hundred bytes.

Every construct that is accepted appears: all types, bounds, patterns, formats, enums, tuples, open objects,
unions, references, recursion. Lengths and counts are bounded, and so is the depth.
"""

from __future__ import annotations

from random import Random
from typing import Any

PATTERNS = [
    "^[a-z]{1,5}$",
    "^(foo|bar)[0-9]?$",
    "[A-Z][a-z]{0,3}",
    r"^\d{2}-\d{2}$",
    "^[^,]{1,4}$",
    r"x\.y\+z",
]
FORMATS = ["date", "time", "uuid", "ipv4", "date-time"]
TEXTS = ["a", 'b"c', "\\", "é", "\n", "x y", ""]
VALUES: list[Any] = [1, 2.5, "a", None, True, [1, "x"], {"k": [1]}, -3, 'é"\n', 1e20]
NAMES = ["a", "b", "ab", "name", "é", 'q"t', "x1", "n\nl", "with space"]
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
}
DEFS: dict[str, Any] = {
    "node": NODE,
    "a/b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    "c~d": {"enum": ["x", 7]},
}


class RandomSchemas:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.used: set[str] = set()

    def schema(self) -> dict[str, Any]:
        """A document of two levels at most, its definitions in it."""
        self.used = set()
        schema = self.any(2)
        return {**schema, "$defs": {name: DEFS[name] for name in sorted(self.used)}} if self.used else schema

    def any(self, depth: int) -> dict[str, Any]:
        flat = [self.string, self.string, self.number, self.number, self.simple, self.values, self.reference]
        deep = [self.array, self.array, self.object, self.object, self.object, self.union, self.one_of]
        make = self.random.choice(flat + deep * (depth > 0))
        schema = make(depth - 1)
        return {"title": "t", "description": "d", **schema} if self.random.random() < 0.1 else schema

    def string(self, depth: int) -> dict[str, Any]:
        low = self.random.randint(0, 4)
        return self.random.choice(
            [
                {"type": "string", "maxLength": self.random.randint(1, 8)},
                {"type": "string", "minLength": low, "maxLength": low + self.random.randint(0, 5)},
                {"type": "string", "pattern": self.random.choice(PATTERNS)},
                {"type": "string", "format": self.random.choice(FORMATS)},
                {"type": "string", "enum": self.random.sample(TEXTS, self.random.randint(1, 4))},
                {"minLength": 1, "maxLength": 3},
            ]
        )

    def number(self, depth: int) -> dict[str, Any]:
        kind = self.random.choice(["integer", "integer", "number"])
        low, part = self.random.randint(-50, 50), self.random.choice([0, 0.5, 0.25, 0.1])
        high = low + self.random.randint(2, 200)
        schema = {
            "type": kind,
            self.random.choice(["minimum", "exclusiveMinimum"]): low + part,
            self.random.choice(["maximum", "exclusiveMaximum"]): high + part,
        }
        if kind == "integer" and self.random.random() < 0.3:
            schema["multipleOf"] = self.random.randint(1, 2)
        return schema

    def simple(self, depth: int) -> dict[str, Any]:
        return self.random.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"type": ["integer", "null", "string"], "maxLength": 3, "minimum": 0, "maximum": 9},
                {"allOf": [{"type": "boolean"}]},
            ]
        )

    def values(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.3:
            return {"const": self.random.choice(VALUES)}
        return {"enum": self.random.sample(VALUES, self.random.randint(1, 5))}

    def reference(self, depth: int) -> dict[str, Any]:
        name = self.random.choice([*DEFS])
        self.used.add(name)
        return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}

    def array(self, depth: int) -> dict[str, Any]:
        low = self.random.randint(0, 2)
        if self.random.random() < 0.6:
            high = low + self.random.randint(0, 3)
            return {"type": "array", "items": self.any(depth), "minItems": low, "maxItems": high}
        prefix = [self.any(depth) for _ in range(self.random.randint(1, 3))]
        schema: dict[str, Any] = {"type": "array", "prefixItems": prefix}
        schema["items"] = self.random.choice([False, {"type": "boolean"}])
        schema["maxItems"] = len(prefix) + self.random.randint(0, 1)
        if self.random.random() < 0.5:
            schema["minItems"] = self.random.randint(0, len(prefix))
        return schema

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(NAMES, self.random.randint(0, 4))
        required = [name for name in names if self.random.random() < 0.6]
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        schema["required"] = required
        kind = self.random.randrange(5)
        if kind == 0 and "x1" not in names:
            schema |= {"patternProperties": {"^x[0-9]$": self.any(0)}, "maxProperties": len(names) + 2}
        elif kind == 1 and not names:
            rule = self.random.choice([{"pattern": "^[a-c]{1,2}$"}, {"maxLength": 3}, {"enum": ["u", "v"]}])
            schema = {"type": "object", "propertyNames": rule, "additionalProperties": self.any(0)}
            schema["maxProperties"] = 2
        elif kind == 2:
            schema |= {"additionalProperties": self.any(0), "maxProperties": len(names) + 1}
        else:
            schema["additionalProperties"] = False
            schema["minProperties"] = self.random.randint(0, len(required))
        return schema

    def union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth) for _ in range(self.random.randint(1, 3))]}

    def one_of(self, depth: int) -> dict[str, Any]:
        tagged = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self.any(depth)},
                "required": ["kind", "value"],
            }
            for kind in ("one", "two")
        ]
        return {"oneOf": [*tagged, {"type": "integer", "minimum": 0, "maximum": 5}]}
