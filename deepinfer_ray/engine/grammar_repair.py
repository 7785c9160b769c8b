"""What the grammar compiler gets wrong, mended in the parsed grammar before it is compiled.

Knows: the numbers in which xgrammar 0.2.9 writes a parsed grammar down. Does not know: schemas, tokens. The
printed form of a grammar would be easier to edit, but does not read back as what it was ("é" before "a" is
printed as one longer escape, a class of "^" as a negated one).
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from typing import Any

logger = logging.getLogger(__name__)

FORMAT = "v18"
"""Of the numbers; a grammar in another one is compiled as it is, and a warning and the tests say so."""

_CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 1, 2, 3, 4, 5, 6, 8
"""Kinds of expressions: [kind, count, negated, low, high, …] twice, [kind, 0], [kind, 1, rule], [kind, count,
expression, …] twice, [kind, 3, rule, least, most]."""
MOST_REPEATED = 32
"""Longer repetitions are left to the compiler."""

_LEAKY = [1, ord('"'), ord('"'), ord("\\"), ord("\\"), ord("\r"), ord("\r"), ord("\n"), ord("\n")]
"""Characters of a JSON string with a length bound: control characters would come raw, which is no JSON."""
_SAFE = [1, 0, 0x1F, ord('"'), ord('"'), ord("\\"), ord("\\")]
_STRING = [*_SAFE, ord("\r"), ord("\r"), ord("\n"), ord("\n")]
"""Characters of a JSON string without a bound, whose rule says itself what follows."""
_NARROW = 0x7F
"""Characters beyond it take two bytes and more."""
_LOOKAHEAD = 2
"""Place in a rule of the expression that has to follow it, -1 = the compiler works it out."""


@functools.cache
def _warn_of(version: str) -> None:
    """Once in a process."""
    logger.warning(
        "xgrammar writes grammars as %s, but the mistakes of its compiler are known as of %s: rows with some "
        "patterns may end with an error; install xgrammar 0.2.9", version, FORMAT,
    )  # fmt: skip


def repaired(grammar: Any, *, json_strings: bool) -> Any:
    """An `xgrammar.Grammar` that says what `grammar` was meant to say. json_strings: it was made of a JSON
    schema, so that its strings are JSON's."""
    import xgrammar

    document = json.loads(grammar.serialize_json())
    if document.get("__VERSION__") != FORMAT:
        _warn_of(str(document.get("__VERSION__")))
        return grammar
    data, starts = document["grammar_expr_data"], document["grammar_expr_indptr"]
    bounds = [*starts, len(data)] if starts[-1] != len(data) else starts
    parts = [data[at:end] for at, end in itertools.pairwise(bounds)]
    changed = False
    if json_strings:
        for place, part in enumerate(parts):
            if part[0] == _CLASS and part[2:] == _LEAKY:
                parts[place] = [_CLASS, len(_SAFE), *_SAFE]
                changed = True
    if any(_takes_several_bytes(part) for part in parts):
        _without_guesses(document["rules"], parts)
        changed = True
    if not changed:
        return grammar
    document["grammar_expr_data"] = [number for part in parts for number in part]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    document["grammar_expr_indptr"] = ends[: len(starts) + len(ends) - len(bounds)]
    return xgrammar.Grammar.deserialize_json(json.dumps(document))


def _takes_several_bytes(part: list[int]) -> bool:
    """Whether an expression is a class with characters beyond ASCII, the strings of JSON left out."""
    if part[0] not in (_CLASS, _CLASS_STAR):
        return False
    return max(part[3:], default=0) > _NARROW or (part[2] == 1 and part[2:] not in (_LEAKY, _SAFE, _STRING))


def _without_guesses(rules: list[list[Any]], parts: list[list[int]]) -> None:
    """Say of every rule that anything may follow it.

    The compiler would work out what does, to tell early which tokens reach beyond a rule. Where a class of
    characters of several bytes follows, it is wrong: masks then allow tokens that the matcher refuses. It
    makes rules of repetitions, too, so these are written out before.
    """
    for place, part in enumerate(parts[:]):
        if part[0] == _REPEAT and max(part[3], part[4]) <= MOST_REPEATED:
            parts[place] = _written_out(part, f"__repeat_{place}", rules, parts)
    parts += [[_CLASS_STAR, 1, 1], [_SEQUENCE, 1, len(parts)]]
    for rule in rules:
        if rule[_LOOKAHEAD] == -1:
            rule[_LOOKAHEAD] = len(parts) - 1


def _written_out(repeat: list[int], name: str, rules: list[list[Any]], parts: list[list[int]]) -> list[int]:
    """The expression instead of a repetition: the first of a chain of rules, one for each time."""
    _, _, rule, least, most = repeat
    item, empty = len(parts), len(parts) + 1
    parts += [[_RULE, 1, rule], [_EMPTY, 0]]

    def add(number: int, *, behind: int | None, may_end: bool) -> int:
        """The rule of the time `number`; behind: the rule of the next. Gives its own."""
        elements = [item]
        if behind is not None:
            elements.append(len(parts))
            parts.append([_RULE, 1, behind])
        choices = [empty] * may_end + [len(parts)]
        parts.extend([[_SEQUENCE, len(elements), *elements], [_CHOICES, len(choices), *choices]])
        rules.append([f"{name}_{number}", len(parts) - 1, -1, *rules[0][3:]])
        return len(rules) - 1

    following = add(least, behind=len(rules), may_end=True) if most == -1 else None
    for number in reversed(range(least if most == -1 else most)):
        following = add(number, behind=following, may_end=number >= least)
    return [_EMPTY, 0] if following is None else [_RULE, 1, following]
