"""The last line of stdout: what a run did, as one JSON object.

Knows: the fixed keys. Does not know: how they were counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepinfer_ray.job.sink import Counts


@dataclass(frozen=True)
class Summary:
    """`counts`, `parts`: the whole output, earlier runs included; `run`, `seconds`, `restarts`: this run.

    `resumed_rows` of the rows were committed by earlier runs; `rows_left` are still to do.
    """

    counts: Counts
    run: Counts
    seconds: float
    restarts: int
    parts: int
    resumed_rows: int
    rows_left: int
    output: str

    def as_dict(self) -> dict[str, Any]:
        tokens = self.run.prompt_tokens + self.run.completion_tokens
        return {
            "event": "summary",
            **self.counts.as_dict(),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1) if self.seconds > 0 else 0.0,
            "restarts": self.restarts,
            "parts": self.parts,
            "resumed_rows": self.resumed_rows,
            "rows_left": self.rows_left,
            "output": self.output,
        }

    def line(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"))
