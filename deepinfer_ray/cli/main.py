"""`deepinfer-ray`: the commands, and how an error becomes a line and an exit code.

Knows: which commands there are. Does not know: what they do; each imports its work when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from deepinfer_ray import __version__
from deepinfer_ray.cli.bench import bench
from deepinfer_ray.cli.demo import demo
from deepinfer_ray.cli.doctor import doctor
from deepinfer_ray.cli.generate import GenerateCommand, generate
from deepinfer_ray.cli.inspect_cmd import inspect
from deepinfer_ray.cli.make_checkpoint import make_checkpoint
from deepinfer_ray.cli.plan import PlanCommand, plan
from deepinfer_ray.cli.report import report
from deepinfer_ray.errors import DeepInferError
from deepinfer_ray.job.signals import StopNow

app = typer.Typer(
    name="deepinfer-ray",
    help="Offline batch inference for DeepSeek-V4.1-Flash on a Ray cluster: Parquet of prompts in, Parquet "
    "of completions out. Start with `deepinfer-ray demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deepinfer-ray {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""


app.command(cls=GenerateCommand)(generate)
app.command()(demo)
app.command()(make_checkpoint)
app.command()(inspect)
app.command()(report)
app.command(cls=PlanCommand)(plan)
app.command()(doctor)
app.command()(bench)


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Ends the process: 0, or the exit code of the error (errors.py).

    An error that was raised on purpose is one line on stderr; anything else is a bug and shows its traceback.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="deepinfer-ray")
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except StopNow as stop:
        print(f"{stop}: what is committed is safe, the same command goes on from there", file=sys.stderr)
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    run()
