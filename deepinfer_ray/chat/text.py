"""Plain text to token ids, with no way for the text to become a control token.

Knows: `tokenizer.json` as data. Does not know: messages, roles, the prompt format.

A second tokenizer is built from the same file with its added vocabulary taken out (spec/chat.md §1.2), so the
literal text `<｜User｜>` in a data set encodes as ordinary characters. Plain prompts go through it too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from deepinfer_ray.chat.tokens import BOS, CONTROL_TOKENS
from deepinfer_ray.errors import CheckpointError, ConfigError, RowError


class TextEncoder:
    """Encodes text with the base vocabulary of one `tokenizer.json`.

    tokenizer_json: the file's content. bos_id: the checkpoint's `bos_token_id`; by default the id of the V4.1
    BOS spelling. Raises `CheckpointError` when the content is no tokenizer of a supported kind.
    """

    def __init__(self, tokenizer_json: str, *, bos_id: int | None = None) -> None:
        try:
            data = json.loads(tokenizer_json)
            plain, self._control_ids = _without_added_vocabulary(data)
            self._plain = Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"tokenizer.json cannot be read as a tokenizer: {error}") from error
        self.tokenizer_json = tokenizer_json
        self._bos_id = self._control_ids.get(BOS) if bos_id is None else bos_id

    @classmethod
    def load(cls, path: str | Path, *, bos_id: int | None = None) -> TextEncoder:
        """From a `tokenizer.json` or the checkpoint directory that holds one."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(file.read_text(encoding="utf-8"), bos_id=bos_id)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); text prompts need it") from error
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error

    @property
    def bos_id(self) -> int:
        """Id that starts every prompt; `ConfigError` if neither the caller nor the tokenizer names one."""
        if self._bos_id is None:
            raise ConfigError(f"tokenizer.json has no token {BOS!r}; pass the checkpoint's bos_token_id")
        return self._bos_id

    def control_id(self, spelling: str) -> int | None:
        """Id of a control or added token by its exact spelling, `None` when the vocabulary lacks it."""
        return self._control_ids.get(spelling)

    def encode_text(self, text: str) -> np.ndarray:
        """int32 [n] base-vocabulary ids of `text`; never an added token, no BOS.

        Raises `RowError("wrong_type")` for text that is no valid Unicode or that the vocabulary cannot spell.
        """
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_text` of each; many texts are spread over the tokenizer's threads."""
        try:
            encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            if all(isinstance(text, str) for text in texts):
                raise RowError(
                    "wrong_type", "the text is no valid Unicode: it holds a lone surrogate"
                ) from error
            raise RowError("wrong_type", "the text is not a string") from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise RowError("wrong_type", "this checkpoint's tokenizer cannot spell the text") from error
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_prompt(self, text: str) -> np.ndarray:
        """int32 [1 + n]: BOS and the text, the form of a completion-style prompt."""
        return np.concatenate([np.array([self.bos_id], np.int32), self.encode_text(text)])

    def __repr__(self) -> str:
        return f"TextEncoder({self._plain.get_vocab_size()} pieces, {len(self._control_ids)} control tokens)"


def _without_added_vocabulary(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """The tokenizer without added and control tokens, and the ids of what was taken out.

    A token may also (or only) stand in the model's own vocabulary, where a merge or a whole-word match could
    reach it; it is removed there with every merge that names it.
    """
    model = data["model"]
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, dict):
        raise CheckpointError(
            f"tokenizer.json has a model of type {model.get('type')!r}; BPE and WordLevel are supported"
        )
    control_ids = {spelling: vocabulary[spelling] for spelling in CONTROL_TOKENS if spelling in vocabulary}
    control_ids |= {token["content"]: token["id"] for token in data.get("added_tokens") or ()}
    plain_vocabulary = {piece: i for piece, i in vocabulary.items() if piece not in control_ids}
    plain_model = {**model, "vocab": plain_vocabulary}
    if "merges" in model and any(spelling in vocabulary for spelling in control_ids):
        plain_model["merges"] = [
            merge for merge in model["merges"] if not control_ids.keys() & _pieces_of_merge(merge)
        ]
    plain = {**data, "added_tokens": [], "model": plain_model, "truncation": None, "padding": None}
    return plain, control_ids


def _pieces_of_merge(merge: str | list[str]) -> set[str]:
    """Both sides of a merge and their product; a file holds `"a b"` or `["a", "b"]`."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {left, right, left + right}
