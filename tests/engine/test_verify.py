"""Verification: golden vectors, exactness of what comes out (chi-square), closed forms, the prefix rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer_ray.engine import sampler
from deepinfer_ray.engine.philox import DRAFT_SEED_OFFSET, ROW_POSITION_STRIDE, seed_bits
from deepinfer_ray.engine.sampler import SampleRows, draw_fresh, filter_distribution, log_distribution
from deepinfer_ray.engine.verify import (
    DraftRows,
    acceptance_chance,
    accepted_prefix,
    judge,
    judge_exactly,
    log_acceptance,
    residual_weights,
    verify,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "ops" / "sampling.safetensors"
DRAWS = 200_000
QUANTILE = 3.719
"""Of the normal distribution at 1 - 1e-4."""

SETTINGS = [
    (1.0, 1.0, -1),
    (1.6, 0.9, -1),
    (1.0, 0.6, -1),
    (1.0, 1.0, 7),
    (0.8, 0.85, 12),
    (1.3, 0.95, 40),
]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """(statistic, critical value at 1e-4); cells of fewer than 8 expected draws are put together."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    small = expected < 8
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(observed) - 1
    critical = freedom * (1 - 2 / (9 * freedom) + QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((observed - expected) ** 2 / expected).sum()), critical


def processed(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    n = len(logits)
    plain = log_distribution(logits, torch.full((n,), temperature))
    return filter_distribution(
        logits, plain, torch.full((n,), top_p), torch.full((n,), top_k), torch.zeros(n)
    )


def streams(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions of DRAWS independent requests."""
    return torch.arange(DRAWS) * 7919 + seed, torch.arange(DRAWS) % 97


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 words a row instead of 64: one is refused with probability < 1/2, here about 1/10."""
    monkeypatch.setattr(sampler, "_DRAWN_WORDS", 8)


def draw_drafts(draft: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    group = sampler.RowGroup()
    return draw_fresh(group, draft, draft, seeds + DRAFT_SEED_OFFSET, positions)


# ------------------------------------------------------------------ golden


class SplitMix64:
    """The generator behind golden/ops/sampling (spec/speculative.md §5.5); the product uses Philox."""

    STEP, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1

    @classmethod
    def unit(cls, state: int) -> float:
        z = (state + cls.STEP) & cls.MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & cls.MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & cls.MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    @classmethod
    def sample(cls, weights: torch.Tensor, seed: int, position: int, case: int) -> int:
        h = ((3 * position + case) * cls.STEP) & cls.MASK
        u = cls.unit((seed + (h ^ ((h << 13) & cls.MASK))) & cls.MASK)
        cumulative = weights.double().cumsum(-1)
        return int((cumulative <= u * cumulative[-1]).sum())

    @classmethod
    def accepts(cls, chance: float, seed: int, position: int) -> bool:
        return cls.unit(seed ^ (((3 * position + 2) * cls.STEP) & cls.MASK)) < chance


def test_golden_verification() -> None:
    golden = {
        name.removeprefix("verify."): value
        for name, value in load_file(GOLDEN).items()
        if name.startswith("verify.") or name in ("seq_seeds_int64_bits", "sample_positions")
    }
    target, read = golden["logprobs"], golden["read_rows"].long()
    draft, ids, verifies = (
        golden["draft_logprobs"][read],
        golden["draft_ids"].long()[read],
        golden["is_verify"],
    )
    known = ids >= 0
    selected = draft.gather(1, ids.clamp_min(0)[:, None])[:, 0]
    assert torch.equal(selected[known], golden["draft_selected_logprobs"][known])
    weights = residual_weights(target, draft)
    chance = torch.where(verifies, acceptance_chance(weights), 1.0)
    torch.testing.assert_close(chance, golden["accept_probs"], rtol=0, atol=2e-6)
    ratio = log_acceptance(target, draft, ids).exp()
    assert ratio[~known].tolist() == [0.0] * int((~known).sum())
    for row in range(len(ids)):
        seed, position = int(golden["seq_seeds_int64_bits"][row]), int(golden["sample_positions"][row])
        seed &= SplitMix64.MASK
        accepted = not verifies[row] or SplitMix64.accepts(float(ratio[row]), seed, position)
        assert accepted == bool(golden["accepted"][row]), row
        if not verifies[row]:
            token = SplitMix64.sample(target[row].exp(), seed, position, 0)
        else:
            token = int(ids[row]) if accepted else SplitMix64.sample(weights[row], seed, position, 1)
        assert token == int(golden["sampled"][row]), row


# ------------------------------------------------------------------ distributions


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_what_comes_out_has_the_target_distribution(
    few_words: None, temperature: float, top_p: float, top_k: int
) -> None:
    """Fresh rows, and rows that verify drafts of another distribution; acceptance as the closed form says."""
    vocab = 64
    generator = torch.Generator().manual_seed(top_k + int(100 * temperature))
    logits = torch.randn(1, vocab, generator=generator) * 1.5
    target = processed(logits, temperature, top_p, top_k)
    draft = processed(logits + torch.randn(1, vocab, generator=generator), temperature, top_p, top_k)
    q, p = target[0].double().exp(), draft[0].double().exp()
    counts, accepted, fresh = np.zeros(vocab), 0, np.zeros(vocab)
    seeds, positions = streams(17)
    for part in torch.arange(DRAWS).split(25_000):
        rows = len(part)
        shared = [x.expand(rows, -1) for x in (logits, target, draft)]
        ids = draw_drafts(shared[2], seeds[part], positions[part] + 1)
        verdict = judge(*shared, ids, torch.ones(rows, dtype=torch.bool), seeds[part], positions[part])
        counts += torch.bincount(verdict.tokens, minlength=vocab).numpy()
        accepted += int(verdict.accepted.sum())
        drawn = draw_fresh(sampler.RowGroup(), shared[0], shared[1], seeds[part], positions[part])
        fresh += torch.bincount(drawn, minlength=vocab).numpy()
    for observed in (counts, fresh):
        statistic, critical = chi_square(observed, q.numpy())
        assert statistic < critical
    chance = float(torch.minimum(p, q).sum())
    assert abs(accepted / DRAWS - chance) < QUANTILE * (chance * (1 - chance) / DRAWS) ** 0.5
    assert float(verdict.chance[0]) == pytest.approx(chance, abs=1e-4)


def test_a_block_of_two_has_the_joint_distribution_of_the_target(few_words: None) -> None:
    """Two tokens of a first-order target: an accepted draft leads to the row that was computed behind it, a
    rejected one to a fresh draw behind its replacement, as the next step would do it."""
    vocab = 9
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(1, vocab, generator=generator), torch.randn(vocab, vocab, generator=generator)
    wrong = torch.randn(vocab + 1, vocab, generator=generator) * 0.8
    q_first, q_second = log_distribution(first), log_distribution(second)
    p_first, p_second = log_distribution(first + wrong[:1]), log_distribution(second + wrong[1:])
    counts = np.zeros((vocab, vocab))
    all_seeds, all_positions = streams(3)
    for part in torch.arange(DRAWS).split(40_000):
        n = len(part)
        seeds, base = all_seeds[part], all_positions[part]
        draft_1 = draw_drafts(p_first.expand(n, -1), seeds, base)
        draft_2 = draw_drafts(p_second[draft_1], seeds, base + 1)
        target = torch.stack([q_first.expand(n, -1), q_second[draft_1], q_second[draft_2]], 1).flatten(0, 1)
        drafted = torch.stack([p_first.expand(n, -1), p_second[draft_1], p_second[:1].expand(n, -1)], 1)
        ids = torch.stack([draft_1, draft_2, torch.full((n,), -1)], 1).flatten()
        verdict = judge(
            target,
            target,
            drafted.flatten(0, 1),
            ids,
            torch.tensor([True, True, False]).repeat(n),
            seeds.repeat_interleave(3),
            (base[:, None] + torch.arange(3) * ROW_POSITION_STRIDE).flatten(),
        )
        prefix = accepted_prefix(verdict.accepted, ids, torch.arange(n) * 3, torch.full((n,), 3), 2)
        newest = verdict.tokens[prefix.final_rows]
        one = torch.where(prefix.count > 0, draft_1, newest)
        later = draw_fresh(sampler.RowGroup(), q_second, q_second[one], seeds, base + 5)
        two = torch.where(prefix.count == 0, later, torch.where(prefix.count == 1, newest, draft_2))
        counts += torch.bincount(one * vocab + two, minlength=vocab * vocab).view(vocab, vocab).numpy()
    joint = (q_first.double().exp().T * q_second.double().exp()).numpy()
    statistic, critical = chi_square(counts.ravel(), joint.ravel())
    assert statistic < critical


# ------------------------------------------------------------------ edges


def judged(target: torch.Tensor, draft: torch.Tensor, ids: list[int]) -> tuple[list[int], list[bool]]:
    n = len(ids)
    verdict = judge(
        target,
        target,
        draft,
        torch.tensor(ids),
        torch.ones(n, dtype=torch.bool),
        torch.arange(n),
        torch.arange(n) + 9,
    )
    return verdict.tokens.tolist(), verdict.accepted.tolist()


def test_placeholders_and_impossible_drafts() -> None:
    """A first decode step verifies an id that the draft is sure of; a filtered or missing one never wins."""
    target = log_distribution(torch.tensor([[0.0, 1.0, 2.0, float("-inf")]])).expand(400, -1)
    point = torch.full((400, 4), float("-inf"))
    point[:, 3] = 0.0
    tokens, accepted = judged(target, point, [3] * 400)
    assert not any(accepted)
    counts = np.bincount(tokens, minlength=4)
    assert counts[3] == 0
    assert counts[2] > counts[1] > counts[0] > 0
    tokens, accepted = judged(target, target, [-1] * 400)
    assert not any(accepted)
    assert set(tokens) <= {0, 1, 2}


def test_equal_distributions_accept_everything_but_the_last_ulp() -> None:
    target = log_distribution(torch.randn(4000, 50, generator=torch.Generator().manual_seed(1)))
    ids = draw_drafts(target, torch.arange(4000), torch.arange(4000))
    _, accepted = judged(target, target, ids.tolist())
    assert all(accepted)
    assert float(acceptance_chance(residual_weights(target, target)).min()) > 0.9999


def test_nothing_left_falls_back_to_the_largest_logit() -> None:
    """A forced rejection where all mass of the target lies under the draft's: the residual rounds to zero."""
    target = torch.full((2, 8), float("-inf"))
    target[0, 5] = 0.0
    target[1] = log_distribution(torch.zeros(1, 8))
    more = torch.full((2, 8), 1e-3)
    assert int(residual_weights(target, more).sum()) == 0
    tokens, _ = judged(target, more, [-1, -1])
    assert tokens == [5, 0]


def rows_of(n: int, temperature: float | list[float], **columns: object) -> SampleRows:
    return SampleRows(
        temperature=np.broadcast_to(np.asarray(temperature, np.float32), n).copy(),
        top_p=np.ones(n, np.float32),
        top_k=np.full(n, -1, np.int32),
        min_p=np.zeros(n, np.float32),
        seeds=seed_bits(list(range(n))),
        positions=np.arange(n, dtype=np.int64),
        top_logprobs=np.full(n, 0, np.int32),
        **columns,  # type: ignore[arg-type]
    )


def drafts_of(ids: list[int], verifies: list[bool], vocab: int) -> DraftRows:
    n = len(ids)
    pool = log_distribution(torch.randn(n, vocab, generator=torch.Generator().manual_seed(2)))
    return DraftRows(torch.tensor(ids), torch.tensor(verifies), torch.arange(n), pool)


def test_greedy_rows_accept_their_argmax_and_nothing_else() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [0.0, 3.0, 3.0], [5.0, 3.0, 1.0], [0.0, 0.0, 0.0]])
    output, verdict = verify(logits, rows_of(4, 0.0), drafts_of([1, 2, 0, 0], [True, True, True, False], 3))
    assert output.tokens.tolist() == [1, 1, 0, 0]
    assert verdict.accepted.tolist() == [True, False, True, False]
    assert verdict.chance.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert judge_exactly(torch.tensor([4]), torch.tensor([4]), torch.tensor([False])).accepted.tolist() == [
        False
    ]


def test_mixed_rows_equal_themselves_alone() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(4))
    temperatures = [0.0 if index % 3 == 0 else 0.5 + index / 40 for index in range(40)]
    drafts = drafts_of([index % 30 for index in range(40)], [index % 4 != 3 for index in range(40)], 30)
    rows = rows_of(40, temperatures)
    together, verdict = verify(logits.clone(), rows, drafts)
    assert together.logprobs is not None
    for index in range(40):
        part = slice(index, index + 1)
        output, own = verify(logits[part].clone(), rows.part(index, index + 1), drafts.part(index, index + 1))
        assert output.logprobs is not None
        assert int(output.tokens) == int(together.tokens[index])
        assert bool(own.accepted) == bool(verdict.accepted[index])
        assert torch.equal(own.chance, verdict.chance[part])
        assert torch.equal(output.logprobs, together.logprobs[part])
    assert 0 < int(verdict.accepted.sum()) < 40


