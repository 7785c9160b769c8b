"""A result's text columns: as the engine gave it, or parsed into reasoning, answer and tool calls.

Knows: `RequestResult` and the chat parser. Does not know: parts, prompts, other columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_ray.chat.options import ParseOptions
from deepinfer_ray.chat.parsing import CompletionParser
from deepinfer_ray.engine.request import FinishReason, RequestResult

_LAST_TOKEN_CHARS = 256
"""What may follow a stop string within the token that completed it."""


class CompletionReader:
    """Reads results of one checkpoint. parser: None when no row of the job is a chat."""

    def __init__(self, parser: CompletionParser | None = None) -> None:
        self._parser = parser

    def columns(
        self, result: RequestResult, parse: ParseOptions | None, stops: Sequence[str], scope: str
    ) -> dict[str, Any]:
        """completion, reasoning, tool_calls and finish_reason. scope: what tool call ids derive from.

        parse: None leaves the completion as it is. A result that ended in an error is not parsed.
        """
        reason = str(result.finish_reason)
        if parse is None or self._parser is None or reason == FinishReason.ERROR:
            return {"completion": result.text, "finish_reason": reason}
        parsed = self._parser.parse_ids(result.token_ids, parse, reason)
        reasoning, content = parsed.reasoning, parsed.content
        if stops and reason == FinishReason.STOP and not parsed.tool_calls:
            if content:
                content = _ended_like(content, result.text, stops)
            else:
                reasoning = _ended_like(reasoning, result.text, stops)
        return {
            "completion": content,
            "reasoning": reasoning if parse.start != "chat" or reasoning else None,
            "tool_calls": parsed.tool_calls_json(scope),
            "finish_reason": parsed.finish_reason,
        }


def _ended_like(piece: str, text: str, stops: Sequence[str]) -> str:
    """`piece`, the end of what the ids say, without what the engine cut from `text` at a stop string."""
    least = max(0, len(piece) - max(map(len, stops)) - _LAST_TOKEN_CHARS)
    for length in range(len(piece), least, -1):
        if text.endswith(piece[:length]):
            return piece[:length]
    return piece if least or not piece else ""
