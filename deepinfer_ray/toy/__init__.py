"""What ships for a first run: a byte-level tokenizer and a small data set of prompts."""

from __future__ import annotations

from pathlib import Path


def prompts_path() -> Path:
    """The shipped Parquet file: columns `id` (string) and `prompt` (string)."""
    return Path(__file__).parent / "data" / "prompts.parquet"
