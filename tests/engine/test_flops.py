"""The closed formulas of FLOP accounting against sums over rows and layers, one term at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer_ray.config.hf import ModelConfig
from deepinfer_ray.engine.flops import FlopModel, StepFlops, capped_sum, peak_tflops
from deepinfer_ray.engine.mock import mock_config

RELEASE = Path(__file__).parents[2] / "configs/models/deepseek-v4.1-flash"


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("cap", [0, 1, 4, 7, 10**9])
def test_capped_sum_is_the_sum(ratio: int, cap: int) -> None:
    counts = np.arange(0, 60)
    expected = [sum(min(t // ratio, cap) for t in range(1, n + 1)) for n in counts.tolist()]
    assert capped_sum(counts, ratio, cap).tolist() == expected


def brute_force(config: ModelConfig, rows: list[tuple[int, bool]], p: int, samples: int) -> StepFlops:
    """Row by row, layer by layer. rows: (position, whether consumer layers compute it) of a prefill chunk."""
    text = config.text
    H, d, m = text.hidden_size, text.head_dim, text.hc_mult
    heads, ih, c = text.num_attention_heads, text.index_n_heads, text.index_head_dim
    total = attention = 0
    for position, kept in rows:
        visible = position + 1
        for layer in config.topology.backbone:
            if layer.is_kv_source:
                total += 4 * H * d * (2 if layer.ratio == 2 else 1)
            if layer.is_index_k_source and visible % layer.ratio == 0:
                total += 4 * d * c
            if layer.is_consumer and not kept:
                continue
            total += p * 3 * H * text.moe_intermediate_size * (layer.experts_per_token + 1)  # MLP
            total += 4 * H * layer.num_experts  # router
            total += p * H * text.q_lora_rank + p * H * d + p * text.q_lora_rank * heads * d
            total += 2 * heads * d * text.o_lora_rank + p * text.o_groups * text.o_lora_rank * H
            for _ in range(2):  # sub-layers
                total += 8 * (m * H) * m * (m + 2) + 8 * m * (m + 1) * H
                total += 0 if layer.index == 0 and _ == 0 else 8 * m * H
            if layer.engram is not None:
                total += p * config.engram.width * H * (m + 1) + 8 * m * H
            if layer.is_index_source:
                total += p * text.q_lora_rank * ih * c + 4 * H * ih
                keys = visible // layer.ratio
                if layer.reads_candidates:
                    keys = min(keys, text.candidate_topk_blocks * text.candidate_block_size)
                total += ih * c * keys
            pairs = min(visible, text.sliding_window)
            if layer.ratio:
                pairs += min(visible // layer.ratio, text.index_topk)
            total += 4 * heads * 2 * d * pairs
            attention += 4 * heads * 2 * d * pairs
        if kept:
            total += 8 * m * H  # the mix behind the last layer
    return StepFlops(total + samples * 4 * H * text.vocab_size, attention)


@pytest.mark.parametrize("numerics", ["released", "exact"])
def test_prefill_chunks(numerics: str) -> None:
    config = mock_config()
    model = FlopModel.build(config, numerics)  # type: ignore[arg-type]
    p = 2 if numerics == "released" else 4
    chunks = [(7, 7), (40, 90), (1, 33), (64, 64)]
    expected = [brute_force(config, [(t, True) for t in range(k - q, k)], p, 1) for q, k in chunks]
    got = model.prompt(*np.array(chunks, np.int32).T)
    assert got.total == sum(step.total for step in expected)
    assert got.attention == sum(step.attention for step in expected)


def test_compact_truncation_counts_consumers_for_kept_rows_only() -> None:
    config = mock_config()
    model = FlopModel.build(config)
    q, k, kept = 50, 80, 12
    rows = [(t, t >= k - kept) for t in range(k - q, k)]
    # The constant first mix belongs to a producer, the last one to a consumer: a dropped row keeps neither.
    expected = brute_force(config, rows, 2, 1)
    got = model.prompt(*(np.array([value]) for value in (q, k, kept)))
    assert got.total == expected.total
    assert got.attention == expected.attention
    assert got.total < model.prompt(np.array([q]), np.array([k])).total


def test_decode_rows_make_index_keys_and_samples_each() -> None:
    config = mock_config()
    model = FlopModel.build(config)
    text = config.text
    q, k = np.array([1, 3, 6], np.int32), np.array([20, 41, 333], np.int32)
    prompt = model.prompt(q, k)
    got = model.decode(q, k)
    more_samples = int(q.sum()) - len(q)
    sources = [layer for layer in config.topology.backbone if layer.is_index_k_source]
    completed = sum(int((k // layer.ratio - (k - q) // layer.ratio).sum()) for layer in sources)
    more_keys = len(sources) * int(q.sum()) - completed
    expected = prompt.total + more_samples * 4 * text.hidden_size * text.vocab_size
    expected += more_keys * 4 * text.head_dim * text.index_head_dim
    assert got.total == expected
    assert got.attention == prompt.attention


def test_the_released_model_needs_what_its_active_parameters_say() -> None:
    """A row of the released model without any context: close to 2 FP8 FLOPs for each active parameter."""
    model = FlopModel.build(ModelConfig.load(RELEASE))
    one = np.array([1])
    step = model.decode(one, one)
    assert 25e9 < step.total < 60e9
    # A million tokens of context: capped layers stop growing, index scoring does not.
    far = model.decode(one, np.array([1_000_000]))
    assert far.attention / model.decode(one, np.array([2_000])).attention < 1.01
    assert far.total > step.total


@pytest.mark.parametrize(
    ("name", "arm", "peak"),
    [
        ("NVIDIA H200", False, 1978),
        ("NVIDIA H100 80GB HBM3", False, 1978),
        ("NVIDIA H100 PCIe", False, 1512),
        ("NVIDIA H200 NVL", False, 1670),
        ("NVIDIA GH200 480GB", True, 1978),
        ("NVIDIA B200", False, 4500),
        ("NVIDIA B200", True, 5000),
        ("NVIDIA A100-SXM4-80GB", False, 624),
        ("NVIDIA GeForce RTX 4090", False, None),
        ("NVIDIA H2000", False, None),
        (None, False, None),
    ],
)
def test_peak_of_a_device(name: str | None, arm: bool, peak: float | None) -> None:
    assert peak_tflops(name, arm_host=arm) == peak
