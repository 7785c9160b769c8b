"""An end to spaces between the parts of JSON, which a grammar allows without one.

Knows: which tokens begin and end with spaces. Does not know: grammars. A model that is led to JSON and has
nothing to say there may write newlines until its tokens are used up. The compiler can count spaces, too, but
a grammar that counts to 64 takes thirty times the memory and several times as long to compile (xgrammar
0.2.9).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_ray.engine.utf8_guard import words_of

_SPACES = b" \t\n\r"


class WhitespaceLimit:
    """pieces: bytes of every token id. most: spaces in a row, more or less the length of a token."""

    def __init__(self, pieces: Sequence[bytes], most: int) -> None:
        self.most = most
        ends = {token: len(piece) - len(piece.rstrip(_SPACES)) for token, piece in enumerate(pieces)}
        self._ends = {token: count for token, count in ends.items() if count}
        self._whole = {token for token, count in self._ends.items() if count == len(pieces[token])}
        begins = [token for token, piece in enumerate(pieces) if piece[:1] and piece[0] in _SPACES]
        self._others = ~words_of(begins, len(pieces))
        newlines = [token for token in self._whole if b"\n" in pieces[token]]
        self._newlines = words_of(newlines, len(pieces))

    def after(self, run: int, token: int) -> int:
        """Spaces at the end of a text that had `run` of them before the token."""
        count = self._ends.get(token, 0)
        return run + count if token in self._whole else count

    def narrow(self, words: np.ndarray, run: int) -> None:
        """Take tokens that begin with spaces out of a mask, in place, where there were enough of them.

        A string of JSON has no newline as such: where one is allowed, the text is between two parts.
        """
        if run >= self.most and (words & self._newlines).any() and (words & self._others).any():
            words &= self._others
