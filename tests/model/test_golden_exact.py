"""Mode `exact` against the tight golden tensors: the whole backbone, prefill and decode, dense and sparse."""

import numpy as np
import pytest
import torch

TOLERANCE = 2e-5
RUNS = [(kind, run) for kind in ("tinyB", "tinyA") for run in ("dense", "sparse")]


def _captured(result, name):
    if name == "main_hidden":
        return result.taps
    if name in ("logits", "logits_at"):
        return result.logits
    return result.capture.get(name.removesuffix("_at"))


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_prefill_equals_golden(harness, kind, run):
    golden = harness.golden_run(kind, "exact", "engine", run)
    prefix, compared = f"{run}.prefill.", 0
    for key, want in golden.tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.endswith(("compress_kv", "index_k")):
            continue
        got = _captured(golden.prefill, name)
        assert got is not None, key
        if got.shape[0] != want.shape[0]:
            got = got[golden.positions]
        compared += 1
        if name.endswith(("gate_indices", "topk")):
            got = harness.sorted_sets(got, want.shape[1])
            assert torch.equal(got, harness.sorted_sets(want)), key
        else:
            assert harness.relative_errors(got, want).max() <= TOLERANCE, key
    assert compared > 30


@pytest.mark.parametrize("kind", ["tinyB", "tinyA"])
def test_cached_entries_and_index_keys_equal_golden(harness, kind):
    golden = harness.golden_run(kind, "exact", "engine", "sparse")
    driver = harness.driver(kind, "exact")
    sequence = driver.add(golden.tensors["input_ids"].numpy())
    driver.prefill(sequence, golden.length)
    state = driver.state(sequence)
    sources = driver.layout.main_parts
    assert len(sources) >= 2
    for layer in sources:
        for name, golden_name in (("entries", "compress_kv"), ("keys", "index_k")):
            want = golden.tensors[f"sparse.prefill.layers.{layer}.{golden_name}"]
            assert harness.relative_errors(state[f"{name}{layer}"][-8:], want).max() <= TOLERANCE


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_decode_equals_golden(harness, kind, run):
    golden = harness.golden_run(kind, "exact", "engine", run)
    layers = harness.load_model(kind, "exact").config.topology.num_layers
    for t, step in enumerate(golden.decode):
        got = {
            "logits": step.logits,
            "main_hidden": step.taps,
            "h_out": torch.stack([step.capture[f"layers.{i}.h_out"] for i in range(layers)], dim=1),
        }
        for name, value in got.items():
            key = f"{run}.decode.{name}"
            if key in golden.tensors:
                assert harness.relative_errors(value, golden.tensors[key][t : t + 1]).max() <= TOLERANCE, key
        for layer in range(layers):
            for name in ("gate_indices", "topk"):
                key = f"{run}.decode.layers.{layer}.{name}"
                if key in golden.tensors:
                    want = golden.tensors[key][t : t + 1]
                    ids = harness.sorted_sets(step.capture[f"layers.{layer}.{name}"], want.shape[1])
                    assert torch.equal(ids, harness.sorted_sets(want)), (key, t)


@pytest.mark.parametrize("kind", ["tinyB", "tinyA"])
def test_engram_rows_equal_golden(harness, kind):
    tensors = harness.expected(kind, "exact")
    model = harness.load_model(kind, "exact")
    driver = harness.driver(kind, "exact")
    ids = tensors["input_ids"].numpy()
    length = int(tensors["prompt_len"])
    grams = driver._grams(ids, np.arange(length), model.config.engram.max_ngram)
    rows = model._hash(torch.from_numpy(grams))
    assert torch.equal(rows.permute(1, 0, 2), tensors["engram.hash_ids"].long())


@pytest.mark.parametrize("prompt", ["prompt0", "prompt1"])
def test_image_positions_use_their_own_gate_bias_and_no_engram(harness, prompt):
    """The text model given merged image rows: gate bias, shut Engram, n-grams that stop at the image."""
    tensors = harness.expected("tinyV", "exact")
    driver = harness.driver("tinyV", "exact")
    ids, length = tensors[f"{prompt}.input_ids"].numpy(), int(tensors[f"{prompt}.prompt_len"])
    mask = ids[:length] >= driver.model.config.text.vocab_size
    sequence = driver.add(ids)
    result = driver.step(
        [sequence], [length], prefill=True, image_mask=mask, embeds=tensors[f"{prompt}.embeds"]
    )
    want = tensors[f"{prompt}.sparse.prefill.logits"]
    assert harness.relative_errors(result.logits, want).max() <= TOLERANCE
    for layer in driver.model.config.topology.backbone:
        key = f"layers.{layer.index}.gate_indices"
        got = harness.sorted_sets(result.capture[key])
        assert torch.equal(got, harness.sorted_sets(tensors[f"{prompt}.sparse.prefill.{key}"]))
    for t, want in enumerate(tensors[f"{prompt}.sparse.decode.logits"]):
        step = driver.decode([sequence])
        assert harness.relative_errors(step.logits, want[None]).max() <= TOLERANCE, t
