"""`deepinfer-ray generate`: the batch job, on a local Ray or on the cluster of RAY_ADDRESS.

Knows: flags and their help. Does not know: what a flag means; `config.load.FLAGS` maps each to its option.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from deepinfer_ray.config.load import FLAGS, load_config

if TYPE_CHECKING:
    from deepinfer_ray.config.engine import EngineConfig
    from deepinfer_ray.config.job import RunConfig
    from deepinfer_ray.fleet.backend import Backend
    from deepinfer_ray.job.generate import BackendFactory

MANY_VALUES = ("--input",)
"""Flags that take several values at once: `--input a b c`."""


class GenerateCommand(TyperCommand):
    """A command in which `--input a b` means `--input a --input b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand_values(args))


def expand_values(args: list[str]) -> list[str]:
    """Repeat a flag of `MANY_VALUES` before each further value: up to the next word that starts with `-`."""
    expanded: list[str] = []
    flag, values = None, 0
    for word in args:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            flag, values = (name, int(bool(equals))) if name in MANY_VALUES else (None, 0)
        elif flag is not None:
            if values:
                expanded.append(flag)
            values += 1
        expanded.append(word)
    return expanded


_METAVARS = {
    "--model": "DIR",
    "--input": "PATH...",
    "--output": "DIR",
    "--deadline": "TIME",
    "--numerics": "exact|released",
    "--device": "cpu|cuda|auto",
    "--on-too-long": "error|truncate-left",
    "--config": "FILE",
    "--set": "KEY=VALUE",
    "--stop": "TEXT",
    "--reasoning-effort": "EFFORT",
    "--output-prefix": "TEXT",
    "--allow-changed": None,
    "--retry-errors": None,
}


def _flag(name: str, text: str, panel: str) -> Any:
    value = _METAVARS.get(name, "COLUMN" if name.endswith("-column") else "N")
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False, metavar=value)


_DATA, _ROWS, _SAMPLING, _ENGINE, _RUN, _CONFIG = (
    "Data",
    "Columns",
    "Sampling (for rows without parameters of their own)",
    "Model and ranks",
    "The run",
    "Configuration",
)
_Text = str | None
_Whole = int | None
_Real = float | None


def generate(
    model: Annotated[_Text, _flag("--model", "Checkpoint directory (Hugging Face layout).", _DATA)] = None,
    input: Annotated[
        list[str] | None,
        _flag("--input", "Parquet or JSONL files, directories or globs, one or more; paths or URIs.", _DATA),
    ] = None,
    output: Annotated[
        _Text,
        _flag("--output", "Directory for the result parts. A second run into it resumes.", _DATA),
    ] = None,
    output_prefix: Annotated[
        _Text, _flag("--output-prefix", "Put this before the name of every output column.", _DATA)
    ] = None,
    prompt_column: Annotated[
        _Text, _flag("--prompt-column", "Column of prompt texts (default: prompt).", _ROWS)
    ] = None,
    token_ids_column: Annotated[
        _Text, _flag("--token-ids-column", "Column of token id lists, used as they are.", _ROWS)
    ] = None,
    messages_column: Annotated[
        _Text, _flag("--messages-column", "Column of chat messages: list of structs, or JSON text.", _ROWS)
    ] = None,
    id_column: Annotated[
        _Text, _flag("--id-column", "Column of unique row ids (default: file#rowgroup:row).", _ROWS)
    ] = None,
    sampling_column: Annotated[
        _Text,
        _flag("--sampling-column", "Column with a row's own parameters: struct, map or JSON text.", _ROWS),
    ] = None,
    schema_column: Annotated[
        _Text, _flag("--schema-column", "Column of JSON schemas that completions must match.", _ROWS)
    ] = None,
    tools_column: Annotated[
        _Text, _flag("--tools-column", "Column of a chat row's tools: list of structs, or JSON text.", _ROWS)
    ] = None,
    chat_column: Annotated[
        _Text,
        _flag("--chat-column", "Column of a chat row's own options: struct, map or JSON text.", _ROWS),
    ] = None,
    image_column: Annotated[
        _Text, _flag("--image-column", "Column of images (not in this version).", _ROWS)
    ] = None,
    max_tokens: Annotated[
        _Whole,
        _flag("--max-tokens", "Tokens of a completion at most (default: 256; chat rows more).", _SAMPLING),
    ] = None,
    temperature: Annotated[
        _Real, _flag("--temperature", "0 = always the likeliest token (default: 1).", _SAMPLING)
    ] = None,
    top_p: Annotated[_Real, _flag("--top-p", "Sample from this share of probability.", _SAMPLING)] = None,
    top_k: Annotated[_Whole, _flag("--top-k", "Sample from the K likeliest; -1 = off.", _SAMPLING)] = None,
    min_p: Annotated[
        _Real, _flag("--min-p", "Drop tokens below this share of the likeliest one.", _SAMPLING)
    ] = None,
    seed: Annotated[_Whole, _flag("--seed", "Same seed, same completions (default: 0).", _SAMPLING)] = None,
    n: Annotated[
        _Whole, _flag("--n", "Completions a row; above 1 completion columns are lists.", _SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None, _flag("--stop", "Text that ends a completion; may be repeated.", _SAMPLING)
    ] = None,
    reasoning_effort: Annotated[
        _Text,
        _flag("--reasoning-effort", "Of chat rows: low, high, max, 1 to 100; none = no thinking.", _SAMPLING),
    ] = None,
    num_drafts: Annotated[
        _Whole,
        _flag(
            "--num-drafts",
            "Draft tokens a step; 0 = off (default: 5 with --device cuda if the checkpoint drafts).",
            _ENGINE,
        ),
    ] = None,
    dp: Annotated[_Whole, _flag("--dp", "Data-parallel ranks.", _ENGINE)] = None,
    cp: Annotated[_Whole, _flag("--cp", "Context-parallel ranks of a replica.", _ENGINE)] = None,
    ep: Annotated[_Whole, _flag("--ep", "Ranks that share one set of experts.", _ENGINE)] = None,
    engram: Annotated[_Whole, _flag("--engram", "Ranks that share one Engram table.", _ENGINE)] = None,
    max_gangs: Annotated[
        _Whole,
        _flag(
            "--max-gangs",
            "More gangs of ranks join while there is work and room, up to so many (default: none).",
            _ENGINE,
        ),
    ] = None,
    max_model_len: Annotated[
        _Whole, _flag("--max-model-len", "Prompt and completion tokens of a row at most.", _ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        _Whole, _flag("--max-num-seqs", "Sequences that a rank runs at once.", _ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        _Whole, _flag("--max-num-batched-tokens", "Tokens of one step of a rank at most.", _ENGINE)
    ] = None,
    numerics: Annotated[
        _Text, _flag("--numerics", "exact, or released (with the release's roundings).", _ENGINE)
    ] = None,
    device: Annotated[_Text, _flag("--device", "cpu, cuda or auto.", _ENGINE)] = None,
    max_error_rate: Annotated[
        _Real, _flag("--max-error-rate", "Stop when more of the rows fail; 1 = never.", _RUN)
    ] = None,
    allow_changed: Annotated[
        bool, _flag("--allow-changed", "Resume although model, sampling or input changed.", _RUN)
    ] = False,
    limit: Annotated[_Whole, _flag("--limit", "Only the first rows of the input.", _RUN)] = None,
    deadline: Annotated[
        _Text,
        _flag(
            "--deadline",
            "Stop in order after this time, e.g. 90m; exit code 0, resumable.",
            _RUN,
        ),
    ] = None,
    on_too_long: Annotated[
        _Text,
        _flag("--on-too-long", "A prompt beyond the context: error, or truncate-left.", _RUN),
    ] = None,
    retry_errors: Annotated[
        bool, _flag("--retry-errors", "Run the rows again that failed in an earlier run.", _RUN)
    ] = False,
    config: Annotated[
        list[str] | None, _flag("--config", "YAML file with options; flags win over it.", _CONFIG)
    ] = None,
    set_: Annotated[
        list[str] | None, _flag("--set", "Any option: block.option=value; may be repeated.", _CONFIG)
    ] = None,
) -> None:
    """Run every row of a Parquet or JSONL data set through the model; one output row for each.

    Starts a local Ray, or joins the cluster of RAY_ADDRESS. May be killed at any moment: the same command
    resumes. Progress goes to stderr, the last line of stdout is a JSON summary. Exit codes: 0 done, 1 a bug,
    2 usage, 3 too many failed rows, 4 cluster, 5 output, 130 and 143 stopped by a signal; 3 and above can be
    resumed.
    """
    given = dict(locals())
    flags: dict[str, object] = {}
    for flag in FLAGS:
        value = given[flag.removeprefix("--").replace("-", "_")]
        flags[flag] = value if value is not False else None
    run_generate(flags, files=config or (), sets=set_ or ())


def ray_backend(config: RunConfig, engine: EngineConfig) -> Backend:
    """Ranks on Ray: the cluster of RAY_ADDRESS, else a local one.

    A size of the Engram group that was left open means a table in every rank here, not one over all ranks.
    """
    from deepinfer_ray.fleet.fleet import RayFleet
    from deepinfer_ray.fleet.options import default_options

    asked, job = config.parallel, config.job
    engine = engine.with_values(parallel={"engram": asked.engram or int(asked.cp == asked.ep == 1)})
    options = default_options(engine, max_gangs=job.max_gangs, idle_s=job.gang_idle_s)
    model = str(config.model.path)
    return RayFleet(model, engine, asked.replicas, device=engine.runtime.backend, options=options)


def run_generate(
    flags: Mapping[str, object],
    *,
    files: Sequence[str] = (),
    sets: Sequence[str] = (),
    make_backend: BackendFactory | None = None,
    before_summary: Callable[[], None] | None = None,
) -> None:
    """Run the job; prints the summary as the last line of stdout and leaves with the job's exit code.

    make_backend: what runs the rows, ranks on Ray by default. before_summary: prints to stdout when all rows
    are done. Raises `typer.Exit` for a code other than 0, and what forbids to begin (`ConfigError`, …).
    """
    from deepinfer_ray.job.generate import generate as run_job
    from deepinfer_ray.job.signals import StopSignals

    resolved = load_config(files, sets, flags)
    factory = make_backend or (lambda engine, model: ray_backend(resolved, engine))
    # whatever prints meanwhile (Ray repeats what its workers print) must not end up in the caller's pipe
    with StopSignals() as signals, contextlib.redirect_stdout(sys.stderr):
        print(f"config: {resolved.model_dump_json(exclude_defaults=True)}", file=sys.stderr)
        outcome = run_job(resolved, factory, lambda text: print(text, file=sys.stderr), signals)
    if outcome.error is not None:
        print(f"error: {outcome.error}", file=sys.stderr)
    if before_summary is not None and not outcome.exit_code:
        before_summary()
    print(outcome.summary.line(), flush=True)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
