"""Sampling defaults that come with a checkpoint (spec/chat.md §10).

Knows: `generation_config.json`. Does not know: rows, requests. Without the file: temperature 1, top_p 1 and
the EOS of `config.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_ray.engine.request import SamplingParams, describe_validation
from deepinfer_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """temperature, top_p: used where a caller names none. eos_token_ids: the first one is the EOS, the others
    stop a request like it."""

    temperature: float = 1.0
    top_p: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: str | Path) -> GenerationDefaults:
        """From the checkpoint's directory; values that break the rules are `ConfigError`."""
        file = Path(directory) / "generation_config.json"
        if not file.is_file():
            return cls()
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: holds a {type(data).__name__}, must be a JSON object")
        values = {name: data[name] for name in ("temperature", "top_p") if data.get(name) is not None}
        try:
            SamplingParams(**values)
        except ValueError as error:
            raise ConfigError(f"{file}: {describe_validation(error)}") from None
        return cls(eos_token_ids=_eos_ids(data.get("eos_token_id"), file), **values)

    def params(self, **values: Any) -> SamplingParams:
        """`SamplingParams` with these defaults under the given values."""
        return SamplingParams(**{"temperature": self.temperature, "top_p": self.top_p, **values})


def _eos_ids(value: object, file: Path) -> tuple[int, ...]:
    listed = [] if value is None else value if isinstance(value, list) else [value]
    ids = tuple(item for item in listed if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
    if len(ids) != len(listed):
        raise ConfigError(f"{file}: eos_token_id = {value!r} must be a token id or a list of them")
    return ids
