"""Chat rows: V4.1 prompt encoding and completion parsing (spec/chat.md).

Rendering, request rules and the stream parser are the `deepseek-recipe` package's; this package maps rows to
it, turns control tokens into ids without a way for user text to become one, and applies our policies.

tokens (spellings) → text (plain text to ids) → options, messages (rows to a request) → segments, encoding
(request to ids) and calls, parsing (completion to reasoning, content, tool calls).
"""
