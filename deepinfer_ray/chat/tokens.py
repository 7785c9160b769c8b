"""Spellings of the control tokens of the V4.1 prompt format (spec/chat.md §1).

Knows: spellings. Does not know: ids; those come from the checkpoint's own tokenizer.
The bars are U+FF5C, the gaps inside BOS, EOS and PAD are U+2581.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"

TASKS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""Quick-instruction tasks and their tokens (spec/chat.md §7)."""

FIM = ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")

CHAT_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML, LATEST_REMINDER)
"""What a tokenizer must hold before it can encode any chat row."""

GROUNDING = tuple(f"<｜{end}{name}｜>" for name in ("polygon", "point", "box", "ref") for end in ("", "/"))

CONTROL_TOKENS = (*CHAT_TOKENS, PAD, IMAGE, *TASKS.values(), *FIM, *GROUNDING)
"""Every spelling that plain text must never turn into an id of its own."""
