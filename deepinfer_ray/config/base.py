"""The base of our own configuration blocks: frozen, unknown keys refused with the nearest valid name.

Knows: how pydantic's complaints become one line for a person. Does not know: any option.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from deepinfer_ray.config.names import nearest_name
from deepinfer_ray.errors import ConfigError


class Section(BaseModel):
    """One block of options."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _no_flags_for_numbers(cls, data: Any) -> Any:
        """`max_seqs: yes` is a mistake, not the number 1."""
        if isinstance(data, Mapping):
            for name, value in data.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field is not None and bool not in _leaves(field.annotation):
                    raise ValueError(
                        f"{name} = {json.dumps(value)} is a true/false value where none is expected"
                    )
        return data

    def to_json(self) -> str:
        """All values, defaults included, in one stable JSON text."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True)


def _leaves(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, one level deep; a plain annotation is its own."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def field_paths(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all options, in declaration order."""
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from field_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def nearest(cls: type[BaseModel], path: str) -> str:
    """`; did you mean 'scheduler.max_seqs'?` or an empty text when nothing is near."""
    leaves = list(field_paths(cls))
    blocks = {known.rsplit(".", depth)[0] for known in leaves for depth in range(1, known.count(".") + 1)}
    peers = [name for name in {*leaves, *blocks} if name.count(".") == path.count(".")]
    near = nearest_name(path, peers)
    if near is None:  # the right option in the wrong block
        by_name = {known.rsplit(".", 1)[-1]: known for known in reversed(leaves)}
        near = by_name.get(nearest_name(path.rsplit(".", 1)[-1], by_name) or "")
    return f"; did you mean '{near}'?" if near else ""


def validation_to_config_error(
    error: ValidationError, root: type[BaseModel], source_of: Callable[[str], str | None]
) -> ConfigError:
    """Every complaint as `key = value (from source): what is wrong`. `source_of(path)` names who set it."""
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        source = source_of(path)
        origin = f" (from {source})" if source else ""
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key '{path}'{origin}{nearest(root, path)}")
        elif problem["type"] == "value_error":
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}{origin}" if path else f"{message}{origin}")
        else:
            message = problem["msg"].replace("Input should", "must")
            if problem["type"] == "model_type":
                message = "must be a block of options"
            lines.append(f"{path} = {problem['input']!r}{origin}: {message}")
    return ConfigError("; ".join(lines))
