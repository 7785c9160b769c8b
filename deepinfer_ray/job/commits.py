"""Finished parts on their way to the output: built and written beside the loop that runs the rows.

Knows: how a part becomes visible, and what is noted of its failed rows. Does not know: backends, the order of
rows.
"""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from deepinfer_ray.job.lease import Lease
from deepinfer_ray.job.ledger import Ledger
from deepinfer_ray.job.plan import Part
from deepinfer_ray.job.sink import Counts, KeptOutcome, PartWriter, RowOutcome

MAX_WAITING = 16
"""Parts that may wait to be written before no new part is begun; a kill costs their rows."""

UPLOADS = 4
"""Parts that are written at a time where writing is waiting for a store."""


@dataclass(frozen=True)
class Committed:
    """A part that is visible. size: bytes it held in memory."""

    counts: Counts
    size: int


class Commits:
    """`submit` and `collect` are called by one thread."""

    def __init__(self, writer: PartWriter, ledger: Ledger, lease: Lease) -> None:
        self._writer, self._ledger, self._lease = writer, ledger, lease
        self._pool = ThreadPoolExecutor(1 if ledger.store.local else UPLOADS, "writer")
        self._building = threading.Lock()  # building a part takes the processor, and parsers are not shared
        self._waiting: deque[tuple[Future[Counts], int]] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether so many wait that no new part should be begun."""
        return len(self._waiting) >= MAX_WAITING

    def submit(
        self, part: Part, table: pa.Table, outcomes: Sequence[RowOutcome | KeptOutcome], size: int
    ) -> None:
        """A part whose rows have all ended."""
        self._waiting.append((self._pool.submit(self._commit, part, table, outcomes), size))

    def collect(self, *, wait: bool = False) -> list[Committed]:
        """Parts that became visible since the last call; wait: until at least one has, if any is on its way.

        Raises what a commit failed with, `OutputError` for one, after the parts before it were given.
        """
        done: list[Committed] = []
        while self._waiting and (wait or self._waiting[0][0].done()):
            future, size = self._waiting[0]
            if done and future.exception() is not None:
                break
            self._waiting.popleft()
            done.append(Committed(future.result(), size))
        return done

    def wait(self, timeout_s: float) -> None:
        """Until the oldest part is written, at most so long."""
        if self._waiting:
            concurrent.futures.wait([self._waiting[0][0]], timeout_s)

    def drop(self) -> None:
        """Leave what is not being written yet undone: there is no time."""
        self._waiting = deque((future, size) for future, size in self._waiting if not future.cancel())

    def close(self) -> list[Committed]:
        """Let what is on its way end; the parts that became visible. Raises nothing."""
        self._pool.shutdown(wait=True)
        done = [(future, size) for future, size in self._waiting if future.exception() is None]
        self._waiting.clear()
        return [Committed(future.result(), size) for future, size in done]

    def _commit(self, part: Part, inputs: pa.Table, outcomes: Sequence[RowOutcome | KeptOutcome]) -> Counts:
        with self._building:
            table, counts = self._writer.table(inputs, outcomes)
        self._lease.check()
        self._ledger.quarantine(part, failures(table, self._writer.prefix))
        self._ledger.commit(part, self._writer.serialiser(part, table, counts))
        return counts


def failures(table: pa.Table, prefix: str) -> bytes:
    """The failed rows of a part as JSON lines: id, code and message, nothing of the row itself."""
    names = ("row_id", "error_code", "error")
    columns = table.select([prefix + name for name in names]).rename_columns(list(names))
    failed = columns.filter(pc.is_valid(columns["error_code"]))
    return b"".join(
        json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n" for row in failed.to_pylist()
    )
