"""Engines that draft: sampled output has the distribution of the model and depends on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from drafting_lab import Lab, bits, prompt, run, sampled_requests

from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.step_inputs import DEVICE_ROWS, RowMultiples

QUANTILE = 3.719


def test_sampled_tokens_are_the_same_in_both_loops_and_alone(lab: Lab) -> None:
    """With fixed lengths and no preemption the boundaries of a sequence's steps are its own affair."""
    requests = sampled_requests(20, 3)
    together = bits(run(lab.engine(zos=True), requests))
    assert bits(run(lab.engine(zos=False), requests)) == together
    assert bits(run(lab.engine(zos=True, max_seqs=1), requests[:5])) == together[:5]
    assert bits(run(lab.engine(zos=True, max_seqs=3), requests[::-1]))[::-1] == together
    filled = lab.engine(zos=True)
    filled.loop.inputs.multiples = RowMultiples(DEVICE_ROWS, DEVICE_ROWS, DEVICE_ROWS)
    assert filled.loop.drafting is not None
    filled.loop.drafting._multiple = DEVICE_ROWS
    assert bits(run(filled, requests)) == together


def test_what_moves_the_ends_of_steps_moves_sampled_tokens_and_no_greedy_ones(lab: Lab) -> None:
    """What the README says of reproducible output: other counts of drafts, preemption, lengths by time."""
    random = np.random.default_rng(17)
    requests = [
        Request(
            prompt(random, 116 + index),
            SamplingParams(temperature=index % 2, max_tokens=18, ignore_eos=True),
            seed=index,
        )
        for index in range(8)
    ]
    together = bits(run(lab.engine(zos=True), requests))
    assert bits(run(lab.engine(zos=False, max_seqs=2), requests)) == together
    others = {
        "no drafts": lab.engine(0),
        "two drafts": lab.engine(2, zos=True),
        "preemption": lab.engine(zos=True, num_blocks=8),
        "lengths by cost": lab.engine(zos=True, varlen=True),
    }
    for name, engine in others.items():
        got = bits(run(engine, requests))
        assert got[::2] == together[::2], name
        assert got[1::2] != together[1::2], name
    assert others["preemption"].stats["preempted"] > 0


def test_log_probabilities_of_sampled_drafts_are_the_models(lab: Lab) -> None:
    """Accepted, resampled and fresh tokens alike: forced upon a loop without drafts they have the same."""
    requests = [
        Request(request.prompt, request.params.model_copy(update={"logprobs": 2}), request.seed)
        for request in sampled_requests(20, 8)
    ]
    engine = lab.engine(zos=True)
    drafted = run(engine, requests)
    assert engine.stats["accepted_lengths"][2] > 0
    again = [
        Request(request.prompt, request.params, request.seed, forced=result.token_ids)
        for request, result in zip(requests, drafted, strict=True)
    ]
    assert bits(run(lab.engine(0), again)) == bits(drafted)


@pytest.mark.parametrize("varlen", [False, True])
def test_five_thousand_samples_have_the_distribution_of_the_model(lab: Lab, varlen: bool) -> None:
    """Four tokens of one prompt, three ids each: their joint distribution against the model's, by chi-square.

    The second token comes from a step that verifies placeholders, the others from real drafts.
    """
    draws, width, length = 2500, 3, 4
    start = np.array([9, 33, 57, 100, 4], np.int32)
    sampling = {"temperature": 1.3, "top_k": width, "ignore_eos": True}
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(length):
        asked = [
            Request(
                start,
                SamplingParams(max_tokens=step + 1, logprobs=width, **sampling),  # type: ignore[arg-type]
                forced=np.array(before, np.int32),
            )
            for before in exact
        ]
        following = {}
        for before, result in zip(exact, run(lab.engine(0, max_seqs=64), asked), strict=True):
            assert result.token_ids[:step].tolist() == list(before)
            assert result.top_logprobs is not None
            for token, logprob in result.top_logprobs[step]:
                following[(*before, token)] = exact[before] * float(np.exp(logprob))
        exact = following
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)

    params = SamplingParams(max_tokens=length, **sampling)  # type: ignore[arg-type]
    engine = lab.engine(2, varlen=varlen, max_seqs=125, num_blocks=160, max_batched_tokens=1000)
    results = run(engine, [Request(start, params, seed=1000 + index) for index in range(draws)])
    counts = dict.fromkeys(exact, 0)
    for result in results:
        counts[tuple(result.token_ids.tolist())] += 1
    expected, observed = np.array(list(exact.values())) * draws, np.array(list(counts.values()))
    small = expected < 8
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    freedom = len(expected) - 1
    critical = freedom * (1 - 2 / (9 * freedom) + QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < critical
    assert freedom > 15
    assert engine.stats["accepted_lengths"][1] > 100
