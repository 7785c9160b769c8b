"""A driver process for tests: `generate` with the stub backend. argv, as JSON: stub options, flags, --set."""

import json
import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parent))
from stub_backend import StubBackend

from deepinfer_ray.cli.generate import run_generate
from deepinfer_ray.errors import DeepInferError
from deepinfer_ray.job.signals import StopNow

if __name__ == "__main__":
    stub, flags, sets = (json.loads(argument) for argument in sys.argv[1:4])
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
