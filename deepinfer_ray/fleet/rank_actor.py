"""One rank as an actor: an engine thread between an inbox and an outbox.

Knows: rows in, results out, steps, credits, its own pulse. Does not know: Ray's API, other ranks, placement.
The class is plain Python; the fleet wraps it with `ray.remote` and several call threads, so `ping` answers
during a step and no call ever waits for a batch.

    engine thread:  take rows from the inbox → add → step → put results into the outbox
    call threads:   submit → inbox;  collect ← outbox (long poll);  ping, profile, stop
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.fleet.backend import WorkItem, WorkResult
from deepinfer_ray.fleet.engines import EngineLike, resolve_factory
from deepinfer_ray.fleet.messages import Heartbeat, RankFault, RankReport, RankSpec, RankWhere
from deepinfer_ray.fleet.metrics import RankMetrics
from deepinfer_ray.parallel.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Set before torch is imported. Ray would give OMP_NUM_THREADS by its own rule (spec/ray.md §0.7)."""

PULSE_S, IDLE_PULSE_S = 1.0, 0.1
"""How often the engine is asked for its numbers: while it runs, and at most when it runs out of work."""

IDLE_TURN_S = 0.02
"""How often a gang without work asks its ranks for some."""

LINGER_S = 0.01
"""After a first result `collect` waits this long for company, so a fast engine is not answered row by row."""


