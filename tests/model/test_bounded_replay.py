"""Consumer layers that run on the end of a prompt only: the golden replay, both modes, any chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

BOUNDS = [("tinyA", 128), ("tinyA", 160), ("tinyB", 16), ("tinyB", 20)]


def run(harness: Any, kind: str, numerics: str, replay: Any, chunks: list[int] | None = None) -> Any:
    """(last rows of the prompt, logits of each decode step, state bytes) of the golden prompt."""
    tensors = harness.expected(kind, "exact")
    ids, length = tensors["input_ids"].numpy(), int(tensors["prompt_len"])
    driver = harness.driver(kind, numerics, num_drafts=0)
    sequence = driver.add(ids)
    mode, keep = replay
    known = None if mode == "off" else (mode, keep, [length])
    for count in chunks or [length]:
        prefill = driver.step([sequence], [count], prefill=True, replay=known)
    steps = [driver.decode([sequence]) for _ in range(len(ids) - length - 1)]
    return prefill, steps, driver.state(sequence)


@pytest.mark.parametrize(("kind", "keep"), BOUNDS)
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_the_golden_replay(harness: Any, kind: str, keep: int, mode: str) -> None:
    tensors, prefix = harness.expected(kind, "exact"), f"bounded{keep}"
    prefill, steps, _ = run(harness, kind, "exact", (mode, keep))
    assert int(tensors[f"{prefix}.kept_from"]) == int(tensors["prompt_len"]) - keep
    for name, got in (("logits", prefill.logits), ("final_hidden", prefill.capture["final_hidden"])):
        want = tensors[f"{prefix}.prefill.{name}"]
        assert harness.relative_errors(got[-8:], want).max() <= 2e-5
    got = torch.cat([step.logits for step in steps])
    assert harness.relative_errors(got, tensors[f"{prefix}.decode.logits"]).max() <= 2e-5


@pytest.mark.parametrize(
    ("kind", "keep", "numerics"),
    [("tinyA", 140, "released"), ("tinyB", 20, "exact"), ("tinyB", 20, "released")],
)
def test_mask_and_compact_give_the_same_bits(harness: Any, kind: str, keep: int, numerics: str) -> None:
    """Of all kept rows, of all caches and of every decode step, however the prompt is cut."""
    length = int(harness.expected(kind, "exact")["prompt_len"])
    masked, mask_steps, mask_state = run(harness, kind, numerics, ("mask", keep))
    early = length - keep
    for chunks in ([length], [early - 5, 3, 10, keep - 8]):
        compact, steps, state = run(harness, kind, numerics, ("compact", keep), chunks)
        rows = min(keep, chunks[-1])
        assert torch.equal(compact.logits[-rows:], masked.logits[-rows:])
        for name, value in state.items():
            assert torch.equal(value, mask_state[name]), name
        for one, other in zip(steps, mask_steps, strict=True):
            assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_short_prompts_are_not_touched(harness: Any, mode: str) -> None:
    length = int(harness.expected("tinyB", "exact")["prompt_len"])
    off, off_steps, off_state = run(harness, "tinyB", "released", ("off", 0))
    got, steps, state = run(harness, "tinyB", "released", (mode, length))
    assert torch.equal(got.logits, off.logits)
    assert all(torch.equal(state[name], off_state[name]) for name in off_state)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(steps, off_steps, strict=True))


def test_several_sequences_in_one_compact_step(harness: Any) -> None:
    """A long one, one that lies before its kept rows, a short one: as each on its own."""
    tokens = harness.expected("tinyB", "exact")["input_ids"].numpy()

    def prefill(groups: list[list[int]]) -> list[torch.Tensor]:
        driver = harness.driver("tinyB", "released", seed=1)
        cases = {0: (60, 60), 1: (30, 75), 2: (9, 9)}
        out: dict[int, torch.Tensor] = {}
        for group in groups:
            sequences = [driver.add(tokens[: cases[i][1]]) for i in group]
            counts = [cases[i][0] for i in group]
            totals = [cases[i][1] for i in group]
            logits = driver.step(sequences, counts, prefill=True, replay=("compact", 20, totals)).logits
            ends = torch.tensor(counts).cumsum(0)
            for i, end, count in zip(group, ends.tolist(), counts, strict=True):
                out[i] = logits[end - min(count, 9 if i == 2 else 1) : end]
        return [out[i] for i in sorted(out)]

    for together, apart in zip(prefill([[0, 1, 2]]), prefill([[0], [1], [2]]), strict=True):
        assert torch.equal(together, apart)
