"""Any chunking of a prompt, and prefill against decode, give the same bits in caches and logits.

`exact` is the sharper mode: in `released` the bf16 roundings hide most differences.
"""

import functools

import pytest
import torch

LENGTHS = {"tinyB": 75, "tinyA": 200}
EIGHT = (1, 2, 3, 7, 33, 64, 131, 199)


@functools.cache
def _one_chunk(harness, kind, mode):
    driver = harness.driver(kind, mode, num_slots=8, num_blocks=16)
    sequence = driver.add(harness.expected(kind, "exact")["input_ids"].numpy())
    logits = driver.prefill(sequence, LENGTHS[kind])[0].logits
    return logits, driver.state(sequence)


def _assert_same_state(got, want, what):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), (what, name)
        assert not value.isnan().any(), name


def _check_chunk(harness, kind, mode, chunk):
    logits, state = _one_chunk(harness, kind, mode)
    driver = harness.driver(kind, mode, num_slots=8, num_blocks=16, seed=chunk)
    sequence = driver.add(harness.expected(kind, "exact")["input_ids"].numpy())
    chunks = driver.prefill(sequence, LENGTHS[kind], chunk)
    assert torch.equal(torch.cat([result.logits for result in chunks]), logits), chunk
    _assert_same_state(driver.state(sequence), state, chunk)


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_every_chunk_size_gives_the_bits_of_one_chunk(harness, mode):
    for chunk in range(1, LENGTHS["tinyB"] + 1):
        _check_chunk(harness, "tinyB", mode, chunk)


@pytest.mark.parametrize("chunk", EIGHT)
def test_chunk_sizes_of_the_wide_model_give_the_bits_of_one_chunk(harness, chunk):
    _check_chunk(harness, "tinyA", "exact", chunk)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["exact", "released"])
def test_all_chunk_sizes_of_the_wide_model_give_the_bits_of_one_chunk(harness, mode):
    for chunk in range(1, LENGTHS["tinyA"] + 1):
        _check_chunk(harness, "tinyA", mode, chunk)


@pytest.mark.parametrize("mode", ["exact", "released"])
@pytest.mark.parametrize("start", [1, 2, 17, 36, 37, 60])
def test_decode_after_prefill_equals_prefill_of_the_longer_prompt(harness, mode, start):
    logits, state = _one_chunk(harness, "tinyB", mode)
    driver = harness.driver("tinyB", mode, num_slots=8, num_blocks=16, seed=start)
    sequence = driver.add(harness.expected("tinyB", "exact")["input_ids"].numpy())
    driver.prefill(sequence, start)
    for row in range(start, LENGTHS["tinyB"]):
        assert torch.equal(driver.decode([sequence]).logits[0], logits[row]), row
    _assert_same_state(driver.state(sequence), state, start)


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_decode_of_the_wide_model_equals_its_prefill(harness, mode):
    logits, state = _one_chunk(harness, "tinyA", mode)
    driver = harness.driver("tinyA", mode, num_slots=8, num_blocks=16, seed=3)
    sequence = driver.add(harness.expected("tinyA", "exact")["input_ids"].numpy())
    driver.prefill(sequence, 170)
    for row in range(170, LENGTHS["tinyA"]):
        assert torch.equal(driver.decode([sequence]).logits[0], logits[row]), row
    _assert_same_state(driver.state(sequence), state, "decode")


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_several_rows_a_sequence_equal_one_at_a_time(harness, mode):
    """Verification steps: rows of a sequence see each other through the ring, causally."""
    logits, _ = _one_chunk(harness, "tinyB", mode)
    driver = harness.driver("tinyB", mode, num_drafts=5, num_slots=8, num_blocks=16)
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    first, second = driver.add(ids), driver.add(ids)
    driver.prefill(first, 30)
    driver.prefill(second, 17)
    widths = [(6, 1), (1, 6), (3, 2), (5, 5), (2, 6), (4, 4), (6, 3), (6, 6), (6, 6), (6, 6)]
    for counts in widths:
        counts = [min(c, 75 - s.length) for c, s in zip(counts, (first, second), strict=True)]
        starts = first.length, second.length
        if 0 in counts:
            break
        step = driver.step([first, second], counts, prefill=False)
        want = [logits[a : a + c] for a, c in zip(starts, counts, strict=True)]
        assert torch.equal(step.logits, torch.cat(want))
    assert first.length > 60
    short = harness.driver("tinyB", mode, num_slots=8, num_blocks=16)
    alone = short.add(ids)
    short.prefill(alone, first.length)
    for name, value in short.state(alone).items():
        assert torch.equal(driver.state(first)[name], value), name


@pytest.mark.parametrize("mode", ["exact", "released"])
def test_rejected_rows_leave_no_trace(harness, mode):
    """Rows at wrong tokens, taken back and computed again, give the bits of a sequence without them."""
    logits, state = _one_chunk(harness, "tinyB", mode)
    ids = harness.expected("tinyB", "exact")["input_ids"].numpy()
    driver = harness.driver("tinyB", mode, num_drafts=5, num_slots=8, num_blocks=16)
    sequence = driver.add(ids.copy())
    driver.prefill(sequence, 20)
    while sequence.length < 75:
        start, good = sequence.length, 1 + sequence.length % 3
        count = min(6, 75 - start)
        sequence.tokens[start + good : start + count] = 7
        step = driver.step([sequence], [count], prefill=False)
        kept = min(good, count)
        assert torch.equal(step.logits[:kept], logits[start : start + kept])
        sequence.tokens[:] = ids
        sequence.length = start + kept
    for name, value in driver.state(sequence).items():
        assert torch.equal(value, state[name]), name
