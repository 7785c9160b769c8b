"""Completions to reasoning, content and tool calls (spec/chat.md §8).

Knows: how the library's stream parser is driven, and our policies for malformed output.
Does not know: prompts, rows, sampling.

From ids, markers are the control tokens themselves: the same characters written with ordinary tokens are
text. From text, markers are recognised by spelling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from deepseek_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    Conversation,
    ConversationRequest,
    InferenceChunk,
    InferenceFinishReason,
    ModelVersion,
    ParsingOptions,
    SpecialTokens,
    StreamProcessor,
    ThinkingInitialStage,
    Tokenizer,
)
from tokenizers import Tokenizer as TextTokenizer

from deepinfer_ray.chat.calls import ToolCall, read_calls, unwrapped
from deepinfer_ray.chat.options import ParseOptions
from deepinfer_ray.chat.text import TextEncoder
from deepinfer_ray.chat.tokens import DSML, EOS, IMAGE, THINK
from deepinfer_ray.errors import ConfigError

STAGES = {
    "chat": None,
    "thinking": ThinkingInitialStage.ReasoningStart,
    "reasoning_continuation": ThinkingInitialStage.ReasoningContinuation,
    "content_continuation": ThinkingInitialStage.ContentContinuation,
}
"""`ParseOptions.start` → the library's initial stage."""

