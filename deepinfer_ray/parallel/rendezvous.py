"""Where the ranks of a gang meet. Plain data: the driver passes it on without knowing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A key-value store that one of the ranks serves.

    prefix: keeps generations and fleets apart that come to use the same store.
    """

    host: str
    port: int
    prefix: str
