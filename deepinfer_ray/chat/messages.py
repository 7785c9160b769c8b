"""Chat messages of a row, checked and brought into the form the renderer takes.

Knows: the message model of spec/chat.md §2 and the choices of §9. Does not know: how anything is rendered.

Every complaint is a `RowError("bad_messages")` (`bad_image` for images) that names the message and its field
and never quotes the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from deepinfer_ray.chat.tokens import IMAGE, TASKS
from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.errors import RowError

ROLES = ("system", "user", "assistant", "tool", "latest_reminder", "developer")
FIELDS = (
    *("role", "content", "name", "reasoning_content", "reasoning"),
    *("tool_calls", "tool_call_id", "prefix", "task"),
)
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image")


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages ready for the renderer, and what it has no field for.

    body: dicts of a Chat Completions body, one an input message. task: the quick instruction of the last
    message, if any. num_images: image parts in all messages.
    """

    body: list[dict[str, Any]]
    task: str | None
    num_images: int

    @property
    def last_user(self) -> int:
        """Index of the last user message or later system message; −1 without one.

        A turn that holds tool results alone does not count (spec/chat.md §3 step 6, §9).
        """
        return max(
            (i for i, m in enumerate(self.body) if m["role"] == "user" or (m["role"] == "system" and i > 0)),
            default=-1,
        )

    @property
    def assistants(self) -> list[tuple[int, dict[str, Any]]]:
        """(index, message) of every assistant message."""
        return [(i, m) for i, m in enumerate(self.body) if m["role"] == "assistant"]

    @property
    def ends_with_prefix(self) -> bool:
        """Whether the last message is to be continued."""
        return bool(self.body[-1].get("prefix"))


