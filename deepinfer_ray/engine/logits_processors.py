"""What requests change about logits before a distribution is formed: bans, biases, penalties.

Knows: the order of the changes and their formulas (spec/speculative.md §5.1, §5.2). Does not know: what a
grammar allows, how many tokens are drawn, temperature, filters. Edits are sparse (row, id, value) lists built
on the host from each row's own history, so a row's logits never depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.engine.request import SamplingParams

NEGATIVE_INFINITY = float("-inf")

MASK_BYTES = 64 << 20
"""Logits that are masked at one time."""


@dataclass(slots=True)
class SparseEdits:
    """(row, id[, value]) triples of one kind, gathered row by row."""

    rows: list[np.ndarray] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, row: int, ids: np.ndarray, values: np.ndarray | float = 0.0) -> None:
        self.rows.append(np.full(len(ids), row, np.int64))
        self.ids.append(ids)
        self.values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape))

    def __len__(self) -> int:
        return len(self.rows)

    def arrays(self) -> list[np.ndarray]:
        """rows int64, ids, values float32, each flat; nothing if there are no edits."""
        if not self.rows:
            return []
        return [np.concatenate(part) for part in (self.rows, self.ids, self.values)]


@dataclass(slots=True)
class LogitEdits:
    """All changes of one step's logit rows; `apply` works in place and in the order of the specification.

    Order: bans (minimum length) → logit_bias → repetition → frequency and presence penalties. The blacklist
    of the whole engine comes before them, temperature after them.
    """

    bans: SparseEdits = field(default_factory=SparseEdits)
    biases: SparseEdits = field(default_factory=SparseEdits)
    repetition: SparseEdits = field(default_factory=SparseEdits)
    penalties: SparseEdits = field(default_factory=SparseEdits)

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        prompt: np.ndarray,
        output: np.ndarray,
        end_ids: Iterable[int] = (),
    ) -> None:
        """What `params` asks of one logit row.

        prompt, output: ids of the sequence before the token that this row predicts, drafts of the same step
        included. end_ids: ids that may end the request; they are banned until `min_tokens` are out.
        """
        if len(output) < params.min_tokens:
            ends = np.fromiter(end_ids, np.int64)
            if ends.size:
                self.bans.add(row, ends, NEGATIVE_INFINITY)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            self.biases.add(row, ids, np.fromiter(params.logit_bias.values(), np.float32))
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.concatenate([prompt, output])).astype(np.int64)
            self.repetition.add(row, seen, params.repetition_penalty)
        if (params.frequency_penalty or params.presence_penalty) and len(output):
            ids, counts = np.unique(output, return_counts=True)
            self.penalties.add(
                row, ids.astype(np.int64), params.frequency_penalty * counts + params.presence_penalty
            )

    def __bool__(self) -> bool:
        return any((self.bans, self.biases, self.repetition, self.penalties))

    def apply(self, logits_NV: torch.Tensor, staging: Staging | None = None) -> None:
        """float32 [N, V], changed in place. Ids are unique within a row except among the bans.

        staging: how the triples reach the logits' device, by default afresh.
        """
        staging = staging or Staging(logits_NV.device)
        kinds = (self.bans, self.biases, self.repetition, self.penalties)
        sent = iter(staging.send([array for kind in kinds for array in kind.arrays()]))
        if self.bans:
            rows, ids, values = next(sent), next(sent), next(sent)
            logits_NV[rows, ids] = values  # not a number: CUDA would wait for its copy
        if self.biases:
            rows, ids, values = next(sent), next(sent), next(sent)
            logits_NV[rows, ids] += values
        if self.repetition:
            rows, ids, factors = next(sent), next(sent), next(sent)
            picked = logits_NV[rows, ids]
            logits_NV[rows, ids] = torch.where(picked > 0, picked / factors, picked * factors)
        if self.penalties:
            rows, ids, values = next(sent), next(sent), next(sent)
            logits_NV[rows, ids] -= values


@dataclass(slots=True)
class TokenMasks:
    """What some logit rows may be at all. rows: int64 [C]. words: int32 [C, ceil(V / 32)], bit v & 31 of word
    v >> 5 set = token v is allowed (spec/speculative.md §7.4)."""

    rows: np.ndarray
    words: np.ndarray

    def apply(self, logits_NV: torch.Tensor, staging: Staging | None = None) -> None:
        """Forbidden tokens of the rows to minus infinity; float32 [N, V], changed in place."""
        staging = staging or Staging(logits_NV.device)
        even = np.pad(self.words, ((0, 0), (0, self.words.shape[1] % 2)))  # the copy moves 64-bit words
        rows_C, words_CW = staging.send([self.rows, even.view(np.int64)])
        places_8 = torch.arange(8, dtype=torch.uint8, device=logits_NV.device)
        vocab = logits_NV.shape[1]
        step = max(1, MASK_BYTES // (4 * vocab))
        for at in range(0, len(self.rows), step):
            part_C, bytes_CB = rows_C[at : at + step], words_CW[at : at + step].view(torch.uint8)
            bits_CV = ((bytes_CB[:, :, None] >> places_8) & 1).flatten(1)[:, :vocab]
            kept_CV = logits_NV.index_select(0, part_C).masked_fill(bits_CV == 0, NEGATIVE_INFINITY)
            logits_NV.index_copy_(0, part_C, kept_CV)


def needs_edits(params: SamplingParams) -> bool:
    """Whether a request's rows must be built one by one; most requests need none of this."""
    return bool(
        params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )
