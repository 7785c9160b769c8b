"""`deepinfer-ray bench NAME`: the measurements that the README and the results files quote."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_ray.cli.options import ConfigFiles, Sets
from deepinfer_ray.errors import ConfigError

BENCHES = {
    "eplb": ("deepinfer_ray.bench.eplb", "expert load balance before and after, payback of a shuffle"),
    "job": ("deepinfer_ray.bench.job", "tokens/s of the job beside its engines alone (some minutes)"),
    "independence": (
        "deepinfer_ray.bench.independence",
        "cost of products whose rows do not depend on the batch",
    ),
    "kills": (
        "deepinfer_ray.bench.kills",
        "jobs killed at random moments: rows lost, doubled, done again (some minutes)",
    ),
    "peer": ("deepinfer_ray.bench.peer", "CPU tokens/s of a tiny checkpoint beside transformers"),
    "policy": (
        "deepinfer_ray.bench.policy",
        "scheduling policies of a lock-step fleet on a simulated clock (about a minute)",
    ),
    "prefix": (
        "deepinfer_ray.bench.prefix",
        "prefill tokens and time of rows with common heads, reuse off and on",
    ),
    "replay": (
        "deepinfer_ray.bench.replay",
        "prefill work and time with only the end of a prompt in the consumer layers",
    ),
    "spec": ("deepinfer_ray.bench.spec", "tokens/s with and without drafts, verified and accepted lengths"),
    "scheduler": ("deepinfer_ray.bench.scheduler", "host time of a decode step at 32…512 sequences"),
}
"""name -> (module with `run() -> list[dict]`, what it measures). A module may also have
`plots(rows, directory) -> list[Path]`."""


PIPED_WIDTH = 500


def _print_rows(result: dict[str, Any]) -> None:
    """A table; where the terminal is too narrow for it, a paragraph a row. Piped output is never cut."""
    console, machine = Console(highlight=False), result["machine"]
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_WIDTH)
    console.print(f"{result['name']} · {machine['processor']} · {machine['cores']} cores · {result['date']}")
    table = Table()
    for column in result["rows"][0] if result["rows"] else ():
        table.add_column(column, justify="right")
    for row in result["rows"]:
        table.add_row(*map(str, row.values()))
    wide = console.measure(table, options=console.options.update(max_width=PIPED_WIDTH)).maximum
    if wide <= console.width:
        console.print(table)
        return
    for row in result["rows"]:
        console.print("", *(f"{column}: [bold]{value}[/]" for column, value in row.items()), sep="   ")


def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the benchmark's plots (SVG) into this directory.")
    ] = None,
    config: ConfigFiles = None,
    sets: Sets = None,
) -> None:
    """Measure something on this machine and print the figures."""
    from deepinfer_ray.bench.machine import report
    from deepinfer_ray.config.load import load_config

    load_config(config or (), sets or ())  # checked only: a benchmark's figures stand for its own options
    if name not in BENCHES:
        known = "; ".join(f"{known} ({about})" for known, (_, about) in BENCHES.items())
        raise ConfigError(f"there is no benchmark {name!r}; choose one of: {known}")
    module = importlib.import_module(BENCHES[name][0])
    if out is not None and not hasattr(module, "plots"):
        raise ConfigError(f"the benchmark {name} draws no plots; leave out --out")
    result = report(name, module.run())
    if out is not None:
        for path in module.plots(result["rows"], out):
            typer.echo(f"wrote {path}", err=True)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_rows(result)
