"""Mode `released` against golden: sub-layers fed with golden inputs (bit-tight), the whole model (loose)."""

import numpy as np
import pytest
import torch

from deepinfer_ray.cache.metadata import build_prefill
from deepinfer_ray.model.step import build_context
from deepinfer_ray.ops.linear import linear
from deepinfer_ray.ops.moe import route

KINDS = ["tinyB", "tinyA"]
VARIANTS = ["reference", "engine"]


def _stored(harness, kind, name):
    """A float32 tensor of the sparse official run at the stored positions."""
    return harness.expected(kind, "official")[f"sparse.prefill.{name}"].float()


def _assert_equal_but_ulps(harness, got, want, what):
    """≥ 99 % of the elements equal, the others one bf16 step off."""
    distance = harness.ulp_distance(got, want)
    assert (distance == 0).float().mean() >= 0.99, what
    assert distance.max() <= 1, what


def _layers(harness, kind, variant):
    model = harness.load_model(kind, "released", variant)
    return model, list(model.blocks)


def _engram_input(harness, kind, variant, layer, stream):
    """The residual stream after a layer's Engram update (unchanged where it has none)."""
    model, blocks = _layers(harness, kind, variant)
    block = blocks[layer]
    if block.engram is None:
        return stream
    tensors = harness.expected(kind, "exact")
    rows = tensors["engram.hash_ids"].long()[tensors["positions"].long()].permute(1, 0, 2)
    fetched = model.engram_store.fetch(rows)[block.layer.engram]
    return block.engram(stream, fetched, None)


def _first_mix(stream):
    mix = torch.zeros(stream.shape[0], stream.shape[1])
    mix[:, 0] = 1
    return mix


def _entering(harness, kind, variant, layer):
    """(stream after Engram, carried mix) that enter a layer, from golden tensors."""
    if layer == 0:
        stream = _stored(harness, kind, "layers.0.h_in")
        return stream, _first_mix(stream)
    stream = _stored(harness, kind, f"layers.{layer - 1}.h_out")
    mix = _stored(harness, kind, f"layers.{layer - 1}.pre_mix")
    return _engram_input(harness, kind, variant, layer, stream), mix