def test_forced_tokens_override_draws_and_acceptance() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    rows = rows_of(4, [0.0, 1.0, 1.0, 1.0], forced=np.array([7, 8, 9, -1]))
    output, verdict = verify(logits.clone(), rows, drafts_of([7, 8, 3, 4], [True, True, True, False], 30))
    assert output.tokens[:3].tolist() == [7, 8, 9]
    assert verdict.accepted.tolist() == [True, True, False, False]
    assert output.logprobs is not None
    want = torch.log_softmax(logits, -1)[torch.arange(3), torch.tensor([7, 8, 9])]
    torch.testing.assert_close(output.logprobs[:3], want)


def test_a_row_without_a_distribution_accepts_nothing() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    output, verdict = verify(logits, rows_of(3, [0.0, 0.0, 1.0]), drafts_of([0, 2, 0], [True] * 3, 4))
    assert output.bad.tolist() == [False, True, False]
    assert verdict.accepted.tolist()[:2] == [True, False]


def test_prefix_ends_at_the_first_rejection() -> None:
    """Lengths 4, 1, 3: flat rows 0-3, 4, 5-7; the last row of each verifies nothing."""
    accepted = torch.tensor([True, False, True, True, True, True, True, True])
    ids = torch.tensor([10, 11, 12, -1, -1, 15, 16, -1])
    prefix = accepted_prefix(accepted, ids, torch.tensor([0, 4, 5]), torch.tensor([4, 1, 3]), 5)
    assert prefix.count.tolist() == [1, 0, 2]
    assert prefix.final_rows.tolist() == [1, 4, 7]
    assert prefix.ids.tolist() == [[10, -1, -1, -1, -1], [-1] * 5, [15, 16, -1, -1, -1]]