def read_messages(messages: object, *, images: bool, continue_final_message: bool = False) -> Messages:
    """Checked messages of a row: a list of dicts or its JSON text; null fields count as absent.

    images: whether image parts are accepted. Unknown fields are ignored unless they look like a misspelt one.
    """
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            _refuse(f"messages: a string that is no JSON ({error})")
    if messages is None or isinstance(messages, bytes | Mapping | str) or not isinstance(messages, Sequence):
        _refuse(f"messages: expected a list of messages, got {_kind(messages)}")
    if not messages:
        _refuse("messages: the list is empty; give at least one user message")
    reader = _Reader(images)
    body = [reader.message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    if continue_final_message:
        if body[-1]["role"] != "assistant":
            _refuse(f"messages[{len(body) - 1}].role: continue_final_message needs a final assistant message")
        body[-1]["prefix"] = True
    task = _take_task(body)
    _check_order(body, task)
    _check_tool_results(body)
    return Messages(body, task, reader.num_images)


class _Reader:
    """Reads messages one by one; counts images."""

    def __init__(self, images: bool) -> None:
        self.images = images
        self.num_images = 0

    def message(self, where: str, message: object) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            _refuse(f"{where}: expected an object with role and content, got {_kind(message)}")
        fields = self._fields(where, message)
        role = fields.get("role")
        if role is None:
            _refuse(f"{where}.role: missing; one of {', '.join(ROLES)}")
        if role not in ROLES:
            nearest = nearest_name(role, ROLES) if isinstance(role, str) else None
            hint = f"did you mean {nearest!r}?" if nearest else f"one of {', '.join(ROLES)}"
            _refuse(f"{where}.role: unknown role; {hint}")
        result: dict[str, Any] = {"role": "system" if role == "developer" else role}
        if role == "assistant":
            result |= self._assistant(where, fields)
        elif foreign := {"tool_calls", "reasoning_content", "reasoning", "prefix"} & fields.keys():
            _refuse(f"{where}.{min(foreign)}: only an assistant message may have it, this one is {role}")
        if role == "tool":
            result["tool_call_id"] = _string(f"{where}.tool_call_id", fields.get("tool_call_id"))
        elif "tool_call_id" in fields:
            _refuse(f"{where}.tool_call_id: only a tool message may have it, this one is {role}")
        needs_content = not (result.get("tool_calls") or result.get("prefix"))
        if needs_content and "content" not in message:
            _refuse(f"{where}.content: missing; a string, null or a list of parts")
        result["content"] = self._content(f"{where}.content", fields.get("content"), role)
        if "task" in fields:
            result["task"] = fields["task"]
        return result

    def _fields(self, where: str, message: Mapping[str, Any]) -> dict[str, Any]:
        if message.get("function_call") is not None:
            _refuse(f"{where}.function_call: the old form is not supported; use tool_calls")
        for name in message:
            nearest = None if name in FIELDS else nearest_name(str(name), FIELDS, cutoff=0.85)
            if nearest and message[name] is not None:
                _refuse(f"{where}.{name}: unknown field; did you mean {nearest!r}?")
        return {name: message[name] for name in FIELDS if message.get(name) is not None}

    def _assistant(self, where: str, fields: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if "reasoning_content" in fields and "reasoning" in fields:
            _refuse(f"{where}.reasoning: give reasoning or reasoning_content, not both")
        for name in ("reasoning_content", "reasoning"):
            if name in fields:
                result["reasoning_content"] = self._text(f"{where}.{name}", fields[name])
        prefix = fields.get("prefix", False)
        if not isinstance(prefix, bool):
            _refuse(f"{where}.prefix: must be true or false, got {_kind(prefix)}")
        calls = fields.get("tool_calls", ())
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            _refuse(f"{where}.tool_calls: expected a list, got {_kind(calls)}")
        if calls:
            if prefix:
                _refuse(f"{where}.tool_calls: a prefix message cannot have tool calls")
            where = f"{where}.tool_calls"
            result["tool_calls"] = [_tool_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]
        if prefix:
            result["prefix"] = True
        return result

    def _content(self, where: str, content: object, role: str) -> str | list[dict[str, Any]]:
        if content is None:
            return ""
        if isinstance(content, str):
            return self._text(where, content)
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            _refuse(f"{where}: expected a string or a list of parts, got {_kind(content)}")
        return [self._part(f"{where}[{i}]", part, role) for i, part in enumerate(content)]

    def _part(self, where: str, part: object, role: str) -> dict[str, Any]:
        if not isinstance(part, Mapping):
            _refuse(f"{where}: expected an object with a type, got {_kind(part)}")
        kind = part.get("type")
        if kind in TEXT_PARTS:
            return {"type": "text", "text": self._text(f"{where}.text", part.get("text"))}
        if kind not in IMAGE_PARTS:
            known = f"text parts are {', '.join(TEXT_PARTS)}, images {', '.join(IMAGE_PARTS)}"
            _refuse(f"{where}.type: unknown kind of part; {known}")
        if role not in ("system", "developer", "user", "tool"):
            raise RowError("bad_image", f"{where}: a {role} message cannot hold an image")
        if not self.images:
            raise RowError("bad_image", f"{where}: this build takes no images yet; remove the image part")
        self.num_images += 1
        source = next(
            (part[name] for name in ("image_url", "image", "url") if part.get(name) is not None), None
        )
        if isinstance(source, str):
            source = {"url": source}
        if not isinstance(source, Mapping) or not isinstance(source.get("url"), str):
            raise RowError("bad_image", f"{where}: an image needs a url (http(s) or data URL)")
        if not source["url"].startswith(("http://", "https://", "data:")):
            raise RowError("bad_image", f"{where}: the image's url is neither an http(s) nor a data URL")
        detail = source.get("detail") or part.get("detail")
        image = {"url": source["url"]} | ({"detail": detail} if detail else {})
        return {"type": "image_url", "image_url": image}

    def _text(self, where: str, text: object) -> str:
        text = _string(where, text)
        if IMAGE in text:
            _refuse(
                f"{where}: the text spells the image placeholder {IMAGE}; remove it or send an image part"
            )
        return text


def _tool_call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(f"{where}: expected an object with id and function, got {_kind(call)}")
    if call.get("type") not in (None, "function"):
        _refuse(f"{where}.type: only function calls are supported")
    function = call.get("function")
    if not isinstance(function, Mapping):
        _refuse(f"{where}.function: expected an object with name and arguments, got {_kind(function)}")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            _refuse(f"{where}.function.arguments: cannot be written as JSON ({error})")
    return {
        "id": _string(f"{where}.id", call.get("id")),
        "type": "function",
        "function": {
            "name": _string(f"{where}.function.name", function.get("name")),
            "arguments": _string(f"{where}.function.arguments", arguments),
        },
    }


def _take_task(body: list[dict[str, Any]]) -> str | None:
    """Removes the tasks; only the last message's counts, and only where a generation can follow."""
    tasks = {i: message.pop("task") for i, message in enumerate(body) if "task" in message}
    for i, task in tasks.items():
        where, role = f"messages[{i}].task", body[i]["role"]
        if not isinstance(task, str) or task not in TASKS:
            _refuse(f"{where}: unknown task; one of {', '.join(TASKS)}")
        if role != ("assistant" if task == "title" and role == "assistant" else "user"):
            _refuse(f"{where}: a {role} message cannot have this task; put it on the last user message")
        if i != len(body) - 1 or body[i].get("prefix"):
            _refuse(f"{where}: only the last message may have a task")
    return next(iter(tasks.values()), None)


def _check_order(body: list[dict[str, Any]], task: str | None) -> None:
    """Orders of roles on which the reference encoders disagree are refused (spec/chat.md §9)."""
    last = len(body) - 1
    for i, message in enumerate(body):
        where, role = f"messages[{i}]", message["role"]
        if message.get("prefix") and i != last:
            _refuse(f"{where}.prefix: only the last message can be a prefix to continue")
        if role == "assistant" and i and body[i - 1]["role"] == "assistant":
            _refuse(
                f"{where}.role: two assistant messages in a row; merge them or put a user message between"
            )
        if role == "latest_reminder" and not (i == 0 or (i == 1 and body[0]["role"] == "system")):
            _refuse(f"{where}.role: a reminder may only follow the leading system message")
    if body[last]["role"] == "assistant" and not body[last].get("prefix") and task is None:
        _refuse(f"messages[{last}].role: an assistant message is last; add a user message or set its prefix")
    if body[last]["role"] == "latest_reminder" or (last == 0 and body[0]["role"] == "system"):
        _refuse(f"messages[{last}].role: nothing to answer; end with a user, tool or later system message")


def _check_tool_results(body: list[dict[str, Any]]) -> None:
    """Every call has exactly one result, in the tool messages directly after it."""
    caller, open_ids = -1, set[str]()
    for i, message in enumerate(body):
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                after = f"messages[{caller}]" if caller >= 0 else "any message"
                _refuse(f"messages[{i}].tool_call_id: answers no open tool call of {after}")
            open_ids.remove(message["tool_call_id"])
        elif open_ids:
            break
        elif message["role"] == "assistant":
            caller, open_ids = i, {call["id"] for call in message.get("tool_calls", ())}
            if len(open_ids) != len(message.get("tool_calls", ())):
                _refuse(f"messages[{i}].tool_calls: two calls have the same id")
    if open_ids:
        _refuse(f"messages[{caller}].tool_calls: {len(open_ids)} call(s) have no tool message right after")


def _string(where: str, value: object) -> str:
    if value is None:
        _refuse(f"{where}: missing")
    if not isinstance(value, str):
        _refuse(f"{where}: expected a string, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(f"{where}: no valid Unicode, it holds a lone surrogate")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _refuse(message: str) -> NoReturn:
    raise RowError("bad_messages", message)
