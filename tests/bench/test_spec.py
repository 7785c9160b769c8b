"""The drafting benchmark on a few tokens: all modes run, and a drafter equal to its target is believed."""

from __future__ import annotations

import torch

from deepinfer_ray.bench import spec


def test_a_drafter_equal_to_its_target_multiplies_the_tokens_of_a_step() -> None:
    torch.set_num_threads(1)
    workload = spec.Workload(sequences=3, requests=3, prompt_tokens=8, output_tokens=19)
    rows = spec.run(workload, repetitions=1, drafters=["equal to the target"])
    assert [(row["temperature"], row["mode"]) for row in rows] == [
        (temperature, mode) for temperature in (0.0, 1.0) for mode in spec.MODES
    ]
    for row in rows:
        if row["mode"] == "no drafts":
            assert (row["verified"], row["accepted"], row["tokens/step"], row["speed-up"]) == (0, 0, 1, 1)
        else:
            # The first step of a sequence verifies placeholders, the last may be cut off.
            assert 3 <= row["tokens/step"] <= 6
            assert row["accepted"] <= row["verified"] <= spec.DRAFTS
        assert row["tokens/s"] > 0
