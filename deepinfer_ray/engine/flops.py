"""How many floating-point operations a step needs, in closed form (spec/engine.md §9.7).

Knows: a model's dimensions, the cost of a row, of a sampled row, of a visible pair; peak rates of devices.
Does not know: time, tensors, ranks. Figures are FP8-equivalent: a multiply-add counts 1 in FP4, 2 in FP8,
4 in BF16, 8 in TF32 or FP32. The drafter is left out, as in the source of the formulas.

Sums over the rows of a sequence never loop: row t of a sequence (t = 1, 2, … tokens visible) sees
min(floor(t / ratio), cap) entries, and `capped_sum` adds that up to any t in one expression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepinfer_ray.config.hf import LayerSpec, ModelConfig

FP4, FP8, BF16, FP32 = 1, 2, 4, 8
"""Cost of one multiply-add."""

UNCAPPED = 2**40
"""A cap that no sequence reaches."""

BF16_DENSE_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("GB300", 2500, 2500),
    ("GB200", 2500, 2500),
    ("B300", 2250, 2500),
    ("B200", 2250, 2500),
    ("GH200", 989, 989),
    ("H200 NVL", 835, 835),
    ("H200", 989, 989),
    ("H100 PCIe", 756, 756),
    ("H100 NVL", 835, 835),
    ("H100", 989, 989),
    ("H800 PCIe", 756, 756),
    ("H800", 989, 989),
    ("H20", 148, 148),
    ("A100", 312, 312),
    ("A800", 312, 312),
)
"""Part of the device's name, dense BF16 TFLOP/s on x86 and on ARM hosts; the first match counts."""


def peak_tflops(device_name: str | None, *, arm_host: bool = False) -> float | None:
    """FP8-equivalent peak of a device, 2 × its dense BF16 rate; None for one that the table does not know.

    device_name: as CUDA reports it (`NVIDIA H200`, `NVIDIA H100 80GB HBM3`), None for a CPU.
    """
    words = (device_name or "").upper().replace("-", " ").split()
    for part, x86, arm in BF16_DENSE_TFLOPS:
        if all(wanted in words for wanted in part.upper().split()):
            return 2 * (arm if arm_host else x86)
    return None


