"""A byte-level tokenizer with the release's control tokens, for checkpoints without the real one.

Knows: spellings and flags of spec/chat.md §1, where they go in a vocabulary of any size. Does not know:
models. Text encodes to one token a byte (ids 3 … 258): every string survives encode and decode. No text
encodes to an id that is left over; it decodes to a word, beyond the list of words to a placeholder, so that
whatever a model emits is text.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.toy.words import PIECES

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"
FIRST_BYTE_ID = 3
BYTE_LEVEL_SPACE = "Ġ"
"""How a byte-level vocabulary spells a space."""
REAL_VOCABULARY = 129280

CONTROL_TOKENS: dict[str, int] = {
    SYSTEM: 128799,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜read_url｜>": 128845,
    IMAGE: 129264,
    "<｜/polygon｜>": 129271,
    "<｜polygon｜>": 129272,
    "<｜/point｜>": 129273,
    "<｜point｜>": 129274,
    "<｜/box｜>": 129275,
    "<｜box｜>": 129276,
    "<｜/ref｜>": 129277,
    "<｜ref｜>": 129278,
}
"""Every control token beside BOS, EOS and PAD, with its id in the release."""

GROUNDING_FIRST = 129271
"""Tokens from here on are `special`: decoding may skip them. The other control tokens never are."""


def control_token_ids(vocab_size: int, system_id: int, image_id: int | None) -> dict[str, int]:
    """Ids of the control tokens: the real ones in the real vocabulary, else the highest free ids below it.

    `system_id` (the drafter's noise token) and `image_id` keep the ids that the config names.
    """
    if vocab_size >= REAL_VOCABULARY:
        return dict(CONTROL_TOKENS)
    fixed = {SYSTEM: system_id} | ({} if image_id is None else {IMAGE: image_id})
    names = [name for name in CONTROL_TOKENS if name not in fixed]
    taken = set(fixed.values())
    free = [i for i in range(vocab_size - 1, FIRST_BYTE_ID + 255, -1) if i not in taken]
    if len(free) < len(names):
        raise ConfigError(
            f"text_config.vocab_size = {vocab_size}: a byte-level tokenizer with all control tokens needs at "
            f"least {FIRST_BYTE_ID + 256 + len(CONTROL_TOKENS)} ids"
        )
    return fixed | dict(zip(names, sorted(free[: len(names)]), strict=True))


def byte_tokenizer(vocab_size: int, system_id: int, image_id: int | None) -> Tokenizer:
    """The tokenizer with exactly `vocab_size` ids: BOS/EOS/PAD 0/1/2, bytes, words, control tokens."""
    control = control_token_ids(vocab_size, system_id, image_id)
    by_id = {0: BOS, 1: EOS, 2: PAD} | {token: name for name, token in control.items()}
    by_id |= {FIRST_BYTE_ID + n: char for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    left_over = (i for i in range(vocab_size) if i not in by_id)
    by_id |= {i: piece.replace(" ", BYTE_LEVEL_SPACE) for i, piece in zip(left_over, PIECES, strict=False)}
    vocab = {by_id.get(i, f"<｜place▁holder▁no▁{i}｜>"): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (BOS, EOS, PAD)]
    )
    for name in sorted(control, key=control.__getitem__):
        if CONTROL_TOKENS[name] >= GROUNDING_FIRST:
            tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        else:
            tokenizer.add_tokens([AddedToken(name, special=False, normalized=name == SYSTEM)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """`tokenizer.json` and the `tokenizer_config.json` that belongs to it."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
