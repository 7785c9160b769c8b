"""What fits on which GPU: weights of a rank by expert-parallel size, and the caches that the rest pays for.

Knows: sizes from a config (spec/model.md §5), the cache layout, memory of GPU kinds. Does not know: a device
of this machine, a checkpoint's files. No tensor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine.capacity import plan_capacity
from deepinfer_ray.engine.draft_pool import DraftPool
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.model.inspect import rank_bytes
from deepinfer_ray.model.tensors import expected_tensors
from deepinfer_ray.ops.numerics import Numerics

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU; memory in bytes as its name says it (decimal), which is less than the device reports."""

    name: str
    memory_bytes: int


GPUS = (Gpu("H100", 80 * 10**9), Gpu("H200", 141 * 10**9), Gpu("B200", 180 * 10**9))


@dataclass(frozen=True)
class Fit:
    """One rank of an EP group on one kind of GPU.

    weights_bytes: on the device. engram_bytes: its share of the tables, in host memory unless
    `model.engram_on_gpu`. left_bytes: for caches, after `cache.memory_utilization`; negative = missing.
    num_blocks, num_slots, cache_tokens: 0 when it does not fit. problem: why it does not.
    """

    gpu: Gpu
    ep: int
    weights_bytes: int
    engram_bytes: int
    left_bytes: int
    num_blocks: int = 0
    num_slots: int = 0
    cache_tokens: int = 0
    problem: str | None = None

    @property
    def fits(self) -> bool:
        return self.problem is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu.name,
            "gpu_bytes": self.gpu.memory_bytes,
            "ep": self.ep,
            "bytes": self.weights_bytes,
            "engram_bytes": self.engram_bytes,
            "left_bytes": self.left_bytes,
            "blocks": self.num_blocks,
            "slots": self.num_slots,
            "cache_tokens": self.cache_tokens,
            "fits": self.fits,
            "problem": self.problem,
        }


def fit_table(model: ModelConfig, engine: EngineConfig, gpus: Sequence[Gpu] = GPUS) -> list[Fit]:
    """Every EP size on every kind of GPU, the Engram tables sharded over the EP group.

    Neither DP nor CP changes what a rank holds: both replicate everything but experts and tables.
    engine: resolved against the model.
    """
    layout = CacheLayout.build(
        model, Numerics(engine.numerics), engine.num_drafts, max_backtracking=engine.max_backtracking
    )
    rows = [row for row in rank_bytes(model, expected_tensors(model)) if row["rank"] == 0]
    drafts = DraftPool.bytes_of(engine.scheduler.max_seqs, engine.num_drafts, model.text.vocab_size)
    return [_fit(gpu, row, layout, engine, drafts) for gpu in gpus for row in rows]


def _fit(gpu: Gpu, row: dict[str, Any], layout: CacheLayout, engine: EngineConfig, drafts: int) -> Fit:
    """drafts: bytes of the pool of drafts."""
    weights = row["bytes"] + (row["engram_bytes"] if engine.model.engram_on_gpu else 0)
    left = int(gpu.memory_bytes * engine.cache.memory_utilization) - weights - drafts
    sizes = (gpu, row["ep"], weights, row["engram_bytes"], left)
    if left <= 0:
        problem = (
            f"weights of a rank take {weights / GIB:.2f} GiB, {engine.cache.memory_utilization:.0%} of the "
            f"device are {(left + weights + drafts) / GIB:.2f} GiB"
        )
        return Fit(*sizes, problem=problem)
    try:
        capacity = plan_capacity(layout, engine, left)
    except ConfigError as error:
        return Fit(*sizes, problem=f"{left / GIB:.2f} GiB are left for caches, but {error}")
    return Fit(*sizes, capacity.num_blocks, capacity.num_slots, capacity.tokens)


def fit_problem(table: Sequence[Fit], ep: int) -> str | None:
    """What to tell a person when a rank of that EP size fits on no kind of GPU; None when it fits on one."""
    asked = [fit for fit in table if fit.ep == ep]
    if not asked or any(fit.fits for fit in asked):
        return None
    names = ", ".join(fit.gpu.name for fit in asked)
    largest = max(asked, key=lambda fit: fit.gpu.memory_bytes)
    least = {
        fit.gpu.name: min(other.ep for other in table if other.gpu == fit.gpu and other.fits)
        for fit in asked
        if any(other.gpu == fit.gpu and other.fits for other in table)
    }
    if least:
        what = "the least EP that fits is " + ", ".join(f"{size} on {name}" for name, size in least.items())
        advice = f"{what}; raise --ep"
    else:
        advice = (
            "no EP size fits either; lower --max-num-seqs or --max-model-len if caches are what is missing"
        )
    why = f"on {largest.gpu.name} {largest.problem}"
    return f"EP {ep} fits on none of {names}: {why}. {advice[0].upper()}{advice[1:]}"
