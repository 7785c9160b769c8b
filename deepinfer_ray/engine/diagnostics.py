"""How each token of a result came about, for those who ask (`sampling.diagnostics`; spec/speculative.md §5.9,
§5.10).

Knows: the figures of one token and of one step of a sequence. Does not know: how they are computed, when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

NO_DRAFT = 1.0
"""In the place of a draft's log-probability: the token was no accepted draft."""


@dataclass(slots=True)
class Diagnostics:
    """Of one sequence; lists with one entry for each output token unless said otherwise.

    sum_smaller_probs: mass of the tokens no likelier than this one, itself included, in the distribution that
    it was taken from; of equal ones those with lower ids count. draft_logprobs: what the drafter gave it,
    `NO_DRAFT` unless it is an accepted draft. verified, accepted: on the last token of a step how many drafts
    the step verified and accepted, and one more (1 without drafts); 0 on its other tokens. confidence: one
    entry for each step, the confidences of the drafts that it verified.
    """

    sum_smaller_probs: list[float] = field(default_factory=list)
    draft_logprobs: list[float] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list)

    def add(
        self,
        smaller: list[float],
        draft_logprobs: list[float],
        accepted: int,
        confidence: list[float],
    ) -> None:
        """One step. smaller, draft_logprobs: of the tokens that were kept. accepted: drafts in all.
        confidence: of the drafts that were verified."""
        count = len(smaller)
        drafts = [NO_DRAFT if place >= accepted else value for place, value in enumerate(draft_logprobs)]
        self.sum_smaller_probs += smaller
        self.draft_logprobs += drafts
        self.verified += [*[0] * (count - 1), len(confidence) + 1]
        self.accepted += [*[0] * (count - 1), accepted + 1]
        self.confidence.append(confidence)


def sum_smaller(logprobs_MV: torch.Tensor, tokens_M: torch.Tensor) -> torch.Tensor:
    """float32 [M]: `Σ p(v)` over tokens v less likely than the row's own, or as likely with an id not above.

    logprobs: float32 [M, V] processed log-distributions. 0 for a token that the distribution cannot give.
    """
    own_M1 = logprobs_MV.gather(1, tokens_M.unsqueeze(1))
    ids = torch.arange(logprobs_MV.shape[1], device=logprobs_MV.device)
    counted = (logprobs_MV < own_M1) | ((logprobs_MV == own_M1) & (ids <= tokens_M.unsqueeze(1)))
    total_M = logprobs_MV.exp().masked_fill(~counted, 0.0).sum(-1)
    return total_M.masked_fill(torch.isneginf(own_M1[:, 0]), 0.0)
