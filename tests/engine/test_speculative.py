"""Engines that draft: greedy output is bit for bit that without drafts, sampled output has its distribution.

The drafter of the tiny model is made to know part of its target, so that about half of its first drafts are
accepted and every length of accepted prefix occurs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_ray.bench.markov_twin import make_markov_twin
from deepinfer_ray.cache.layout import CacheLayout
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.engine import drafting, inputs
from deepinfer_ray.engine.build import RankParts, build_engine, prepare
from deepinfer_ray.engine.cost_curve import CostCurve, StepCosts
from deepinfer_ray.engine.draft_length import ScheduledLengths
from deepinfer_ray.engine.draft_pool import DraftPool
from deepinfer_ray.engine.engine import Engine
from deepinfer_ray.engine.handover import PromptSender, SplitEngine
from deepinfer_ray.engine.inputs import InFlight, repaired_positions, rows_of_lengths
from deepinfer_ray.engine.mock import MockModel, byte_tokenizer, mock_config
from deepinfer_ray.engine.request import Request, RequestResult, SamplingParams
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.engine.step_inputs import DEVICE_ROWS, RowMultiples
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.model.checkpoint import Checkpoint
from deepinfer_ray.model.v41 import TextModel
from deepinfer_ray.model.weights import load_text_model

TINY = Path(__file__).parents[1] / "data" / "golden" / "tinyB"
VOCAB, EOS, DRAFTS = 512, 1, 5
QUANTILE = 3.719

SIZES = (1, 2, 4, *range(8, 513, 8))
JAGGED = StepCosts(CostCurve(SIZES, tuple(1 + 0.04 * size + 0.3 * (size % 24 == 0) for size in SIZES)))
"""A cost curve under which lengths vary all the time."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Lab:
    """A loaded model from which engines of any settings are made."""

    parts: RankParts
    model: TextModel

    @classmethod
    def load(cls, numerics: str = "released", share: float = 0.3) -> Lab:
        parts = prepare(TINY, EngineConfig(numerics=numerics), "cpu")  # type: ignore[arg-type]
        with Checkpoint.open(TINY, drafter=True) as checkpoint:
            model = load_text_model(checkpoint, parts.numerics, max_positions=384, drafter=True)
        make_markov_twin(model, share)
        assert model.drafter is not None
        generator = torch.Generator().manual_seed(1)
        model.drafter.confidence.copy_(torch.randn(model.drafter.confidence.shape, generator=generator))
        return cls(parts, model)

    def engine(
        self,
        drafts: int = DRAFTS,
        *,
        num_blocks: int = 64,
        varlen: bool = False,
        hooks: Any = None,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> Engine:
        values: dict[str, Any] = {"max_model_len": 200, "max_seqs": 8, **more}
        settings = SchedulerSettings(
            num_blocks=num_blocks, vocab_size=VOCAB, eos_token_id=EOS, num_drafts=drafts, **values
        )
        layout = CacheLayout.build(self.parts.model_config, self.parts.numerics, drafts)
        pools = CachePools(layout, num_blocks, settings.num_state_slots + settings.prefix_snapshots)
        pools.poison(range(1, pools.num_slots), range(1, pools.num_blocks))
        parts = self.parts
        engine = Engine(
            self.model,
            pools,
            parts.tokenizer,
            parts.config.with_values(sampling=sampling or {}),
            compress=parts.compress,
            settings=settings,
            hooks=hooks,
        )
        if varlen:
            engine.loop.inputs.varlen = True
            engine.scheduler.draft_lengths = ScheduledLengths(JAGGED)
        return engine


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab.load()


def run(engine: Engine, requests: list[Request]) -> list[RequestResult]:
    for request in requests:
        engine.add(Request(request.prompt, request.params, request.seed, forced=request.forced))
    results = sorted(engine.run(), key=lambda result: result.request_id)
    engine.check_integrity()
    assert [result.error for result in results] == [None] * len(requests)
    return results


def bits(results: list[RequestResult]) -> list[Any]:
    return [
        (
            result.token_ids.tolist(),
            None if result.logprobs is None else result.logprobs.tolist(),
            None if result.prompt_logprobs is None else result.prompt_logprobs.tolist(),
            result.top_logprobs,
            result.finish_reason,
            result.text,
        )
        for result in results
    ]


def prompt(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(3, 509, length).astype(np.int32)


# ------------------------------------------------------------------ greedy: the same bits

KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "prompt_logprobs": 0},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {EOS: 2.0, 17: 1.5}, "min_tokens": 4},
    {"stop": "from what comes out", "logprobs": 1},
    {"stop_token_ids": "from what comes out"},
    {"stop": "from what comes out", "include_stop_str_in_output": True, "min_tokens": 3},
]


