"""Chat rows: a column of messages, with tools and options of the row's own.

Knows: where a row's messages, tools and options stand. Does not know: how messages are rendered (`chat`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from deepinfer_ray.chat.constraint import structured_outputs
from deepinfer_ray.chat.encoding import ChatEncoder, EncodedChat
from deepinfer_ray.chat.options import ChatOptions
from deepinfer_ray.errors import RowError
from deepinfer_ray.job import values
from deepinfer_ray.job.prompts import Ask, Asked, RowSize, own_sampling, split

CHAT_NAMES = frozenset(ChatOptions.model_fields)
"""Names in a sampling struct that are chat options."""

_REASONS = ("thinking", "reasoning_continuation")
"""Where a completion starts that reasons before it answers."""


@dataclass(frozen=True)
class ChatRules:
    """What holds for every chat row. context: tokens of prompt and completion. options: of rows without own.

    api_sampling: sample as the public API does: thinking rows at temperature 1 and top_p of at least 0.95,
    others at top_p 1 (spec/chat.md §10).
    """

    context: int
    options: Mapping[str, Any]
    api_sampling: bool = False
    top_p: float = 1.0
    """The job's, for `api_sampling`."""


class ChatPrompts:
    """A column of messages: a list of structs, or its JSON text."""

    def __init__(
        self,
        column: str,
        encoder: ChatEncoder,
        rules: ChatRules,
        limits: RowSize,
        *,
        sampling: str | None = None,
        chat: str | None = None,
        tools: str | None = None,
    ) -> None:
        self._column, self._encoder, self._rules, self._limits = column, encoder, rules, limits
        self._sampling, self._chat, self._tools = sampling, chat, tools

    def of(self, table: pa.Table) -> Ask:
        messages_of = values.getter(table[self._column])
        sampling_of = own_sampling(table, self._sampling)
        chat_of = _own(table, self._chat, lambda raw, name: values.mapping(raw, name, "bad_messages"))
        tools_of = _own(table, self._tools, lambda raw, name: values.structure(raw, name, "bad_messages"))

        def ask(row: int) -> Asked:
            raw = messages_of(row)
            self._limits.check(raw)
            if raw is None:
                raise RowError("null_prompt", f"column {self._column} is null")
            messages = values.structure(raw, self._column, "bad_messages")
            options, sampling = split(sampling_of(row), CHAT_NAMES)
            options |= chat_of(row) or {}
            tools = tools_of(row)
            if tools is not None:
                options["tools"] = tools
            return chat_asked(messages, options, sampling, self._encoder, self._rules)

        return ask


def chat_asked(
    messages: Any,
    own: Mapping[str, Any],
    sampling: Mapping[str, Any],
    encoder: ChatEncoder,
    rules: ChatRules,
) -> Asked:
    """What messages with options of their own ask for. Codes: bad_messages, bad_image, bad_schema."""
    options = ChatOptions.of_row({**rules.options, **own})
    chat = encoder.encode(messages, options)
    return Asked(
        chat.token_ids,
        lambda limit: _newest_turns(messages, options, encoder, limit),
        _api_sampling(sampling, chat.thinking, rules.top_p) if rules.api_sampling else dict(sampling),
        chat.parse,
        chat.default_max_tokens(rules.context),
        structured_outputs(chat, options),
        encoder.end_of_reasoning if chat.parse.start in _REASONS else (),
    )


def _own(table: pa.Table, column: str | None, read: Callable[[Any, str], Any]) -> Callable[[int], Any]:
    if column is None:
        return lambda row: None
    raw_of = values.getter(table[column])
    return lambda row: read(raw_of(row), column)


def _api_sampling(sampling: Mapping[str, Any], thinking: bool, top_p: float) -> dict[str, Any]:
    if not thinking:
        return {**sampling, "top_p": 1.0}
    asked = sampling.get("top_p", top_p)
    return {
        **sampling,
        "temperature": 1.0,
        "top_p": max(asked, 0.95) if isinstance(asked, int | float) else asked,
    }


def _newest_turns(messages: Any, options: ChatOptions, encoder: ChatEncoder, limit: int) -> np.ndarray:
    """The prompt without as many of the oldest turns as it takes; leading system messages stay.

    A turn is a user message and what follows it, so that what is left is a conversation. Raises `RowError`
    (`prompt_too_long`) when not even the last turn fits.
    """
    listed: Sequence[Any] = json.loads(messages) if isinstance(messages, str) else messages
    roles = [message["role"] for message in listed]
    turns = [index for index, role in enumerate(roles) if role == "user"]
    head = turns[0] if turns else 0
    kept: EncodedChat | None = None
    smallest = 0
    low, high = 1, len(turns) - 1  # the first turn that stays; a prompt grows with the turns it keeps
    while low <= high:
        middle = (low + high) // 2
        chat = encoder.encode([*listed[:head], *listed[turns[middle] :]], options)
        if len(chat.token_ids) <= limit:
            kept, high = chat, middle - 1
        else:
            smallest, low = len(chat.token_ids), middle + 1
    if kept is None:
        least = f"{smallest} tokens even with its last turn alone" if smallest else "one turn only"
        raise RowError(
            "prompt_too_long", f"the conversation has {least}, {limit} tokens are left for the prompt"
        )
    return kept.token_ids
