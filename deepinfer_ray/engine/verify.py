"""Verification of drafts: which are accepted, what stands in for the first that is not (speculative spec §3).

Knows: arithmetic on flat rows, and the prefix rule of a sequence. Does not know: models, caches, requests.

Row j of a sequence says how its token j+1 is distributed; draft j+1 is verified against it. With target
distribution q, draft distribution p (both processed: temperature, filters, renormalised) and draft x ~ p:

    accept x            with probability min(1, q(x) / p(x))
    otherwise draw      y ~ r,  r(v) ∝ max(q(v) - α·p(v), 0)
    so that             P(y) = min(q(y), p(y)) + (1 - Σ min(q, p)) · r(y) = q(y)      for α = 1

α = e^-5e-5 keeps r from vanishing after quantisation: every token's probability is then between q - ε/(1+ε)
and (1+ε)·q, ε = 1 - α. Rows behind the first rejected one are of no account. The last row of a sequence has
no draft to verify: its token ("bonus") is drawn from q itself.

Shape letters: n sequences, N drafts, T rows, M rows of one kind, V vocabulary, R rows of the draft pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.engine.philox import CASE_ACCEPT, CASE_RESIDUAL, CASE_SAMPLE, random_words, uniform
from deepinfer_ray.engine.sampler import (
    FIXED_POINT,
    RowGroup,
    SampleOutput,
    SampleRows,
    draw_from,
    fixed_point_weights,
    sample,
)

DRAFT_SHARE = math.exp(-5e-5)
"""α: how much of the draft's probability a rejection takes off the target's."""


@dataclass(slots=True)
class Verdict:
    """tokens: int64 [M], the draft where it is accepted, else what is drawn in its place. accepted: bool [M].
    chance: float32 [M], probability that a draft of this distribution is accepted (1 on fresh rows)."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    chance: torch.Tensor