def greedy_requests(lab: Lab, count: int, seed: int) -> list[Request]:
    """Random prompts, many of which outgrow a block; stops are taken from what each gives without them."""
    random = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        length = int(random.choice([1, 2, 16, 17, 60, 118, 124, 127, int(random.integers(1, 128))]))
        kind = {
            name: value
            for name, value in KINDS[index % len(KINDS)].items()
            if name not in ("stop", "stop_token_ids")
        }
        max_tokens = max(int(random.integers(2, 26)), kind.get("min_tokens", 0))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **kind)
        requests.append(Request(prompt(random, length), params, seed=index))
    free = run(lab.engine(0), requests)
    for index, (request, result) in enumerate(zip(requests, free, strict=True)):
        kind = KINDS[index % len(KINDS)]
        inner = result.token_ids[len(result.token_ids) // 2 :].tolist()
        if "stop_token_ids" in kind:
            request.params = request.params.model_copy(update={"stop_token_ids": (inner[0], inner[-1])})
        if "stop" in kind and len(result.text) > 6:
            middle = len(result.text) // 2
            request.params = request.params.model_copy(update={"stop": (result.text[middle : middle + 3],)})
    return requests


MODES = list(itertools.product([False, True], [False, True]))


@pytest.fixture(scope="module")
def greedy(lab: Lab) -> tuple[list[Request], list[Any]]:
    requests = greedy_requests(lab, 32, 5)
    without = bits(run(lab.engine(0), requests))
    assert {entry[4] for entry in without} == {"stop", "length"}
    return requests, without


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


# ------------------------------------------------------------------ sampled


def sampled_requests(count: int, seed: int) -> list[Request]:
    random = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
        {"temperature": 1.2, "top_k": 20},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
    ]
    return [
        Request(
            prompt(random, int(random.integers(1, 100))),
            SamplingParams(max_tokens=int(random.integers(2, 20)), **kinds[index % len(kinds)]),
            seed=index,
        )
        for index in range(count)
    ]


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


# ------------------------------------------------------------------ parts


def test_forced_outputs_come_out_with_the_models_own_logprobs(lab: Lab) -> None:
    """Free places go on from them, with drafts as without."""
    random = np.random.default_rng(3)
    forced = [prompt(random, 7), np.array([5, -1, 9], np.int32), np.array([4], np.int32)]
    requests = [
        Request(
            prompt(random, 20),
            SamplingParams(temperature=0.0, max_tokens=9, logprobs=0, ignore_eos=True),
            forced=ids,
        )
        for ids in forced
    ]
    without = run(lab.engine(0), requests)
    for ids, result in zip(forced, without, strict=True):
        kept = ids >= 0
        assert result.token_ids[: len(ids)][kept].tolist() == ids[kept].tolist()
    for zos in (False, True):
        assert bits(run(lab.engine(zos=zos), requests)) == bits(without)


def test_a_model_without_its_drafter_is_refused() -> None:
    model = MockModel(mock_config(VOCAB))
    settings = SchedulerSettings(num_blocks=16, vocab_size=VOCAB, num_drafts=2, max_model_len=100, max_seqs=2)
    pools = CachePools(model.layout(2), 16, settings.num_state_slots)
    with pytest.raises(ConfigError, match="loaded without its draft layers; set it to 0"):
        Engine(
            model,
            pools,
            byte_tokenizer(VOCAB),
            EngineConfig(),
            compress=np.zeros(VOCAB, np.int32),
            settings=settings,
        )


@pytest.mark.parametrize("drafts", [5, 6])
def test_more_drafts_than_were_trained_are_told_of(drafts: int, caplog: pytest.LogCaptureFixture) -> None:
    prepare(TINY, EngineConfig().with_values(speculative={"num_drafts": drafts}), "cpu")
    said = [message for message in caplog.messages if "dspark_block_size" in message]
    assert len(said) == (drafts > 5)
    assert all(
        f"num_drafts = {drafts}, but the drafter of this checkpoint was trained for 5" in m for m in said
    )


def test_more_drafts_than_were_trained_change_no_token(
    lab: Lab, greedy: tuple[list[Request], list[Any]]
) -> None:
    requests, without = greedy
    assert bits(run(lab.engine(9, zos=True), requests[:8])) == without[:8]


