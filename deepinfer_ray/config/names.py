"""The valid name that somebody who wrote another one most likely meant.

Knows: spelling. Does not know: what is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest_name(name: str, valid: Collection[str], cutoff: float = 0.6) -> str | None:
    """The valid name most like `name`, if any is close; the first by alphabet of several. cutoff: 0 … 1."""
    matches = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=cutoff)
    return matches[0] if matches else None
