"""The thread that reads and encodes ahead, and the budget that keeps it from reading too far.

Knows: the order of rows, how much may be open. Does not know: the backend, results, the output.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from deepinfer_ray.job.encode import EncodedRow, Encoder
from deepinfer_ray.job.plan import Part
from deepinfer_ray.job.source import read_parts

QUEUE_BYTES = 64 << 20
"""Bytes of encoded prompts that wait for the backend at most."""

CHUNK_ROWS, CHUNK_BYTES = 32, 1 << 18
"""Rows that pass the queue together, and bytes of prompts from which on they do not wait for more."""


@dataclass(slots=True, eq=False)
class FedRow:
    """Row `index` of `part`; `table` comes with the part's first row alone."""

    part: Part
    index: int
    row: EncodedRow
    table: pa.Table | None


@dataclass(slots=True)
class _Chunk:
    """Rows of one part that pass the queue together. bytes: of their prompts."""

    rows: list[FedRow] = field(default_factory=list)
    bytes: int = 0

    def add(self, row: FedRow) -> None:
        self.rows.append(row)
        if row.row.prompt is not None:
            self.bytes += row.row.prompt.nbytes


class Feeder:
    """Rows in plan order through a bounded queue; `take` and `hold` are called by one other thread.

    At most `queue_rows` rows and `QUEUE_BYTES` of prompts wait in the queue. A part is begun, which holds the
    bytes of its table and its rows, only while those held stay below `max_open_bytes` and `max_open_rows`;
    one part is always allowed.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        encoder: Encoder,
        *,
        queue_rows: int,
        max_open_bytes: int,
        max_open_rows: int | None = None,
        reader: Callable[[Iterable[Part]], Iterator[tuple[Part, pa.Table]]] = read_parts,
    ) -> None:
        self._tables = reader(parts)
        self._encoder = encoder
        self._max_open_bytes, self._max_open_rows = max_open_bytes, max_open_rows
        self._queue: queue.Queue[_Chunk | BaseException | None] = queue.Queue(
            max(1, queue_rows // CHUNK_ROWS)
        )
        self._ready: deque[FedRow] = deque()
        self._changed = threading.Condition()
        self._open_bytes = self._open_rows = 0
        self._queued_bytes = 0
        self._stop = threading.Event()
        self._started = self._ended = False
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        """Begin to read ahead; a second call changes nothing."""
        if not self._started:
            self._started = True
            self._thread.start()

    @property
    def exhausted(self) -> bool:
        """Whether every row was taken."""
        return self._ended

    def take(self) -> FedRow | None:
        """The next row if one is ready. Raises what the thread failed with."""
        if self._ended:
            return None
        if self._ready:
            return self._ready.popleft()
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, _Chunk):
            with self._changed:
                self._queued_bytes -= item.bytes
                self._changed.notify()
            self._ready.extend(item.rows)
            return self._ready.popleft()
        self._ended = True
        if item is not None:
            raise item
        return None

    def wait(self, timeout_s: float) -> None:
        """Until a row is ready or the rows have ended, at most so long."""
        ready = self._queue.not_empty
        with ready:
            ready.wait_for(lambda: self._ended or bool(self._ready or self._queue.queue), timeout_s)

    def hold(self, size: int) -> None:
        """`size` more bytes belong to open parts."""
        with self._changed:
            self._open_bytes += size

    def release(self, size: int, rows: int) -> None:
        """A part of so many bytes and rows was committed."""
        with self._changed:
            self._open_bytes -= size
            self._open_rows -= rows
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread; rows that were not taken are dropped."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._ended = True

    def _run(self) -> None:
        try:
            for part, table in self._tables:
                if not self._open(table):
                    return
                chunk = _Chunk()
                for index, row in enumerate(self._encoder.encode(part, table, part.errors)):
                    chunk.add(FedRow(part, index, row, table if index == 0 else None))
                    if len(chunk.rows) >= CHUNK_ROWS or chunk.bytes >= CHUNK_BYTES or index + 1 == part.rows:
                        if not self._put(chunk):
                            return
                        chunk = _Chunk()
            self._put(None)
        except BaseException as error:  # the thread that takes rows must hear of it
            self._put(error)

    def _open(self, table: pa.Table) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._has_room(table))
            self._open_bytes += table.nbytes
            self._open_rows += table.num_rows
        return not self._stop.is_set()

    def _has_room(self, table: pa.Table) -> bool:
        if self._open_rows == 0:
            return True
        if self._max_open_rows is not None and self._open_rows + table.num_rows > self._max_open_rows:
            return False
        return self._open_bytes + table.nbytes <= self._max_open_bytes

    def _put(self, item: _Chunk | BaseException | None) -> bool:
        if isinstance(item, _Chunk):
            with self._changed:
                self._changed.wait_for(lambda: self._stop.is_set() or self._queued_bytes <= QUEUE_BYTES)
                self._queued_bytes += item.bytes
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
