"""`deepinfer-ray demo`: the whole path on a laptop, with what ships.

Knows: the toy prompts, where the demo keeps its checkpoint. Does not know: how anything runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_ray.cli.generate import run_generate
from deepinfer_ray.cli.options import ConfigFiles, Sets

RANKS = 2
SMALL_PARTS = "job.rows_per_part=16"
SHOWN_ROWS = 3
SHOWN_CHARACTERS = 60


def demo(
    output: Annotated[
        Path, typer.Option("--output", help="Directory for the result parts; a second run resumes.")
    ] = Path("demo-output"),
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of a completion.")] = 32,
    config: ConfigFiles = None,
    sets: Sets = None,
) -> None:
    """Send the shipped prompts through a tiny random model on two ranks of a local Ray.

    The model has the architecture of the release at toy size and random weights: its completions are noise,
    the path they take is the real one.
    """
    from deepinfer_ray.toy import prompts_path

    model = demo_checkpoint()
    typer.echo(f"model:   {model} (random weights)\nprompts: {prompts_path()}", err=True)
    flags: dict[str, object] = {
        "--model": str(model),
        "--input": [str(prompts_path())],
        "--output": str(output),
        "--id-column": "id",
        "--dp": RANKS,
        "--device": "cpu",
        "--max-tokens": max_tokens,
        "--temperature": 0.8,
        "--max-num-seqs": 16,
        "--allow-changed": True,  # a newer version may make another model; the demo goes on all the same
    }
    run_generate(
        flags, files=config or (), sets=[SMALL_PARTS, *(sets or ())], before_summary=lambda: show(output)
    )


def demo_checkpoint() -> Path:
    """The tiny checkpoint, made on first use and kept in the user's cache directory.

    Its name follows from its configuration and tokenizer, so sources that changed them make another.
    """
    from deepinfer_ray.model.synthetic import make_checkpoint, preset_files

    config, tokenizer = preset_files("tiny")
    text = json.dumps(config, sort_keys=True) + tokenizer.to_str()
    path = _cache() / f"tiny-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not (path / "config.json").is_file():
        make_checkpoint(path, "tiny")
    return path


def _cache() -> Path:
    """A directory that can be written: in XDG_CACHE_HOME or ~/.cache, else a temporary one of this user."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer_ray"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError:
        fallback = Path(tempfile.gettempdir()) / f"deepinfer_ray-{os.getuid()}"
        fallback.mkdir(mode=0o700, exist_ok=True)
        return fallback


def show(output: Path) -> None:
    """Where the parts are, and the first rows of them."""
    import pyarrow.parquet as pq

    parts = sorted(output.glob("part-*.parquet"))
    typer.echo(f"Parquet parts in {output.resolve()}:")
    for part in parts:
        typer.echo(f"  {part.name}")
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += pq.ParquetFile(part).read().to_pylist()
        if len(rows) >= SHOWN_ROWS:
            break
    for row in rows[:SHOWN_ROWS]:
        typer.echo(f"\n{row['row_id']}: {row['finish_reason']}, {row['completion_tokens']} tokens")
        typer.echo(f"  prompt:     {_short(row['prompt'])}")
        typer.echo(f"  completion: {_short(row['completion'])}")


def _short(text: str | None) -> str:
    shown = repr(text or "")
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"