def test_which_random_words_rows_and_drafts_draw(lab: Lab) -> None:
    """Positions and seeds of spec/speculative.md §5.5: rows far apart, drafts at their own place, with a seed
    of their own."""
    engine = lab.engine(3, zos=False)
    for index in range(2):
        engine.add(Request(prompt(np.random.default_rng(index), 7 + index), SamplingParams(), seed=2**64 - 5))
    while (plan := engine.loop.last_plan) is None or plan.is_prompt:
        engine.step()
    table = engine.scheduler.table
    rows = inputs.verify_rows(plan, table)
    assert plan.q.tolist() == [4, 4]
    first = (plan.k - plan.q + 1).tolist()
    assert sorted(first) == [8, 9], "the prompt's first token stands at 7 or 8, its successor is sampled"
    assert rows.positions.tolist() == [base + j * 10_000_019 for base in first for j in range(4)]
    assert rows.seeds.tolist() == [-5] * 8
    for place in range(3):
        drafts = inputs.draft_rows(plan, table, place)
        assert drafts.positions.tolist() == [base + 1 + place for base in first]
        assert drafts.seeds.tolist() == [1_000_000_007 - 5] * 2
    engine.close()


def test_a_draft_draws_at_the_place_where_its_token_will_stand(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the step accepted before it."""
    seen: list[list[int]] = []
    sample = drafting.sample

    def watched(logits: torch.Tensor, rows: Any, *args: Any, **more: Any) -> Any:
        seen.append((torch.from_numpy(rows.positions) + more["shift"]).tolist())
        return sample(logits, rows, *args, **more)

    monkeypatch.setattr(drafting, "sample", watched)
    engine = lab.engine(3, zos=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add(Request(prompt(np.random.default_rng(1), 9), params, seed=4))
    accepted = set()
    while not engine.step():
        plan = engine.loop.last_plan
        assert plan is not None
        if not plan.is_prompt:
            row = int(plan.rows[0])
            length = int(engine.scheduler.table.len[row])
            assert seen == [[length + place] for place in range(3)]
            accepted.add(int(engine.scheduler.table.accepted[row]))
        seen.clear()
    assert len(accepted) > 1


def test_a_request_that_ends_asks_for_no_verification(lab: Lab) -> None:
    """Its confidences are 0 from the step on that emits its end, in an accepted draft too (§2.2)."""
    engine = lab.engine(zos=False)
    drafting_ = engine.loop.drafting
    assert drafting_ is not None
    made, ended = drafting_.outputs, []

    def watched(plan: Any, host: dict[str, np.ndarray]) -> Any:
        outputs = made(plan, host)
        assert outputs.accepted is not None
        assert outputs.confidence is not None
        for index in range(plan.num_seqs):
            emitted = [*outputs.accepted[index], outputs.sampled[index]]
            ends = EOS in emitted or 17 in emitted
            assert (outputs.confidence[index] == 0).all() == ends
            ended.append((ends, EOS in emitted[:-1] or 17 in emitted[:-1]))
        return outputs

    drafting_.outputs = watched  # type: ignore[method-assign]
    random = np.random.default_rng(4)
    likely = {EOS: 3.0, 17: 3.0}
    params = SamplingParams(temperature=0.9, max_tokens=40, logit_bias=likely, stop_token_ids=[17])
    run(engine, [Request(prompt(random, 20), params, seed=index) for index in range(24)])
    assert (True, True) in ended, "an end inside accepted drafts"
    assert (False, False) in ended


def test_slot_zero_keeps_its_placeholders() -> None:
    pool = DraftPool(3, 2, 40, "cpu")
    rows = pool.write_rows(torch.tensor([0, 1, 3]), 1)
    assert rows.tolist() == [pool.nowhere * 2 + 1, 3, 7]
    assert pool.ids[:2].tolist() == [39, 39]
    assert pool.logprobs[:2].exp().sum(1).tolist() == [1.0, 1.0]
    assert pool.logprobs[:2, 39].tolist() == [0.0, 0.0]
    assert pool.confidence[:2].tolist() == [1.0, 1.0]
    assert pool.logprobs.nbytes + pool.ids.nbytes + pool.confidence.nbytes == DraftPool.bytes_of(3, 2, 40)


def test_lengths_and_positions_of_a_step_whose_predecessor_is_in_flight() -> None:
    cu, seq, place = rows_of_lengths(torch.tensor([3, 1, 2]), 6)
    assert cu.tolist() == [0, 3, 4, 6]
    assert seq.tolist() == [0, 0, 0, 1, 2, 2]
    assert place.tolist() == [0, 1, 2, 0, 0, 1]
    previous = InFlight(torch.zeros(2), torch.zeros(2, 5), torch.tensor([1, 5]))
    # The host counted 6 rows for the step in flight; sequence 0 was second in it, sequence 2 first, 1 is new.
    base, remap = torch.tensor([100, 50, 70]), torch.tensor([1, -1, 0])
    assert repaired_positions(base, remap, previous, (seq, place)).tolist() == [100, 101, 102, 50, 66, 67]


# ------------------------------------------------------------------ soak


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
