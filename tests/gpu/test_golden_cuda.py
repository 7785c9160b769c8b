"""Golden models on a CUDA device: mode `exact` meets the tolerance that it meets on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-5
RUNS = [(kind, run) for kind in ("tinyB", "tinyA") for run in ("dense", "sparse")]
SETS = ("gate_indices", "topk")


@pytest.fixture(autouse=True, scope="module")
def _no_tf32() -> None:
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is on: products have 10 bits"
    assert not torch.backends.cuda.matmul.allow_tf32


def captured(result: Any, name: str) -> torch.Tensor | None:
    if name == "main_hidden":
        return result.taps
    if name in ("logits", "logits_at"):
        return result.logits
    return result.capture.get(name.removesuffix("_at"))


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_prefill_equals_golden(
    harness: Any, device: str, figures: dict[str, Any], kind: str, run: str
) -> None:
    golden = harness.golden_run(kind, "exact", "engine", run, device)
    prefix, compared, worst = f"{run}.prefill.", 0, 0.0
    for key, want in golden.tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.endswith(("compress_kv", "index_k")):
            continue
        got = captured(golden.prefill, name)
        assert got is not None, key
        if got.shape[0] != want.shape[0]:
            got = got[golden.positions]
        compared += 1
        if name.endswith(SETS):
            assert torch.equal(harness.sorted_sets(got, want.shape[1]), harness.sorted_sets(want)), key
        else:
            error = float(harness.relative_errors(got, want).max())
            assert error <= TOLERANCE, (key, error)
            worst = max(worst, error)
    assert compared > 30
    figures[f"golden {kind} {run} prefill: worst relative error"] = worst


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_decode_equals_golden(
    harness: Any, device: str, figures: dict[str, Any], kind: str, run: str
) -> None:
    golden = harness.golden_run(kind, "exact", "engine", run, device)
    layers = golden.driver.model.config.topology.num_layers
    worst, compared = 0.0, 0
    for t, step in enumerate(golden.decode):
        got = {
            "logits": step.logits,
            "main_hidden": step.taps,
            "h_out": torch.stack([step.capture[f"layers.{i}.h_out"] for i in range(layers)], dim=1),
        }
        for name, value in got.items():
            key = f"{run}.decode.{name}"
            if key in golden.tensors:
                error = float(harness.relative_errors(value, golden.tensors[key][t : t + 1]).max())
                assert error <= TOLERANCE, (key, t, error)
                worst, compared = max(worst, error), compared + 1
        for key in golden.tensors:
            if key.startswith(f"{run}.decode.layers.") and key.endswith(SETS):
                want = golden.tensors[key][t : t + 1]
                ids = step.capture[key.removeprefix(f"{run}.decode.")]
                assert torch.equal(harness.sorted_sets(ids, want.shape[1]), harness.sorted_sets(want)), key
    assert compared >= len(golden.decode) >= 8
    figures[f"golden {kind} {run} decode: worst relative error"] = worst


@pytest.mark.parametrize("kind", ["tinyB", "tinyA"])
def test_released_stays_close_to_the_cpu(
    harness: Any, device: str, figures: dict[str, Any], kind: str
) -> None:
    """Roundings amplify the low bits of sums, so only the middle of the errors says anything (golden §4)."""
    cpu = harness.golden_run(kind, "released", "engine", "sparse")
    cuda = harness.golden_run(kind, "released", "engine", "sparse", device)
    errors = harness.relative_errors(cuda.prefill.logits, cpu.prefill.logits)
    figures[f"released {kind}: median relative difference of prefill logits, CUDA to CPU"] = float(
        errors.median()
    )
    assert errors.median() <= 0.08
    first = "layers.0.h_out"
    assert harness.relative_errors(cuda.prefill.capture[first], cpu.prefill.capture[first]).median() <= 0.02
