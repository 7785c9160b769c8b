"""What an OpenAI batch gives back: `results.jsonl` and `errors.jsonl`, made from the committed parts.

Knows: the response bodies of both urls. Does not know: how rows were run. Both files follow from the parts
alone, so they are the same however often a job was resumed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer

from deepinfer_ray.engine.detokenizer import TokenTable
from deepinfer_ray.job.openai_rows import BODY, CHAT_URL, CUSTOM_ID, URL
from deepinfer_ray.job.prepare import RowSetup
from deepinfer_ray.job.schema import COMPLETION_COLUMNS, ROW_COLUMNS
from deepinfer_ray.job.store import Store

RESULTS, ERRORS = "results.jsonl", "errors.jsonl"

Row = Mapping[str, Any]
"""A row of a part by column, without the prefix."""

Tables = Callable[[list[str]], Iterable[pa.Table]]
"""Column names → the tables of all parts, in order, with these columns."""


class TokenTexts:
    """Token ids as the texts that a response's logprobs name."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        self._json, self._vocab_size = tokenizer_json, vocab_size

    @cached_property
    def _pieces(self) -> tuple[bytes, ...]:
        return TokenTable.of(Tokenizer.from_str(self._json), self._vocab_size).pieces

    def entry(self, token: int, logprob: float = 0.0) -> dict[str, Any]:
        piece = self._pieces[token]
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


class ResultFiles:
    """Writes both files. created: seconds since 1970 in every response. prefix: of output columns."""

    def __init__(self, store: Store, texts: TokenTexts, *, created: int, n: int, prefix: str = "") -> None:
        self._store, self._texts, self._created, self._n, self._prefix = store, texts, created, n, prefix

    def there(self) -> bool:
        """Whether a run that completed has written them."""
        return all(self._store.exists(name) for name in (RESULTS, ERRORS))

    def clear(self) -> None:
        """Before rows are run: the files speak of a complete job only."""
        for name in (RESULTS, ERRORS):
            self._store.take(name)

    def write(self, tables: Tables) -> tuple[int, int]:
        """(results, errors). Reads every part twice, holds one at a time. Raises `OutputError`."""
        ours = [self._prefix + name for name in ("row_id", "error", "error_code")]
        errors = self._write(ERRORS, tables([CUSTOM_ID, *ours]), self.error_line)
        every = [self._prefix + name for name in ROW_COLUMNS]
        return self._write(RESULTS, tables([CUSTOM_ID, URL, BODY, *every]), self.result_line), errors

    def _write(
        self,
        name: str,
        tables: Iterable[pa.Table],
        line: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    ) -> int:
        written = 0

        def fill(file: Any) -> None:
            nonlocal written
            for row in _rows(tables, self._prefix):
                made = line(row)
                if made is not None:
                    file.write(json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
                    written += 1

        self._store.write(name, fill)
        return written

    def error_line(self, row: Row) -> dict[str, Any] | None:
        """The line of a row that failed, None for the others."""
        if row["error_code"] is None:
            return None
        return {
            "id": f"batch_req_{_hash(row)}",
            "custom_id": row[CUSTOM_ID],
            "response": None,
            "error": {"code": row["error_code"], "message": row["error"]},
        }

    def result_line(self, row: Row) -> dict[str, Any] | None:
        """The line of a row that ran, None for the others."""
        if row["error_code"] is not None:
            return None
        chat = row.get(URL) == CHAT_URL
        many = self._completions(row)
        choices = [self._choice(one, index, chat) for index, one in enumerate(many)]
        prompt, completion = row["prompt_tokens"], sum(one["completion_tokens"] for one in many)
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{_hash(row)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": json.loads(row[BODY]).get("model"),
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": sum(one["cached_tokens"] or 0 for one in many)},
            },
        }
        return {
            "id": f"batch_req_{_hash(row)}",
            "custom_id": row[CUSTOM_ID],
            "response": {"status_code": 200, "request_id": f"req_{_hash(row)}", "body": body},
            "error": None,
        }

    def _completions(self, row: Row) -> list[dict[str, Any]]:
        """A row's completion columns, one dict a completion."""
        if self._n == 1:
            return [{name: row[name] for name in COMPLETION_COLUMNS}]
        return [{name: row[name][i] for name in COMPLETION_COLUMNS} for i in range(self._n)]

    def _choice(self, one: Row, index: int, chat: bool) -> dict[str, Any]:
        if not chat:
            return {
                "index": index,
                "text": one["completion"],
                "logprobs": self._completion_logprobs(one),
                "finish_reason": one["finish_reason"],
            }
        calls = None if one["tool_calls"] is None else json.loads(one["tool_calls"])
        message = {"role": "assistant", "content": one["completion"], "refusal": None}
        if calls:
            message |= {"content": one["completion"] or None, "tool_calls": calls}
        if one["reasoning"] is not None:
            message["reasoning_content"] = one["reasoning"]
        return {
            "index": index,
            "message": message,
            "logprobs": self._chat_logprobs(one),
            "finish_reason": one["finish_reason"],
        }

    def _chat_logprobs(self, one: Row) -> dict[str, Any] | None:
        if one["logprobs"] is None:
            return None
        top = one["top_logprobs"] or [[]] * len(one["logprobs"])
        content = [
            {
                **self._texts.entry(token, logprob),
                "top_logprobs": [self._texts.entry(each["id"], each["logprob"]) for each in best],
            }
            for token, logprob, best in zip(one["token_ids"], one["logprobs"], top, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, one: Row) -> dict[str, Any] | None:
        if one["logprobs"] is None:
            return None
        tokens = [self._texts.entry(token)["token"] for token in one["token_ids"]]
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        top = one["top_logprobs"]
        return {
            "tokens": tokens,
            "token_logprobs": one["logprobs"],
            "top_logprobs": None
            if top is None
            else [
                {self._texts.entry(each["id"], 0.0)["token"]: each["logprob"] for each in best}
                for best in top
            ],
            "text_offset": offsets,
        }


def result_files(setup: RowSetup, store: Store, manifest: Mapping[str, Any]) -> ResultFiles | None:
    """Those of a job; None when its input is no batch. manifest: says when the job was begun."""
    if setup.columns.batch is None or setup.text is None:
        return None
    texts = TokenTexts(setup.text.tokenizer_json, setup.rules.vocab_size)
    created = int(datetime.datetime.fromisoformat(manifest["created"]).timestamp())
    return ResultFiles(store, texts, created=created, n=setup.rules.n, prefix=setup.job.output_prefix or "")


def _rows(tables: Iterable[pa.Table], prefix: str) -> Iterator[dict[str, Any]]:
    for table in tables:
        names = [name.removeprefix(prefix) for name in table.column_names]
        for batch in table.rename_columns(names).to_batches(max_chunksize=256):
            yield from batch.to_pylist()


def _hash(row: Row) -> str:
    return hashlib.sha256(row["row_id"].encode()).hexdigest()[:24]
