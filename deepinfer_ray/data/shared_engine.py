"""One engine for several batches at a time, so that no batch waits for the slowest row of another.

Knows: requests, results, threads. Does not know: rows, Arrow, Ray.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.errors import DeepInferError, RankFailure
from deepinfer_ray.fleet.engines import EngineLike


class Ticket:
    """The requests of one batch on their way; their results come from `take` in completion order."""

    def __init__(self, engine: SharedEngine, requests: Sequence[Request]) -> None:
        self.results: queue.SimpleQueue[RequestResult | Exception] = queue.SimpleQueue()
        self.waiting = deque(requests)
        self.cancelled = False
        self._engine = engine

    def take(self) -> RequestResult:
        """The next result; waits for it. Raises `RankFailure` when the engine broke."""
        result = self.results.get()
        if isinstance(result, Exception):
            raise RankFailure(
                f"the engine of this actor failed: {type(result).__name__}: {result}"
            ) from result
        return result

    def cancel(self) -> None:
        """Nobody takes the rest: what waits is dropped, what runs ends unseen. May be called twice."""
        self.cancelled = True
        self._engine.wake()


class SharedEngine:
    """Steps an engine on a thread of its own as long as there are tickets; first come, first served."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._tickets: deque[Ticket] = deque()  # those with requests that were not added yet
        self._owners: dict[int, Ticket] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Queue requests. May be called from any thread; a broken engine answers through the ticket."""
        ticket = Ticket(self, requests)
        with self._changed:
            if self._failure is not None or self._stop:
                ticket.results.put(self._failure or DeepInferError("it is closed"))
            elif ticket.waiting:
                self._tickets.append(ticket)
                self._changed.notify()
        return ticket

    def wake(self) -> None:
        """Look at the tickets again."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its step; what is under way is dropped. May be called twice."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stop or bool(self._tickets) or self._engine.has_unfinished()
                    )
                    if self._stop:
                        return
                    self._admit()
                for result in self._engine.step():
                    self._owners.pop(result.request_id).results.put(result)
        except Exception as error:  # every batch that waits must hear of it
            with self._changed:
                self._failure = error
                for ticket in {*self._tickets, *self._owners.values()}:
                    ticket.results.put(error)
                self._tickets.clear()
                self._owners.clear()

    def _admit(self) -> None:
        """Give the engine what it would take now."""
        room = self._engine.wanted()
        while self._tickets:
            ticket = self._tickets[0]
            if ticket.cancelled:
                ticket.waiting.clear()
            while ticket.waiting and room > 0:
                request = ticket.waiting.popleft()
                room -= 1
                try:
                    self._owners[request.request_id] = ticket
                    self._engine.add(request)
                except Exception as error:  # a row's own, whatever it is
                    del self._owners[request.request_id]
                    ticket.results.put(RequestResult.refused(request.request_id, len(request.prompt), error))
            if ticket.waiting:
                return
            self._tickets.popleft()
