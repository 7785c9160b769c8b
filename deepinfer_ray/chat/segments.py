"""A rendered prompt as control tokens and the text between them.

Knows: the order of control tokens in a prompt. Does not know: messages, tokenizers.

The library renders; where a case needs what it has no option for (numeric efforts, tasks, kept reasoning),
the segments are edited by position, never by searching user text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deepinfer_ray.chat.tokens import ASSISTANT, END_THINK, GROUNDING, THINK


class Segment(NamedTuple):
    """A piece of a prompt: one control token (by spelling) or a text."""

    text: str
    is_control: bool = False


def control(spelling: str) -> Segment:
    """A control token as a segment."""
    return Segment(spelling, True)


def split_prompt(prompt: str, special_ranges: Sequence[tuple[int, int]]) -> list[Segment]:
    """Segments of `prompt`; `special_ranges` are ascending half-open code point ranges, a token each.

    The library also marks the visual grounding tokens that an assistant message of the row spells; row text
    is never a control token here (spec/chat.md §1.2 lists what may be), so those stay text.
    """
    segments: list[Segment] = []
    position = 0
    for start, end in special_ranges:
        if prompt[start:end] in GROUNDING:
            continue
        segments += [Segment(prompt[position:start]), control(prompt[start:end])]
        position = end
    segments.append(Segment(prompt[position:]))
    return joined(segments)


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Without empty texts, neighbouring texts merged: text between two control tokens is one segment."""
    result: list[Segment] = []
    for segment in segments:
        if result and not segment.is_control and not result[-1].is_control:
            result[-1] = Segment(result[-1].text + segment.text)
        elif segment.text:
            result.append(segment)
    return result


def assistant_headers(segments: Sequence[Segment]) -> list[int]:
    """Positions of the assistant control tokens, in prompt order."""
    return [i for i, segment in enumerate(segments) if segment == control(ASSISTANT)]


def keep_reasoning(segments: Sequence[Segment], reasoning: dict[int, str]) -> list[Segment]:
    """Writes the reasoning of the n-th assistant turn back where the renderer dropped it.

    `…<Assistant></think>answer` becomes `…<Assistant><think>reasoning</think>answer`.
    """
    headers = assistant_headers(segments)
    result = list(segments)
    for turn in sorted(reasoning, reverse=True):
        after = headers[turn] + 1
        if result[after] == control(END_THINK):
            result[after : after + 1] = [control(THINK), Segment(reasoning[turn]), control(END_THINK)]
    return joined(result)


def without_last_header(segments: Sequence[Segment]) -> list[Segment]:
    """Without the assistant header that opens the new turn."""
    return list(segments[: assistant_headers(segments)[-1]])