def capped_sum(count: np.ndarray, ratio: int, cap: int) -> np.ndarray:
    """Σ_{t=1..count} min(floor(t / ratio), cap) for each count ≥ 0; int64 like `count`.

    With m = min(floor(count / ratio), cap): every value 1 … m-1 occurs `ratio` times, m on all that is left.
    """
    count = count.astype(np.int64, copy=False)
    m = np.minimum(count // ratio, cap)
    return ratio * (m * (m - 1) // 2) + m * (count - ratio * m + 1)


@dataclass(frozen=True, slots=True)
class PairCost:
    """`flops` for each entry that a row sees, at most `cap` of them, `ratio` tokens an entry.

    attention: whether it is core attention (the figure attn_TFLOPs) or the indexer. consumer: only rows that
    the consumer layers compute.
    """

    flops: float
    ratio: int
    cap: int
    attention: bool
    consumer: bool


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Of one step or of many together. attention: the part of `total` that core attention takes."""

    total: float
    attention: float

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(self.total + other.total, self.attention + other.attention)


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Costs of one model. row: of each row, in layers that every row passes. consumer_row: of each row that
    the consumer layers compute. sample: of each row that is sampled from. group: (ratio, FLOPs) of the index
    keys that are made once a completed group of `ratio` tokens (in decode: once a row)."""

    row: float
    consumer_row: float
    sample: float
    group: tuple[tuple[int, float], ...]
    pairs: tuple[PairCost, ...]

    @classmethod
    def build(cls, config: ModelConfig, numerics: Literal["exact", "released"] = "released") -> FlopModel:
        """numerics: `released` counts quantized products as FP8, `exact` as BF16; indexer pairs are FP4."""
        text, topology = config.text, config.topology
        p = FP8 if numerics == "released" else BF16
        H, C, V = text.hidden_size, text.hc_mult, text.vocab_size
        row = consumer_row = 0.0
        group: dict[int, float] = {}
        pairs: dict[tuple[int, int, bool, bool], float] = {}

        def pair(ratio: int, cap: int, attention: bool, consumer: bool, flops: float) -> None:
            key = (ratio, cap, attention, consumer)
            pairs[key] = pairs.get(key, 0.0) + flops

        for layer in topology.backbone:
            cost = _layer_row(config, layer, p)
            # Entries and index keys are made from every row, even where a consumer computes a few rows only.
            shared = BF16 * H * (2 if layer.ratio > 1 else 1) * text.head_dim if layer.is_kv_source else 0
            row += shared
            if layer.is_consumer:
                consumer_row += cost
            else:
                row += cost
            if layer.is_index_k_source:
                made = BF16 * text.head_dim * text.index_head_dim
                group[layer.ratio] = group.get(layer.ratio, 0.0) + made
            core = BF16 * text.num_attention_heads * 2 * text.head_dim
            pair(1, text.sliding_window, True, layer.is_consumer, core)
            if layer.ratio:
                pair(layer.ratio, text.index_topk, True, layer.is_consumer, core)
            if layer.is_index_source:
                slots = text.candidate_topk_blocks * text.candidate_block_size
                cap = slots if layer.reads_candidates else UNCAPPED
                scored = FP4 * text.index_n_heads * text.index_head_dim
                pair(layer.ratio, cap, False, layer.is_consumer, scored)
        # Mixes are shifted: the first sub-layer's input is a copy, one more mix stands behind the last.
        row -= FP32 * C * H
        consumer_row += FP32 * C * H
        return cls(
            row=row,
            consumer_row=consumer_row,
            sample=float(BF16 * H * V),
            group=tuple(sorted(group.items())),
            pairs=tuple(PairCost(flops, *key) for key, flops in pairs.items()),
        )

    def prompt(self, q: np.ndarray, k: np.ndarray, kept: np.ndarray | None = None) -> StepFlops:
        """Of prefill chunks: `q` new tokens each, `k` tokens after them (int [n]).

        kept: rows that the consumer layers compute, the last of each chunk; None = all
        (`prefill.truncation_mode` off or mask).
        """
        q, k = q.astype(np.int64, copy=False), k.astype(np.int64, copy=False)
        kept = q if kept is None else kept.astype(np.int64, copy=False)
        groups = sum(cost * float((k // ratio - (k - q) // ratio).sum()) for ratio, cost in self.group)
        return self._sum(q, k, kept, samples=len(q), groups=groups)

    def decode(self, q: np.ndarray, k: np.ndarray) -> StepFlops:
        """Of decode rows: all `q` rows of a sequence are sampled from."""
        q, k = q.astype(np.int64, copy=False), k.astype(np.int64, copy=False)
        rows = int(q.sum())
        return self._sum(q, k, q, samples=rows, groups=rows * sum(cost for _, cost in self.group))

    def _sum(self, q: np.ndarray, k: np.ndarray, kept: np.ndarray, samples: int, groups: float) -> StepFlops:
        total = self.row * float(q.sum()) + self.consumer_row * float(kept.sum())
        total += self.sample * samples + groups
        attention = 0.0
        for cost in self.pairs:
            first = k - (kept if cost.consumer else q)
            seen = capped_sum(k, cost.ratio, cost.cap) - capped_sum(first, cost.ratio, cost.cap)
            flops = cost.flops * float(seen.sum())
            total += flops
            attention += flops if cost.attention else 0.0
        return StepFlops(total, attention)


def _layer_row(config: ModelConfig, layer: LayerSpec, p: int) -> float:
    """FLOPs of one row in one backbone layer, without pairs, entries and index keys.

    p: cost of a multiply-add of the quantized projections.
    """
    text = config.text
    H, d, C = text.hidden_size, text.head_dim, text.hc_mult
    heads, q_rank = text.num_attention_heads, text.q_lora_rank
    index = text.index_n_heads if layer.is_index_source else 0
    experts = layer.experts_per_token + text.n_shared_experts
    mlp = p * 3 * H * text.moe_intermediate_size * experts
    router = BF16 * H * layer.num_experts
    attention = p * H * (q_rank + d) + p * q_rank * (heads * d + index * text.index_head_dim)
    attention += FP8 * heads * d * text.o_lora_rank + p * text.o_groups * text.o_lora_rank * H
    attention += BF16 * H * index
    sublayer = FP32 * C * H * C * (C + 2) + FP32 * C * H + FP32 * C * (C + 1) * H
    engram = 0
    if layer.engram is not None:
        engram = p * config.engram.width * H * (C + 1) + FP32 * C * H
    return float(mlp + router + attention + 2 * sublayer + engram)
