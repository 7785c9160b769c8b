"""`deepinfer-ray inspect`: what a checkpoint holds, what is wrong with it, what each rank would hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_ray.cli.options import ConfigFiles, Sets
from deepinfer_ray.config.load import load_config
from deepinfer_ray.errors import CheckpointError, ConfigError

GIB = 2**30


def inspect(
    path: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory, or a config.json.", show_default=False)
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="The same, as an option.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: ConfigFiles = None,
    sets: Sets = None,
) -> None:
    """Coverage, sizes and fit of a checkpoint; with only a config.json, what a checkpoint must hold."""
    from deepinfer_ray.model.inspect import inspect_checkpoint  # torch: not for --help

    configured = load_config(config or (), sets or ()).model.path
    given = path or model
    if given is None:
        if configured is None:
            raise ConfigError(
                "give the checkpoint: deepinfer-ray inspect DIR, or model.path in a --config file"
            )
        given = Path(configured)
    report = inspect_checkpoint(given)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(Console(), given, report)
    if report["problems"]:
        raise CheckpointError(
            f"{given}: {len(report['problems'])} problems, the first: {report['problems'][0]}"
        )


def _print(console: Console, model: Path, report: dict[str, Any]) -> None:
    what = "must hold" if report["config_only"] else "holds"
    console.print(
        f"{model}: a checkpoint {what} {report['tensors']:,} tensors, {report['parameters']:,} parameters, "
        f"{report['bytes']:,} bytes ({report['bytes'] / GIB:,.2f} GiB)",
        markup=False,
    )
    table = Table(title="Components")
    for column in ("component", "tensors", "parameters", "bytes", "GiB"):
        table.add_column(column, justify="left" if column == "component" else "right")
    for row in report["components"]:
        sizes = (f"{row['tensors']:,}", f"{row['parameters']:,}", f"{row['bytes']:,}")
        table.add_row(row["name"], *sizes, f"{row['bytes'] / GIB:,.3f}")
    console.print(table)
    ranks = Table(title="One rank by expert-parallel size (GiB)")
    for column in ("EP", "experts", "routed", "draft routed", "replicated", "device", "Engram share"):
        ranks.add_column(column, justify="right")
    for row in (row for row in report["ranks"] if row["rank"] == 0):
        parts = ("routed_bytes", "draft_routed_bytes", "replicated_bytes", "bytes", "engram_bytes")
        ranks.add_row(
            str(row["ep"]),
            f"{row['experts']} / {row['draft_experts']}",
            *(f"{row[part] / GIB:,.2f}" for part in parts),
        )
    console.print(ranks)
    for title, lines in (("Problems", report["problems"]), ("CPU only", report["gpu_problems"])):
        for line in lines:
            console.print(f"{title}: {line}", markup=False)