@pytest.mark.parametrize("kind", KINDS)
def test_experts_from_golden_input_reference(harness, kind):
    for block in _layers(harness, kind, "reference")[1]:
        name = f"layers.{block.layer.index}"
        out = block.ffn.compute(_stored(harness, kind, f"{name}.ffn_in"))
        _assert_equal_but_ulps(harness, out, _stored(harness, kind, f"{name}.ffn_out"), name)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_from_golden_input_engine(harness, kind):
    errors = []
    for block in _layers(harness, kind, "engine")[1]:
        name = f"layers.{block.layer.index}"
        out = block.ffn.compute(_stored(harness, kind, f"{name}.ffn_in"))
        errors.append(harness.relative_errors(out, _stored(harness, kind, f"{name}.ffn_out")))
    errors = torch.cat(errors)
    assert errors.median() <= 0.02
    assert errors.max() <= 0.10
    assert errors.median() > 0.005, "the engine's SwiGLU rounding point differs from the reference's"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_router_from_golden_input(harness, kind, variant):
    tensors = harness.expected(kind, "official")
    positions = tensors["positions"].long()
    for block in _layers(harness, kind, variant)[1]:
        name = f"sparse.prefill.layers.{block.layer.index}"
        gate = block.ffn
        logits = linear(tensors[f"{name}.ffn_in"].float(), gate.gate)
        experts, weights = route(logits, gate.bias, gate.k, gate.scaling)
        assert torch.equal(
            harness.sorted_sets(experts), harness.sorted_sets(tensors[f"{name}.gate_indices"][positions])
        )
        want = tensors[f"{name}.gate_weights"][positions].sort(-1).values
        assert torch.allclose(weights.sort(-1).values, want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_input_from_golden_stream(harness, kind, variant):
    for layer, block in enumerate(_layers(harness, kind, variant)[1]):
        stream, mix = _entering(harness, kind, variant, layer)
        want = _stored(harness, kind, f"layers.{layer}.attn_in")
        _assert_equal_but_ulps(harness, block.attn_input(mix, stream), want, layer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_residual_updates_from_golden_stream(harness, kind, variant):
    for layer, block in enumerate(_layers(harness, kind, variant)[1]):
        stream, _ = _entering(harness, kind, variant, layer)
        mix, post, comb = block.hc_attn.mix(stream)
        stream = block.hc_attn.update(stream, _stored(harness, kind, f"layers.{layer}.attn_out"), post, comb)
        ffn_in = block.ffn_input(mix, stream)
        _assert_equal_but_ulps(harness, ffn_in, _stored(harness, kind, f"layers.{layer}.ffn_in"), layer)
        mix, post, comb = block.hc_ffn.mix(stream)
        stream = block.hc_ffn.update(stream, _stored(harness, kind, f"layers.{layer}.ffn_out"), post, comb)
        _assert_equal_but_ulps(harness, stream, _stored(harness, kind, f"layers.{layer}.h_out"), layer)
        assert torch.allclose(mix, _stored(harness, kind, f"layers.{layer}.pre_mix"), rtol=0, atol=5e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_taps_from_golden_streams(harness, kind, variant):
    model, blocks = _layers(harness, kind, variant)
    taps = []
    for layer in model.config.text.dspark_target_layer_ids:
        stream, _ = _entering(harness, kind, variant, layer)
        taps.append(blocks[layer].numerics.b(stream.mean(1)))
    _assert_equal_but_ulps(harness, torch.cat(taps, -1), _stored(harness, kind, "main_hidden"), "main_hidden")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_from_golden_hidden(harness, kind, variant):
    model, _ = _layers(harness, kind, variant)
    logits = model.logits(model.head.normed(_stored(harness, kind, "final_hidden")))
    _assert_equal_but_ulps(harness, logits, _stored(harness, kind, "logits"), "logits")


@pytest.mark.parametrize(("kind", "median", "worst"), [("tinyB", 0.05, 0.08), ("tinyA", 0.05, 0.08)])
def test_first_attention_engine(harness, kind, median, worst):
    golden = harness.golden_run(kind, "released", "engine", "sparse")
    got = golden.prefill.capture["layers.0.attn_out"][golden.positions]
    errors = harness.relative_errors(got, _stored(harness, kind, "layers.0.attn_out"))
    assert errors.median() <= median
    assert errors.max() <= worst
    assert errors.median() > 0.01, "the engine quantizes the attention output, the reference does not"


@pytest.mark.parametrize("kind", KINDS)
def test_first_attention_reference_is_bit_equal(harness, kind):
    golden = harness.golden_run(kind, "released", "reference", "sparse")
    got = golden.prefill.capture["layers.0.attn_out"][golden.positions]
    assert torch.equal(got, _stored(harness, kind, "layers.0.attn_out"))


ENTRIES = [("tinyA", 2, (99,)), ("tinyA", 4, (99,)), ("tinyA", 6, (197, 198, 199))]
ENTRIES += [("tinyB", 2, (36,)), ("tinyB", 4, (72, 73, 74))]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kind", "layer", "entries"), ENTRIES)
def test_entries_and_index_keys_from_golden_input(harness, kind, variant, layer, entries):
    """Compressed rows whose tokens are all stored, through the pools, against the last eight golden rows."""
    tensors = harness.expected(kind, "official")
    positions, length = tensors["positions"].tolist(), int(tensors["prompt_len"])
    driver = harness.driver(kind, "released", variant)
    model, sequence = driver.model, driver.add(tensors["input_ids"].numpy())
    attention = model.blocks[layer].attn
    ratio, total = attention.ratio, length // attention.ratio
    for entry in entries:
        tokens = [positions.index(entry * ratio + i) for i in range(ratio)]
        v = _stored(harness, kind, f"layers.{layer}.attn_in")[tokens]
        meta = build_prefill(
            driver.layout,
            model.config.topology.ratios,
            q=np.array([ratio]),
            k=np.array([(entry + 1) * ratio]),
            state_ids=np.array([sequence.slot]),
            block_tables=sequence.blocks[None],
            input_ids=np.zeros(ratio, np.int64),
            ngram_ids=np.zeros((ratio, 4), np.int64),
        )
        ctx = build_context(meta, driver.pools, model.numerics, *model._tables)
        attention._store_entries(linear(v, attention.side)[:, : attention.entry_rows], ctx)
        slot = meta.ratios[ratio].entry_slots
        row = entry - total + 8
        got = driver.pools.load_entries(layer, slot)
        if variant == "reference":
            want = _stored(harness, kind, f"layers.{layer}.compress_kv")[row : row + 1]
            _assert_equal_but_ulps(harness, got, want, entry)
        got = driver.pools.load_index_keys(layer, slot)
        want = _stored(harness, kind, f"layers.{layer}.index_k")[row : row + 1]
        _assert_equal_but_ulps(harness, got, want, entry)


def test_first_layers_equal_golden_from_input_ids(harness):
    """tinyA: window attention, Engram, a ratio-2 source with its indexer. Behind them flips spread."""
    golden = harness.golden_run("tinyA", "released", "reference", "sparse")
    capture, positions = golden.prefill.capture, golden.positions
    for layer in range(3):
        for name in ("attn_in", "attn_out", "ffn_in", "ffn_out", "h_out"):
            key = f"layers.{layer}.{name}"
            assert torch.equal(capture[key][positions], _stored(harness, "tinyA", key)), key
    topk = golden.tensors["sparse.prefill.layers.2.topk"]
    got = harness.sorted_sets(capture["layers.2.topk"], topk.shape[1])
    assert (got != harness.sorted_sets(topk)).any(-1).sum() <= 1
    weights = golden.tensors["sparse.prefill.layers.2.gate_weights"]
    close = torch.isclose(capture["layers.2.gate_weights"], weights, rtol=2e-6, atol=0).all(-1)
    assert close.sum() >= 198


LOOSE = {
    "reference": {"layer": (0.01, 0.05), "logits": (0.06, 0.15, 0.85), "experts": 0.93, "topk": (0.88, 0.80)},
    "engine": {"layer": (0.02, 0.07), "logits": (0.08, 0.25, 0.78), "experts": 0.88, "topk": (0.88, 0.75)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_model_is_inside_the_loose_bounds(harness, kind, variant):
    golden, bounds = harness.golden_run(kind, "released", variant, "sparse"), LOOSE[variant]
    tensors, capture = golden.tensors, golden.prefill.capture
    topology = harness.load_model(kind, "released", variant).config.topology
    first, last = bounds["layer"]
    limits = np.linspace(first, last, topology.num_layers)
    for layer, limit in enumerate(limits):
        key = f"layers.{layer}.h_out"
        got = capture[key][golden.positions]
        assert harness.relative_errors(got, _stored(harness, kind, key)).median() <= limit, key
    logits, want = golden.prefill.logits, tensors["sparse.prefill.logits"].float()
    errors = harness.relative_errors(logits, want)
    median, ninety, same = bounds["logits"]
    assert errors.median() <= median
    assert errors.quantile(0.9) <= ninety
    assert (logits.argmax(-1) == want.argmax(-1)).float().mean() >= same
    equal, overlap = [], []
    for layer in topology.backbone:
        key = f"layers.{layer.index}.gate_indices"
        a, b = harness.sorted_sets(capture[key]), harness.sorted_sets(tensors[f"sparse.prefill.{key}"])
        equal.append((a == b).all(-1).float())
        if layer.is_index_source:
            key = f"layers.{layer.index}.topk"
            for mine, theirs in zip(capture[key], tensors[f"sparse.prefill.{key}"], strict=True):
                theirs = set(theirs[theirs >= 0].tolist())
                if theirs:
                    overlap.append(len(theirs & set(mine[mine >= 0].tolist())) / len(theirs))
    assert torch.cat(equal).mean() >= bounds["experts"]
    assert np.mean(overlap) >= bounds["topk"][kind == "tinyB"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_image_rows_from_golden_input(harness, variant):
    """tinyV: experts from stored inputs, with the image bias at image positions."""
    tensors = harness.expected("tinyV", "official")
    vocab = harness.load_model("tinyV", "released").config.text.vocab_size
    errors, compared = [], 0
    for prompt in ("prompt0", "prompt1"):
        positions = harness.expected("tinyV", "exact")[f"{prompt}.positions"].long()
        ids = harness.expected("tinyV", "exact")[f"{prompt}.input_ids"].long()[positions]
        for block in harness.load_model("tinyV", "released", variant).blocks:
            name = f"{prompt}.sparse.prefill.layers.{block.layer.index}"
            if f"{name}.ffn_in" not in tensors:
                continue
            compared += 1
            out = block.ffn.compute(tensors[f"{name}.ffn_in"].float(), ids >= vocab)
            want = tensors[f"{name}.ffn_out"].float()
            if variant == "reference":
                _assert_equal_but_ulps(harness, out, want, name)
            errors.append(harness.relative_errors(out, want))
    assert compared >= 2
    assert torch.cat(errors).median() <= 0.02


def test_modes_differ(harness):
    """A run in mode exact fails the bit-tight local check: the quantizers are really there."""
    block = harness.load_model("tinyB", "exact").blocks[0]
    out = block.ffn.compute(_stored(harness, "tinyB", "layers.0.ffn_in"))
    assert (
        harness.ulp_distance(out, _stored(harness, "tinyB", "layers.0.ffn_out")) == 0
    ).float().mean() < 0.9
