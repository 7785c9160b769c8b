"""Offline batch inference for DeepSeek-V4.1-Flash. Names load on first use, so no part pulls in another."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_ray.engine.request import RequestResult, SamplingParams
    from deepinfer_ray.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestResult", "SamplingParams"]

_HOMES = {
    "LLM": "deepinfer_ray.llm",
    "RequestResult": "deepinfer_ray.engine.request",
    "SamplingParams": "deepinfer_ray.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
