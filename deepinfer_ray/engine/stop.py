"""Stop strings in a stream of bytes that arrives in arbitrary pieces.

Knows: bytes. Does not know: tokens, sequences. Matching works on UTF-8 bytes, which is exact because UTF-8
synchronises itself. A match is the one that ends first, and among those the one that begins first, so it does
not depend on how the stream is cut. Bytes that may still become part of a match are withheld.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopScanner:
    """Feeds on bytes, hands back those that no stop string can claim any more.

    stops: non-empty byte strings. include: keep the stop string itself in the released bytes.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Iterable[bytes], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = b""
        self.matched: bytes | None = None
        """The stop string that ended the stream, None while it runs."""

    def push(self, data: bytes, armed: bool = True) -> bytes:
        """Bytes that are final now; nothing after a match. Unarmed pushes withhold but never match."""
        if self.matched is not None:
            return b""
        buffer = self._held + data
        if armed and (found := self._first_match(buffer)):
            start, end = found
            self.matched, self._held = buffer[start:end], b""
            return buffer[: end if self._include else start]
        keep = self._partial(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> bytes:
        """What was withheld when the stream ends without a match."""
        held, self._held = self._held, b""
        return held

    def _first_match(self, buffer: bytes) -> tuple[int, int] | None:
        """(start, end) of the match with the least end, then the least start."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = start, end
        return best

    def _partial(self, buffer: bytes) -> int:
        """Length of the longest suffix that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
