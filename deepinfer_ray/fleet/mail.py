"""Calls to ranks that have no answer yet.

Knows: Ray's references, and which rank of which gang each belongs to. Does not know: what an answer means.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_ray.fleet.gang import Gang, Rank


@dataclass(frozen=True, slots=True)
class Letter:
    """One call."""

    kind: Literal["submit", "collect", "ping"]
    gang: Gang
    rank: Rank


class Mail:
    """The letters on their way; nothing here blocks but `wait`."""

    def __init__(self) -> None:
        self._letters: dict[Any, Letter] = {}

    def sent(self, ref: Any, letter: Letter) -> Any:
        """A call was made; gives its reference back."""
        self._letters[ref] = letter
        return ref

    def forget(self, gang: Gang) -> None:
        """Nobody wants to know what its ranks answer."""
        self._letters = {ref: letter for ref, letter in self._letters.items() if letter.gang is not gang}

    def wait(self, others: Sequence[Any], timeout_s: float) -> None:
        """Until something is answered, here or among `others`, at most so long."""
        import ray

        refs = [*self._letters, *others]
        if refs:
            ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=True)
        else:
            time.sleep(timeout_s)

    def answered(self) -> Iterator[tuple[Letter, Any]]:
        """Letters with their answers, or with Ray's error in place of one; what is forgotten meanwhile is not
        given."""
        import ray

        refs = list(self._letters)
        for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else ():
            letter = self._letters.pop(ref, None)
            if letter is None:
                continue
            try:
                answer = ray.get(ref)
            except ray.exceptions.RayError as error:
                answer = error
            yield letter, answer
