"""A driver process for tests: `generate` with the stub backend. argv, as JSON: stub options, flags, --set.

Stub options of the process alone: memory = [file, rows between two lines] notes rows submitted and resident
bytes; short = whether completions are two tokens.
"""

import json
import sys
from pathlib import Path

import psutil
import typer

sys.path.insert(0, str(Path(__file__).parent))
from stub_backend import StubBackend

from deepinfer_ray.cli.generate import run_generate
from deepinfer_ray.errors import DeepInferError
from deepinfer_ray.job.signals import StopNow


def noting(path, step):
    """`on_poll` that writes a line each time `step` more rows were submitted."""
    process, last = psutil.Process(), -step

    def note(stub):
        nonlocal last
        if stub.submitted - last >= step:
            last = stub.submitted
            with open(path, "a") as file:
                print(last, process.memory_info().rss, file=file)

    return note


if __name__ == "__main__":
    stub, flags, sets = (json.loads(argument) for argument in sys.argv[1:4])
    if memory := stub.pop("memory", None):
        stub["on_poll"] = noting(*memory)
    if stub.pop("short", False):
        stub["answer"] = lambda item: ([70, 71], "CD", "length")
    try:
        run_generate(flags, sets=sets, make_backend=lambda engine, model: StubBackend(**stub))
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except StopNow as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
