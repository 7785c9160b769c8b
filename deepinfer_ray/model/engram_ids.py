"""The map from token ids to the compressed ids that Engram hashes (spec/model.md §3.4).

Knows: the normalization of token texts. Does not know: tables, primes, sequences.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_ray.errors import CheckpointError

DEAD = -1
"""Compressed id of positions that cut n-grams: image spans, and every id outside the map."""

_LONE_SPACE = "\ue000"
"""Stands for a text that is exactly one space while white space is stripped."""


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, given as file or directory; `CheckpointError` if unusable."""
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; a checkpoint directory must hold tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: is not a usable tokenizer: {error}") from None


def compressed_ids(tokenizer: Tokenizer | str | Path) -> np.ndarray:
    """int32 [len(tokenizer)]: class of every token id, numbered by first appearance.

    Two tokens share a class if their texts are equal after NFKC, accents, case and white space are removed. A
    token whose text is not valid UTF-8 on its own is a class by its raw spelling.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    normalizer = _normalizer()
    classes: dict[str, int] = {}
    ids = np.empty(size, np.int32)
    for token, text in enumerate(texts):
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token) or ""
        else:
            key = normalizer.normalize_str(text) or text
        ids[token] = classes.setdefault(key, len(classes))
    return ids


def checked_compressed_ids(tokenizer: Tokenizer | str | Path, expected_classes: int) -> np.ndarray:
    """`compressed_ids`, or `CheckpointError` if the number of classes is not the one that the tables were
    hashed with: rows would be looked up in the wrong places."""
    ids = compressed_ids(tokenizer)
    classes = int(ids.max()) + 1 if ids.size else 0
    if classes != expected_classes:
        raise CheckpointError(
            f"the tokenizer gives {classes} compressed ids, but config.json says "
            f"engram_compressed_vocab_size = {expected_classes}; tokenizer.json and config.json do not "
            "belong together"
        )
    return ids
