"""The drafter against the golden block logits, chains, confidences and inner streams; its key lists."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.drafter import DraftRequest, block_keys, confidence_logit, logistic
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model
from deepinfer_ray.ops.numerics import Numerics

TOLERANCE = 2e-5
DRAFTS = 5
RUNS = [(kind, run) for kind in ("tinyB", "tinyA") for run in ("dense", "sparse")]


@cache
def load(root, kind: str, mode: str = "exact", dense: bool = False) -> TextModel:
    with Checkpoint.open(root / kind, drafter=True) as checkpoint:
        config = checkpoint.config
        if dense:
            config = config.with_text(index_topk=4096, candidate_topk_blocks=4096)
        return load_text_model(checkpoint, Numerics(mode), config=config, drafter=True)


def draft(model, driver, sequence, anchor: int, capture=None):
    """(ids [N+1], logits [N, V], confidence logits [N]) of the greedy chain behind the newest token."""
    request = DraftRequest(
        torch.tensor([anchor]),
        torch.tensor([sequence.length - 1]),
        torch.tensor([sequence.slot]),
        sequence.length + DRAFTS,
    )
    with torch.inference_mode():
        block = model.draft_block(request, driver.pools, DRAFTS, capture)
        previous, ids, logits, confidences = request.tokens, [anchor], [], []
        for place in range(DRAFTS):
            row, confidence = model.draft_step(block, place, previous)
            previous = row.argmax(-1)
            ids.append(int(previous))
            logits.append(row[0])
            confidences.append(confidence[0])
    return ids, torch.stack(logits), torch.stack(confidences)


@pytest.mark.parametrize(("kind", "run"), RUNS)
def test_drafts_equal_golden(harness, kind, run):
    tensors = harness.expected(kind, "exact")
    model = load(harness.root, kind, "exact", run == "dense")
    driver = harness.Driver(model, token_map=harness.expected_map(kind), num_drafts=DRAFTS)
    ids, length = tensors["input_ids"].numpy(), int(tensors["prompt_len"])
    sequence = driver.add(ids)
    driver.prefill(sequence, length)
    prefix = f"{run}.decode.draft"
    for t, want_ids in enumerate(tensors[f"{prefix}_ids"].tolist()):
        driver.decode([sequence])
        capture: dict[str, torch.Tensor] = {}
        got_ids, logits, confidences = draft(model, driver, sequence, int(ids[length + t + 1]), capture)
        assert got_ids == want_ids, t
        assert harness.relative_errors(logits, tensors[f"{prefix}_logits"][t]).max() <= TOLERANCE, t
        want = tensors[f"{prefix}_conf"][t]
        assert (confidences - want).abs().max() <= TOLERANCE * max(1.0, float(want.abs().max())), t
        if f"{prefix}_h" in tensors:
            layers = model.config.topology.drafts
            streams = torch.stack([capture[f"layers.{layer.index}.h_out"] for layer in layers])
            assert harness.relative_errors(streams, tensors[f"{prefix}_h"][t]).max() <= TOLERANCE, t


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize(("kind", "keep"), [("tinyB", 16), ("tinyB", 20), ("tinyA", 128)])
def test_drafts_behind_a_bounded_replay_equal_golden(harness, kind, keep, mode):
    """Features exist for the kept rows only, and are enough for the drafter's window."""
    tensors = harness.expected(kind, "exact")
    model = load(harness.root, kind)
    driver = harness.Driver(model, token_map=harness.expected_map(kind), num_drafts=DRAFTS)
    ids, length = tensors["input_ids"].numpy(), int(tensors["prompt_len"])
    sequence = driver.add(ids)
    driver.step([sequence], [length], prefill=True, replay=(mode, keep, [length]))
    for t, want_ids in enumerate(tensors[f"bounded{keep}.decode.draft_ids"].tolist()):
        driver.decode([sequence])
        got_ids, _, confidences = draft(model, driver, sequence, int(ids[length + t + 1]))
        assert got_ids == want_ids, t
        want = tensors[f"bounded{keep}.decode.draft_conf"][t]
        assert (confidences - want).abs().max() <= TOLERANCE * max(1.0, float(want.abs().max())), t


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_chunked_prompts_and_rejected_rows_leave_the_same_drafts(harness, mode):
    """Context keys come from every row of every step, rejected ones are overwritten in time."""
    model = load(harness.root, "tinyB", mode)
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    wrong = np.concatenate([ids[:61], (ids[61:66] + 7) % 500])

    def run(chunk: int | None, verify: bool):
        driver = harness.Driver(model, token_map=harness.expected_map("tinyB"), num_drafts=DRAFTS)
        sequence = driver.add(ids, reserve=16)
        driver.prefill(sequence, 60, chunk)
        if verify:
            sequence.tokens = wrong  # one right row, five that will be rejected
            driver.decode([sequence], rows=6)
            sequence.tokens, sequence.length = ids, 61
        else:
            driver.decode([sequence])
        return draft(model, driver, sequence, int(ids[61]))

    one = run(None, False)
    for other in (run(7, False), run(None, True), run(23, True)):
        assert other[0] == one[0]
        assert torch.equal(other[1], one[1])
        assert torch.equal(other[2], one[2])


