"""Tokens that would break a character, by themselves or behind the token that began it.

Knows: UTF-8. Does not know: grammars. xgrammar's negated classes let through what encodes surrogates, and its
patterns inside JSON longer encodings than needed. Neither is UTF-8: the text would show replacement
characters, more of them than the grammar counted. A token of whole characters is never wrong; only one that
goes on with a character can be, or one whose own bytes are no UTF-8 wherever it stands.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np

SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""First bytes whose second byte has a range narrower than 80 … BF (Unicode standard, table 3-7)."""

_ASCII_ENDS = tuple(chr(code) for code in range(0x21, 0x7F))


class Utf8Guard:
    """Masks for the tokens behind those that end with such a first byte."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """pieces: bytes of every token id."""
        self.broken = [token for token, piece in enumerate(pieces) if _is_broken(piece)]
        """Tokens that no text has."""
        self._lead = {
            token: piece[-1] for token, piece in enumerate(pieces) if piece and piece[-1] in SECOND_BYTES
        }
        first = np.array([piece[0] if piece else 0 for piece in pieces])
        self._allowed = {
            lead: words_of(
                np.flatnonzero((first < 0x80) | (first > 0xBF) | ((first >= low) & (first <= high))),
                len(pieces),
            )
            for lead, (low, high) in SECOND_BYTES.items()
        }

    def allowed_after(self, token: int) -> np.ndarray | None:
        """int32 words of the tokens that may follow, None = any."""
        lead = self._lead.get(token)
        return None if lead is None else self._allowed[lead]


def _is_broken(piece: bytes) -> bool:
    """Whether the bytes are part of no UTF-8 text, or of one in a way that no mask gets right. They may begin
    and end inside a character."""
    if piece.isascii():
        return False
    start = next((at for at, byte in enumerate(piece) if not 0x80 <= byte < 0xC0), len(piece))
    if start > 3:
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(piece[start:])
    except UnicodeDecodeError:
        return True
    begun = decoder.getstate()[0]
    if not begun:
        return False
    low, high = SECOND_BYTES.get(begun[0], (0x80, 0xBF)) if len(begun) > 1 else (0, 0xFF)
    if len(begun) > 1 and not low <= begun[1] <= high:  # the decoder looks at whole characters
        return True
    # Masks let "}" and a first byte through where "}" and spaces may stand; hardly a vocabulary has such.
    return text.endswith(_ASCII_ENDS)


def words_of(ids: Iterable[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] with the bits of the ids set: bit v & 31 of word v >> 5."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
