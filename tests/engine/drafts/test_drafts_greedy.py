"""Engines that draft: greedy output is bit for bit that without drafts, in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from drafting_lab import DRAFTS, MODES, TINY, Lab, bits, greedy_requests, prompt, run

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine.build import build_engine
from deepinfer_ray.engine.cost_curve import StepCosts
from deepinfer_ray.engine.draft_length import ScheduledLengths
from deepinfer_ray.engine.handover import PromptSender, SplitEngine
from deepinfer_ray.engine.request import Request, SamplingParams
from deepinfer_ray.engine.step_inputs import DEVICE_ROWS, RowMultiples


@pytest.mark.parametrize(
    ("varlen", "zos"), MODES, ids=["fixed", "fixed-overlapped", "varlen", "varlen-overlapped"]
)
def test_greedy_with_drafts_is_greedy_without(
    lab: Lab, greedy: tuple[list[Request], list[Any]], varlen: bool, zos: bool
) -> None:
    """Tokens, log-probabilities, alternatives, texts; few blocks, so that sequences give way all the time."""
    requests, without = greedy
    engine = lab.engine(varlen=varlen, zos=zos, num_blocks=9)
    assert bits(run(engine, requests)) == without
    stats = engine.stats
    assert stats["preempted"] > 3
    assert min(stats["accepted_lengths"][:5]) > 0, "every accepted length occurs"
    assert (np.count_nonzero(stats["verified_lengths"]) > 3) == varlen


def test_filled_up_steps_change_no_bit(lab: Lab, greedy: tuple[list[Request], list[Any]]) -> None:
    """As a device runs them: rows and sequences in sixteens, fixed shapes."""
    requests, without = greedy
    engine = lab.engine(zos=True)
    engine.loop.inputs.multiples = RowMultiples(DEVICE_ROWS, DEVICE_ROWS, DEVICE_ROWS)
    assert engine.loop.drafting is not None
    engine.loop.drafting._multiple = DEVICE_ROWS
    assert bits(run(engine, requests)) == without


@pytest.mark.parametrize("drafts", [1, 2])
def test_few_drafts(lab: Lab, greedy: tuple[list[Request], list[Any]], drafts: int) -> None:
    requests, without = greedy
    assert bits(run(lab.engine(drafts, zos=True), requests[:12])) == without[:12]


def test_logits_in_parts_change_no_bit(lab: Lab, greedy: tuple[list[Request], list[Any]]) -> None:
    requests, without = greedy
    engine = lab.engine(zos=True)
    assert engine.loop.drafting is not None
    engine.loop.drafting._part = 16
    assert bits(run(engine, requests[:16])) == without[:16]


@pytest.mark.parametrize("zos", [False, True], ids=["plain", "overlapped"])
def test_kept_prefixes_keep_the_drafters_rings(lab: Lab, zos: bool) -> None:
    """Prompts with a common head start from a snapshot, drafts included: same bits, the same acceptance."""
    random = np.random.default_rng(9)
    head = prompt(random, 131)
    requests = [
        Request(
            np.concatenate([head, prompt(random, int(random.integers(1, 30)))]),
            SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True),
        )
        for _ in range(8)
    ]
    without = bits(run(lab.engine(0), requests))
    plain = lab.engine(zos=zos, max_seqs=3)
    assert bits(run(plain, requests)) == without
    keeping = lab.engine(zos=zos, max_seqs=3, prefix_snapshots=4, prefix_min_saved_tokens=1)
    assert bits(run(keeping, requests)) == without
    assert keeping.stats["prefix_hits"] >= 5
    assert keeping.stats["accepted_lengths"] == plain.stats["accepted_lengths"]


def test_hand_over_between_engines_that_draft(lab: Lab, greedy: tuple[list[Request], list[Any]]) -> None:
    """The rings of the draft layers go along; the first step behind it verifies placeholders."""
    requests, without = greedy
    told = {"diagnostics": True}
    engine = SplitEngine(
        lab.engine(role="prompt", hooks=PromptSender(), sampling=told),
        lab.engine(role="completion", preemption="stop", zos=True, sampling=told),
    )
    for request in requests[:16]:
        engine.add(Request(request.prompt, request.params, request.seed))
    results = sorted(engine.run(), key=lambda result: result.request_id)
    assert bits(results) == without[:16]
    assert engine.completion.stats["accepted_lengths"][2] > 0
    for result in results:
        assert result.diagnostics is not None
        assert len(result.diagnostics.sum_smaller_probs) == len(result.token_ids)


def test_an_engine_of_a_directory_drafts() -> None:
    """Measured costs, the untrained drafter of the checkpoint, lengths by confidence."""
    results, scheduler = {}, {"max_seqs": 4, "max_model_len": 200}
    random = np.random.default_rng(1)
    requests = [
        Request(prompt(random, 30), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        for _ in range(4)
    ]
    for drafts, varlen in ((0, False), (3, True)):
        config = EngineConfig(scheduler=scheduler, speculative={"num_drafts": drafts, "varlen": varlen})  # type: ignore[arg-type]
        engine = build_engine(TINY, config, "cpu")
        results[drafts] = bits(run(engine, requests))
        if varlen:
            lengths = engine.scheduler.draft_lengths
            assert isinstance(lengths, ScheduledLengths)
            assert isinstance(lengths.cost, StepCosts)
            assert lengths.cost.curve.sizes == (1, 2, 4, 8, 16)
            assert lengths.cost.sampler(4) > 0
    assert results[3] == results[0]


def test_diagnostics_say_how_tokens_came_about(lab: Lab, greedy: tuple[list[Request], list[Any]]) -> None:
    """The same bits with them as without; whole lengths in spite of stops inside accepted drafts and of
    preemptions; the mass of less likely tokens does not depend on drafts."""
    requests, without = greedy[0][:16], greedy[1][:16]
    plain = run(lab.engine(0, sampling={"diagnostics": True}), requests)
    assert bits(plain) == without
    for zos in (False, True):
        engine = lab.engine(zos=zos, num_blocks=7, sampling={"diagnostics": True})
        results = run(engine, requests)
        assert bits(results) == without
        assert engine.stats["preempted"] > 0
        accepted = verified = steps = 0
        for result, alone in zip(results, plain, strict=True):
            told, same = result.diagnostics, alone.diagnostics
            assert told is not None
            assert same is not None
            count = len(result.token_ids)
            assert told.sum_smaller_probs == same.sum_smaller_probs
            assert all(0 < mass <= 1 + 1e-6 for mass in told.sum_smaller_probs)
            assert [len(each) for each in (told.draft_logprobs, told.verified, told.accepted)] == [count] * 3
            assert same.draft_logprobs == [1.0] * count
            assert same.verified == same.accepted == [1] * count
            assert told.verified[0] == told.accepted[0] == 1, "the first token comes from the prompt"
            ends = [place for place, number in enumerate(told.verified) if number]
            assert len(told.confidence) == len(ends)
            for number, place in enumerate(ends):
                begin = ends[number - 1] + 1 if number else 0
                drafts = [logprob for logprob in told.draft_logprobs[begin : place + 1] if logprob <= 0]
                assert all(logprob > -20 for logprob in drafts), "also of greedy rows, with all tokens"
                assert len(drafts) == min(told.accepted[place] - 1, place + 1 - begin)
                assert len(told.confidence[number]) == told.verified[place] - 1
                assert all(0 <= chance <= 1 for chance in told.confidence[number])
                accepted += told.accepted[place] - 1
                verified += told.verified[place] - 1
                steps += told.verified[place] > 1
        lengths = engine.stats["accepted_lengths"]
        assert accepted == sum(length * times for length, times in enumerate(lengths))
        assert steps == sum(lengths)
        assert verified == steps * DRAFTS


def test_few_candidates_change_no_greedy_token(lab: Lab, greedy: tuple[list[Request], list[Any]]) -> None:
    """With and without drafts; log-probabilities are of those that take part."""
    requests, without = greedy
    few = run(lab.engine(0, sampling={"force_topk": 4}), requests[:12])
    assert [result.token_ids.tolist() for result in few] == [entry[0] for entry in without[:12]]
    assert bits(run(lab.engine(zos=True, sampling={"force_topk": 4}), requests[:12])) == bits(few)
    shown = [
        result.top_logprobs for result in few if result.top_logprobs and len(result.top_logprobs[0]) == 2
    ]
    whole = [entry[3] for entry in without[:12] if entry[3] and len(entry[3][0]) == 2]
    assert shown
    assert all(a[0][0][1] > b[0][0][1] for a, b in zip(shown, whole, strict=True))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("numerics", ["released", "exact"])
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_greedy_with_drafts_is_greedy_without_for_five_hundred_prompts(numerics: str, share: float) -> None:
    """Every mode with every count of drafts in one checkpoint, with one of them in the others."""
    lab = Lab.load(numerics, share)
    requests = greedy_requests(lab, 500, 11)
    without = bits(run(lab.engine(0), requests))
    settings = list(itertools.product(MODES, (1, 3, 5), (9, 64)))
    if (numerics, share) != ("released", 0.3):
        settings = settings[::7]  # all modes, counts and pools occur
    for (varlen, zos), drafts, blocks in settings:
        got = bits(run(lab.engine(drafts, varlen=varlen, zos=zos, num_blocks=blocks), requests))
        assert got == without, (varlen, zos, drafts, blocks)
