"""Rows of an OpenAI batch file: a request's url and body become what a row asks for.

Knows: the request bodies of `/v1/chat/completions` and `/v1/completions`. Does not know: results, files.

Body keys are sampling parameters, under OpenAI's names and ours, and chat options; `HARMLESS` ones have
nothing to say here and are left unread; any other key is the row's error, so that no wish is dropped in
silence.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from deepinfer_ray.chat.encoding import ChatEncoder
from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.errors import RowError
from deepinfer_ray.job import jsonl, values
from deepinfer_ray.job.chat_rows import CHAT_NAMES, ChatRules, chat_asked
from deepinfer_ray.job.locate import FoundFiles
from deepinfer_ray.job.prompts import Ask, Asked, RowSize, newest, split

CUSTOM_ID, METHOD, URL, BODY = "custom_id", "method", "url", "body"
CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"

HARMLESS = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Keys that change nothing about the tokens of an offline run."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Keys that may only have the value that asks for nothing."""

_SAMPLING = frozenset(SamplingParams.model_fields) - {"logprobs"}
_CHAT_KEYS = frozenset(
    {"messages", "chat_template_kwargs", "max_completion_tokens", "logprobs", "top_logprobs"}
)
_COMPLETION_KEYS = frozenset({"prompt", "logprobs"})
_SNIFFED_LINES = 100


def is_batch(found: FoundFiles) -> bool:
    """Whether the input is an OpenAI batch: JSON lines whose first object has `custom_id` and a `body`."""
    if not found.files or found.files[0].kind != "jsonl":
        return False
    file = found.files[0]
    for line in itertools.islice(
        jsonl.read_lines(file.filesystem, file.path, jsonl.Block(0, 1)), _SNIFFED_LINES
    ):
        row = jsonl.parse(line)
        if not isinstance(row, RowError):
            return CUSTOM_ID in row and isinstance(row.get(BODY), dict)
    return False


class BatchPrompts:
    """Requests of a batch file."""

    def __init__(self, encoder: ChatEncoder, rules: ChatRules, size: RowSize, max_tokens: int) -> None:
        """max_tokens: default of `/v1/completions`."""
        self._encoder, self._rules, self._size, self._max_tokens = encoder, rules, size, max_tokens

    def of(self, table: pa.Table) -> Ask:
        columns = {
            name: values.getter(table[name]) if name in table.column_names else _absent
            for name in (METHOD, URL, BODY)
        }

        def ask(row: int) -> Asked:
            method, url = (values.plain_text(columns[name](row), name) for name in (METHOD, URL))
            if method is not None and method != "POST":
                raise RowError("wrong_type", f"the method is {method!r}, a batch request is a POST")
            raw = columns[BODY](row)
            self._size.check(raw)
            body = values.mapping(raw, BODY, "wrong_type")
            if url == CHAT_URL:
                return self._chat(body)
            if url == COMPLETIONS_URL:
                return self._completion(body)
            given = "missing" if url is None else repr(url)
            raise RowError("wrong_type", f"the url is {given}, it must be {CHAT_URL} or {COMPLETIONS_URL}")

        return ask

    def _chat(self, body: Mapping[str, Any]) -> Asked:
        check_keys(body, _SAMPLING | CHAT_NAMES | _CHAT_KEYS)
        if "messages" not in body:
            raise RowError("null_prompt", "the body has no messages")
        options, rest = split(body, CHAT_NAMES)
        extra = rest.pop("chat_template_kwargs", {})
        if not isinstance(extra, Mapping):
            raise RowError("bad_messages", "chat_template_kwargs is no object")
        options |= {"thinking" if name == "enable_thinking" else name: value for name, value in extra.items()}
        sampling = {name: value for name, value in rest.items() if name in _SAMPLING}
        if (wanted := _one_length(body)) is not None:
            sampling["max_tokens"] = wanted
        sampling |= _chat_logprobs(rest)
        return chat_asked(body["messages"], options, sampling, self._encoder, self._rules)

    def _completion(self, body: Mapping[str, Any]) -> Asked:
        check_keys(body, _SAMPLING | _COMPLETION_KEYS)
        ids, is_text = self._prompt(body.get("prompt"))
        sampling = {name: value for name, value in body.items() if name in _SAMPLING or name == "logprobs"}
        return Asked(
            ids,
            lambda limit: newest(ids, limit, keep_first=is_text),
            sampling,
            max_tokens=self._max_tokens,
        )

    def _prompt(self, prompt: Any) -> tuple[np.ndarray, bool]:
        """(ids, whether they were a text)."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if prompt is None:
            raise RowError("null_prompt", "the body has no prompt")
        if isinstance(prompt, str):
            if not prompt:
                raise RowError("empty_prompt", "the prompt is an empty string")
            return self._encoder.text.encode_prompt(prompt), True
        if not isinstance(prompt, list):
            raise RowError("wrong_type", "the prompt is neither a string nor a list of token ids")
        if prompt and isinstance(prompt[0], str | list):
            raise RowError(
                "wrong_type", f"the request has {len(prompt)} prompts; give each a line of its own"
            )
        return values.checked_list(prompt, "prompt"), False


def check_keys(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises `RowError` (`bad_sampling_params`) for a key that would be dropped."""
    for name, value in body.items():
        if name in HARMLESS or name in known:
            continue
        if name in _FIXED:
            if value not in _FIXED[name]:
                raise RowError("bad_sampling_params", f"body.{name} is not supported here; leave it out")
            continue
        nearest = nearest_name(name, known)
        hint = f"did you mean {nearest!r}?" if nearest else "leave it out"
        raise RowError("bad_sampling_params", f"body.{name} is unknown; {hint}")


def _one_length(body: Mapping[str, Any]) -> Any:
    both = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    if len(both) == 2 and both[0] != both[1]:
        raise RowError("bad_sampling_params", "max_tokens and max_completion_tokens differ; give one of them")
    return both[0] if both else None


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise RowError(
            "bad_sampling_params", "logprobs of a chat is true or false; top_logprobs is the number"
        )
    if top is not None and not wanted:
        raise RowError("bad_sampling_params", "top_logprobs needs logprobs true")
    return {"logprobs": top or 0} if wanted else {}


def _absent(row: int) -> None:
    return None
