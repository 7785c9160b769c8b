"""The checkpoint's `config.json` as one checked object: `ModelConfig`.

Knows: the file, and where the pieces are: types (`schema.py`), rules (`rules.py`), layer roles
(`topology.py`). Does not know: tensors, devices. Each violation is a `ConfigError` that names key, value and
rule; rules that only a GPU kernel needs are a list of `gpu_capability_problems`, never an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer_ray.config.capabilities import gpu_capability_problems
from deepinfer_ray.config.engram import EngramPlan, engram_plan
from deepinfer_ray.config.rules import (
    Problems,
    check_top_level,
    parse_quantization,
    parse_text,
    parse_vision,
    show,
)
from deepinfer_ray.config.schema import QuantizationConfig, RopeScaling, TextConfig, VisionConfig
from deepinfer_ray.config.topology import LayerSpec, Topology, build_topology
from deepinfer_ray.errors import ConfigError

__all__ = [
    "EngramPlan",
    "LayerSpec",
    "ModelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "TextConfig",
    "Topology",
    "VisionConfig",
    "engram_plan",
    "gpu_capability_problems",
]

logger = logging.getLogger(__name__)

UNREAD_KEYS = {
    "": {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "tokenizer_compatibility",
    }
    | {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"}
    | {"text_config", "vision_config", "quantization_config", "_name_or_path"},
    "text_config": {"model_type", "initializer_range", "use_cache"},
    "vision_config": {"model_type"},
    "quantization_config": {"fmt"},
    "text_config.rope_scaling": {"type"},
}
"""Keys that are known though no model field holds them: they cause no warning."""


@dataclass(frozen=True)
class ModelConfig:
    """A checked `config.json`. Equality and hash are those of its parts."""

    text: TextConfig
    vision: VisionConfig | None
    """None without a tower: no `vision_config`, or one with `num_hidden_layers` 0."""
    quantization: QuantizationConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    tokenizer_compatibility: str
    topology: Topology

    @property
    def has_vision(self) -> bool:
        return self.vision is not None

    @cached_property
    def engram(self) -> EngramPlan:
        return engram_plan(self.text)

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, given as the file or as the directory that holds it."""
        return cls.from_dict(read_config_json(path), source=str(_config_path(path)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Check a parsed `config.json`; unknown keys are ignored with one warning that lists them."""
        check_top_level(data, source)
        for key in ("text_config", "quantization_config"):
            if key not in data:
                raise ConfigError(f"{source}: {key} is missing: the key is required")
        quantization = parse_quantization(data["quantization_config"], source)
        problems = Problems(source)
        if not isinstance(data["text_config"], Mapping):
            raise ConfigError(f"{source}: text_config = {show(data['text_config'])}: must be a JSON object")
        text = parse_text(data["text_config"], source)
        try:
            topology = build_topology(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        vision = parse_vision(data.get("vision_config"), source)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value = data.get(key)
            if value is not None:
                rule = f"must be a token id below vocab_size = {text.vocab_size}"
                problems.need(0 <= value < text.vocab_size, key, value, rule)
        if vision is not None:
            rule = "the key is required because vision_config has a tower"
            problems.need(data.get("image_token_id") is not None, "image_token_id", None, rule)
        problems.raise_if_any()
        _warn_unknown(data, source)
        return cls(
            text=text,
            vision=vision,
            quantization=quantization,
            bos_token_id=data["bos_token_id"],
            eos_token_id=data["eos_token_id"],
            pad_token_id=data["pad_token_id"],
            image_token_id=data.get("image_token_id"),
            tokenizer_compatibility=data.get("tokenizer_compatibility") or "release",
            topology=topology,
        )

    def with_text(self, **changes: object) -> ModelConfig:
        """The same model with other `text_config` values, all rules checked again."""
        text = parse_text({**self.text.model_dump(), **changes}, "with_text")
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ModelConfig(**{**values, "text": text, "topology": build_topology(text)})


def _config_path(path: str | Path) -> Path:
    path = Path(path)
    return path / "config.json" if path.is_dir() else path


def read_config_json(path: str | Path) -> dict[str, Any]:
    """The parsed file; unreadable, not JSON or not an object is a `ConfigError`."""
    file = _config_path(path)
    try:
        data = json.loads(file.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        what = "file or directory" if file == Path(path) else "file"
        raise ConfigError(f"{file}: no such {what}; a checkpoint directory must hold config.json") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        hint = "; give the checkpoint's directory or its config.json" if file.name != "config.json" else ""
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}){hint}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds a {type(data).__name__}, must be a JSON object")
    return data


def _warn_unknown(data: Mapping[str, Any], source: str) -> None:
    blocks: list[tuple[str, object, set[str]]] = [
        ("", data, set()),
        ("text_config", data["text_config"], set(TextConfig.model_fields)),
        ("vision_config", data.get("vision_config"), set(VisionConfig.model_fields)),
        ("quantization_config", data["quantization_config"], set(QuantizationConfig.model_fields)),
        ("text_config.rope_scaling", data["text_config"].get("rope_scaling"), set(RopeScaling.model_fields)),
    ]
    unknown = [
        f"{path}.{key}" if path else str(key)
        for path, block, fields in blocks
        if isinstance(block, Mapping)
        for key in block
        if key not in fields and key not in UNREAD_KEYS[path]
    ]
    if unknown:
        logger.warning("%s: ignoring unknown keys: %s", source, ", ".join(unknown))
