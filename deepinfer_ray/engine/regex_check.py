"""Which regular expressions the grammar compiler takes at their word.

Knows: the syntax that xgrammar 0.2.9 converts exactly. Does not know: what matches. The compiler drops some
constructs with no more than a warning (look-around, anchors inside a pattern, flags, group names) and writes
characters raw that JSON wants escaped; all of these are refused here, so that nothing is ignored.
"""

from __future__ import annotations

import re

from deepinfer_ray.errors import RowError

_CLASS_ESCAPES = frozenset("dDwWsS")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_CODE_POINT = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_QUANTIFIER = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_regex(pattern: object, where: str, *, in_json: bool = False) -> str:
    """The pattern, if it means here what it says; `RowError` (`bad_schema`) naming `where` otherwise.

    in_json: it describes the content of a JSON string, which is written without escapes: a quote, a backslash
    or a control character may then stand in a character class only, where it is left out. A pattern always
    describes the whole text: `^` at its start and `$` at its end say nothing more.
    """
    if not isinstance(pattern, str):
        raise _refused(where, f"a pattern is a string, not {type(pattern).__name__}")
    at, last = 0, len(pattern) - 1
    while at <= last:
        char = pattern[at]
        if char == "\\":
            literal, at = _escape(pattern, at, where)
            if in_json and literal is not None:
                _plain(literal, where)
            continue
        if char == "[":
            at = _class_end(pattern, at, where)
            continue
        if char == "(" and pattern[at + 1 : at + 2] == "?":
            if pattern[at + 2 : at + 3] != ":":
                raise _refused(where, f"{pattern[at : at + 4]!r} is not supported, only (?:…) and (…)")
            at += 3
            continue
        if (char == "^" and at > 0) or (char == "$" and at < last):
            raise _refused(where, f"the anchor {char} stands inside the pattern; only its ends can have one")
        if char == "{":
            at = _quantifier_end(pattern, at, where)
            continue
        if in_json:
            _plain(char, where)
        at += 1
    return pattern


def _escape(pattern: str, at: int, where: str) -> tuple[str | None, int]:
    """(the character it stands for, None for a class; place behind the escape)."""
    name = pattern[at + 1 : at + 2]
    if name in _CLASS_ESCAPES and name:
        return None, at + 2
    if name == "0" and pattern[at + 2 : at + 3].isdigit():
        raise _refused(where, "octal escapes are not supported; write \\xHH")
    if name in _CONTROLS and name:
        return _CONTROLS[name], at + 2
    code = _CODE_POINT.match(pattern, at + 1)
    if code is not None:
        value = int(next(group for group in code.groups() if group), 16)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise _refused(where, f"the escape {code.group()!r} is no character")
        return chr(value), code.end()
    if not name or name.isalnum():
        raise _refused(where, f"the escape {pattern[at : at + 2]!r} is not supported")
    return name, at + 2


def _class_end(pattern: str, at: int, where: str) -> int:
    """Place behind a character class."""
    place = at + 1 + (pattern[at + 1 : at + 2] == "^")
    if pattern[place : place + 1] == "]":
        raise _refused(where, "an empty character class matches nothing or everything; write what is meant")
    while place < len(pattern):
        if pattern[place] == "]":
            return place + 1
        if pattern[place] == "[":
            raise _refused(where, "a [ inside a character class must be escaped")
        place = _escape(pattern, place, where)[1] if pattern[place] == "\\" else place + 1
    raise _refused(where, "a character class is not closed")


def _quantifier_end(pattern: str, at: int, where: str) -> int:
    found = _QUANTIFIER.match(pattern, at)
    if found is None:
        raise _refused(where, "a { that begins no {m}, {m,} or {m,n} must be escaped")
    low, high = found.groups()
    if high and int(high) < int(low):
        raise _refused(where, f"{found.group()} asks for at least {low} and at most {high}")
    return found.end()


def _plain(char: str, where: str) -> None:
    if char in '"\\' or char < " ":
        raise _refused(
            where,
            f"{char!r} would need an escape in JSON, which patterns cannot give; use a character class "
            "without it",
        )


def _refused(where: str, reason: str) -> RowError:
    return RowError("bad_schema", f"{where}: {reason}")
