"""The loop of a job: rows to the backend, results to their parts, finished parts to the ledger.

Knows: which rows are under way, when to stop. Does not know: Arrow, Ray, how a row was read or is written.
One thread runs the loop and talks to the backend; one feeds it, one writes parts.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from deepinfer_ray.errors import JobError
from deepinfer_ray.fleet.backend import Backend, Grows, WorkItem, WorkResult
from deepinfer_ray.job.commits import Commits, Committed
from deepinfer_ray.job.feeder import FedRow, Feeder
from deepinfer_ray.job.observe import Observer
from deepinfer_ray.job.plan import Part
from deepinfer_ray.job.prefix_order import PrefixWindow
from deepinfer_ray.job.progress import Progress
from deepinfer_ray.job.signals import StopNow, StopSignals
from deepinfer_ray.job.sink import Counts, KeptOutcome, RowOutcome

POLL_S = 0.1
HUNGRY_POLL_S = 0.01
"""How long to wait for results: with enough rows under way, and when the feeder is behind."""

GATHER_S = 0.05
"""How long rows may wait for others to be sent with: order needs a choice, and a rank few calls."""

STATUS_S = 1.0
"""How often the backend is asked how it is."""


class Ending(enum.StrEnum):
    """Why the loop ended."""

    DONE = "done"
    SIGNAL = "signal"
    NOTICE = "notice"
    DEADLINE = "deadline"


@dataclass(slots=True, eq=False)
class OpenPart:
    """A part some of whose rows are under way. `outcomes` grows in row order; `missing` have not ended."""

    part: Part
    table: pa.Table
    kept: Mapping[int, KeptOutcome]
    missing: int
    bytes: int
    outcomes: list[RowOutcome | KeptOutcome] = field(default_factory=list)


class Runner:
    """Runs the rows that `feeder` gives. After `run`: `counts` of the `parts` it committed; `out_of_time` if
    it left open parts because the process is about to be killed.

    kept: rows of a part that an earlier run finished and that are not to be run again (`--retry-errors`).
    rows_left: that the feeder has, for a backend that grows with them.
    before: counts of the parts that were committed earlier, for the error rate. min_rows_for_rate: rows that
    must have ended before their error rate can stop a job; the end of a job always checks it.
    """

    def __init__(
        self,
        *,
        feeder: Feeder,
        backend: Backend,
        commits: Commits,
        progress: Progress,
        signals: StopSignals,
        before: Counts,
        rows_left: int = 0,
        max_error_rate: float = 1.0,
        min_rows_for_rate: int = 100,
        deadline: float | None = None,
        kept: Callable[[Part], Mapping[int, KeptOutcome]] = lambda part: {},
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self.parts = 0
        self.restarts = 0
        self.out_of_time = False
        self._feeder = feeder
        self._backend = backend
        self._commits = commits
        self._progress = progress
        self._signals = signals
        self._before = before
        self._rows_left = rows_left
        self._max_error_rate = max_error_rate
        self._min_rows_for_rate = min_rows_for_rate
        self._deadline = deadline
        self._kept = kept
        self._observer = observer or Observer(None, rows_left=0)
        self._clock = clock
        self._open: dict[str, OpenPart] = {}
        self._under_way: dict[int, tuple[OpenPart, RowOutcome, int]] = {}  # by key: …, completion index
        self._read = 0
        self._next_key = 0
        self._ahead = PrefixWindow()
        self._held: FedRow | None = None  # first row of a part that is not begun yet
        self._gathered_since: float | None = None
        self._sent = False
        self._asked = clock()
        self._ending: Ending | None = None
        self._ended = Counts()  # rows whose result is known, committed or not

    def run(self) -> Ending:
        """Until every row has ended, or a signal or the deadline stops it in order.

        Raises `JobError` (too many errors), `OutputError`, and what the backend and the reader raise; parts
        whose rows had all ended are committed even then.
        """
        self._feeder.start()
        try:
            while not self._finished() and not self._out_of_time():
                self._check_ending()
                hungry = self._feed()
                wait_s = HUNGRY_POLL_S if hungry else POLL_S
                results = self._backend.poll(wait_s if self._under_way else 0.0)
                self._feeder.hold(sum(map(self._receive, results)))
                if not self._under_way:
                    self._wait_for_work(wait_s)
                self._count(self._commits.collect())
                self._check_error_rate(self._min_rows_for_rate)
                self._show()
        except StopNow:
            self._commits.drop()
            raise
        finally:
            self._feeder.stop()
            try:
                while self._commits.pending:
                    self._count(self._commits.collect(wait=True))
            finally:
                self._count(self._commits.close())
            self._look(last=True)
        self._check_error_rate(1)
        self._show(force=True)
        return self._ending or Ending.DONE

    # -- rows in ---------------------------------------------------------------------------------------------

    def _feed(self) -> bool:
        """Hand over as many rows as the backend would take; whether it would have taken more."""
        room = self._backend.wanted()
        self._look_ahead(room)
        if self._gathering(room):
            return True
        items = self._ahead.take(room)
        if items:
            self._sent = True
            self._observer.sent(items)
            self._backend.submit(items)
        return len(items) < room and not self._feeder.exhausted

    def _gathering(self, room: int) -> bool:
        """Whether the few rows that wait should wait for more; the very first ones for a part of them."""
        few = 0 < len(self._ahead) < room or (not self._sent and len(self._ahead) > 0)
        if not few or self._held is not None or self._feeder.exhausted:
            self._gathered_since = None
            return False
        if self._gathered_since is None:
            self._gathered_since = self._clock()
        return self._clock() - self._gathered_since < GATHER_S

    def _wait_for_work(self, timeout_s: float) -> None:
        """With nothing under way, the next step is a row that is read or a part that is written."""
        if self._held is not None or self._feeder.exhausted:
            self._commits.wait(timeout_s)
        else:
            self._feeder.wait(timeout_s)

    def _look_ahead(self, room: int) -> None:
        """Takes rows until `room` items wait, and for the sake of their order what is left of open parts."""
        while len(self._ahead) < room or self._ahead.has_room:
            fed, self._held = self._held or self._feeder.take(), None
            if fed is None:
                return
            if fed.index == 0:
                if self._ending is not None:  # stopping: no new part
                    self._feeder.stop()
                    return
                if len(self._ahead) >= room or self._commits.full:
                    self._held = fed
                    return
                self._begin(fed)
            self._ahead.push(self._items(fed))

    def _begin(self, fed: FedRow) -> None:
        assert fed.table is not None
        part = fed.part
        self._open[part.name] = OpenPart(part, fed.table, self._kept(part), part.rows, fed.table.nbytes)

    def _items(self, fed: FedRow) -> list[WorkItem]:
        """The work of a row; none when its outcome is known already."""
        self._read += 1
        open_part = self._open[fed.part.name]
        kept = open_part.kept.get(fed.index)
        if kept is not None:
            open_part.outcomes.append(kept)
            self._row_ended(open_part, kept)
            return []
        row = fed.row
        items = []
        prompt, params = row.prompt, row.params
        outcome = RowOutcome(row)
        open_part.outcomes.append(outcome)
        if prompt is None or params is None:
            self._row_ended(open_part, outcome)
            return []
        for index, seed in enumerate(row.seeds):
            items.append(WorkItem(self._next_key, prompt, params, seed))
            self._under_way[self._next_key] = (open_part, outcome, index)
            self._next_key += 1
        return items

    # -- results out -----------------------------------------------------------------------------------------

    def _receive(self, result: WorkResult) -> int:
        """The bytes that it takes until its part is committed."""
        found = self._under_way.pop(result.key, None)
        if found is None:
            return 0  # a second result of an item that was redone after a death
        open_part, outcome, index = found
        self._observer.received(result, outcome.row.row_id)
        size = outcome.set(index, result.result, result.attempts)
        open_part.bytes += size
        if outcome.complete:
            self._row_ended(open_part, outcome)
        return size

    def _row_ended(self, open_part: OpenPart, outcome: RowOutcome | KeptOutcome) -> None:
        self._ended.add(outcome.counts())
        open_part.missing -= 1
        if open_part.missing == 0:
            del self._open[open_part.part.name]
            self._commits.submit(open_part.part, open_part.table, open_part.outcomes, open_part.bytes)

    def _count(self, committed: list[Committed]) -> None:
        for part in committed:
            self.counts.add(part.counts)
            self.parts += 1
            self._feeder.release(part.size, part.counts.rows)

    # -- the end ---------------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        return self._feeder.exhausted and self._held is None and not self._open and not self._commits.pending

    def _out_of_time(self) -> bool:
        """Whether open parts must be left so that finished ones are still written."""
        if self._ending is None or not self._signals.time_is_up:
            return False
        self.out_of_time = True
        rows = sum(open_part.missing for open_part in self._open.values())
        self._progress.note(
            f"time is up: {rows} rows of {len(self._open)} open parts are left to the next run"
        )
        return True

    def _check_ending(self) -> None:
        if self._ending is not None:
            return
        if self._signals.requested is not None:
            name = signal.Signals(self._signals.requested).name
            self._ending = Ending.SIGNAL
            self._note_ending(f"{name}: stopping", "; once more stops at once and redoes them later")
        elif self._signals.announced:
            self._ending = Ending.NOTICE
            self._note_ending("the driver's machine will be taken away: stopping", "")
        elif self._deadline is not None and self._clock() >= self._deadline:
            self._ending = Ending.DEADLINE
            self._note_ending("deadline reached: stopping", "")

    def _note_ending(self, why: str, hint: str) -> None:
        rows = sum(open_part.missing for open_part in self._open.values())
        self._progress.note(
            f"{why} after {rows} more rows, which complete {len(self._open)} open parts{hint}"
        )
        self._tell_backend()

    def _check_error_rate(self, min_rows: int) -> None:
        if self._before.rows + self._ended.rows < min_rows:
            return
        # Among the rows that were read: a bad one ends as it is read, long before those around it have run.
        rows = self._before.rows + self._read
        errors = self._before.errors + self._ended.errors
        if errors <= self._max_error_rate * rows:
            return
        codes = self._before.error_codes + self._ended.error_codes
        worst = ", ".join(f"{code} {count}" for code, count in codes.most_common(5))
        raise JobError(
            f"{errors} of {rows} rows ended in an error ({errors / rows:.1%}), more than --max-error-rate "
            f"{self._max_error_rate:g} allows: {worst}. The rows' column error says why; to go on, run the "
            "same command with a higher --max-error-rate"
        )

    def _look(self, *, last: bool = False) -> None:
        """Ask the backend how it is, and note it; tell it how much is still to come."""
        self._asked = self._clock()
        self._tell_backend()
        status = self._backend.status()
        self.restarts = int(status.get("restarts", 0))
        notice_s = status.get("notice_s")
        if notice_s is not None and not self._signals.announced:
            self._signals.announce(notice_s)
        self._observer.turn(self._ended, self.parts, status, self._backend, last=last)

    def _tell_backend(self) -> None:
        """How much is still to come. Of a run that stops nothing that a backend should grow for."""
        if isinstance(self._backend, Grows):
            self._backend.expect(0 if self._ending is not None else self._to_come())

    def _to_come(self) -> int:
        """About how many items are still to be submitted: those that wait here, and those of unread rows."""
        unread = max(0, self._rows_left - self._read)
        return len(self._ahead) + (unread * self._next_key // self._read if self._read else unread)

    def _show(self, *, force: bool = False) -> None:
        if self._clock() - self._asked >= STATUS_S:
            self._look()
        ended = self._ended
        self._progress.update(
            ended.rows, ended.errors, ended.prompt_tokens + ended.completion_tokens, force=force
        )
