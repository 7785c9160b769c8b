"""Random regular languages, each written as a pattern here, as Python's pattern and as EBNF, with members.

The three spellings say the same, so that one checks the others: what a constraint lets through must match
Python's pattern, and members must be let through.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

CHARS = ["a", "b", "c", "Z", "0", "7", " ", "-", '"', "\\", "/", "]", "^", "é", "ß", "€", "漢", "𝄞", "\n"]
RANGES = [("a", "c"), ("A", "Z"), ("0", "9"), ("à", "ü"), ("\u2000", "\u20ff"), ("一", "鿿")]
OTHERS = ["x", "ö", "字", "😀", "~"]
"""Members of negated classes, if these do not name them."""


@dataclass(frozen=True)
class Language:
    """pattern: for `structured_outputs`. python: for `re.fullmatch`. ebnf: with rule `root`. member: one."""

    pattern: str
    python: str
    ebnf: str
    member: str


def random_language(random: Random, depth: int = 3) -> Language:
    kinds = [_literal, _literal, _class, _class]
    if depth:
        kinds += [_sequence, _sequence, _choice, _repeat, _repeat]
    made = random.choice(kinds)(random, depth - 1)
    return made


def _escaped(char: str, random: Random) -> str:
    """Of a pattern, outside a class."""
    if char == "\n":
        return "\\n"
    if ord(char) > 0x7F:
        return random.choice([char, f"\\u{{{ord(char):x}}}"])
    return char if char.isalnum() or char in ' "-/' else "\\" + char


def _in_class(char: str) -> str:
    if char == "\n":
        return "\\n"
    return "\\" + char if char in "\\]^-[" else char


def _literal(random: Random, depth: int) -> Language:
    text = "".join(random.choice(CHARS) for _ in range(random.randint(1, 3)))
    pattern = "".join(_escaped(char, random) for char in text)
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return Language(pattern, re.escape(text), f'"{quoted}"', text)


def _class(random: Random, depth: int) -> Language:
    parts = [random.choice(RANGES) for _ in range(random.randint(0, 2))]
    parts += [(char, char) for char in random.sample(CHARS, random.randint(1, 3))]
    body = "".join(_in_class(low) if low == high else f"{low}-{high}" for low, high in parts)
    named = [chr(code) for low, high in parts for code in range(ord(low), ord(high) + 1)]
    free = [char for char in OTHERS if char not in named]
    if free and random.random() < 0.4:
        return Language(f"[^{body}]", f"[^{body}]", f"[^{body}]", random.choice(free))
    return Language(f"[{body}]", f"[{body}]", f"[{body}]", random.choice(named))


def _sequence(random: Random, depth: int) -> Language:
    parts = [random_language(random, depth) for _ in range(random.randint(2, 3))]
    return Language(
        "".join(part.pattern for part in parts),
        "".join(part.python for part in parts),
        "(" + " ".join(part.ebnf for part in parts) + ")",
        "".join(part.member for part in parts),
    )


def _choice(random: Random, depth: int) -> Language:
    parts = [random_language(random, depth) for _ in range(random.randint(2, 3))]
    group = random.choice(["(", "(?:"])
    return Language(
        group + "|".join(part.pattern for part in parts) + ")",
        "(?:" + "|".join(part.python for part in parts) + ")",
        "(" + " | ".join(part.ebnf for part in parts) + ")",
        random.choice(parts).member,
    )


def _repeat(random: Random, depth: int) -> Language:
    part = random_language(random, depth)
    low = random.randint(0, 2)
    high = low + random.randint(0, 2) if low else random.randint(1, 3)
    sign, count = random.choice(
        [
            ("?", random.randint(0, 1)),
            ("*", random.randint(0, 3)),
            ("+", random.randint(1, 3)),
            (f"{{{low},{high}}}", random.randint(low, high)),
            (f"{{{high}}}", high),
            (f"{{{low},}}", low + 1),
        ]
    )
    return Language(
        f"({part.pattern}){sign}", f"(?:{part.python}){sign}", f"({part.ebnf}){sign}", part.member * count
    )
