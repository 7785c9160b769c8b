"""A request's logits do not depend on the batch: alone, among 1…70 rows, elsewhere, beside other lengths."""

import numpy as np
import pytest
import torch

MODES = ["exact", "released"]


def _neighbours(driver, rng, count):
    vocab = driver.model.config.text.vocab_size
    tokens = [np.append(0, rng.integers(3, vocab, size=rng.integers(3, 60))) for _ in range(count)]
    return [driver.add(ids) for ids in tokens]


@pytest.mark.parametrize("mode", MODES)
def test_decode_rows_are_independent_of_the_batch(harness, mode):
    """Every batch size 1…70: the request at a random place, its neighbours of random lengths."""
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    rng = np.random.default_rng(7)
    driver = harness.driver("tinyB", mode, num_slots=90, num_blocks=200)
    ours, others = driver.add(ids), _neighbours(driver, rng, 69)
    driver.prefill(ours, 40)
    driver.step(others, [len(s.tokens) - 1 for s in others], prefill=True)
    want = driver.decode([ours])
    for size in range(1, 71):
        at = int(rng.integers(0, size))
        batch = [others[i] for i in rng.permutation(69)[: size - 1]]
        batch.insert(at, ours)
        for sequence in batch:
            sequence.length -= 1 if sequence is ours or sequence.length == len(sequence.tokens) else 0
        got = driver.decode(batch)
        assert torch.equal(got.logits[at], want.logits[0]), (size, at)
        assert torch.equal(got.taps[at], want.taps[0]), (size, at)


@pytest.mark.parametrize("mode", MODES)
def test_prefill_rows_are_independent_of_the_batch(harness, mode):
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    alone = harness.driver("tinyB", mode, num_slots=8, num_blocks=16)
    sequence = alone.add(ids)
    want, state = alone.prefill(sequence, 75)[0].logits, alone.state(sequence)
    rng = np.random.default_rng(11)
    for size in (2, 3, 5, 8, 17, 33, 70):
        driver = harness.driver("tinyB", mode, num_slots=90, num_blocks=200, seed=size)
        batch, at = _neighbours(driver, rng, size - 1), int(rng.integers(0, size))
        ours = driver.add(ids)
        batch.insert(at, ours)
        counts = [75 if s is ours else len(s.tokens) for s in batch]
        got = driver.step(batch, counts, prefill=True).logits
        first = sum(counts[:at])
        assert torch.equal(got[first : first + 75], want), size
        for name, value in driver.state(ours).items():
            assert torch.equal(value, state[name]), (size, name)


@pytest.mark.parametrize("mode", MODES)
def test_the_wide_model_is_independent_of_the_batch(harness, mode):
    ids = harness.expected("tinyA", "exact")["input_ids"].numpy()
    rng = np.random.default_rng(3)
    driver = harness.driver("tinyA", mode, num_slots=40, num_blocks=200)
    ours, others = driver.add(ids), _neighbours(driver, rng, 32)
    driver.prefill(ours, 150)
    driver.step(others, [len(s.tokens) - 1 for s in others], prefill=True)
    want = driver.decode([ours]).logits[0]
    for size in (1, 2, 3, 4, 7, 15, 16, 17, 33):
        ours.length -= 1
        batch = [*others[: size - 1], ours]
        for other in batch[:-1]:
            other.length = len(other.tokens) - 1
        assert torch.equal(driver.decode(batch).logits[-1], want), size


def test_placeholder_rows_change_nothing(harness):
    """A rank without work runs a masked row in slot 0 and block 0."""
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    results = []
    for placeholders in (0, 3):
        driver = harness.driver("tinyB", "released", num_slots=8, num_blocks=16)
        driver.pools.slots[0], driver.pools.blocks[0] = 0, 0
        ours = driver.add(ids)
        driver.prefill(ours, 40)
        batch = [ours]
        for _ in range(placeholders):
            batch.append(type(ours)(np.zeros(1, np.int64), 0, np.zeros(1, np.int64)))
        valid = np.array([True] + [False] * placeholders)
        step = driver.step(batch, [1] * len(batch), prefill=False, valid=valid)
        if placeholders:
            assert (step.capture["layers.0.gate_indices"][1:] == -1).all()
            assert (step.capture["layers.0.gate_weights"][1:] == 0).all()
        results.append(step.logits[0])
    assert torch.equal(*results)


def test_stale_cache_bytes_are_never_read(harness):
    """The driver's free slots and blocks decode to NaN: nothing of them may reach a logit."""
    driver = harness.driver("tinyB", "released", num_slots=8, num_blocks=16)
    assert driver.pools.load_window(0, torch.tensor([5])).isnan().any()
    sequence = driver.add(harness.expected("tinyB", "exact")["input_ids"].numpy())
    for result in (*driver.prefill(sequence, 70, 9), driver.decode([sequence])):
        assert not result.logits.isnan().any()
