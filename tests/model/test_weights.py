"""Loading: shapes, budgets, what is left out, Engram tables; models that differ only in how they are held."""

import numpy as np
import pytest
import torch

from deepinfer_ray.errors import CheckpointError, ConfigError
from deepinfer_ray.model import weights
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.parallel.engram_shards import shard_range
from deepinfer_ray.parallel.engram_store import LocalEngramStore, padded_rows


@pytest.fixture
def checkpoint(harness):
    with Checkpoint.open(harness.root / "tinyB") as opened:
        yield opened


@pytest.mark.parametrize("kind", ["tinyA", "tinyB", "tinyV"])
def test_golden_checkpoints_load_without_drafter_and_tower(harness, kind):
    model = harness.load_model(kind, "released")
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith(("mtp", "vision", "aligner")) for name in names)
    assert all(not value.is_meta for value in model.parameters())
    assert any("bias_vl" in name for name in names) == (kind == "tinyV")


def test_the_budget_decides_how_experts_are_held(checkpoint):
    for dtype in (torch.float32, torch.bfloat16):
        need = weights.dequantized_expert_bytes(checkpoint.config, dtype)
        assert need == 8 * 6 * 3 * 64 * 32 * dtype.itemsize
        for budget, kind in ((need, "StackedExperts"), (need - 1, "PackedExperts")):
            model = weights.load_text_model(
                checkpoint, Numerics(), dequant_budget_bytes=budget, products=dtype
            )
            assert {type(block.ffn.experts).__name__ for block in model.blocks} == {kind}


def test_bfloat16_weights_round_as_float32_ones_do(harness, checkpoint):
    """One product from exact operands, summed in float32, rounded once: the same up to the order of sums."""
    ids, rows = harness.expected("tinyB", "exact")["input_ids"].numpy(), []
    for dtype in (torch.float32, torch.bfloat16):
        model = weights.load_text_model(checkpoint, Numerics(), products=dtype)
        driver = harness.Driver(model, token_map=harness.expected_map("tinyB"), num_slots=8, num_blocks=16)
        rows.append(driver.prefill(driver.add(ids), 75)[0].capture["layers.0.attn_out"])
    assert (harness.ulp_distance(*rows) == 0).float().mean() > 0.97
    assert harness.relative_errors(*rows).median() < 0.005


def test_packed_and_stacked_models_give_the_same_logits(harness):
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    rows = []
    for budget in (0, 1 << 30):
        driver = harness.driver("tinyB", "released", budget=budget, num_slots=8, num_blocks=16)
        sequence = driver.add(ids)
        driver.prefill(sequence, 30, 8)
        rows.append(driver.decode([sequence]).logits)
    assert torch.equal(*rows)


def test_the_width_of_a_selection_changes_no_bit(harness, checkpoint):
    """A shorter bound of positions narrows the selection; the padding columns carry nothing."""
    config = checkpoint.config.with_text(index_topk=256, candidate_topk_blocks=64)
    ids, rows = harness.expected("tinyB", "exact")["input_ids"].numpy(), []
    for bound in (96, 256):
        model = weights.load_text_model(checkpoint, Numerics("exact"), config=config, max_positions=bound)
        driver = harness.Driver(model, token_map=harness.expected_map("tinyB"), num_slots=8, num_blocks=16)
        rows.append(driver.prefill(driver.add(ids), 75)[0].logits)
    assert torch.equal(*rows)


def test_a_tensor_of_another_shape_is_named(harness):
    block = harness.load_model("tinyB", "exact").blocks[0]
    with pytest.raises(
        CheckpointError, match=r"Attention.wo_b is \[64, 64\] but the checkpoint gives \[1, 2\]"
    ):
        weights.put(block.attn, "wo_b", torch.zeros(1, 2))


def test_an_unknown_backend_is_an_error(checkpoint):
    with pytest.raises(ConfigError, match="backend 'tpu' has no weight preparation; known backends: cpu"):
        weights.load_text_model(checkpoint, Numerics(), backend="tpu")


def test_positions_behind_the_bound_are_an_error(harness, checkpoint):
    model = weights.load_text_model(checkpoint, Numerics(), max_positions=16)
    driver = harness.Driver(model, token_map=harness.expected_map("tinyB"), num_slots=8, num_blocks=16)
    with pytest.raises(ValueError, match="position 19 is outside the RoPE table of 16 positions"):
        driver.prefill(driver.add(np.zeros(20, np.int64)), 20)


def test_the_engram_store_holds_the_stored_bytes(harness, checkpoint):
    store = weights.load_engram_store(checkpoint)
    plan = checkpoint.config.engram
    width = plan.head_dim
    for ordinal, layer in enumerate(plan.layer_ids):
        codes = checkpoint.read(f"layers.{layer}.engram.embed.weight").float()
        scale = torch.exp2(
            checkpoint.read(f"layers.{layer}.engram.embed.scale").view(torch.uint8).float() - 127
        )
        table = codes * scale.repeat_interleave(32, 1)
        rows = torch.randint(0, plan.rows[ordinal], (5, plan.columns))
        rows[2] = -1
        asked = torch.full((len(plan.layer_ids), 5, plan.columns), 3)
        asked[ordinal] = rows
        got = store.fetch(asked)[ordinal].view(5, plan.columns, width)
        assert torch.equal(got[[0, 1, 3, 4]], table[rows[[0, 1, 3, 4]]])
        assert got[2].eq(0).all()


def test_engram_rows_are_shared_out_evenly():
    assert padded_rows(434, 1) == 512
    assert padded_rows(434, 3) == 768
    assert [shard_range(434, 2, rank) for rank in range(2)] == [(0, 256), (256, 434)]
    assert shard_range(434, 3, 2) == (434, 434), "the last of many ranks may own none"


def test_engram_scales_must_fit_their_codes():
    with pytest.raises(ValueError, match="need scales of one byte a row and 32 columns"):
        LocalEngramStore([torch.zeros(4, 64, dtype=torch.uint8)], [torch.zeros(4, 1, dtype=torch.uint8)])


def test_a_model_that_was_not_prepared_says_so(checkpoint):
    with torch.device("meta"):
        model = TextModel(checkpoint.config, Numerics())
    with pytest.raises(RuntimeError, match=r"prepare\(\) must run before the first forward pass"):
        model(None, None)
