"""Token ids to text: a table of each id's bytes, and a stream that decodes them as they come.

Knows: tokenizers, UTF-8, stop strings through `StopScanner`. Does not know: sequences, sampling.
Text is decoded from the joined bytes of all tokens, never token by token, so a character that is spread over
tokens appears once it is complete; U+FFFD stands only for bytes that are no UTF-8 at all.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer_ray.engine.stop import StopScanner

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _byte_of_char() -> dict[str, int]:
    """The reversible byte ↔ character map of byte-level BPE: printable bytes stand for themselves, the other
    bytes are numbered upwards from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table, spare = {}, 0x100
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(spare)] = byte
            spare += 1
    return table


_BYTE_OF_CHAR = _byte_of_char()


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Bytes of one vocabulary piece. Added tokens (`<｜User｜>`) hold other characters and stand
    for their own UTF-8."""
    if byte_level:
        mapped = [_BYTE_OF_CHAR.get(char, -1) for char in piece]
        if -1 not in mapped:
            return bytes(mapped)
    return piece.encode()


class TokenTable:
    """id → bytes for every id of the model's vocabulary; ids that the tokenizer lacks are empty.

    One table serves all requests of a rank.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = tuple(pieces)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, hidden: Iterable[int] = ()) -> TokenTable:
        """hidden: ids that leave no text, such as EOS."""
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        byte_level = b"ByteLevel" in state
        names = [tokenizer.id_to_token(token) for token in range(vocab_size)]
        for token in hidden:
            names[token] = None
        return cls(b"" if name is None else piece_bytes(name, byte_level) for name in names)

    def __len__(self) -> int:
        return len(self.pieces)

    def join(self, token_ids: Iterable[int]) -> bytes:
        pieces = self.pieces
        return b"".join([pieces[token] for token in token_ids])

    def text(self, token_ids: Iterable[int]) -> str:
        """All tokens at once, special tokens kept."""
        return self.join(token_ids).decode("utf-8", errors="replace")


class TextStream:
    """The text of one request, token by token; `text` holds everything that is final."""

    __slots__ = ("_decoder", "_parts", "_scanner", "_table")

    def __init__(self, table: TokenTable, stops: Iterable[str] = (), include_stop: bool = False) -> None:
        self._table = table
        self._scanner = StopScanner((stop.encode() for stop in stops), include_stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether the last token completed a stop string."""
        return self._scanner.matched is not None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, token: int, armed: bool = True) -> str:
        """Adds a token, returns the text that became final. Unarmed: stop strings cannot match yet."""
        return self._emit(self._scanner.push(self._table.pieces[token], armed), final=self.stopped)

    def finish(self) -> str:
        """Ends the stream: releases what was withheld; bytes of an unfinished character become U+FFFD."""
        return self._emit(self._scanner.finish(), final=True)

    def _emit(self, data: bytes, final: bool) -> str:
        part = self._decoder.decode(data, final)
        if part:
            self._parts.append(part)
        return part