def log_acceptance(target_MV: torch.Tensor, draft_MV: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
    """float32 [M]: `min(0, log q(x) - log p(x))` of each row's draft; -inf for a draft -1 or a token that the
    target cannot give."""
    column_M1 = ids_M.clamp_min(0).unsqueeze(1)
    target_M, draft_M = target_MV.gather(1, column_M1)[:, 0], draft_MV.gather(1, column_M1)[:, 0]
    return (target_M - draft_M).clamp_max(0.0).masked_fill(ids_M < 0, float("-inf"))


def residual_weights(target_MV: torch.Tensor, draft_MV: torch.Tensor) -> torch.Tensor:
    """int64 [M, V]: `floor(max(q - α·p, 0) · 2^31)`, not normalised."""
    rest_MV = (target_MV.exp() - draft_MV.exp() * DRAFT_SHARE).clamp_min(0.0)
    return (rest_MV * float(FIXED_POINT)).nan_to_num(0.0, posinf=0.0).long()


def acceptance_chance(residual_MV: torch.Tensor) -> torch.Tensor:
    """float32 [M]: `1 - Σ r`, the closed form of the acceptance probability (up to α)."""
    return (1.0 - residual_MV.sum(-1).double() / FIXED_POINT).clamp_min(0.0).float()


def judge(
    logits_MV: torch.Tensor,
    target_MV: torch.Tensor,
    draft_MV: torch.Tensor,
    ids_M: torch.Tensor,
    verifies_M: torch.Tensor,
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
) -> Verdict:
    """Accept or resample sampled rows; fresh rows are drawn from the target.

    logits: raw, masked. target, draft: processed log-distributions, float32 [M, V]. ids: int64 [M] drafts, -1
    = reject. verifies: bool [M], False on fresh rows, whose draft columns mean nothing. seeds, positions:
    int64 [M]. Acceptance, resampling and fresh draws use three different streams, every row's draw being made
    whatever happens to the rows before it.
    """
    words_M = random_words(seeds_M, positions_M, CASE_ACCEPT, 4)[:, 0]
    accepted_M = verifies_M & (uniform(words_M) < log_acceptance(target_MV, draft_MV, ids_M).exp())
    residual_MV = residual_weights(target_MV, draft_MV)
    resampled_M = draw_from(residual_MV, seeds_M, positions_M, CASE_RESIDUAL)
    nothing_left_M = residual_MV.sum(-1) == 0
    resampled_M = torch.where(nothing_left_M, logits_MV.argmax(-1), resampled_M)
    fresh_M = draw_from(fixed_point_weights(target_MV), seeds_M, positions_M, CASE_SAMPLE)
    tokens_M = torch.where(verifies_M, torch.where(accepted_M, ids_M, resampled_M), fresh_M)
    chance_M = torch.where(verifies_M, acceptance_chance(residual_MV), 1.0)
    return Verdict(tokens_M, accepted_M, chance_M)


def judge_exactly(tokens_M: torch.Tensor, ids_M: torch.Tensor, verifies_M: torch.Tensor) -> Verdict:
    """Rows whose token is certain (argmax of a greedy row, or forced): a draft is accepted iff it is that."""
    accepted_M = verifies_M & (tokens_M == ids_M)
    return Verdict(tokens_M, accepted_M, (accepted_M | ~verifies_M).float())


@dataclass(slots=True)
class DraftRows:
    """What T flat rows verify.

    ids: int64 [T], -1 = none (rejected). verifies: bool [T], False on the last row of a sequence.
    read_rows: int64 [T] rows of `logprobs`, the processed draft distributions float32 [R, V].
    """

    ids: torch.Tensor
    verifies: torch.Tensor
    read_rows: torch.Tensor
    logprobs: torch.Tensor

    def part(self, start: int, stop: int) -> DraftRows:
        """Rows [start, stop)."""
        return DraftRows(
            self.ids[start:stop], self.verifies[start:stop], self.read_rows[start:stop], self.logprobs
        )


class _DrawVerified:
    """Draws of `sample` that accept or resample; keeps what became of each row."""

    def __init__(self, drafts: DraftRows) -> None:
        self.drafts = drafts
        self.accepted = torch.zeros_like(drafts.verifies)
        self.chance = torch.zeros(drafts.ids.shape, dtype=torch.float32, device=drafts.ids.device)

    def __call__(
        self,
        group: RowGroup,
        logits_MV: torch.Tensor,
        logprobs_MV: torch.Tensor,
        seeds_M: torch.Tensor,
        positions_M: torch.Tensor,
    ) -> torch.Tensor:
        drafts = self.drafts
        ids_M, verifies_M = group.take(drafts.ids), group.take(drafts.verifies)
        draft_MV = drafts.logprobs.index_select(0, group.take(drafts.read_rows))
        verdict = judge(logits_MV, logprobs_MV, draft_MV, ids_M, verifies_M, seeds_M, positions_M)
        self.accepted = group.put(self.accepted, verdict.accepted)
        self.chance = group.put(self.chance, verdict.chance)
        return verdict.tokens


def verify(
    logits_TV: torch.Tensor, rows: SampleRows, drafts: DraftRows, staging: Staging | None = None
) -> tuple[SampleOutput, Verdict]:
    """`sample` of rows that verify drafts: a row's token is its draft where that is accepted.

    `logits_TV` float32 comes masked (`sampler.mask_logits`). Log-probabilities are looked up for that token.
    A row without a usable distribution accepts nothing, so that it ends its sequence's prefix.
    """
    staging = staging or Staging(logits_TV.device)
    certain = rows.greedy if rows.forced is None else rows.greedy | (rows.forced >= 0)
    draw = _DrawVerified(drafts)
    output = sample(logits_TV, rows, None, staging, draw=draw)
    verdict = judge_exactly(output.tokens, drafts.ids, drafts.verifies)
    if not certain.all():
        certain_T = staging.send([certain])[0].bool()
        verdict.accepted = torch.where(certain_T, verdict.accepted, draw.accepted)
        verdict.chance = torch.where(certain_T, verdict.chance, draw.chance)
    verdict.accepted &= ~output.bad
    return output, verdict


@dataclass(slots=True)
class Prefix:
    """What a step leaves of each sequence. count: int64 [n] accepted drafts. final_rows: int64 [n], the row
    whose token is the newest. ids: int64 [n, N] accepted drafts, -1 behind them."""

    count: torch.Tensor
    final_rows: torch.Tensor
    ids: torch.Tensor


def accepted_prefix(
    accepted_T: torch.Tensor, ids_T: torch.Tensor, first_rows_n: torch.Tensor, q_n: torch.Tensor, drafts: int
) -> Prefix:
    """A draft counts iff it and all before it are accepted (speculative spec §3.3).

    first_rows, q: int64 [n], rows of each sequence in the flat order. drafts: N, the columns of the result.
    """
    column_N = torch.arange(drafts, device=q_n.device)
    inside_nN = column_N < (q_n - 1).unsqueeze(1)
    place_nN = (first_rows_n.unsqueeze(1) + column_N).clamp_max(accepted_T.shape[0] - 1)
    alive_nN = (accepted_T[place_nN] & inside_nN).cumprod(1).bool()
    count_n = alive_nN.sum(1)
    return Prefix(count_n, first_rows_n + count_n, ids_T[place_nN].masked_fill(~alive_nN, -1))