class RankActor:
    """`start / submit / collect / ping / stop`. Every call but `start` may come at any time."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        os.environ.update({**RANK_ENVIRONMENT, **(environment or {})})
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._spec: RankSpec | None = None
        self._inbox: deque[WorkItem] = deque()
        self._outbox: list[WorkResult] = []
        self._in_flight: dict[int, WorkItem] = {}
        self._received = 0
        self._engine_wants = 0
        self._unseen = 0  # rows submitted that the engine's own count does not know yet
        self._reported_wanted = 0
        self._step = 0
        self._phase = "created"
        self._changed_at = time.monotonic()
        self._stopping = False
        self._fault: RankFault | None = None
        self._engine: Any = None
        self._metrics: RankMetrics | None = None
        self._stats: dict[str, Any] | None = None
        self._pulsed = -PULSE_S
        self._store: Any = None

    # ---- calls

    def where(self) -> RankWhere:
        """Machine, process and GPUs of this actor."""
        return where_am_i()

    def start(self, spec: RankSpec) -> RankReport:
        """Build the engine and start the loop; returns when it stands or failed (`report.fault`)."""
        with self._changed:
            if self._thread is not None:
                raise RuntimeError(f"rank {spec.rank} was started twice")
            self._spec = spec
            self._enter("loading")
            self._thread = threading.Thread(target=self._run, args=(spec,), name="engine", daemon=True)
            self._thread.start()
            self._changed.wait_for(lambda: self._phase != "loading")
            return self._report()

    def serve(self, prefix: str) -> Rendezvous:
        """Serve the place where the ranks of this gang meet, at a free port of this machine."""
        from deepinfer_ray.parallel.groups import Store

        self._store = Store(where_am_i().address, prefix)
        return self._store.rendezvous

    def submit(self, items: Sequence[WorkItem]) -> None:
        """Queue rows for the engine. Prompts are copied: they may be views into shared memory."""
        with self._changed:
            for item in items:
                item.prompt = np.array(item.prompt, dtype=np.int32)
                self._inbox.append(item)
                self._in_flight[item.key] = item
            self._received += len(items)
            self._unseen += len(items)
            self._reported_wanted = max(0, self._reported_wanted - len(items))
            self._changed.notify_all()

    def collect(self, max_wait_s: float) -> RankReport:
        """Results so far and credits; waits up to `max_wait_s` for news.

        News are results, a larger appetite than last reported, the end of the loop.
        """
        with self._changed:
            self._changed.wait_for(self._has_news, timeout=max_wait_s)
            if self._outbox and self._phase == "step":
                self._changed.wait_for(lambda: self._phase != "step", timeout=LINGER_S)
            return self._report()

    def ping(self) -> Heartbeat:
        """The pulse, at any time."""
        with self._changed:
            return self._heartbeat()

    def profile(self, num_steps: int = 20, output_dir: str | None = None) -> str:
        """Profile the next steps; the path of the trace on this machine, once it is written.

        Raises `ValueError`, `ProfileBusyError`, `ProfileTimeoutError` (engine/profiling.py).
        """
        engine = self._engine
        if not hasattr(engine, "profiler"):
            raise ValueError("the engine of this rank cannot be profiled")
        return str(engine.profiler.wait(engine.profile(num_steps, output_dir)))

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the loop after the step in progress; rows in flight are dropped. True if it ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    # ---- engine thread

    def _run(self, spec: RankSpec) -> None:
        try:
            engine = self._engine = resolve_factory(spec.engine_factory)(spec)
            self._metrics = RankMetrics(spec.rank)
            self._saw(engine, "idle")
            gang = getattr(engine, "ranks", None)  # the turns of a gang are made together
            while self._take(engine) if gang is None else self._take_turn(engine, gang):
                self._saw(engine, "step")
                results = engine.step() if gang is not None or engine.has_unfinished() else []
                self._pulse(engine, IDLE_PULSE_S if not engine.has_unfinished() else PULSE_S)
                self._publish(results, steps=0 if gang is not None and gang.idle else 1)
            close_engine(engine)
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            with self._changed:
                self._fault = RankFault(type(error).__name__, str(error), trace)
                self._enter("failed")
            close_engine(self._engine)

    def _take(self, engine: EngineLike) -> bool:
        """Move the inbox into the engine; waits while there is nothing to do; False when it must end."""
        with self._changed:
            while not self._inbox and not self._stopping and not engine.has_unfinished():
                if self._phase != "idle":
                    self._engine_wants, self._unseen = engine.wanted(), 0
                    self._enter("idle")
                self._changed.wait()
            if self._stopping:
                self._enter("stopped")
                return False
            items = list(self._inbox)
            self._inbox.clear()
        for item in items:
            self._admit(engine, item)
        return True

    def _take_turn(self, engine: EngineLike, gang: Any) -> bool:
        """`_take` in a gang: nobody waits alone, and all leave in the same turn.

        While nobody has work a turn is made every `IDLE_TURN_S`, or when rows come in here.
        """
        with self._changed:
            if gang.left:
                self._enter("stopped")
                return False
            if gang.idle and not self._inbox:
                if self._phase != "idle":
                    self._engine_wants, self._unseen = engine.wanted(), 0
                    self._enter("idle")
                self._changed.wait(IDLE_TURN_S)
            gang.leaving = self._stopping
            items = list(self._inbox)
            self._inbox.clear()
        for item in items:
            self._admit(engine, item)
        return True

    def _admit(self, engine: EngineLike, item: WorkItem) -> None:
        """Add one row; its own exception is its own result."""
        try:
            engine.add(Request(item.prompt, item.params, item.seed, item.key, time.monotonic()))
        except Exception as error:
            self._publish([RequestResult.refused(item.key, len(item.prompt), error)], steps=0)

    def _publish(self, results: Sequence[RequestResult], steps: int = 1) -> None:
        with self._changed:
            self._step += steps
            self._changed_at = time.monotonic()
            for result in results:
                item = self._in_flight.pop(result.request_id)
                self._outbox.append(WorkResult(item.key, result, item.attempts))
            if results:
                self._changed.notify_all()

    def _pulse(self, engine: EngineLike, interval_s: float) -> None:
        """Take the engine's numbers for the next report and for Prometheus, if the last are old enough."""
        ask, now = getattr(engine, "pulse", None), time.monotonic()
        if ask is None or now - self._pulsed < interval_s:
            return
        self._pulsed = now
        stats = ask()
        if self._metrics is not None:
            self._metrics.update(stats)
        with self._changed:
            self._stats = stats

    def _saw(self, engine: EngineLike, phase: str) -> None:
        """Refresh the engine's appetite, which now knows all rows but those that came in meanwhile."""
        with self._changed:
            self._engine_wants, self._unseen = engine.wanted(), len(self._inbox)
            if phase != self._phase or self._wanted() > self._reported_wanted:
                self._enter(phase)

    # ---- under the lock

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._changed_at = time.monotonic()
        self._changed.notify_all()

    def _wanted(self) -> int:
        return 0 if self._ended() else max(0, self._engine_wants - self._unseen)

    def _ended(self) -> bool:
        return self._phase in ("stopped", "failed")

    def _has_news(self) -> bool:
        return bool(self._outbox) or self._ended() or self._wanted() > self._reported_wanted

    def _heartbeat(self) -> Heartbeat:
        spec = self._spec
        return Heartbeat(
            rank=spec.rank if spec else -1,
            generation=spec.generation if spec else -1,
            phase=self._phase,
            step=self._step,
            age_s=time.monotonic() - self._changed_at,
            in_flight=len(self._in_flight),
            part=getattr(self._engine, "part", ""),
        )

    def _report(self) -> RankReport:
        results, self._outbox = self._outbox, []
        stats, self._stats = self._stats, None
        self._reported_wanted = self._wanted()
        return RankReport(
            self._heartbeat(), self._received, self._reported_wanted, results, self._fault, stats
        )


def close_engine(engine: Any) -> None:
    """End the threads of an engine that has any; its rank is over, so an error here is only logged."""
    try:
        if hasattr(engine, "close"):
            engine.close()
    except Exception:
        logger.exception("the engine could not be closed")


def where_am_i() -> RankWhere:
    """The place of this process; outside a cluster the node id is empty."""
    node_id, address, gpu_ids = "", "localhost", ()
    with contextlib.suppress(Exception):
        import ray

        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        address = ray.util.get_node_ip_address()
        gpu_ids = tuple(context.get_accelerator_ids().get("GPU", ()))
    return RankWhere(node_id, address, os.getpid(), gpu_ids)
