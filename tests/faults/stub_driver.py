"""The command `generate` over real ranks with the stub engine. argv: flags as JSON."""

import json
import sys

import typer
from lab import load_stub

from deepinfer_ray.cli.generate import run_generate
from deepinfer_ray.fleet.fleet import RayFleet

if __name__ == "__main__":
    flags, stub = json.loads(sys.argv[1]), load_stub()

    def backend(engine, model):
        return RayFleet("none", {"room": 8}, flags["--dp"], device="cpu", engine_factory=stub.make)

    try:
        run_generate(flags, make_backend=backend)
    except typer.Exit as done:
        sys.exit(done.exit_code)
