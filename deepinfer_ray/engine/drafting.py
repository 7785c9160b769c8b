"""A decode step behind its forward when there are drafts: verify, choose the newest token, draft anew.

Knows: plans and the table's columns, the pool of drafts, the model's draft block (speculative spec §0, §2.1,
§3). Does not know: scheduling, when results are committed. Reads no value of the device on the host.

Shape letters: n sequences (filled up with placeholders), N drafts, T rows (filled up), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.engine import inputs
from deepinfer_ray.engine.draft_pool import DraftPool
from deepinfer_ray.engine.inputs import InFlight, StepRows
from deepinfer_ray.engine.logits_processors import TokenMasks
from deepinfer_ray.engine.plan import StepOutputs, StepPlan
from deepinfer_ray.engine.sampler import (
    RowGroup,
    SampleOutput,
    SampleRows,
    draw_fresh,
    mask_logits,
    sample,
)
from deepinfer_ray.engine.table import SequenceTable
from deepinfer_ray.engine.verify import DraftRows, Prefix, Verdict, accepted_prefix, verify
from deepinfer_ray.model.drafter import DraftBlock, DraftRequest, logistic

LOGIT_BYTES = 512 << 20
"""Logits that are verified at one time; parts change no bit."""

LEAST_TEMPERATURE = 1e-5
"""Of confidences."""


class DraftingModel(Protocol):
    """What drafting needs of a model."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def draft_block(self, request: DraftRequest, pools: CachePools, drafts: int) -> DraftBlock:
        """Stores the block's keys; a collective of the expert group."""
        ...

    def draft_step(
        self, block: DraftBlock, place: int, previous_n: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits float32 [n, V], confidence logit float32 [n])."""
        ...


@dataclass(slots=True)
class Drafted:
    """Results of a step. in_flight: for the step behind it, on the device. tensors: for the host, by name."""

    in_flight: InFlight
    tensors: dict[str, torch.Tensor | None]


@dataclass(slots=True)
class _Step:
    """A plan's arrays on the device. verifies, read_rows: [T]; the others [n]."""

    verifies: torch.Tensor
    read_rows: torch.Tensor
    first_rows: torch.Tensor
    q: torch.Tensor
    base: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    stops: torch.Tensor
    """[n, 2] ids that end the request, -1 = none."""
    valid: torch.Tensor | None
    bound: int


class _KeepDistribution:
    """Draws of draft tokens that leave their distributions in the pool."""

    def __init__(self, pool: DraftPool, rows_n: torch.Tensor) -> None:
        self.pool, self.rows_n = pool, rows_n

    def __call__(
        self,
        group: RowGroup,
        logits_MV: torch.Tensor,
        logprobs_MV: torch.Tensor,
        seeds_M: torch.Tensor,
        positions_M: torch.Tensor,
    ) -> torch.Tensor:
        rows_M = group.take(self.rows_n)
        if group.mask is not None:  # the others of the batch are drawn in another way
            rows_M = torch.where(group.mask, rows_M, self.pool.nowhere * self.pool.drafts)
        self.pool.logprobs.index_copy_(0, rows_M, logprobs_MV)
        return draw_fresh(group, logits_MV, logprobs_MV, seeds_M, positions_M)


