"""What a result says of its tokens beside their ids, kept with the sequences step by step.

Knows: prompt scores, alternatives, diagnostics of a committed step. Does not know: how they are computed.
"""

from __future__ import annotations

import numpy as np

from deepinfer_ray.engine.diagnostics import NO_DRAFT, Diagnostics
from deepinfer_ray.engine.inputs import PromptScores
from deepinfer_ray.engine.plan import CommitResult, StepPlan
from deepinfer_ray.engine.table import SequenceTable


class TokenDetails:
    """Those of one table's sequences."""

    def __init__(self, table: SequenceTable) -> None:
        self.table = table

    def keep_scores(self, plan: StepPlan, scores: PromptScores, values: np.ndarray) -> None:
        """Log-probabilities of prompt tokens."""
        at = 0
        for index, first, count in scores.spans:
            row = int(plan.rows[index])
            sequence = self.table.sequences[row]
            if sequence is not None and self.table.seq_id[row] == plan.seq_ids[index]:
                if sequence.prompt_logprobs is None:
                    sequence.prompt_logprobs = np.zeros(sequence.prompt_len - 1, np.float32)
                sequence.prompt_logprobs[first - 1 : first - 1 + count] = values[at : at + count]
            at += count

    def keep(
        self,
        plan: StepPlan,
        members: np.ndarray,
        rows_nC: np.ndarray | None,
        result: CommitResult,
        host: dict[str, np.ndarray],
    ) -> None:
        """Alternatives and diagnostics of the tokens that were really appended.

        members: int64 plan indices, one logit row each in this order, unless rows are given: int64 [n, N+1]
        logit rows of each sequence's tokens. host: results of the step by name.
        """
        if rows_nC is None:
            owners, rows_nC = plan.rows[members], np.arange(len(members))[:, None]
        else:
            owners = plan.rows
        places = dict(zip(owners.tolist(), rows_nC, strict=True))
        for index, (row, count) in enumerate(zip(result.rows.tolist(), result.counts.tolist(), strict=True)):
            sequence = self.table.sequences[row]
            if sequence is None:
                continue
            width = int(self.table.num_logprobs[row])
            if "top_ids" in host and width > 0:
                if sequence.top_logprobs is None:
                    sequence.top_logprobs = []
                for place in places[row][:count].tolist():
                    ids, logprobs = host["top_ids"][place, :width], host["top_logprobs"][place, :width]
                    sequence.top_logprobs.append(list(zip(ids.tolist(), logprobs.tolist(), strict=True)))
            if "smaller" in host:
                if sequence.diagnostics is None:
                    sequence.diagnostics = Diagnostics()
                _diagnose(sequence.diagnostics, places[row], count, index, result, host)


def _diagnose(
    diagnostics: Diagnostics,
    places: np.ndarray,
    count: int,
    index: int,
    result: CommitResult,
    host: dict[str, np.ndarray],
) -> None:
    smaller = host["smaller"][places[:count]].tolist()
    if "draft_logprobs" not in host or result.verified_each is None or result.accepted_each is None:
        diagnostics.add(smaller, [NO_DRAFT] * count, 0, [])
        return
    diagnostics.add(
        smaller,
        host["draft_logprobs"][places[:count]].tolist(),
        int(result.accepted_each[index]),
        host["draft_confidence"][places[: int(result.verified_each[index])]].tolist(),
    )
