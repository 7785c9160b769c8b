"""The sampler against the vectors of spec/speculative.md §5.4, golden/ops/sampling and independent
formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer_ray.engine import sampler
from deepinfer_ray.engine.diagnostics import sum_smaller
from deepinfer_ray.engine.logits_processors import LogitEdits
from deepinfer_ray.engine.philox import random_words, seed_bits
from deepinfer_ray.engine.request import SamplingParams
from deepinfer_ray.engine.sampler import SampleRows, log_distribution, sample, select

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "ops" / "sampling.safetensors"


def make_rows(
    count: int,
    temperature: float | np.ndarray = 1.0,
    top_p: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = -1,
    min_p: float = 0.0,
    top_logprobs: int = -1,
    edits: LogitEdits | None = None,
) -> SampleRows:
    def column(value: object, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), (count,)).copy()

    return SampleRows(
        column(temperature, np.float32),
        column(top_p, np.float32),
        column(top_k, np.int32),
        column(min_p, np.float32),
        seed_bits(list(range(100, 100 + count))),
        np.arange(count, dtype=np.int64) * 7 + 3,
        column(top_logprobs, np.int32),
        edits,
    )


# ------------------------------------------------------------------ selection


def draw(probabilities: torch.Tensor, seed: int, positions: range, case: int = 0) -> list[int]:
    count = len(positions)
    words = random_words(torch.full((count,), seed), torch.tensor(list(positions)), case, 64)
    weights = (probabilities.to(torch.float32) * 2.0**31).long().expand(count, -1)
    return select(weights, words).tolist()


def test_selection_vectors() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4] + [0.0] * 28)
    assert draw(p, 42, range(12)) == [3, 0, 3, 2, 3, 1, 3, 2, 2, 3, 1, 2]
    assert draw(p, 42, range(12), case=1) == [0, 2, 3, 2, 0, 3, 2, 3, 3, 3, 2, 2]


def test_selection_vector_of_a_large_vocabulary() -> None:
    p = torch.from_numpy((np.arange(1, 10001) / 50005000).astype(np.float32))
    assert int((p * 2.0**31).long().sum()) == 2147478752
    assert draw(p, 7, range(6)) == [5917, 6573, 6925, 6487, 9284, 4551]


@pytest.mark.parametrize("vocab", [5, 512, 10000])
def test_selection_follows_the_traversal_one_token_at_a_time(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.randint(0, 2**17, (9, vocab), generator=generator)
    words = torch.randint(0, 2**32, (9, 16), generator=generator)
    stride = 2048 if vocab >= 8192 else 1 << (vocab - 1).bit_length()
    expected = []
    for row in range(9):
        total = int(weights[row].sum())
        usable = [word for word in words[row].tolist() if word < (2**32 - 1) // total * total]
        remainder, passed = usable[0] % total, 0
        for token in sorted(range(vocab), key=lambda v: (v % stride, v // stride)):
            passed += int(weights[row, token])
            if passed > remainder:
                expected.append(token)
                break
    assert select(weights, words).tolist() == expected


def test_refused_words_are_skipped() -> None:
    weights = torch.tensor([[2**31, 1]])  # the largest multiple of the total is the total
    words = torch.tensor([[2**32 - 1, 2**31 + 5, 2**31, 0]])
    assert select(weights, words).tolist() == [1]


def test_empirical_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, -1).clone()
    counts = torch.bincount(sample(logits, make_rows(20000)).tokens, minlength=4) / 20000
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0, -1.0]), 0)
    assert (counts - expected).abs().max() < 0.012


# ------------------------------------------------------------------ golden


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN)


def golden_distribution(golden: dict[str, torch.Tensor]) -> torch.Tensor:
    temperature, top_p, top_k = (golden[f"fused.{name}"] for name in ("temperature", "top_p", "top_k"))
    plain = log_distribution(golden["fused.logits"], temperature)
    return sampler.filter_distribution(golden["fused.logits"], plain, top_p, top_k, torch.zeros_like(top_p))


def test_golden_log_distribution(golden: dict[str, torch.Tensor]) -> None:
    got, expected = golden_distribution(golden), golden["fused.logprobs"]
    assert torch.equal(torch.isinf(got), torch.isinf(expected))
    kept = torch.isfinite(expected)
    torch.testing.assert_close(got[kept], expected[kept], rtol=2e-6, atol=2e-6)


class SplitMix64:
    """The generator behind golden/ops/sampling (spec/speculative.md §5.5); the product uses Philox."""

    STEP = 0x9E3779B97F4A7C15
    MASK = (1 << 64) - 1

    @classmethod
    def bits(cls, state: int) -> int:
        z = (state + cls.STEP) & cls.MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & cls.MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & cls.MASK
        return z ^ (z >> 31)

    @classmethod
    def uniform(cls, seed: int, position: int, case: int) -> float:
        h = ((3 * position + case) * cls.STEP) & cls.MASK
        return (cls.bits((seed + (h ^ ((h << 13) & cls.MASK))) & cls.MASK) >> 11) * 2.0**-53


def golden_draws(golden: dict[str, torch.Tensor], p: torch.Tensor, case: int, offset: int = 0) -> list[int]:
    cumulative = p.double().cumsum(-1)
    tokens = []
    for row, (seed, position) in enumerate(
        zip(golden["seq_seeds_int64_bits"].tolist(), golden["sample_positions"].tolist(), strict=True)
    ):
        u = SplitMix64.uniform((seed + offset) & SplitMix64.MASK, position, case)
        tokens.append(int((cumulative[row] > u * cumulative[row, -1]).int().argmax()))
    return tokens


def test_golden_plumbing_with_its_own_generator(golden: dict[str, torch.Tensor]) -> None:
    uniforms = [
        SplitMix64.uniform(seed & SplitMix64.MASK, position, 0)
        for seed, position in zip(
            golden["seq_seeds_int64_bits"].tolist(), golden["sample_positions"].tolist(), strict=True
        )
    ]
    np.testing.assert_array_equal(uniforms, golden["uniform"].numpy())
    assert golden_draws(golden, golden["probs"], 0) == golden["sampled"].tolist()
    assert golden_draws(golden, golden["probs"], 1) == golden["sampled_nextn"].tolist()
    ours = golden_distribution(golden).exp()
    assert golden_draws(golden, ours, 0) == golden["fused.sampled"].tolist()
    assert golden_draws(golden, ours, 0, 1000000007) == golden["fused.sampled_draft_tag"].tolist()


# ------------------------------------------------------------------ filters


def brute_force_filter(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> set[int]:
    shifted = (logits - logits.max()).astype(np.float64) / temperature
    p = np.exp(shifted) / np.exp(shifted).sum()
    ranked = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    kept, mass = set(), 0.0
    for rank, token in enumerate(ranked):
        if mass > top_p or (0 < top_k <= rank):
            break
        kept.add(token)
        mass += p[token]
    return kept


def test_top_p_and_top_k_against_the_definition() -> None:
    generator = np.random.default_rng(3)
    for _ in range(60):
        logits = (generator.normal(size=40) * 3).round(2).astype(np.float32)
        temperature = float(generator.uniform(0.3, 2.0))
        top_p, top_k = float(generator.uniform(0.05, 1.0)), int(generator.integers(1, 41))
        block = torch.from_numpy(logits)[None]
        got = sampler.filter_distribution(
            block,
            log_distribution(block, torch.tensor([temperature])),
            torch.tensor([top_p]),
            torch.tensor([top_k]),
            torch.zeros(1),
        )
        kept = set(torch.isfinite(got[0]).nonzero()[:, 0].tolist())
        assert kept == brute_force_filter(logits, temperature, top_p, top_k)
        assert got.exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_ties_keep_the_lowest_ids() -> None:
    rows = make_rows(1, top_k=2, top_logprobs=5)
    output = sample(torch.zeros(1, 6), rows)
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    assert output.top_ids[0, :2].tolist() == [0, 1]
    assert output.top_logprobs[0, 2:].tolist() == [-9999.0] * 3


def test_tiny_top_p_keeps_exactly_one_token() -> None:
    output = sample(torch.tensor([[0.5, 0.5, 0.4]]), make_rows(1, top_p=1e-9, top_logprobs=0))
    assert output.tokens.tolist() == [0]
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [0.0]


def test_min_p_against_its_formula() -> None:
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=(8, 50)).astype(np.float32) * 2)
    got = sampler.filter_distribution(
        logits,
        log_distribution(logits, torch.full((8,), 0.7)),
        torch.ones(8),
        torch.full((8,), -1),
        torch.full((8,), 0.2),
    )
    p = torch.softmax(logits.double() / 0.7, -1)
    kept = p >= 0.2 * p.amax(-1, keepdim=True)
    expected = torch.where(kept, p, 0) / torch.where(kept, p, 0).sum(-1, keepdim=True)
    torch.testing.assert_close(got.exp().double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("best", [1, 3, 39, 40, 200])
def test_only_the_best_logits_take_part(best: int) -> None:
    """Ties keep the lower ids, minus infinity and NaN stay what they are, what is left is normalised anew."""
    logits = torch.from_numpy((np.random.default_rng(best).normal(size=(9, 40)) * 3).round(0)).float()
    logits[0] = 0.0
    logits[1, 5:] = float("-inf")
    logits[2, 7] = float("nan")
    output = sample(logits.clone(), make_rows(9, top_logprobs=40), best=best)
    assert output.bad.tolist() == [False, False, True, *[False] * 6]
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    for row in (0, 1, *range(3, 9)):
        ranked = sorted(range(40), key=lambda v: (-logits[row, v].item(), v))[:best]
        kept = [v for v in ranked if logits[row, v] > float("-inf")]
        shown = output.top_logprobs[row] > -9999
        assert output.top_ids[row][shown].tolist() == kept
        expected = torch.log_softmax(logits[row, kept], 0)
        torch.testing.assert_close(output.top_logprobs[row][shown], expected, atol=1e-5, rtol=1e-5)
        assert int(output.tokens[row]) in kept


def test_the_best_are_chosen_behind_masks_and_edits_and_before_filters() -> None:
    edits = LogitEdits()
    edits.add_row(0, SamplingParams(logit_bias={3: 9.0}), np.array([0]), np.array([0]))
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0, 1.0]])
    rows = make_rows(1, top_p=0.01, top_logprobs=5, edits=edits)
    output = sample(logits, rows, torch.tensor([0]), best=2)
    assert output.tokens.tolist() == [3]
    assert torch.isfinite(logits[0]).nonzero()[:, 0].tolist() == [1, 3]


# ------------------------------------------------------------------ greedy and log-probabilities


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0], [0.0, -0.0, -1.0, 0.0]])
    output = sample(logits, make_rows(2, temperature=0.0))
    assert output.tokens.tolist() == [1, 0]
    assert output.logprobs is None


def test_greedy_logprobs_are_masked_but_unfiltered_at_temperature_one() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    masked = logits.clone()
    masked[:, [4, 9]] = float("-inf")
    rows = make_rows(3, temperature=0.0, top_k=2, top_p=0.1, top_logprobs=3)
    output = sample(logits, rows, blacklist=torch.tensor([4, 9]))
    expected = torch.log_softmax(masked, -1)
    assert output.logprobs is not None
    assert output.top_ids is not None
    torch.testing.assert_close(output.logprobs, expected.amax(-1))
    assert torch.equal(output.top_ids, expected.sort(dim=-1, descending=True, stable=True).indices[:, :3])


def test_sampled_logprobs_are_of_the_processed_distribution() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    output = sample(logits.clone(), make_rows(4, temperature=0.5, top_k=3, top_logprobs=4))
    top = torch.log_softmax((logits * 2).sort(dim=-1, descending=True).values[:, :3], -1)
    assert output.top_logprobs is not None
    torch.testing.assert_close(output.top_logprobs[:, :3], top)
    assert (output.top_logprobs[:, 3] == -9999).all()


def test_prompt_logprobs_are_a_plain_log_softmax() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4))
    targets = torch.tensor([3, 0, 39, 7, 7])
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(sampler.prompt_logprobs(logits, targets), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_is_flagged_alone(poison: float | None, temperature: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(6))
    clean = sample(logits.clone(), make_rows(3, temperature=temperature, top_logprobs=2))
    if poison is None:
        logits[1] = float("-inf")
    else:
        logits[1, 5] = poison
    output = sample(logits, make_rows(3, temperature=temperature, top_logprobs=2))
    assert output.bad.tolist() == [False, True, False]
    assert output.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_mass_of_the_less_likely_tokens(temperature: float) -> None:
    """Of equal tokens those with lower ids count; of a greedy row the plain distribution counts."""
    logits = torch.from_numpy((np.random.default_rng(1).normal(size=(12, 20)) * 2).round(0)).float()
    logits[3, 4:] = float("-inf")
    rows = make_rows(12, temperature=temperature, top_k=7)
    plain = sample(logits.clone(), rows)
    assert plain.smaller is None
    rows.diagnose = True
    output = sample(logits.clone(), rows)
    assert output.tokens.tolist() == plain.tokens.tolist()
    rows.top_logprobs[:] = 20
    shown = sample(logits.clone(), rows)
    assert shown.top_ids is not None
    assert shown.top_logprobs is not None
    assert output.smaller is not None
    for row in range(12):
        token = int(output.tokens[row])
        pairs = zip(shown.top_ids[row].tolist(), shown.top_logprobs[row].tolist(), strict=True)
        p = {v: np.exp(logprob) for v, logprob in pairs if logprob > -9999}
        expected = sum(q for v, q in p.items() if (q, v) <= (p[token], token))
        assert output.smaller[row].item() == pytest.approx(expected, abs=1e-6)


def test_a_token_that_cannot_come_has_no_mass() -> None:
    logprobs = log_distribution(torch.tensor([[0.0, float("-inf"), 0.0]]))
    assert sum_smaller(logprobs, torch.tensor([1])).tolist() == [0.0]
    assert sum_smaller(logprobs, torch.tensor([0])).tolist() == [0.5]
    assert sum_smaller(logprobs, torch.tensor([2])).tolist() == [1.0]


# ------------------------------------------------------------------ row independence


@pytest.mark.parametrize("wanted", [-1, 0, 3])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 0.7), (0.7, 1.3)])
def test_computing_all_rows_in_every_way_gives_the_same_bits(
    wanted: int, temperatures: tuple[float, ...]
) -> None:
    generator = np.random.default_rng(5)
    count, padded = 13, 16
    logits = torch.from_numpy(generator.normal(size=(padded, 300)).astype(np.float32) * 4)
    rows = make_rows(
        count,
        temperature=generator.choice(temperatures, count),
        top_p=generator.choice([1.0, 0.6], count),
        min_p=generator.choice([0.0, 0.1], count),
        top_logprobs=generator.choice([-1, wanted], count),
    )
    few = sample(logits[:count].clone(), rows, whole=False)
    every = sample(logits.clone(), rows.padded(padded), whole=True)
    for name in ("tokens", "bad", "logprobs", "top_ids", "top_logprobs"):
        small, large = getattr(few, name), getattr(every, name)
        assert (small is None) == (large is None), name
        if small is not None:
            assert torch.equal(small, large[:count]), name


@pytest.mark.parametrize("vocab", [64, 517, 9001, 40000])
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    count = 23
    logits = torch.from_numpy(generator.normal(size=(count, vocab)).astype(np.float32) * 4)
    rows = make_rows(
        count,
        temperature=generator.choice([0.0, 0.7, 1.0, 1.9], count),
        top_p=generator.choice([1.0, 0.6, 0.95], count),
        top_k=generator.choice([-1, 3, 40], count),
        top_logprobs=3,
    )
    together = sample(logits.clone(), rows)
    assert together.logprobs is not None
    assert together.top_logprobs is not None
    for row in range(count):
        names = ("temperature", "top_p", "top_k", "min_p", "seeds", "positions", "top_logprobs")
        alone = sample(
            logits[row : row + 1].clone(), SampleRows(*(getattr(rows, n)[row : row + 1] for n in names))
        )
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs is not None
        assert alone.logprobs[0] == together.logprobs[row]
        assert alone.top_logprobs is not None
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[row])


# ------------------------------------------------------------------ logit edits


def edited(
    params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    edits = LogitEdits()
    edits.add_row(1, params, np.asarray(prompt, np.int32), np.asarray(output, np.int32), end_ids=[1, 5])
    changed = torch.stack([logits, logits, logits])
    edits.apply(changed)
    assert torch.equal(changed[0], logits)
    assert torch.equal(changed[2], logits)
    return changed[1]


LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.5, -2.0, 0.25])


def test_penalties_against_the_formula() -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-0.5)
    prompt, output = [2, 2, 6], [4, 4, 4, 1]
    got = edited(params, prompt, output, LOGITS)
    for token in range(8):
        value = LOGITS[token].item()
        if token in prompt or token in output:
            value = value / 1.5 if value > 0 else value * 1.5
        if token in output:
            value -= 0.25 * output.count(token) - 0.5
        assert got[token].item() == pytest.approx(value, abs=1e-6)


def test_logit_bias_adds_and_min_tokens_bans_the_ends() -> None:
    params = SamplingParams(logit_bias={3: 4.0, 5: 100.0}, min_tokens=2, max_tokens=9)
    got = edited(params, [0], [7], LOGITS)
    assert got[3] == 4.0
    assert got[1] == got[5] == float("-inf")
    unbanned = edited(params, [0], [7, 7], LOGITS)
    assert unbanned[1] == -1.0
    assert unbanned[5] == 101.5
