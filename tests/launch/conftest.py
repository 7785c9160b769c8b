"""The launch files of the repository, loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def load():
    """load(path below the root) → the YAML file's content."""
    return lambda name: yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
