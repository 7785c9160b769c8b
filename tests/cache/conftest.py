"""Layouts of the released model and of a small one with the same roles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.ops.numerics import Numerics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def flash() -> ModelConfig:
    """The released configuration."""
    return ModelConfig.load(ROOT / "configs" / "models" / "deepseek-v4.1-flash" / "config.json")


@pytest.fixture(scope="session")
def small(flash: ModelConfig) -> ModelConfig:
    """Released roles, head 64, index head 32, window 16."""
    return flash.with_text(head_dim=64, index_head_dim=32, qk_rope_head_dim=16, sliding_window=16)


@pytest.fixture(scope="session")
def build(small: ModelConfig) -> Callable[..., CacheLayout]:
    """`CacheLayout.build` of the small model; keywords as there, `mode` for the numeric mode."""

    def make(
        num_drafts: int = 0, mode: Any = "released", variant: Any = "engine", **keywords: Any
    ) -> CacheLayout:
        return CacheLayout.build(small, Numerics(mode, variant), num_drafts, **keywords)

    return make
