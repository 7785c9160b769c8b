"""`ray job submit` of the README command on a real head: stopped midway, submitted again, all rows once."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.model.synthetic import make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROWS = 600
RAY = Path(sys.executable).with_name("ray")


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def marked(mark):
    """Processes of this test that run, found by a variable that children inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DEEPINFER_TEST_MARK") == mark and process.status() != "zombie":
                found.append(process)
    return found


@pytest.fixture
def head():
    """A Ray head with dashboard, its own directory and ports. Yields (API address, environment)."""
    port, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "DEEPINFER_TEST_MARK": mark,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # `python` is this one
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)  # the package comes with the working directory
    with tempfile.TemporaryDirectory(prefix="rj-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        command = [
            *(RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"),
            *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--metrics-export-port={metrics}"),
            *("--num-cpus=3", "--num-gpus=0", f"--object-store-memory={150 * 2**20}", f"--temp-dir={temp}"),
        ]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            address = f"http://127.0.0.1:{dashboard}"
            wait_until(lambda: answers(f"{address}/api/version"), 60, "the dashboard does not answer")
            yield address, environment
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            for left in marked(mark):
                with contextlib.suppress(psutil.Error):
                    left.kill()
            process.wait()


def answers(url):
    """Whether somebody listens who asks for the token."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    raise AssertionError("the head answers without a token")


def wait_until(holds, timeout_s, message):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, message
        time.sleep(0.1)


def checkout(root, where):
    """What `--working-dir .` would send from a checkout: without tests, data and caches."""
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("deepinfer_ray", "kernels", "jobs", "configs"):
        shutil.copytree(root / name, where / name, ignore=skip)


def readme_command(root):
    """The words that follow `ray job submit` in the README."""
    text = (root / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("ray job submit ")]
    words = shlex.split(line)[3:]
    assert {"MODEL", "IN", "OUT"} < set(words)
    return words


def test_stop_and_submit_again(head, root, tmp_path):
    address, environment = head
    checkout(root, work := tmp_path / "checkout")
    model = make_checkpoint(tmp_path / "model", "tiny")
    rows = pa.table({"id": [f"r{i:03}" for i in range(ROWS)], "prompt": [f"row {i}" for i in range(ROWS)]})
    pq.write_table(rows, tmp_path / "in.parquet")
    output = tmp_path / "out"

    def ray_job(*words, **options):
        command = [RAY, "job", *map(str, words)]
        return subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=120, **options
        )

    places = {"MODEL": model, "IN": tmp_path / "in.parquet", "OUT": output}
    words = [places.get(word, word) for word in readme_command(root)]

    def submit(name, *options):
        return ray_job(
            *("submit", "--address", address, "--submission-id", name, *options, *words),
            *("--device", "cpu", "--max-tokens", 8, "--max-num-seqs", 8, "--set", "job.rows_per_part=20"),
        )

    first = submit("first", "--no-wait")
    assert first.returncode == 0, first.stderr
    wait_until(lambda: len(parts(output)) >= 2, 90, f"no part appears: {logs(ray_job, address, 'first')}")
    stopped = ray_job("stop", "--address", address, "first")
    assert stopped.returncode == 0, stopped.stderr
    assert "was stopped" in stopped.stderr + stopped.stdout
    committed = sum(pq.read_metadata(part).num_rows for part in parts(output))
    assert 0 < committed < ROWS
    log = logs(ray_job, address, "first")
    assert "SIGTERM: stopping" in log
    summary = json.loads(next(line for line in log.splitlines() if line.startswith('{"event":"summary"')))
    assert (summary["rows"], summary["rows_left"]) == (committed, ROWS - committed)

    second = submit("second")
    assert second.returncode == 0, second.stdout + second.stderr
    said = second.stdout + second.stderr
    assert f"resuming: {committed:,} rows are committed, {ROWS - committed:,} rows left" in said
    ids = [row for part in parts(output) for row in pq.read_table(part, columns=["id"])["id"].to_pylist()]
    assert sorted(ids) == rows["id"].to_pylist()
    assert not list(output.glob("_deepinfer/tmp/*"))


def parts(output):
    return sorted(output.glob("part-*.parquet"))


def logs(ray_job, address, name):
    return ray_job("logs", "--address", address, name).stdout