def test_a_sequence_drafts_the_same_alone_and_among_others(harness):
    model = load(harness.root, "tinyB", "released")
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    driver = harness.Driver(model, token_map=harness.expected_map("tinyB"), num_drafts=DRAFTS)
    lengths = [1, 3, 15, 16, 17, 22, 40]
    sequences = [driver.add(ids[9:], reserve=16) for _ in lengths]
    alone = []
    for sequence, length in zip(sequences, lengths, strict=True):
        driver.prefill(sequence, length)
        alone.append(draft(model, driver, sequence, 5))
    request = DraftRequest(
        torch.full((len(lengths),), 5),
        torch.tensor([sequence.length - 1 for sequence in sequences]),
        torch.tensor([sequence.slot for sequence in sequences]),
        64,
    )
    with torch.inference_mode():
        block = model.draft_block(request, driver.pools, DRAFTS)
        previous = request.tokens
        for place in range(DRAFTS):
            logits, confidence = model.draft_step(block, place, previous)
            previous = logits.argmax(-1)
            for index, (ids_alone, logits_alone, confidence_alone) in enumerate(alone):
                assert int(previous[index]) == ids_alone[place + 1]
                assert torch.equal(logits[index], logits_alone[place])
                assert torch.equal(confidence[index], confidence_alone[place])


def test_block_keys_are_the_window_and_the_whole_block():
    window, ring, drafts = 128, 134, 5
    positions, states = torch.tensor([0, 126, 127, 128, 139, 400]), torch.tensor([1, 2, 3, 4, 5, 6])
    keys, stores = block_keys(positions, states, window, ring, drafts)
    for row, (position, state) in enumerate(zip(positions.tolist(), states.tolist(), strict=True)):
        seen = range(position - window + 1, position + drafts + 1)
        want = [state * ring + place % ring if place >= 0 else -1 for place in seen]
        assert keys[row].tolist() == want
        assert stores[row].tolist() == want[window:]
        real = [record for record in want if record >= 0]
        assert len(set(real)) == len(real), "window and block need different slots"


def test_confidence_equals_golden(harness):
    from safetensors.torch import load_file

    golden = {
        name.removeprefix("confidence."): value.float()
        for name, value in load_file(harness.root / "ops" / "spec_schedule.safetensors").items()
        if name.startswith("confidence.")
    }
    for temperature in (1.0, 1.7):
        logit = confidence_logit(
            golden["hidden"], golden["markov_embed"], golden["weight"][:, 0], temperature
        )
        want = golden[f"t{temperature}"]
        assert torch.allclose(logistic(logit), want, rtol=2e-6, atol=1e-7)
    huge = torch.full((1, 96), 1e9)
    assert float(confidence_logit(huge, golden["markov_embed"][:1], golden["weight"][:, 0]).abs()) == 60.0


def test_an_engine_without_drafts_reads_no_draft_weights(harness):
    with Checkpoint.open(harness.root / "tinyB") as checkpoint:
        model = load_text_model(checkpoint, Numerics("exact"))
    assert model.drafter is None
