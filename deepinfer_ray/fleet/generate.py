"""Lists of requests over a fleet that stays up between calls: what `LLM(dp=…)` stands on.

Knows: requests, results in input order, when to close. Does not know: texts, prompts, how ranks run.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

from deepinfer_ray.engine.request import Request, RequestResult
from deepinfer_ray.fleet.backend import Backend, WorkItem
from deepinfer_ray.fleet.engines import DEFAULT_FACTORY, EngineFactory
from deepinfer_ray.fleet.fleet import RayFleet
from deepinfer_ray.fleet.options import FleetOptions

POLL_S = 1.0


def run_requests(backend: Backend, requests: Sequence[Request]) -> list[RequestResult]:
    """Run all requests on a started backend that has nothing else to do; one result each, in input order.

    A request's own id is given back in its result; ids need not be unique.
    """
    results: dict[int, RequestResult] = {}
    sent = 0
    while len(results) < len(requests):
        room = min(backend.wanted(), len(requests) - sent)
        if room:
            items = [
                WorkItem(key, requests[key].prompt, requests[key].params, requests[key].seed)
                for key in range(sent, sent + room)
            ]
            backend.submit(items)
            sent += room
        for done in backend.poll(POLL_S):
            done.result.request_id = requests[done.key].request_id
            results[done.key] = done.result
    return [results[key] for key in range(len(requests))]


class FleetGenerator:
    """D ranks on Ray that answer `run` calls until `close`, or until the interpreter ends."""

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        engine_config: Any = None,
        *,
        dp: int,
        device: str = "auto",
        engine_factory: EngineFactory | str = DEFAULT_FACTORY,
        options: FleetOptions | None = None,
    ) -> None:
        """Starts the ranks. Raises what `RayFleet.start` raises; nothing is left then."""
        self._fleet = RayFleet(
            model_dir, engine_config, dp, device=device, engine_factory=engine_factory, options=options
        )
        self._fleet.start()
        atexit.register(self.close)  # before Ray's own exit hook, which was registered earlier

    def run(self, requests: Sequence[Request]) -> list[RequestResult]:
        """One result a request, in input order. On an error or Ctrl-C the ranks are ended first."""
        try:
            return run_requests(self._fleet, requests)
        except BaseException:
            self.close(graceful=False)
            raise

    def status(self) -> dict[str, Any]:
        """The fleet's picture of itself."""
        return self._fleet.status()

    def close(self, graceful: bool = True) -> None:
        """End the ranks; a cluster that was started for them ends too. May be called twice."""
        atexit.unregister(self.close)
        self._fleet.close(graceful)

    def __enter__(self) -> FleetGenerator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(graceful=kind is None)
