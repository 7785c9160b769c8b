"""Operation vectors of the golden set."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

OPS = Path(__file__).parents[1] / "data" / "golden" / "ops"

torch.set_num_threads(1)


@cache
def _load(name: str) -> dict[str, torch.Tensor]:
    return load_file(OPS / f"{name}.safetensors")


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], dict[str, torch.Tensor]]:
    """`vectors("rope")`: the tensors of one file."""
    return _load


def _bf16_steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in bf16 steps; signed zeros are equal."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.to(torch.bfloat16).contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(got) - ordered(want)).abs()


@pytest.fixture(scope="session")
def bf16_steps() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return _bf16_steps


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative L2 error of a row."""
    a, b = (x.double().reshape(x.shape[0], -1) for x in (got, want))
    return float(((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)).max())


@pytest.fixture(scope="session")
def relative() -> Callable[[torch.Tensor, torch.Tensor], float]:
    return _relative
