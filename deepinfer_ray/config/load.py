"""One configuration from four sources: command line > environment > YAML > defaults.

Knows: where a value came from, how texts become values, the table of short flags. Does not know: options.
Every complaint names the key, the value and its source; an unknown key gets the nearest valid name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from deepinfer_ray.config.base import Section, nearest, validation_to_config_error
from deepinfer_ray.config.job import RunConfig
from deepinfer_ray.errors import ConfigError

ENV_PREFIX = "DEEPINFER_RAY__"

FLAGS: dict[str, str] = {
    "--model": "model.path",
    "--numerics": "numerics",
    "--device": "runtime.backend",
    "--dp": "parallel.dp",
    "--cp": "parallel.cp",
    "--ep": "parallel.ep",
    "--engram": "parallel.engram",
    "--max-model-len": "scheduler.max_model_len",
    "--max-num-seqs": "scheduler.max_seqs",
    "--max-num-batched-tokens": "scheduler.max_batched_tokens",
    "--num-drafts": "speculative.num_drafts",
    "--input": "job.input",
    "--output": "job.output",
    "--output-prefix": "job.output_prefix",
    "--prompt-column": "job.prompt_column",
    "--messages-column": "job.messages_column",
    "--token-ids-column": "job.token_ids_column",
    "--id-column": "job.id_column",
    "--sampling-column": "job.sampling_column",
    "--schema-column": "job.schema_column",
    "--tools-column": "job.tools_column",
    "--chat-column": "job.chat_column",
    "--image-column": "job.image_column",
    "--max-tokens": "job.sampling.max_tokens",
    "--temperature": "job.sampling.temperature",
    "--top-p": "job.sampling.top_p",
    "--top-k": "job.sampling.top_k",
    "--min-p": "job.sampling.min_p",
    "--seed": "job.sampling.seed",
    "--n": "job.sampling.n",
    "--stop": "job.sampling.stop",
    "--reasoning-effort": "job.chat.reasoning_effort",
    "--max-gangs": "job.max_gangs",
    "--max-error-rate": "job.max_error_rate",
    "--allow-changed": "job.allow_changed",
    "--limit": "job.limit",
    "--deadline": "job.deadline_s",
    "--on-too-long": "job.on_too_long",
    "--retry-errors": "job.retry_errors",
}
"""Short flags of the command line → configuration keys. The one place where this mapping exists."""

OPTION_ALIASES: dict[str, str] = {
    **{
        flag.removeprefix("--").replace("-", "_"): key
        for flag, key in FLAGS.items()
        if not key.startswith("job.")
    },
    "tokenizer": "model.tokenizer_path",
    "seed": "runtime.seed",
    "gpu_memory_utilization": "cache.memory_utilization",
    "data_parallel_size": "parallel.dp",
    "context_parallel_size": "parallel.cp",
    "expert_parallel_size": "parallel.ep",
    "engram_parallel_size": "parallel.engram",
    "chunked_prefill": "scheduler.chunked_prefill",
    "enforce_eager": "runtime.enforce_eager",
    "load_format": "model.load_format",
}
"""Keyword options of the Python API → configuration keys; blocks and dotted keys work beside them."""

_S = TypeVar("_S", bound=Section)


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key given twice: the first value would vanish silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} given twice", key_node.start_mark
                )
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep)


class _Layers:
    """Values merged so far, and who set each of them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def set(self, path: str, value: object, source: str) -> None:
        """Set a dotted key; a mapping is merged key by key."""
        parts = path.split(".")
        if not all(parts):
            raise ConfigError(f"'{path}' (from {source}) is not a key; write block.option")
        if isinstance(value, Mapping):
            if not value:
                return
            for key, item in value.items():
                self.set(f"{path}.{key}", item, source)
            return
        node = self.values
        for depth, part in enumerate(parts[:-1], 1):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                outer = ".".join(parts[:depth])
                raise ConfigError(
                    f"'{path}' (from {source}) reaches into '{outer}' = {child!r} "
                    f"(from {self.sources[outer]}), which is not a block"
                )
            node = child
        node[parts[-1]] = value
        self.sources[path] = source

    def source_of(self, path: str) -> str | None:
        """The source of a key, of the nearest key above it, or of the only one below it."""
        parts = path.split(".") if path else []
        for end in range(len(parts), 0, -1):
            source = self.sources.get(".".join(parts[:end]))
            if source is not None:
                return source
        below = sorted({s for key, s in self.sources.items() if path and key.startswith(f"{path}.")})
        return ", ".join(below) or None

    def build(self, cls: type[_S]) -> _S:
        try:
            return cls.model_validate(self.values)
        except ValidationError as error:
            raise validation_to_config_error(error, cls, self.source_of) from None


def parse_text(text: str) -> object:
    """A value written as text: null, a list or mapping in flow style, else the text itself.

    Numbers and booleans stay texts here, the option's type decides about them.
    """
    stripped = text.strip()
    if stripped.lower() in ("null", "none", "~"):
        return None
    if stripped[:1] in ("[", "{"):
        try:
            return yaml.load(stripped, Loader=_UniqueKeys)
        except yaml.YAMLError:
            return text
    return text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping; missing, unreadable or malformed is a `ConfigError` with the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: is not valid YAML: {getattr(error, 'problem', error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: must hold a mapping of option blocks, not a {type(data).__name__}")
    return data


def load_config(
    files: Sequence[str | Path] = (),
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """The configuration of a run.

    files: YAML files, later ones win. sets: texts `a.b=c` of `--set`. flags: values by flag name (`--dp`);
    None and empty tuples mean "not given". environ: variables, `os.environ` by default;
    `DEEPINFER_RAY__A__B=c` sets `a.b`. Flags win over `--set`, both over the environment,
    that over files. Raises `ConfigError`.
    """
    layers = _Layers()
    for file in files:
        for key, value in read_yaml(file).items():
            layers.set(key, value, str(file))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            layers.set(key, parse_text(text), f"environment variable {name}")
        elif name.startswith("DEEPINFER") and "__" in name:  # one that was meant for us
            meant = re.sub("DEEPINFER_*(RAY)?_*", ENV_PREFIX, name, count=1)
            raise ConfigError(f"environment variable {name} is not read; did you mean {meant}?")
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item}: write --set block.option=value")
        layers.set(key.strip(), parse_text(text), f"--set {key.strip()}")
    for flag, value in (flags or {}).items():
        if value is None or value == () or value == []:
            continue
        if flag not in FLAGS:
            raise ConfigError(f"unknown flag {flag}")
        layers.set(FLAGS[flag], list(value) if isinstance(value, tuple) else value, flag)
    return layers.build(RunConfig)


def from_options(cls: type[_S], options: Mapping[str, object]) -> _S:
    """A config from keyword options of the Python API.

    A name is an alias (`max_num_seqs`), a dotted key, or a block given as a mapping (`scheduler={...}`).
    """
    layers = _Layers()
    for name, value in options.items():
        key = OPTION_ALIASES.get(name, name)
        if "." not in key and key not in cls.model_fields:
            near = nearest(cls, key)
            raise ConfigError(f"unknown option '{name}'{near}")
        layers.set(key, value, f"option {name}")
    return layers.build(cls)
