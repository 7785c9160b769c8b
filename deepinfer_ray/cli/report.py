"""`deepinfer-ray report`: what became of a job, as a page or as JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deepinfer_ray.cli.options import ConfigFiles, Sets
from deepinfer_ray.errors import ConfigError


def report(
    output: Annotated[
        str | None, typer.Argument(help="Output directory of a job, local or a URI.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object; writes nothing.")
    ] = False,
    config: ConfigFiles = None,
    sets: Sets = None,
) -> None:
    """Make the report of a job anew and print its path: speed, ranks, lengths, errors, slowest rows.

    Reads the output directory alone, so it works for a job that ended, was killed, or still runs.
    """
    from deepinfer_ray.config.load import load_config
    from deepinfer_ray.job.report import read_report
    from deepinfer_ray.job.report_file import write_report
    from deepinfer_ray.job.store import Store

    configured = load_config(config or (), sets or ()).job.output
    location = output or configured
    if location is None:
        raise ConfigError(
            "give the output directory: deepinfer-ray report OUTPUT, or job.output in a --config file"
        )
    store = Store(location)
    if as_json:
        typer.echo(json.dumps(read_report(store).as_dict()))
    else:
        typer.echo(write_report(store)[1])
