"""Regular expressions that the grammar compiler takes at their word: checked, and written so that it does.

Knows: the syntax that xgrammar 0.2.9 converts. Does not know: what matches. The compiler drops some
constructs with no more than a warning (look-around, anchors inside a pattern, flags, group names) and writes
characters raw that JSON wants escaped; all of these are refused here, so that nothing is ignored. Others it
reads as something else, and they are written in another way:

    \\x41b     is read with as many digits as follow: an escape becomes its character or \\uHHHH
    [\\^a]     is read as [^a]: what stands first moves to the end
    (a|b)?    lets too much through around loops: it becomes {0,1}
    [^é]      inside JSON takes a quote as it comes: every class leaves out what JSON escapes
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepinfer_ray.errors import RowError

_CLASS_ESCAPES = frozenset("dDwWsS")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_CODE_POINT = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_QUANTIFIER_TEXT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
Range = tuple[int, int]
"""First and last code point."""
_ANY: Range = (0, 0x10FFFF)
_DIGITS: list[Range] = [(0x30, 0x39)]
_WORD: list[Range] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: list[Range] = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_ESCAPED: list[Range] = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
"""What JSON writes with an escape."""
_ESCAPED_CLASS = r'\u0000-\u001f"\\'
_SYNTAX = "\\^$.|?*+()[]{}"


def check_regex(pattern: object, where: str, *, in_json: bool = False) -> str:
    """The pattern as the compiler must be told it; `RowError` (`bad_schema`) naming `where` otherwise.

    in_json: it describes the content of a JSON string, which is written without escapes: a quote, a backslash
    or a control character may then stand in a character class only, which is told without them. A pattern
    always describes the whole text: `^` at its start and `$` at its end say nothing more.
    """
    if not isinstance(pattern, str):
        raise _refused(where, f"a pattern is a string, not {type(pattern).__name__}")
    reader = _Reader(pattern, where, in_json)
    told: list[str] = []
    before = _NOTHING
    while not reader.at_end:
        char = reader.peek()
        if char in "?*+{":
            quantifier = reader.quantifier()
            if before is _LAZY or (before is _QUANTIFIER and quantifier != "?"):
                raise _refused(where, f"the quantifier {quantifier} stands behind another one")
            if before is _NOTHING:
                raise _refused(where, f"the quantifier {quantifier} has nothing before it")
            if before is _QUANTIFIER:  # lazy or not, the same texts match
                before = _LAZY
                continue
            told.append("{0,1}" if quantifier == "?" else quantifier)
            before = _QUANTIFIER
            continue
        before = _NOTHING if char in "(|" or (char == "^" and not told) else _ATOM
        told.append(reader.group() if char == "(" else reader.atom())
    return "".join(told)


_NOTHING, _ATOM, _QUANTIFIER, _LAZY = "nothing", "atom", "quantifier", "lazy"
"""What stands before a place of a pattern."""


@dataclass(slots=True)
class _Reader:
    """A place in a pattern; every part that is read is given as the compiler must be told it."""

    pattern: str
    where: str
    in_json: bool
    at: int = 0

    @property
    def at_end(self) -> bool:
        return self.at == len(self.pattern)

    def peek(self, count: int = 1) -> str:
        return self.pattern[self.at : self.at + count]

    def group(self) -> str:
        """What opens a group."""
        if self.peek(2) != "(?":
            self.at += 1
            return "("
        if self.peek(3) != "(?:":
            raise _refused(self.where, f"{self.peek(4)!r} is not supported, only (?:…) and (…)")
        self.at += 3
        return "(?:"

    def quantifier(self) -> str:
        if self.peek() != "{":
            self.at += 1
            return self.pattern[self.at - 1]
        found = _QUANTIFIER_TEXT.match(self.pattern, self.at)
        if found is None:
            raise _refused(self.where, "a { that begins no {m}, {m,} or {m,n} must be escaped")
        low, high = found.groups()
        if high and int(high) < int(low):
            raise _refused(self.where, f"{found.group()} asks for at least {low} and at most {high}")
        self.at = found.end()
        return found.group()

    def atom(self) -> str:
        """A character, an escape, a class, an anchor, `.`, `|` or `)`."""
        char = self.peek()
        if char == "[":
            return self.char_class()
        if char == "\\":
            begin = self.at
            literal = self.escape()
            if literal is None:
                name = self.pattern[begin + 1]
                return self._without_escapes(_CLASSES[name]) if self.in_json else f"\\{name}"
            if self.in_json:
                _plain(literal, self.where)
            return _written(literal, _SYNTAX)
        if (char == "^" and self.at > 0) or (char == "$" and self.at < len(self.pattern) - 1):
            raise _refused(
                self.where, f"the anchor {char} stands inside the pattern; only its ends can have one"
            )
        if self.in_json:
            _plain(char, self.where)
        self.at += 1
        if char == "." and self.in_json:
            return f"[^{_ESCAPED_CLASS}]"
        return char if char in _SYNTAX else _written(char, "")

    def escape(self) -> str | None:
        """The character that an escape stands for, None for a class."""
        pattern, at, where = self.pattern, self.at, self.where
        name = pattern[at + 1 : at + 2]
        self.at = at + 2
        if name in _CLASS_ESCAPES and name:
            return None
        if name == "0" and pattern[at + 2 : at + 3].isdigit():
            raise _refused(where, "octal escapes are not supported; write \\xHH")
        if name in _CONTROLS and name:
            return _CONTROLS[name]
        code = _CODE_POINT.match(pattern, at + 1)
        if code is not None:
            value = int(next(group for group in code.groups() if group), 16)
            if value > 0x10FFFF or 0xD800 <= value < 0xE000:
                raise _refused(where, f"the escape {code.group()!r} is no character")
            self.at = code.end()
            return chr(value)
        if not name or name.isalnum():
            raise _refused(where, f"the escape {pattern[at : at + 2]!r} is not supported")
        return name

    def char_class(self) -> str:
        negated = self.peek(2) == "[^"
        self.at += 1 + negated
        if self.peek() == "]":
            raise _refused(
                self.where, "an empty character class matches nothing or everything; write what is meant"
            )
        members: list[str] = []
        ranges: list[Range] = []
        while self.peek() != "]":
            low = self._member()
            high = low
            if low is not None and self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.at += 1
                high = self._member()
                if high is None or high < low:
                    raise _refused(self.where, "a range of a character class needs two characters in order")
            if low is None or high is None:
                name = self.pattern[self.at - 1]
                members.append(f"\\{name}")
                ranges += _CLASSES[name]
            else:
                members.append(_range(low, high))
                ranges.append((ord(low), ord(high)))
        self.at += 1
        if negated:
            return f"[^{''.join(members)}{_ESCAPED_CLASS if self.in_json else ''}]"
        if self.in_json:
            return self._without_escapes(ranges)
        return _positive(members, ranges)

    def _without_escapes(self, ranges: list[Range]) -> str:
        """The class of these characters, without those that JSON escapes."""
        kept = _minus(ranges, _ESCAPED)
        if not kept:
            raise _refused(self.where, "a character class has nothing but what JSON writes with an escape")
        return _positive([_range(chr(low), chr(high)) for low, high in kept], kept)

    def _member(self) -> str | None:
        """The next character of a class, None for an escape that is a class of its own."""
        char = self.peek()
        if not char:
            raise _refused(self.where, "a character class is not closed")
        if char == "[":
            raise _refused(self.where, "a [ inside a character class must be escaped")
        if char == "\\":
            return self.escape()
        self.at += 1
        return char


def _positive(members: list[str], ranges: list[Range]) -> str:
    """A class of members; what begins with ^ may not stand first, where it would mean "none of"."""
    if members[0].startswith("\\^"):
        if len(members) == 1 and ranges[0][1] == ord("^"):
            return "\\^"
        members = [*members[1:], members[0]]
        if len(members) == 1:
            members = [_range("_", chr(ranges[0][1])), "\\^"]
    return f"[{''.join(members)}]"


def _minus(ranges: list[Range], others: list[Range]) -> list[Range]:
    """Ranges of what is in the first but not in the second; both in any order."""
    for low, high in others:
        parts: list[Range] = []
        for start, stop in ranges:
            parts += [(start, min(stop, low - 1)), (max(start, high + 1), stop)]
        ranges = [part for part in parts if part[0] <= part[1]]
    return ranges


def _range(low: str, high: str) -> str:
    first, last = (_written(char, "\\]^-[") for char in (low, high))
    return first if low == high else f"{first}-{last}"


def _written(char: str, syntax: str) -> str:
    """A character that means itself."""
    if char in syntax:
        return "\\" + char
    return char if char.isprintable() or ord(char) > 0xFFFF else f"\\u{ord(char):04x}"


def _plain(char: str, where: str) -> None:
    if char in '"\\' or char < " ":
        raise _refused(
            where,
            f"{char!r} would need an escape in JSON, which patterns cannot give; use a character class "
            "without it",
        )


def _refused(where: str, reason: str) -> RowError:
    return RowError("bad_schema", f"{where}: {reason}")


_CLASSES = {
    **{"d": _DIGITS, "w": _WORD, "s": _SPACES},
    **{name: _minus([_ANY], own) for name, own in (("D", _DIGITS), ("W", _WORD), ("S", _SPACES))},
}
"""What the escapes of classes stand for."""
