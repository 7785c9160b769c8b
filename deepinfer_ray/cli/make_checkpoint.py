"""`deepinfer-ray make-checkpoint`: a random checkpoint in the stored format of the release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from deepinfer_ray.cli.options import ConfigFiles, Sets


def make_checkpoint(
    out: Annotated[Path, typer.Option("--out", help="New or empty directory.")],
    preset: Annotated[
        Literal["tiny", "tiny-gpu", "slice"],
        typer.Option(
            "--preset", help="tiny: CPU; tiny-gpu: kernel shapes; slice: real dimensions, cut down."
        ),
    ] = "tiny",
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same bytes.")] = 0,
    layers: Annotated[int | None, typer.Option("--layers", help="Backbone layers.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", help="Routed experts a layer.")] = None,
    engram_rows: Annotated[
        int | None, typer.Option("--engram-rows", help="Rows of an Engram table, about.")
    ] = None,
    config: ConfigFiles = None,
    sets: Sets = None,
) -> None:
    """Write a synthetic checkpoint with its tokenizer."""
    from deepinfer_ray.config.load import load_config
    from deepinfer_ray.model import synthetic  # torch: not for --help

    load_config(config or (), sets or ())  # checked only: nothing of it decides what a checkpoint holds

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("writing", total=None)
        path = synthetic.make_checkpoint(
            out,
            preset,
            seed,
            layers=layers,
            experts=experts,
            engram_rows=engram_rows,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(str(path))