class Drafting:
    """Verification and drafting of one loop's decode steps, in step order and on one stream."""

    def __init__(
        self,
        model: DraftingModel,
        pools: CachePools,
        table: SequenceTable,
        *,
        num_slots: int,
        vocab_size: int,
        temperature: float | tuple[float, ...] = 1.0,
        blacklist: torch.Tensor | None = None,
        best: int = 0,
        staging: Staging | None = None,
        row_multiple: int = 1,
        diagnose: bool = False,
    ) -> None:
        """num_slots: draft slots of the scheduler. temperature: of confidences, one or one for each draft.
        blacklist: ids that are never sampled. best: logits that take part, of drafts too; 0 = all.
        row_multiple: sequences of a draft block are filled up to this. diagnose: give how tokens came
        about."""
        self.model, self.pools, self.table = model, pools, table
        self.drafts = table.num_drafts
        self.pool = DraftPool(num_slots, self.drafts, vocab_size, pools.device)
        values = temperature if isinstance(temperature, tuple) else (temperature,) * self.drafts
        self.temperatures = [max(value, LEAST_TEMPERATURE) for value in values]
        self._blacklist, self._best, self._multiple = blacklist, best, row_multiple
        self._told = torch.zeros_like(self.pool.confidence) if diagnose else None
        """Log-probabilities that the drafter gave its drafts, in the pool's rows; of greedy ones too, whose
        distributions the pool does not keep."""
        self._staging = staging or Staging(pools.device)
        self._part = max(16, LOGIT_BYTES // (4 * vocab_size))

    # -- one step ---------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, hidden_TD: torch.Tensor, masks: TokenMasks | None = None) -> Drafted:
        """hidden: rows of the step's forward. Everything before the step is committed by now, so that the
        plan's lengths and the table's columns are exact. masks: of the step's logit rows."""
        step = self._send(plan, hidden_TD.shape[0])
        rows = inputs.verify_rows(plan, self.table).padded(hidden_TD.shape[0])
        rows.masks, rows.diagnose = masks, self._told is not None
        ids_T = self.pool.ids.index_select(0, step.read_rows).masked_fill(~step.verifies, -1)
        logits_TV = self.model.logits(hidden_TD)
        mask_logits(logits_TV, rows, self._blacklist, self._staging, self._best)
        drafts = DraftRows(ids_T, step.verifies, step.read_rows, self.pool.logprobs)
        output, verdict = self._verify(logits_TV, rows, drafts)
        del logits_TV
        prefix = accepted_prefix(verdict.accepted, ids_T, step.first_rows, step.q, self.drafts)
        newest_n = output.tokens.index_select(0, prefix.final_rows)
        surprise = (verdict.chance - self.pool.confidence.index_select(0, step.read_rows)).abs()
        error = surprise.masked_fill(~step.verifies, 0.0).sum()

        before: dict[str, torch.Tensor | None] = {}
        if self._told is not None:  # of the block that was verified, before the next one takes its place
            before = {
                "smaller": output.smaller,
                "draft_logprobs": self._told.index_select(0, step.read_rows),
                "draft_confidence": self.pool.confidence.index_select(0, step.read_rows),
            }
        ids_nN, confidence_nN = self._draft(plan, step, newest_n, prefix)
        n = plan.num_seqs
        tensors: dict[str, torch.Tensor | None] = {
            "tokens": newest_n[:n],
            "bad": output.bad.index_select(0, prefix.final_rows)[:n],
            "accepted": prefix.ids[:n],
            "drafts": ids_nN[:n],
            "confidence": confidence_nN[:n],
            "error": error.view(1),
            "logprobs": output.logprobs,
            "top_ids": output.top_ids,
            "top_logprobs": output.top_logprobs,
            **before,
        }
        return Drafted(InFlight(newest_n, ids_nN, prefix.count, confidence_nN), tensors)

    def placeholder(self) -> None:
        """The draft block of a rank without work: other ranks wait in its collectives."""
        count = self._multiple
        (zeros_n,) = self._staging.send([np.zeros(count, np.int64)])
        request = DraftRequest(zeros_n, zeros_n, zeros_n, 1 + self.drafts, zeros_n.bool())
        self.model.draft_block(request, self.pools, self.drafts)

    def outputs(self, plan: StepPlan, host: dict[str, np.ndarray]) -> StepOutputs:
        """What the step gave, as arrays for the commit."""
        outputs = StepOutputs(
            host["tokens"].astype(np.int32),
            accepted=host["accepted"].astype(np.int32),
            drafts=host["drafts"].astype(np.int32),
            confidence=host["confidence"],
        )
        if "logprobs" in host:
            outputs.logprobs = host["logprobs"][self.rows_of(plan)]
        return outputs

    def rows_of(self, plan: StepPlan) -> np.ndarray:
        """int64 [n, N+1] flat row of each sequence's j-th token; undefined behind its last row."""
        first = np.cumsum(plan.q) - plan.q
        return np.minimum(first[:, None] + np.arange(self.drafts + 1), int(plan.q.sum()) - 1)

    # -- parts ------------------------------------------------------------------------------------------

    def _send(self, plan: StepPlan, num_rows: int) -> _Step:
        rows, n = StepRows.of(plan), plan.num_seqs
        fill, more = num_rows - len(rows.positions), -n % self._multiple
        verifies = rows.row_in_seq < (plan.q - 1)[rows.seq_of_row]
        read_rows = np.where(
            verifies, plan.draft_read[rows.seq_of_row].astype(np.int64) * self.drafts + rows.row_in_seq, 0
        )
        stop_ids = self.table.stop_ids[plan.rows, :1]
        if stop_ids.shape[1] == 0:
            stop_ids = np.full((n, 1), -1, np.int32)
        stops = np.concatenate([self.table.eos[plan.rows][:, None], stop_ids], axis=1)

        def filled(array: np.ndarray, count: int, value: int = 0) -> np.ndarray:
            return np.concatenate([array, np.full((count, *array.shape[1:]), value, array.dtype)])

        base = plan.k - plan.q
        sent = self._staging.send(
            [
                filled(verifies, fill),
                filled(read_rows, fill),
                filled(np.cumsum(plan.q) - plan.q, more),
                filled(plan.q, more, 1),
                filled(base, more),
                filled(plan.rows, more),
                filled(plan.draft_write, more),
                filled(stops, more, -1),
                np.arange(n + more) < n,
            ]
        )
        return _Step(
            verifies=sent[0].bool(),
            read_rows=sent[1],
            first_rows=sent[2],
            q=sent[3],
            base=sent[4],
            states=sent[5],
            slots=sent[6],
            stops=sent[7],
            valid=sent[8].bool() if more else None,
            bound=int(base.max()) + 2 * self.drafts + 2,
        )

    def _verify(
        self, logits_TV: torch.Tensor, rows: SampleRows, drafts: DraftRows
    ) -> tuple[SampleOutput, Verdict]:
        """`verify` in parts, so that what it needs beside the logits stays small."""
        total = logits_TV.shape[0]
        if total <= self._part:
            return verify(logits_TV, rows.part(0, total), drafts, self._staging)
        parts = []
        for at in range(0, total, self._part):
            end = min(at + self._part, total)
            parts.append(verify(logits_TV[at:end], rows.part(at, end), drafts.part(at, end), self._staging))
        return _joined([output for output, _ in parts]), Verdict(
            *(torch.cat([getattr(v, name) for _, v in parts]) for name in ("tokens", "accepted", "chance"))
        )

    def _draft(
        self, plan: StepPlan, step: _Step, newest_n: torch.Tensor, prefix: Prefix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n, N], confidences float32 [n, N]) of the next block, kept in the pool."""
        positions_n = step.base + prefix.count
        request = DraftRequest(newest_n, positions_n, step.states, step.bound, step.valid)
        block = self.model.draft_block(request, self.pools, self.drafts)
        emitted = torch.cat([prefix.ids, newest_n.unsqueeze(1)], dim=1)
        ends = (emitted.unsqueeze(2) == step.stops.unsqueeze(1)) & (emitted.unsqueeze(2) >= 0)
        ends_n = ends.flatten(1).any(1)  # such a request is dead in the next step and needs no rows
        previous_n, ids, confidences = newest_n, [], []
        for place, temperature in enumerate(self.temperatures):
            logits_nV, score_n = self.model.draft_step(block, place, previous_n, temperature)
            rows = inputs.draft_rows(plan, self.table, place).padded(len(newest_n))
            rows_n = self.pool.write_rows(step.slots, place)
            rows.diagnose = self._told is not None
            keep = _KeepDistribution(self.pool, rows_n)
            drawn = sample(
                logits_nV, rows, None, self._staging, draw=keep, shift=prefix.count, best=self._best
            )
            previous_n = drawn.tokens
            if self._told is not None and drawn.logprobs is not None:
                self._told.index_copy_(0, rows_n, drawn.logprobs)
            confidence_n = logistic(score_n).masked_fill(ends_n, 0.0)
            self.pool.ids.index_copy_(0, rows_n, previous_n)
            self.pool.confidence.index_copy_(0, rows_n, confidence_n)
            ids.append(previous_n)
            confidences.append(confidence_n)
        return torch.stack(ids, 1), torch.stack(confidences, 1)


def _joined(parts: list[SampleOutput]) -> SampleOutput:
    """Outputs of consecutive rows as one; what only some rows wanted is zero elsewhere."""
    joined = SampleOutput(torch.cat([part.tokens for part in parts]), torch.cat([part.bad for part in parts]))
    if any(part.logprobs is not None for part in parts):
        zeros = [torch.zeros(part.tokens.shape, device=part.tokens.device) for part in parts]
        joined.logprobs = torch.cat(
            [
                zero if part.logprobs is None else part.logprobs
                for part, zero in zip(parts, zeros, strict=True)
            ]
        )
    if parts[0].smaller is not None:
        joined.smaller = torch.cat([part.smaller for part in parts if part.smaller is not None])
    width = max((part.top_ids.shape[1] for part in parts if part.top_ids is not None), default=0)
    if width:
        ids, logprobs = [], []
        for part in parts:
            rows = len(part.tokens)
            own = part.tokens.new_zeros(rows, 0) if part.top_ids is None else part.top_ids
            values = torch.zeros(rows, 0, device=own.device)
            values = values if part.top_logprobs is None else part.top_logprobs
            ids.append(F.pad(own, (0, width - own.shape[1])))
            logprobs.append(F.pad(values, (0, width - values.shape[1])))
        joined.top_ids, joined.top_logprobs = torch.cat(ids), torch.cat(logprobs)
    return joined
