"""The order in which rows that were read ahead go to the backend: those that begin alike one after another,
the longest first.

Knows: the prompts of rows that wait. Does not know: parts, files, ranks, what a rank keeps. Only the order of
submission changes; which part a row belongs to and where it stands there does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer_ray.fleet.affinity import head_of
from deepinfer_ray.fleet.backend import WorkItem

MAX_ITEMS = 1024
MAX_BYTES = 64 << 20
"""Work items and bytes of their prompts that are read ahead for the sake of order."""


class PrefixWindow:
    """Items that wait, grouped by the first block of their prompt.

    Turn by turn: all groups as they stand, the one with the longest item first, so that no long row is left
    when the short ones are done, and groups of equal length oldest first. What comes meanwhile waits for the
    next turn, so that neither a head which never ends nor long rows hold anybody up. Within a group, prompts
    with longer common beginnings are neighbours, and items with equal prompts keep their order.
    """

    def __init__(self, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._groups: dict[bytes, list[WorkItem]] = {}
        self._turn: deque[list[WorkItem]] = deque()
        self._current: deque[WorkItem] = deque()
        self._count = self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        """Whether more may be read ahead."""
        return self._count < self._max_items and self._bytes < self._max_bytes

    def push(self, items: Iterable[WorkItem]) -> None:
        for item in items:
            self._groups.setdefault(head_of(item.prompt), []).append(item)
            self._count += 1
            self._bytes += item.prompt.nbytes

    def take(self, count: int) -> list[WorkItem]:
        """The next `count` items, fewer if there are no more."""
        taken: list[WorkItem] = []
        while len(taken) < count and self._count:
            if not self._current:
                group = self._next_group()
                # Bytewise order is not that of the ids, but equal beginnings are neighbours in it just so.
                group.sort(key=lambda item: item.prompt.tobytes())
                self._current.extend(group)
            item = self._current.popleft()
            self._count -= 1
            self._bytes -= item.prompt.nbytes
            taken.append(item)
        return taken

    def _next_group(self) -> list[WorkItem]:
        if not self._turn:
            self._turn.extend(sorted(self._groups.values(), key=_longest, reverse=True))
            self._groups.clear()
        return self._turn.popleft()


def _longest(group: list[WorkItem]) -> int:
    """Tokens of prompt and completion at most, of the group's longest item."""
    return max(len(item.prompt) + (item.params.max_tokens or 0) for item in group)
