"""The demo and a stopped job on a real local Ray: rows come out, no process stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.model.synthetic import make_checkpoint
from deepinfer_ray.toy import prompts_path

pytestmark = pytest.mark.ray


@pytest.fixture
def deepinfer(tmp_path):
    """deepinfer(words…) → Popen whose processes, Ray's included, all end before the test does."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "DEEPINFER_TEST_MARK": mark}
    environment.pop("RAY_ADDRESS", None)

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-m", "deepinfer_ray.cli.main", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    yield start
    deadline = time.monotonic() + 15
    while left := marked_processes(mark):
        assert time.monotonic() < deadline, f"these are left: {left}"
        time.sleep(0.2)


def marked_processes(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("DEEPINFER_TEST_MARK") == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append((process.pid, process.name()))
        except psutil.Error:
            continue
    return found


def test_demo_runs_and_runs_again(deepinfer, tmp_path):
    words = ("demo", "--output", tmp_path / "out", "--max-tokens", "4")
    out, err = (process := deepinfer(*words)).communicate(timeout=120)
    assert process.returncode == 0, err
    rows = pq.read_table(prompts_path()).num_rows
    summary = json.loads(out.splitlines()[-1])
    assert (summary["rows"], summary["ok"], summary["errors"]) == (rows, rows, 0)
    assert summary["parts"] == len(list((tmp_path / "out").glob("part-*.parquet"))) > 1
    assert f"Parquet parts in {tmp_path / 'out'}:" in out
    assert out.count("completion: ") == 3
    assert "starting 2 ranks" in err
    report = tmp_path / "out/_deepinfer/report.html"
    assert f"report: {report}" in err
    assert 'data-chart="phases"' in report.read_text()
    again, err = (process := deepinfer(*words)).communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"resuming: {rows} rows are committed, 0 rows left" in err
    assert json.loads(again.splitlines()[-1])["resumed_rows"] == rows


def test_ctrl_c_drains_the_ranks(deepinfer, tmp_path):
    model = make_checkpoint(tmp_path / "model", "tiny")
    pq.write_table(pa.table({"prompt": [f"row {i}" for i in range(400)]}), tmp_path / "in.parquet")
    process = deepinfer(
        *("generate", "--model", model, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out"),
        *("--device", "cpu", "--max-tokens", 8, "--max-num-seqs", 8, "--set", "job.rows_per_part=8"),
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("part-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    summary = json.loads(out)
    committed = sum(pq.read_metadata(part).num_rows for part in (tmp_path / "out").glob("part-*"))
    assert summary["rows"] == committed > 0
    assert summary["rows_left"] == 400 - committed > 0
    assert f"report: {tmp_path}/out/_deepinfer/report.html" in err
    assert "Batch job, not complete" in (tmp_path / "out/_deepinfer/report.html").read_text()
    assert "Traceback" not in err
