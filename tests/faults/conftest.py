"""`lab(call, **args)`: what `lab.py` can do, in a process of its own with a cluster of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def lab(tmp_path_factory):  # one cluster for all modules here
    script = Path(__file__).with_name("lab.py")
    log = tmp_path_factory.mktemp("lab") / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip

    def call(name, **args):
        print(json.dumps({"call": name, "args": args}), file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, f"the lab is gone: {log.read_text(errors='replace')[-4000:]}"
        answer = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{log.read_text(errors='replace')[-2000:]}"
        return answer["result"]

    yield call
    process.stdin.close()
    process.wait(60)
