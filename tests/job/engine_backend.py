"""A backend that is one real engine in this process."""

from __future__ import annotations

from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.engine.request import Request
from deepinfer_ray.fleet.backend import WorkResult


class EngineBackend:
    def __init__(self, model_dir, config):
        self._model_dir, self._config = model_dir, config
        self._attempts = {}

    def start(self):
        self.engine = build_engine(self._model_dir, self._config, "cpu")

    def wanted(self):
        return self.engine.wanted()

    def submit(self, items):
        for item in items:
            self._attempts[item.key] = item.attempts
            self.engine.add(Request(item.prompt, item.params, item.seed, request_id=item.key))

    def poll(self, timeout_s):
        if not self.engine.has_unfinished():
            return []
        results = self.engine.step()
        return [WorkResult(r.request_id, r, self._attempts.pop(r.request_id)) for r in results]

    def status(self):
        return {"restarts": 0}

    def close(self, graceful):
        pass
