"""Chat rows to token ids (spec/chat.md §2–7, §10).

Knows: how a row's messages and options become the library's request, and where the prompt it renders must be
edited. Does not know: the wording of the prompt (the library renders it), completions, sampling.

The renderer tells which characters are control tokens; those become their ids, and every text between two of
them is encoded as one piece without the added vocabulary. User text therefore never becomes a control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from deepseek_recipe import (
    ChatCompletionRequest,
    Conversation,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV41Encoding,
    ModelVersion,
    SpecialTokens,
    UserMessage,
)

from deepinfer_ray.chat.messages import Messages, read_messages
from deepinfer_ray.chat.options import ChatOptions, Effort, ParseOptions
from deepinfer_ray.chat.parsing import STAGES
from deepinfer_ray.chat.segments import (
    Segment,
    assistant_headers,
    control,
    joined,
    keep_reasoning,
    split_prompt,
    without_last_header,
)
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.chat.tokens import CHAT_TOKENS, END_THINK, IMAGE, TASKS
from deepinfer_ray.errors import ConfigError, RowError

MODEL = "DeepSeek-V4.1-Flash"
DEFAULT_EFFORT = 75
"""What an absent effort stands for (spec/chat.md §4.1)."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt before tokenization.

    parse: how the completion must be read. constraint: (kind, schema) that constrained decoding could enforce
    (`json`, `regex`, `tool_call`, `tool_call_required`), or `None`. image_sources: the library's image
    sources, in the order of their placeholders. continues: the completion goes on with a message that the row
    began.
    """

    segments: Sequence[Segment]
    parse: ParseOptions
    thinking: bool
    effort: Effort
    constraint: tuple[str, str] | None = None
    image_sources: tuple[Any, ...] = ()
    continues: bool = False

    @property
    def text(self) -> str:
        """The prompt with control tokens spelled out; for showing, not for encoding."""
        return "".join(segment.text for segment in self.segments)

    def __repr__(self) -> str:  # never the prompt itself
        return f"RenderedChat({len(self.segments)} segments, thinking={self.thinking})"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChat:
    """token_ids: int32 [n], BOS first; one placeholder id an image. The rest is `RenderedChat`'s."""

    token_ids: np.ndarray
    parse: ParseOptions
    thinking: bool
    effort: Effort
    constraint: tuple[str, str] | None = None
    image_sources: tuple[Any, ...] = ()
    continues: bool = False

    def default_max_tokens(self, context: int) -> int:
        """Completion length when neither row nor job names one; for prompts without images."""
        return default_max_tokens(self.thinking, self.effort, len(self.token_ids), context)

    def __repr__(self) -> str:  # never the prompt itself
        return f"EncodedChat({len(self.token_ids)} tokens, thinking={self.thinking})"


