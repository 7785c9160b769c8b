"""`deepinfer-ray plan`: what a job would do, without doing it; takes the flags of `generate`.

Knows: how the findings become JSON or lines. Does not know: how they are found.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
import unicodedata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_ray.cli.generate import GenerateCommand, generate
from deepinfer_ray.config.load import FLAGS, load_config

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_PROMPT_CHARACTERS = 2000
GIB = 2**30
BAR = 40

PlanCommand = GenerateCommand
"""`--input a b` means `--input a --input b`."""


def plan(*, as_json: bool = False, tokens_per_second: float | None = None, **given: Any) -> None:
    """Look before you run: rows, bad rows, tokens, what fits on which GPU, placement, time.

    Takes the flags of generate. Reads the input once and encodes every row; needs the model's config.json and
    tokenizer, not its weights, and no GPU. Without --input shows only what fits; with RAY_ADDRESS set, where
    the ranks would stand. Writes nothing.
    """
    from deepinfer_ray.job.forecast import forecast

    flags: dict[str, object] = {}
    for flag in FLAGS:
        value = given[flag.removeprefix("--").replace("-", "_")]
        flags[flag] = value if value is not False else None
    config = load_config(given["config"] or (), given["set_"] or (), flags)
    show = sys.stderr.isatty()

    def progress(rows: int) -> None:
        if show:
            print(f"\r{rows:,} rows read", end="", file=sys.stderr, flush=True)

    found = forecast(
        config,
        lambda text: print(text, file=sys.stderr),
        tokens_per_second=tokens_per_second,
        progress=progress,
    )
    if show:
        print(file=sys.stderr)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        from rich.console import Console

        _print(Console(highlight=False), found)


def _take_flags_of_generate() -> None:
    """Give `plan` the parameters of `generate`, so that the two command lines cannot drift apart."""
    hints = typing.get_type_hints(generate, include_extras=True)
    own = {
        "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object.")],
        "tokens_per_second": Annotated[
            float | None,
            typer.Option(
                "--tokens-per-second",
                help="Measured speed of all ranks, for the time (default: of the last run into --output).",
                show_default=False,
                metavar="N",
            ),
        ],
    }
    parameters = list(inspect.signature(generate).parameters.values())
    for name, default in (("as_json", False), ("tokens_per_second", None)):
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    annotated = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation={**hints, **own}[parameter.name])
        for parameter in parameters
    ]
    plan.__signature__ = inspect.Signature(annotated)  # type: ignore[attr-defined]
    plan.__annotations__ = {parameter.name: parameter.annotation for parameter in annotated}


_take_flags_of_generate()


def _print(console: Console, found: dict[str, Any]) -> None:
    def line(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    rows = found["rows"]
    if rows is None:
        line("rows: no --input")
    else:
        _print_rows(line, found)
    line()
    _print_fit(console, found)
    line()
    _print_placement(line, found)
    estimate = found["estimate"]
    line(f"time:        {estimate['text']}")
    if found["first_prompt"] is not None:
        prompt = found["first_prompt"]
        cut = prompt["text"][:SHOWN_PROMPT_CHARACTERS]
        more = f" … ({len(prompt['text']):,} characters)" if len(cut) < len(prompt["text"]) else ""
        line(f"\nfirst prompt ({printable(prompt['row_id'])}, {prompt['tokens']:,} tokens):")
        line(printable(cut, keep="\n\t") + more)
    for problem in found["problems"]:
        line(f"\nproblem: {problem}")


def _print_rows(line: typing.Callable[[str], None], found: dict[str, Any]) -> None:
    line(
        f"rows:        {found['rows']:,} in {_counted(found['files'], 'file')} → "
        + _counted(found["parts"], "part")
        + (f"; {found['committed_rows']:,} are committed already" if found["committed_rows"] else "")
    )
    tokens = found["prompt_tokens"]
    if tokens is None:
        return
    line(f"bad rows:    {found['bad_rows']:,}")
    for code, error in found["errors"].items():
        line(f"  {code}: {error['rows']:,}, e.g. {printable(error['row_id'])}: {error['message']}")
    line(
        f"prompt tokens: {tokens['total']:,} (min {tokens['min']:,}, median {tokens['median']:,}, "
        f"mean {tokens['mean']:,.1f}, p90 {tokens['p90']:,}, p99 {tokens['p99']:,}, max {tokens['max']:,})"
    )
    most = max((bucket["rows"] for bucket in tokens["histogram"]), default=1)
    for bucket in tokens["histogram"]:
        bar = "█" * round(bucket["rows"] / most * BAR) or ("▏" if bucket["rows"] else "")
        line(f"  {bucket['from']:>9,}–{bucket['to']:<9,} {bucket['rows']:>11,} {bar}")
    line(f"completion tokens: at most {found['max_completion_tokens']:,}")


def printable(text: str, keep: str = "") -> str:
    """The text with control characters, which a terminal would obey, as escapes; but for those in `keep`."""
    return "".join(
        ascii(char)[1:-1] if unicodedata.category(char) == "Cc" and char not in keep else char
        for char in text
    )


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _print_fit(console: Console, found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="One rank by expert-parallel size (GiB): weights, and what is left for caches")
    kinds = list(dict.fromkeys(fit["gpu"] for fit in found["fit"]))
    for column in ("EP", "weights", "Engram share", *kinds):
        table.add_column(column, justify="right")
    by_place = {(fit["gpu"], fit["ep"]): fit for fit in found["fit"]}
    for ep in dict.fromkeys(fit["ep"] for fit in found["fit"]):
        first = by_place[kinds[0], ep]
        mark = " *" if ep == found["grid"]["ep"] else ""
        fits = [by_place[kind, ep] for kind in kinds]
        cells = [f"{fit['left_bytes'] / GIB:,.1f}" if fit["fits"] else "–" for fit in fits]
        table.add_row(
            f"{ep}{mark}", f"{first['bytes'] / GIB:,.2f}", f"{first['engram_bytes'] / GIB:,.2f}", *cells
        )
    console.print(table)
    grid = found["grid"]
    console.print(
        f"* asked for: {grid['text']}; – does not fit. DP and CP replicate, so they change no column.",
        markup=False,
        soft_wrap=True,
    )
    cpu = found["cpu"]
    caches = f"caches of a rank: {cpu['blocks']:,} blocks and {cpu['slots']:,} slots for "
    caches += f"{cpu['cache_tokens']:,} tokens"
    shown = f"does not fit: {cpu['problem']}" if cpu["problem"] else caches
    console.print(f"without a GPU: {shown}", markup=False, soft_wrap=True)


def _print_placement(line: typing.Callable[[str], None], found: dict[str, Any]) -> None:
    placement = found["placement"]
    line(f"placement:   {placement['text']}")
    for node in placement["nodes"]:
        domain = f", {node['domain']}" if node["domain"] else ""
        line(
            f"  {node['address']} ({node['node_id'][:8]}{domain}): {node['ranks_now']} ranks now, "
            f"{node['ranks_empty']} when empty"
        )
