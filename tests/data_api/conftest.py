"""The stub engine, a tiny checkpoint, jobs in this process to compare with, and one local Ray cluster."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.config.load import load_config
from deepinfer_ray.data import BatchPredictor
from deepinfer_ray.engine.request import Request
from deepinfer_ray.fleet.backend import WorkResult
from deepinfer_ray.job.generate import generate
from deepinfer_ray.job.signals import StopSignals
from deepinfer_ray.model.synthetic import make_checkpoint

STUB = Path(__file__).with_name("stub_engine.py")


def load_stub():
    """The stub as a module that travels to workers by value: they need not find the tests."""
    spec = importlib.util.spec_from_file_location("data_stub_engine", STUB)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stub():
    return load_stub()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny checkpoint directory."""
    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "tiny"))


class EngineBackend:
    """A backend that is one engine in this process."""

    def __init__(self, engine):
        self._engine = engine

    def start(self):
        pass

    def wanted(self):
        return self._engine.wanted()

    def submit(self, items):
        for item in items:
            self._engine.add(Request(item.prompt, item.params, item.seed, request_id=item.key))

    def poll(self, timeout_s):
        results = self._engine.step() if self._engine.has_unfinished() else []
        return [WorkResult(result.request_id, result, 1) for result in results]

    def status(self):
        return {"restarts": 0}

    def close(self, graceful):
        pass


@pytest.fixture
def job_rows(model, tmp_path):
    """job_rows(input, engine, flags…) → the rows of a job over it, by row id."""

    def run(path, engine, **options):
        flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        flags |= {"--model": model, "--input": [str(path)], "--output": str(tmp_path / "job")}
        with StopSignals() as signals:
            outcome = generate(
                load_config((), (), flags, {}), lambda *_: EngineBackend(engine), lambda text: None, signals
            )
        assert outcome.exit_code == 0
        parts = sorted((tmp_path / "job").glob("part-*.parquet"))
        return by_id(pa.concat_tables(pq.ParquetFile(part).read() for part in parts))

    return run


NOT_COMPARED = ("attempts", "cached_tokens")


@pytest.fixture
def by_row_id():
    return by_id


def by_id(table):
    """Rows by id, without what a retry may change; an id that occurs twice fails."""
    rows = {row["row_id"]: row for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    for row in rows.values():
        for name in NOT_COMPARED:
            del row[name]
    return rows


@pytest.fixture
def predictor(model, stub):
    """predictor(options…, engine={room, step_s}) → a BatchPredictor on a stub engine, closed afterwards."""
    made = []

    def make(engine=(), **options):
        made.append(
            BatchPredictor(
                {"model": model, "token_ids_column": "ids", "device": "cpu", **options},
                engine_factory=partial(stub.make, **dict(engine)),
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def ray_cluster(local_ray):
    """The session's cluster, set up for pipelines; the value is the ray module."""
    import ray.data

    local_ray.cloudpickle.register_pickle_by_value(load_stub())
    ray.data.DataContext.get_current().enable_progress_bars = False
    return local_ray
