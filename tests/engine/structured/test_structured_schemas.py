"""Which schemas, patterns and constraints are kept, and what is said about the others."""

from __future__ import annotations

import json
import re

import pytest

from deepinfer_ray.engine.grammar_spec import GrammarLimits, GrammarSpec
from deepinfer_ray.engine.json_schema import normalise
from deepinfer_ray.engine.regex_check import check_regex
from deepinfer_ray.errors import RowError

INT = {"type": "integer"}
REST = r'"\\\u0000-\u001f'
NOT_A = f"([^{REST}a][^{REST}]*|a([^{REST}][^{REST}]*)){{0,1}}"
"""All names but `a`."""
KEPT = [
    (True, {}),
    ({"title": "t", "x-note": 1}, {}),
    (
        {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 7.5},
        {"type": "integer", "minimum": 3, "exclusiveMaximum": 8},
    ),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": 5}, {"type": "integer", "exclusiveMinimum": 5}),
    ({"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 11}, {"enum": [5, 10]}),
    ({"type": ["integer", "number"]}, {"type": "number"}),
    (
        {"type": ["null", "string"], "maxLength": 3},
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    ),
    ({"maxLength": 3}, {"type": "string", "maxLength": 3}),
    ({"enum": [1, "a", 1.0], "type": "integer"}, {"enum": [1, 1.0]}),
    ({"const": {"a": [None]}}, {"enum": [{"a": [None]}]}),
    ({"allOf": [INT]}, INT),
    ({"oneOf": [INT, {"type": "string"}]}, {"anyOf": [INT, {"type": "string"}]}),
    ({"anyOf": [False, INT]}, INT),
    ({"type": "array"}, {"type": "array", "items": True}),
    ({"type": "array", "items": INT, "maxItems": 0}, {"type": "array", "items": False}),
    (
        {"type": "array", "prefixItems": [INT, INT], "maxItems": 1},
        {"type": "array", "items": False, "prefixItems": [INT]},
    ),
    ({"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": True}),
    (
        {"type": "object", "properties": {"a": INT, "b": False}},
        {"type": "object", "properties": {"a": INT}, "additionalProperties": False},
    ),
    (
        {"type": "object", "required": ["a"], "additionalProperties": INT, "maxProperties": 1},
        {
            "type": "object",
            "properties": {"a": INT},
            "additionalProperties": INT,
            "required": ["a"],
            "propertyNames": {"pattern": NOT_A},
            "maxProperties": 1,
        },
    ),
    ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": INT}}, {"$ref": "#/$defs/d0", "$defs": {"d0": INT}}),
]


@pytest.mark.parametrize(("schema", "kept"), KEPT, ids=lambda value: json.dumps(value)[:40])
def test_what_is_kept_of_a_schema(schema, kept):
    assert normalise(schema, 8) == kept


def test_names_that_are_taken_are_no_further_members():
    """Whatever the pattern of other names matches, it is no declared name."""
    schema = {"type": "object", "properties": {"ab": INT, "abc": INT, 'q"': INT}, "additionalProperties": INT}
    pattern = normalise(schema, 8)["propertyNames"]["pattern"]
    assert [name for name in ("ab", "abc", 'q"', '"') if re.fullmatch(pattern, name)] == []
    others = ["", "a", "abcd", "b", "abd", "é", "q"]
    assert [name for name in others if not re.fullmatch(pattern, name)] == []


REFUSED = [
    (False, "schema: false allows no value"),
    (3, "schema: a schema is an object or true, not int"),
    ({"not": {}}, "schema: the keyword 'not' is not supported"),
    ({"if": {}, "then": {}}, "the keyword 'if' is not supported"),
    (
        {"type": "string", "maxlength": 3},
        "the keyword 'maxlength' is not supported; did you mean 'maxLength'?",
    ),
    ({"type": "integer", "nullable": True}, "the keyword 'nullable' is not supported"),
    ({"type": "array", "contains": INT}, "the keyword 'contains' is not supported"),
    ({"type": "array", "uniqueItems": True}, "schema: the keyword 'uniqueItems' is not supported"),
    ({"type": "array", "items": [INT]}, "schema.items: a list of schemas is called 'prefixItems'"),
    ({"type": "string", "format": "regex"}, "schema.format: 'regex' is not supported; supported are date, "),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' together with 'maxLength'"),
    ({"type": "string", "pattern": "^a|^b"}, "schema.pattern: the anchor ^ stands inside the pattern"),
    ({"type": "string", "pattern": "\\n"}, r"schema.pattern: '\n' would need an escape in JSON"),
    ({"type": "string", "minLength": 4, "maxLength": 3}, "minLength 4 exceeds maxLength 3"),
    ({"type": "string", "maxLength": -1}, "schema.maxLength: -1 is no count"),
    ({"type": "string", "maxLength": 10**9}, "schema.maxLength: 1000000000 is more than 100000"),
    ({"type": "string", "minimum": 3}, "'minimum' has no effect on type string"),
    ({"minimum": 3, "maxLength": 3}, "keywords of several types, but no 'type'"),
    ({"type": "int"}, "schema.type: 'int' is no type; the types are array, boolean"),
    ({"type": []}, "a list of at least one type is needed"),
    ({"type": "number", "minimum": 1e-9}, "schema.minimum: 1e-09 needs an exponent"),
    ({"type": "number", "multipleOf": 0.1}, "schema: 'multipleOf' has no effect on type number"),
    ({"type": "integer", "multipleOf": 5000}, "schema.multipleOf: 5000 is no integer from 1 to 1000"),
    (
        {"type": "integer", "multipleOf": 2, "minimum": 0},
        "'multipleOf' between bounds is supported for up to",
    ),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "schema: no integer is between the bounds"),
    ({"type": "integer", "minimum": True}, "schema.minimum: True is no number"),
    ({"enum": []}, "schema.enum: a list of at least one value is needed"),
    ({"enum": ["a"], "type": "integer"}, "schema.enum: no value is of type integer"),
    ({"enum": [1], "minimum": 0}, "'minimum' beside 'enum' is not supported"),
    ({"$ref": "#/$defs/a", "minimum": 0, "$defs": {"a": INT}}, "'minimum' beside '$ref' is not supported"),
    ({"allOf": [INT, {"minimum": 0}]}, "'allOf' of several schemas is not supported; merge them into one"),
    ({"anyOf": [{"required": ["a"]}], "type": "object"}, "'type' beside 'anyOf' is not supported"),
    ({"oneOf": [INT, {"type": "number"}]}, "schema.oneOf: that no value fits two branches cannot be shown"),
    ({"anyOf": [{}, {"type": "array", "items": {"not": {}}}]}, "schema.anyOf[1].items: the keyword 'not'"),
    ({"$ref": "https://example.com/s"}, "$ref 'https://example.com/s' is not supported; only '#'"),
    ({"$ref": "#/$defs/a"}, "$ref '#/$defs/a' names no definition"),
    ({"$ref": "#"}, "schema.$ref: '#' leads back to itself"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "needs itself inside itself"),
    ({"type": "array", "items": {"$defs": {}}}, "schema.items: '$defs' is supported at the root only"),
    ({"type": "object", "required": ["a"], "properties": {"b": INT}}, "'a' is required, but 'properties'"),
    (
        {"type": "object", "properties": {"a": INT}, "propertyNames": {"maxLength": 1}},
        "'propertyNames' beside",
    ),
    ({"type": "object", "patternProperties": {"a": INT, "b": INT}}, "of several patterns is not supported"),
    (
        {"type": "object", "properties": {"ab": INT}, "patternProperties": {"b": INT}},
        "schema.patternProperties['b']: the declared member 'ab' matches it, too",
    ),
    (
        {"type": "object", "minProperties": 3},
        "minProperties 3 cannot be kept for members that are not declared",
    ),
    (
        {"type": "object", "properties": {"a": 1}},
        "schema.properties.a: a schema is an object or true, not int",
    ),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_kept_is_refused(schema, message):
    with pytest.raises(RowError) as caught:
        normalise(schema, 8)
    assert caught.value.code == "bad_schema"
    assert message in str(caught.value)


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = INT
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_nesting_is_limited():
    assert normalise(nested(8), 8)
    for deep in (nested(9), nested(900), {"const": json.loads("[" * 60 + "]" * 60)}):
        with pytest.raises(RowError, match=r"structured\.max_nesting"):
            normalise(deep, 8)


PATTERNS = [
    ("a", "a"),
    ("^a$", "^a$"),
    ("", ""),
    ("^(a|b)*?c{2,3}d{2}e{1,}?$", "^(a|b)*c{2,3}d{2}e{1,}$"),
    (r"[^\]\\a-z]+\.\u00e9\x41b\u{1F600}\d\w\S", r"[^\]\\a-z]+\.éAb😀\d\w\S"),
    ("(?:ab)?c??", "(?:ab){0,1}c{0,1}"),
    (r"[\^]x[\^a]y[\^-b]z[\^-\^q]", r"\^x[a\^]y[_-b\^]z[q\^]"),
    (r"[\x5ea-]\n\x24\0[\d\-x]", r"[a\-\^]\u000a\$\u0000[\d\-x]"),
]


@pytest.mark.parametrize(("pattern", "told"), PATTERNS)
def test_how_patterns_are_told(pattern, told):
    assert check_regex(pattern, "regex") == told
    assert check_regex(told, "regex") == told


JSON_PATTERNS = [
    ("a.b", r'a[^\u0000-\u001f"\\]b'),
    (r"[^é]\d", r'[^é\u0000-\u001f"\\][0-9]'),
    (r'["-\x5d]+', r"[#-\[\]]+"),
    (
        r"\D|\s",
        "[ -!#-/:-\\[\\]-\U0010ffff]|"
        "[ \\u00a0\\u1680\\u2000-\\u200a\\u2028-\\u2029\\u202f\\u205f\\u3000\\ufeff]",
    ),
]


@pytest.mark.parametrize(("pattern", "told"), JSON_PATTERNS)
def test_how_patterns_inside_json_are_told(pattern, told):
    """No class has what JSON would write with an escape."""
    assert check_regex(pattern, "schema.pattern", in_json=True) == told


BAD_PATTERNS = [
    ("a^b", "the anchor ^ stands inside"),
    ("a$|b", "the anchor $ stands inside"),
    ("(?=a)b", "'(?=a' is not supported, only (?:…) and (…)"),
    ("(?i)a", "is not supported"),
    ("(?<n>a)", "is not supported"),
    (r"(a)\1", r"'\\1' is not supported"),
    (r"\bfoo", r"'\\b' is not supported"),
    (r"\p{L}", r"'\\p' is not supported"),
    (r"\ud800", "is no character"),
    ("a\\", "is not supported"),
    ("[a", "a character class is not closed"),
    ("[[a]", "a [ inside a character class must be escaped"),
    ("[]a]", "an empty character class"),
    ("a{,3}", "must be escaped"),
    ("a{3,2}", "asks for at least 3 and at most 2"),
    ("a*+", "the quantifier + stands behind another one"),
    ("a*??", "the quantifier ? stands behind another one"),
    ("(|*a)", "the quantifier * has nothing before it"),
    ("[b-a]", "a range of a character class needs two characters in order"),
    (7, "a pattern is a string, not int"),
]


@pytest.mark.parametrize(("pattern", "message"), BAD_PATTERNS, ids=lambda value: str(value)[:20])
def test_patterns_that_would_not_be_kept(pattern, message):
    with pytest.raises(RowError) as caught:
        check_regex(pattern, "regex")
    assert str(caught.value).startswith("regex: ")
    assert message in str(caught.value)


def test_a_class_of_nothing_but_escapes_is_refused_in_json():
    with pytest.raises(RowError, match="has nothing but what JSON writes with an escape"):
        normalise({"type": "string", "pattern": '["\\\\]'}, 8)


def test_the_canonical_form_names_the_grammar():
    one = GrammarSpec.of({"json": {"type": "integer", "title": "x"}})
    same = GrammarSpec.of({"json": '{"title": "y", "type": "integer"}', "regex": None, "json_object": False})
    assert one == same
    assert one.key == same.key
    tight = GrammarSpec.of({"json": INT, "disable_any_whitespace": True})
    later = GrammarSpec.of({"json": INT, "trigger_token_ids": [7, 8], "bound_token_id": 3})
    assert len({one.key, tight.key}) == 2
    assert later.key == one.key
    assert (later.trigger_token_ids, later.bound_token_id) == ((7, 8), 3)
    assert "integer" not in repr(one)


BAD_ASKED = [
    ({}, "exactly one of json, regex, grammar, choice, structural_tag, json_object is needed, got none"),
    ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
    ({"jsn": {}}, "the key 'jsn' is unknown; did you mean 'json'?"),
    ({"whitespace_pattern": " "}, "the key 'whitespace_pattern' is unknown; valid: json, regex"),
    ({"json": "{"}, "structured_outputs.json: no JSON"),
    ({"json": "NaN"}, "NaN is no JSON"),
    ({"json": "[" * 5000}, "structured_outputs.json: no JSON"),
    ({"json": {"enum": ["x" * 3000]}}, "json takes 3013 bytes, at most 2000 are allowed"),
    ({"json": " " * 9000}, "the text has 9000 characters, at most 2000 bytes"),
    ({"json_object": 1}, "json_object is true or false"),
    ({"grammar": {}}, "grammar is EBNF text"),
    ({"choice": []}, "choice is a list of texts, none of them empty"),
    ({"choice": ["a", ""]}, "none of them empty"),
    ({"choice": "ab"}, "choice is a list of texts"),
    ({"regex": "a", "disable_any_whitespace": True}, "belongs to json or json_object"),
    ({"regex": "a", "trigger_token_ids": [-1]}, "trigger_token_ids is a list of token ids"),
    ({"regex": "a", "bound_token_id": 3}, "bound_token_id is a token id and needs trigger_token_ids"),
    ({"structural_tag": {"structures": []}}, "an object of 'type' and 'format' is needed"),
    (
        {"structural_tag": {"type": "structural_tag", "format": {"type": "any"}}},
        "the type must be one of const_string",
    ),
    (
        {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text", "max_tokens": 3}}},
        "structural_tag.format: any_text has no field 'max_tokens'",
    ),
    (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"not": {}}}]},
            }
        },
        "the keyword 'not' is not supported",
    ),
]


@pytest.mark.parametrize(("asked", "message"), BAD_ASKED, ids=lambda value: str(value)[:40])
def test_wishes_that_cannot_be_read(asked, message):
    with pytest.raises(RowError) as caught:
        GrammarSpec.of(asked, GrammarLimits(max_bytes=2000, max_nesting=8))
    assert caught.value.code == "bad_schema"
    assert message in str(caught.value)
