"""The driver that `bench kills` starts and kills: the command `generate`, and a tally of rows that ranks get.

argv: JSON with `flags`, `sets` and `tally` (a file that grows by one byte for each row an engine is given).
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_ray.config.engine import EngineConfig
    from deepinfer_ray.config.hf import ModelConfig
    from deepinfer_ray.fleet.backend import Backend
    from deepinfer_ray.fleet.engines import EngineLike
    from deepinfer_ray.fleet.messages import RankSpec


def tallied(path: str, spec: RankSpec) -> EngineLike:
    """The real engine of a rank, which also counts in `path` what it is given."""
    from deepinfer_ray.fleet.engines import engine_from_checkpoint

    engine: Any = engine_from_checkpoint(spec)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    add = engine.add

    def count(request: Any) -> Any:
        os.write(file, b".")  # O_APPEND: ranks of one machine do not overwrite each other
        return add(request)

    engine.add = count
    return engine


def main(flags: dict[str, Any], sets: list[str], tally: str) -> None:
    """Run the job; the process ends with its exit code."""
    import typer

    from deepinfer_ray.cli.generate import run_generate
    from deepinfer_ray.fleet.fleet import RayFleet

    def backend(engine: EngineConfig, model: ModelConfig) -> Backend:
        factory = partial(tallied, tally)
        return RayFleet(flags["--model"], engine, flags["--dp"], device="cpu", engine_factory=factory)

    try:
        run_generate(flags, sets=sets, make_backend=backend)
    except typer.Exit as done:
        sys.exit(done.exit_code)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