class ChatEncoder:
    """Encodes chat rows for one checkpoint's tokenizer.

    images: accept image parts (one placeholder token each; expanding it is the vision path's work).
    Raises `ConfigError` naming the control tokens the tokenizer lacks.
    """

    def __init__(self, text: TextEncoder, *, images: bool = False) -> None:
        needed = (*CHAT_TOKENS, IMAGE) if images else CHAT_TOKENS
        missing = [spelling for spelling in needed if text.control_id(spelling) is None]
        if missing:
            raise ConfigError(
                f"tokenizer.json lacks the control tokens {', '.join(missing)}, so this checkpoint cannot "
                "take chat messages; use prompts or token ids, or a tokenizer with these tokens"
            )
        self.text = text
        self.images = images
        special_tokens = SpecialTokens(image=IMAGE)
        self._renderer = DeepseekV41Encoding().with_special_tokens(special_tokens)
        self._conversion = ConversionOptions().with_special_tokens(special_tokens)

    @classmethod
    def load(cls, path: str | Path, *, images: bool = False) -> ChatEncoder:
        """From a checkpoint directory or a `tokenizer.json`."""
        return cls(TextEncoder.load(path), images=images)

    @property
    def end_of_reasoning(self) -> tuple[int, ...]:
        """The token behind which the answer begins."""
        token = self.text.control_id(END_THINK)
        return () if token is None else (token,)

    def encode(self, messages: object, options: ChatOptions | None = None) -> EncodedChat:
        """Token ids of a row's messages (a list of dicts or its JSON text).

        Raises `RowError`: `bad_messages` naming message and field, `bad_image`.
        """
        chat = self.render(messages, options)
        texts = iter(self.text.encode_texts([s.text for s in chat.segments if not s.is_control]))
        pieces = [self._control(s.text) if s.is_control else next(texts) for s in chat.segments]
        return EncodedChat(
            np.concatenate(pieces),
            chat.parse,
            chat.thinking,
            chat.effort,
            chat.constraint,
            chat.image_sources,
            chat.continues,
        )

    def render(self, messages: object, options: ChatOptions | None = None) -> RenderedChat:
        """The prompt of a row's messages; same errors as `encode`."""
        options = options or ChatOptions()
        row = read_messages(
            messages, images=self.images, continue_final_message=options.continue_final_message
        )
        request = self._convert(row, options)
        prompt = self._renderer.render_conversation(request.conversation)
        segments = split_prompt(prompt.prompt, prompt.special_ranges)
        segments = self._with_effort(segments, options)
        segments = self._with_reasoning(segments, row, options)
        parse = _parse_options(request, row, options)
        if row.task is not None:
            segments = joined([*segments, control(TASKS[row.task])])
        constraint = request.inference_options.output_constraint
        return RenderedChat(
            segments,
            parse,
            options.thinks,
            options.reasoning_effort,
            (constraint.kind, constraint.schema) if constraint else None,
            tuple(prompt.image_sources),
            row.ends_with_prefix,
        )

    def _convert(self, row: Messages, options: ChatOptions) -> ConversationRequest:
        """The library's request; it applies the rules of tools, tool_choice and response_format."""
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": row.body,
            "thinking": {"type": "enabled" if options.thinks else "disabled"},
        }
        if options.thinks and isinstance(options.reasoning_effort, str):
            body["reasoning_effort"] = options.reasoning_effort
        if options.active_tools:
            body |= {"tools": _named_parameters(options.active_tools), "tool_choice": options.tool_choice}
        if options.response_format is not None:
            body["response_format"] = options.response_format
        try:
            return ChatCompletionRequest(body).convert(self._conversion)
        except ConversionError as error:
            raise RowError("bad_messages", f"messages, tools or format: {_reason(error)}") from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RowError("bad_messages", f"messages, tools or format: {error}") from None

    def _with_effort(self, segments: Sequence[Segment], options: ChatOptions) -> list[Segment]:
        """Writes an integer effort, which the library has no name for, into its effort line."""
        effort = options.reasoning_effort
        if not options.thinks or not isinstance(effort, int):
            return list(segments)
        bos, system, text, *rest = segments
        default = self._effort_line
        if not text.text.startswith(default):
            raise ConfigError("deepseek-recipe renders an unknown effort line; install the pinned version")
        line = default.replace(str(DEFAULT_EFFORT), str(effort))
        return [bos, system, Segment(line + text.text.removeprefix(default)), *rest]

    @cached_property
    def _effort_line(self) -> str:
        """The text between `<System>` and `<User>` of a thinking prompt without a system message."""
        prompt = self._renderer.render_conversation(Conversation([UserMessage("")]))
        _bos, _system, line, *_rest = split_prompt(prompt.prompt, prompt.special_ranges)
        if line.text.count(str(DEFAULT_EFFORT)) != 1:
            raise ConfigError("deepseek-recipe renders an unknown effort line; install the pinned version")
        return line.text

    def _with_reasoning(
        self, segments: Sequence[Segment], row: Messages, options: ChatOptions
    ) -> list[Segment]:
        """Restores the reasoning that the row keeps but the library drops, and closes a task's turn.

        Kept without tools: all of it under `drop_thinking=False`, else what follows the last user message,
        where a turn of tool results alone is no user message (spec/chat.md §9).
        """
        headers = len(assistant_headers(segments))
        if headers != len(row.assistants) + (not row.ends_with_prefix):
            raise ConfigError("deepseek-recipe renders unknown turn headers; install the pinned version")
        first_kept = row.last_user if options.drop_thinking else -1
        if options.thinks and not options.active_tools:
            kept = {
                turn: message.get("reasoning_content", "")
                for turn, (index, message) in enumerate(row.assistants)
                if index > first_kept
            }
            segments = keep_reasoning(segments, kept)
        if row.task not in (None, "action"):
            segments = without_last_header(segments)
        return list(segments)

    def _control(self, spelling: str) -> np.ndarray:
        token_id = self.text.control_id(spelling)
        if token_id is None:
            raise RowError(
                "bad_messages", f"this checkpoint's tokenizer lacks {spelling}, which the row needs"
            )
        return np.array([token_id], np.int32)


def default_max_tokens(thinking: bool, effort: Effort, prompt_tokens: int, context: int) -> int:
    """Completion length of a chat row whose `max_tokens` is unset (spec/chat.md §10).

    8192 without thinking, 65536 with it, 131072 at effort `max` (`ultra`, 100); at most the rest of the
    context, at least 1. prompt_tokens counts an image with its whole span.
    """
    top = thinking and effort in ("max", "ultra", 100)
    conversation = Conversation([], thinking_mode=thinking, reasoning_effort="max" if top else None)
    request = ConversationRequest(conversation, ModelVersion.DeepseekV41Flash)
    return request.resolve_max_tokens(min(prompt_tokens, context), context)


def _parse_options(request: ConversationRequest, row: Messages, options: ChatOptions) -> ParseOptions:
    if row.task is not None:  # answered by plain content (spec/chat.md §7)
        return ParseOptions(start="chat", parse_tool_calls=False)
    parsing = request.parsing_options
    stage = parsing.thinking_initial_stage
    return ParseOptions(
        start=next(start for start, known in STAGES.items() if known == stage),
        parse_tool_calls=parsing.parse_tool_calls,
        parse_json_output=parsing.parse_json_output,
        starts_in_tool_calls=parsing.starts_in_tool_calls,
        schemas={
            tool["function"]["name"]: tool["function"].get("parameters") for tool in options.active_tools
        },
    )


def _named_parameters(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose empty `parameters` are absent: the library renders both alike but refuses the former."""

    def named(tool: dict[str, Any]) -> dict[str, Any]:
        declared = tool.get("function")
        if not isinstance(declared, dict) or declared.get("parameters"):
            return tool
        return {**tool, "function": {k: v for k, v in declared.items() if k != "parameters"}}

    return [named(tool) for tool in tools]


def _reason(error: ConversionError) -> str:
    """The library's sentence out of its JSON error body."""
    return str(json.loads(error.body)["error"]["message"])