_SPECIAL_TOKENS = SpecialTokens(image=IMAGE)


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """finish_reason: the engine's, or `tool_calls` when it stopped and a call was recognised.

    incomplete: an unfinished call was dropped. reasoning_tokens: generated before the reasoning ended; `None`
    when only text was parsed.
    """

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    incomplete: bool = False
    reasoning_tokens: int | None = None

    def tool_calls_json(self, scope: str) -> str | None:
        """The calls as the `tool_calls` of an assistant message (JSON list); `None` without calls.

        The model writes no call ids; they derive from `scope` (the row id), so a rerun gives the same row.
        """
        if not self.tool_calls:
            return None
        calls = [
            {
                "id": "call_" + hashlib.sha256(f"{scope}\x1f{i}".encode(errors="replace")).hexdigest()[:24],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(self.tool_calls)
        ]
        return json.dumps(calls, ensure_ascii=False)

    def __repr__(self) -> str:  # never the text itself
        return f"ParsedCompletion({self.finish_reason}, {len(self.tool_calls)} tool calls)"


class CompletionParser:
    """Parses the generated ids of one checkpoint's model."""

    def __init__(self, text: TextEncoder) -> None:
        ids = {spelling: text.control_id(spelling) for spelling in (EOS, THINK, DSML)}
        if missing := [spelling for spelling, token_id in ids.items() if token_id is None]:
            raise ConfigError(
                f"tokenizer.json lacks the control tokens {', '.join(missing)}, so completions of this "
                "checkpoint cannot be parsed as chat"
            )
        self._eos_id, self._think_id, self._dsml_id = ids[EOS], ids[THINK], ids[DSML]
        self._tokenizer_json = text.tokenizer_json
        self._tokenizer = Tokenizer.from_str(text.tokenizer_json)

    def parse_ids(
        self, token_ids: Sequence[int] | np.ndarray, options: ParseOptions, finish_reason: str = "stop"
    ) -> ParsedCompletion:
        """token_ids: the generated ids; one trailing EOS is stripped. finish_reason: the engine's."""
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        if ids and ids[-1] == self._eos_id:
            ids.pop()
        if options.start == "thinking" and ids and ids[0] == self._think_id:
            ids.pop(0)
        message, reason, reasoning_tokens = _run(
            [InferenceChunk.tokens(ids)] if ids else [], options, finish_reason, self._tokenizer
        )
        pieces = self._pieces(ids) if message.get("tool_calls") else []
        parsed = _result(message, reason, pieces, options, finish_reason)
        if _lost_json(parsed, options):
            return self.parse_ids(ids, options.model_copy(update={"parse_json_output": False}), finish_reason)
        return replace(parsed, reasoning_tokens=reasoning_tokens)

    def _pieces(self, ids: list[int]) -> list[str]:
        """Texts between the DSML markers."""
        pieces: list[list[int]] = [[]]
        for token_id in ids:
            if token_id == self._dsml_id:
                pieces.append([])
            else:
                pieces[-1].append(token_id)
        return [self._decoder.decode(piece, skip_special_tokens=False) for piece in pieces]

    @cached_property
    def _decoder(self) -> TextTokenizer:
        """Only completions with calls need it."""
        return TextTokenizer.from_str(self._tokenizer_json)


def parse_text(text: str, options: ParseOptions, finish_reason: str = "stop") -> ParsedCompletion:
    """A completion of which only the text is left (without EOS); markers are found by spelling."""
    if options.start == "thinking":
        text = text.removeprefix(THINK)
    message, reason, _ = _run([InferenceChunk.text(text)] if text else [], options, finish_reason, None)
    parsed = _result(message, reason, text.split(DSML), options, finish_reason)
    if _lost_json(parsed, options):
        return parse_text(text, options.model_copy(update={"parse_json_output": False}), finish_reason)
    return parsed


def _run(
    chunks: list[InferenceChunk], options: ParseOptions, finish_reason: str, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], str, int | None]:
    """(message, finish reason, reasoning tokens) of the library's parser."""
    conversation = Conversation([], thinking_mode=options.start != "chat")
    request = ConversationRequest(conversation, ModelVersion.DeepseekV41Flash)
    processor = StreamProcessor(
        ChatCompletionRequest.chunk_generator(request, "", ""),
        ParsingOptions(
            parse_tool_calls=options.parse_tool_calls,
            starts_in_tool_calls=options.starts_in_tool_calls,
            parse_json_output=options.parse_json_output,
            thinking_initial_stage=STAGES[options.start],
            stop_sequences=list(options.stop),
            special_tokens=_SPECIAL_TOKENS,
        ),
        tokenizer,
    )
    end = InferenceFinishReason.Length if finish_reason == "length" else InferenceFinishReason.Stop
    response = ChatCompletionResponse("", "", 0, 0, 0)
    for chunk in [*chunks, InferenceChunk.finish(end)]:
        for update in processor.push(chunk):
            response.accumulate(update)
        if processor.finished:  # a stop string was met
            break
    for update in processor.finish():
        response.accumulate(update)
    body = json.loads(response.to_json())
    choice = body["choices"][0]
    details = body["usage"].get("completion_tokens_details") or {}
    return choice["message"], choice["finish_reason"], details.get("reasoning_tokens", 0)


def _result(
    message: dict[str, Any], reason: str, pieces: Sequence[str], options: ParseOptions, finish_reason: str
) -> ParsedCompletion:
    """The library's answer under our policies."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [ToolCall(function["name"], function["arguments"]) for function in functions]
    incomplete = False
    if calls:
        block = read_calls(pieces, starts_inside=options.starts_in_tool_calls)
        incomplete = block.incomplete
        if not block.regular:
            calls = block.calls
        calls = [unwrapped(call, options.schemas.get(call.name)) for call in calls]
    if finish_reason not in ("stop", "length") or (reason == "tool_calls" and not calls):
        reason = finish_reason
    content = message.get("content") or ""
    return ParsedCompletion(
        reasoning=message.get("reasoning_content") or "",
        content=content.strip(" ") if options.parse_json_output else content,
        tool_calls=tuple(calls),
        finish_reason=reason,
        incomplete=incomplete,
    )


def _lost_json(parsed: ParsedCompletion, options: ParseOptions) -> bool:
    """Whether JSON mode blanked the whole answer because it holds no JSON; then the text is kept."""
    return options.parse_json_output and not parsed.content
