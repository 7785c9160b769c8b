"""What the tests of a device share: golden models, engines around them, and the file of figures.

`DEEPINFER_TEST_DEVICE=cpu` runs the bodies of the tests that do not need CUDA on a CPU; figures are then not
written. Figures go to `tests/gpu/results/<card>.json` when the session ends, measured values of that session
replacing those of earlier ones.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import RankParts, prepare
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.weights import load_text_model

# Must be set before CUDA starts: an eager decode step launches more kernels than the default queue holds, and
# a full queue makes the host wait (spec/engine.md §17).
os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
RESULTS = Path(__file__).parent / "results"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of two GPUs are left out where there is one."""
    if torch.cuda.device_count() < 2:
        out = [item for item in items if item.get_closest_marker("gpu2")]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def device() -> str:
    return os.environ.get("DEEPINFER_TEST_DEVICE", "cuda")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_harness", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def harness() -> Any:
    """The driver and the comparisons of the model's tests."""
    return _load(Path(__file__).parents[1] / "model" / "conftest.py").Harness


@dataclass(frozen=True)
class Rank:
    """A loaded model from which engines of any settings are made."""

    parts: RankParts
    model: Any

    def configured(self, section: str, **values: Any) -> Rank:
        """The same weights under other options of a section of the configuration."""
        config = self.parts.config
        changed = getattr(config, section).model_copy(update=values)
        return replace(self, parts=replace(self.parts, config=config.model_copy(update={section: changed})))

    def engine(self, model: Any = None, num_blocks: int = 160, **settings: Any) -> Engine:
        parts, text = self.parts, self.parts.model_config.text
        values = {"max_model_len": 300, "max_seqs": 16, "max_batched_tokens": 4096, **settings}
        resolved = SchedulerSettings(
            num_blocks=num_blocks,
            vocab_size=text.vocab_size,
            eos_token_id=parts.model_config.eos_token_id,
            **values,
        )
        slots = resolved.num_state_slots + resolved.prefix_snapshots
        pools = CachePools(parts.layout, num_blocks, slots, parts.device)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        return Engine(
            model or self.model,
            pools,
            parts.tokenizer,
            parts.config,
            compress=parts.compress,
            settings=resolved,
        )


@cache
def load_rank(path: Path, mode: str, device: str, sinkhorn: int | None = None) -> Rank:
    options = {"numerics": mode, "sampling": {"token_blacklist": "4..6"}}
    parts = prepare(path, EngineConfig.model_validate(options), device)
    with Checkpoint.open(path) as checkpoint:
        config = checkpoint.config
        if sinkhorn is not None:
            config = config.with_text(hc_sinkhorn_iters=sinkhorn)
        model = load_text_model(
            checkpoint, parts.numerics, config=config, max_positions=512, device=parts.device
        )
    return Rank(parts, model)


@pytest.fixture(scope="session")
def rank_of(device: str) -> Callable[..., Rank]:
    """`rank_of("tinyB" or a directory, mode, sinkhorn iterations)`."""

    def make(where: str | Path, mode: str = "exact", sinkhorn: int | None = None, on: str = device) -> Rank:
        path = GOLDEN / where if isinstance(where, str) else where
        return load_rank(path, mode, on, sinkhorn)

    return make


@pytest.fixture(scope="session")
def figures(device: str) -> Iterator[dict[str, Any]]:
    """Measured values by name; written for the card at hand when the session ends."""
    values: dict[str, Any] = {}
    yield values
    if device == "cpu" or not values:
        return
    card = torch.cuda.get_device_name()
    path = RESULTS / f"{card.split()[-1].lower()}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    merged = {**before.get("figures", {}), **values}
    found = {
        "card": card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "figures": dict(sorted(merged.items())),
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
