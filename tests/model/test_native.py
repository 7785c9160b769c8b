"""The whole model with native code and without: the same bits in logits and caches."""

import pytest
import torch

from deepinfer_ray.ops import native


@pytest.mark.parametrize("kind", ["tinyB", "tinyA"])
@pytest.mark.parametrize("mode", ["exact", "released"])
def test_native_code_changes_no_bit(harness, monkeypatch, kind, mode):
    tensors = harness.expected(kind, "exact")
    ids, length = tensors["input_ids"].numpy(), int(tensors["prompt_len"])
    harness.load_model(kind, mode)
    runs = []
    for library in (native._library, None):
        monkeypatch.setattr(native, "_library", library)
        driver = harness.driver(kind, mode, num_slots=8, num_blocks=16)
        sequence = driver.add(ids)
        steps = driver.prefill(sequence, length - 20, 33)
        steps += [driver.decode([sequence]) for _ in range(20)]
        runs.append((torch.cat([step.logits for step in steps]), driver.state(sequence)))
    (fused, fused_state), (plain, plain_state) = runs
    assert torch.equal(fused, plain)
    for name, value in plain_state.items():
        assert torch.equal(fused_state[name], value), name
