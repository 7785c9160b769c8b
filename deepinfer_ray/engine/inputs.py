"""What a step needs from the sequence table: tokens, n-gram windows, sampling columns.

Knows: `StepPlan` and `SequenceTable` (spec/engine.md §8.1, §8.3, §8.5). Does not know: the cache's geometry
(the metadata builders do), the model, how tokens are drawn. Vectorised over sequences; only rows that asked
for penalties, biases or a minimum length are visited one by one.

Shape letters: n sequences, T rows, N drafts, G n-gram order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_ray.engine.logits_processors import LogitEdits
from deepinfer_ray.engine.philox import DRAFT_SEED_OFFSET, ROW_POSITION_STRIDE
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.sampler import SampleRows
from deepinfer_ray.engine.table import SequenceTable


@dataclass(slots=True)
class StepRows:
    """Where the T rows of a plan come from. seq_of_row, row_in_seq, positions: int64 [T]."""

    seq_of_row: np.ndarray
    row_in_seq: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> StepRows:
        seq_of_row = np.repeat(np.arange(plan.num_seqs), plan.q)
        starts = np.cumsum(plan.q) - plan.q
        row_in_seq = np.arange(len(seq_of_row)) - starts[seq_of_row]
        return cls(seq_of_row, row_in_seq, (plan.k - plan.q)[seq_of_row] + row_in_seq)


@dataclass(slots=True)
class HistoryReader:
    """Token ids and Engram ids by (row, position), drafts included where a position lies beyond `len`.

    order: G, ids per n-gram window. pad: compressed id that stands for blocked places (spec/model.md §3.4).
    """

    table: SequenceTable
    order: int
    pad: int

    def tokens(self, plan: StepPlan, rows: StepRows) -> tuple[np.ndarray, np.ndarray]:
        """input ids int32 [T] and n-gram windows int32 [T, G] of a step whose tokens the host knows."""
        if plan.is_prompt:
            owner_T = plan.rows[rows.seq_of_row]
            places_TG = rows.positions[:, None] - np.arange(self.order)
            windows_TG = self._compressed(owner_T[:, None], places_TG)
            return self.table.tokens[owner_T, rows.positions], block_after_gap(windows_TG, self.pad)
        return self._decode_tokens(plan, rows)

    def _decode_tokens(self, plan: StepPlan, rows: StepRows) -> tuple[np.ndarray, np.ndarray]:
        """The last committed token of each sequence, then its drafts; windows slide over one strip of ids a
        sequence: G-1 before that token, the token, N drafts."""
        table, order = self.table, self.order
        last_n = table.len[plan.rows].astype(np.int64) - 1
        drafts_nN = table.draft[plan.rows]
        ids_nC = np.concatenate([table.tokens[plan.rows, last_n][:, None], drafts_nN], axis=1)
        places_nG = last_n[:, None] + np.arange(1 - order, 1)
        strip_nS = np.concatenate(
            [self._compressed(plan.rows[:, None], places_nG), table.compress_ids(drafts_nN)], axis=1
        )
        if len(rows.positions) == ids_nC.size:  # every sequence brings all its drafts
            ids_T = ids_nC.reshape(-1)
            windows_TG = _slide(strip_nS, order)
        else:
            ids_T = ids_nC[rows.seq_of_row, rows.row_in_seq]
            column_TG = rows.row_in_seq[:, None] + np.arange(order - 1, -1, -1)
            windows_TG = strip_nS[rows.seq_of_row[:, None], column_TG]
        gap = bool(strip_nS.size) and int(strip_nS.min()) < 0
        return ids_T, block_after_gap(windows_TG, self.pad) if gap else windows_TG

    def overlapped(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The host's part of a step that follows an uncommitted one (spec/engine.md §8.3).

        Returns fresh_ids int32 [n, N+1], the same through the Engram lookup, and the window int32 [n, N+G-1]:
        the G-1 ids before the step's first row (before the in-flight rows for overlapping sequences), then
        the N drafts in flight (pads for fresh sequences).
        """
        table, overlapping = self.table, plan.remap >= 0
        length = table.len[plan.rows].astype(np.int64)
        first = np.where(overlapping, length, length - 1)
        fresh_ids = np.concatenate(
            [table.tokens[plan.rows, length - 1][:, None], table.draft[plan.rows]], axis=1
        )
        places = first[:, None] - np.arange(self.order - 1, 0, -1)
        history = self._compressed(plan.rows[:, None], places)
        in_flight = np.where(overlapping[:, None], table.compress_ids(table.draft[plan.rows]), self.pad)
        window = np.concatenate([np.where(places < 0, self.pad, history), in_flight], axis=1)
        return fresh_ids, table.compress_ids(fresh_ids), window

    def _compressed(self, owner: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Engram ids of committed tokens; -1 before the first one, images are -1 already."""
        values = self.table.compressed[owner, np.maximum(places, 0)]
        return np.where(places < 0, -1, values) if places.size and places.min() < 0 else values


def _slide(strip_nS: np.ndarray, order: int) -> np.ndarray:
    """[n * (S-order+1), order] windows of every strip, newest id first."""
    if order == 0:
        return np.empty((len(strip_nS) * (strip_nS.shape[1] + 1), 0), strip_nS.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(strip_nS, order, axis=1)
    return windows[..., ::-1].reshape(-1, order)


def block_after_gap(windows_TG: np.ndarray, pad: int) -> np.ndarray:
    """Blocking is sticky: from the first -1 (image, or before the start) on, all older places are `pad`."""
    return np.where(np.logical_or.accumulate(windows_TG < 0, axis=1), pad, windows_TG)


@dataclass(slots=True)
class InFlight:
    """Device results of the uncommitted previous step, in its own batch order.

    sampled: int64 [m]. drafts: int64 [m, N]. accepted: int64 [m], accepted drafts. confidence: float32 [m, N]
    of the drafts, None without any.
    """

    sampled: torch.Tensor
    drafts: torch.Tensor
    accepted: torch.Tensor
    confidence: torch.Tensor | None = None


def repaired_positions(
    base: torch.Tensor, remap: torch.Tensor, previous: InFlight, rows: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """int64 [T] true positions of a step whose lengths the host could only bound.

    base: int64 [n] first positions if the previous step advances each sequence by N + 1. It advances it by
    one and its accepted drafts (spec/engine.md §7.4). rows: (sequence of each row [T], its place there [T]).
    """
    seq_T, step_T = rows
    rejected_n = previous.drafts.shape[1] - previous.accepted[remap.clamp_min(0)]
    return (base - rejected_n.masked_fill(remap < 0, 0)).index_select(0, seq_T) + step_T


def rows_of_lengths(q: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cu_q [n+1], sequence of each row [T], row in its sequence [T]) of lengths int64 [n] on a device; the
    host knows their sum T."""
    cu_n = torch.cat([q.new_zeros(1), q.cumsum(0)])
    seq_T = torch.repeat_interleave(torch.arange(len(q), device=q.device), q, output_size=total)
    return cu_n, seq_T, torch.arange(total, device=q.device) - cu_n.index_select(0, seq_T)


def gather_in_flight(
    remap: torch.Tensor,
    fresh_ids: torch.Tensor,
    fresh_compressed: torch.Tensor,
    window: torch.Tensor,
    previous: InFlight,
    lookup: torch.Tensor | None,
    pad: int,
    rows: tuple[torch.Tensor, torch.Tensor],
    order: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """input ids int64 [T] and n-gram windows int64 [T, G] where the previous step is still in flight.

    Device counterpart of `HistoryReader.tokens` (spec/speculative.md §3.5, spec/engine.md §8.3). remap:
    [n], -1 = fresh. fresh_*: [n, N+1]. window: [n, N+G-1]. lookup: [ids] token id → Engram id or None.
    rows: (sequence of each row [T], row in its sequence [T]). order: G.
    """
    seq_T, step_T = rows
    drafts = fresh_ids.shape[1] - 1
    overlapping_n = remap >= 0
    source_n = remap.clamp_min(0)
    current = torch.cat([previous.sampled[source_n, None], previous.drafts[source_n]], dim=1)
    ids_nC = torch.where(overlapping_n[:, None], current, fresh_ids)
    compressed = current if lookup is None else _look_up(lookup, current)
    compressed_nC = torch.where(overlapping_n[:, None], compressed, fresh_compressed)
    rejected_n = torch.where(overlapping_n, drafts - previous.accepted[source_n], drafts)

    back_G = torch.arange(order, device=remap.device)
    offset_TG = step_T[:, None] - back_G
    inside_TG = offset_TG >= 0
    recent_TG = compressed_nC[seq_T[:, None], offset_TG.clamp_min(0)]
    if window.shape[1]:
        place_TG = window.shape[1] - rejected_n[seq_T, None] + offset_TG
        older_TG = window[seq_T[:, None], place_TG.clamp(0, window.shape[1] - 1)]
        recent_TG = torch.where(inside_TG, recent_TG, older_TG)
    blocked_TG = (recent_TG < 0).cumsum(dim=1) > 0
    return ids_nC[seq_T, step_T], torch.where(blocked_TG, pad, recent_TG)


def _look_up(lookup: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    inside = ids < len(lookup)
    return torch.where(inside, lookup[torch.where(inside, ids, 0)], -1)


def sample_rows(plan: StepPlan, table: SequenceTable, members: np.ndarray) -> SampleRows:
    """Sampling columns of the sequences `members` (indices into the plan), one row each.

    The row predicts the token at position k (spec/speculative.md §5.5); call it once everything before that
    token is committed.
    """
    rows = plan.rows[members]
    return _columns(table, rows, plan.k[members].astype(np.int64), np.zeros(len(rows), np.int64))


def verify_rows(plan: StepPlan, table: SequenceTable) -> SampleRows:
    """Sampling columns of every row of a decode step that verifies drafts (spec/speculative.md §3.1, §5.5).

    Row j of a sequence predicts the token behind its j-th draft: histories include the drafts before it. The
    positions of further rows are far apart, so that no two draws of a request ever share random words.
    """
    rows = StepRows.of(plan)
    base = (plan.k - plan.q + 1).astype(np.int64)
    positions = base[rows.seq_of_row] + rows.row_in_seq * ROW_POSITION_STRIDE
    return _columns(table, plan.rows[rows.seq_of_row], positions, rows.row_in_seq)


def draft_rows(plan: StepPlan, table: SequenceTable, place: int) -> SampleRows:
    """Sampling columns of draft `place` of every sequence, as if the step had accepted no draft; what it did
    accept is added to the positions on the device. Bans and penalties do not apply to drafts."""
    rows = plan.rows
    seeds = table.seed[rows] + np.uint64(DRAFT_SEED_OFFSET)
    return SampleRows(
        temperature=table.temperature[rows],
        top_p=table.top_p[rows],
        top_k=table.top_k[rows],
        min_p=table.min_p[rows],
        seeds=seeds.view(np.int64),
        positions=(plan.k - plan.q).astype(np.int64) + 2 + place,
        top_logprobs=np.full(len(rows), -1, np.int32),
    )


def _columns(
    table: SequenceTable, owner: np.ndarray, positions: np.ndarray, drafts_before: np.ndarray
) -> SampleRows:
    """Columns of logit rows by table row. drafts_before: pending drafts that each row's history includes."""
    output_len = table.len[owner] - table.prompt_len[owner] + drafts_before
    edited = table.has_penalty[owner] | table.has_bias[owner] | (output_len < table.min_tokens[owner])
    edits = None
    if edited.any():
        edits = LogitEdits()
        for index in np.flatnonzero(edited).tolist():
            _add_edits(edits, index, int(owner[index]), int(drafts_before[index]), table)
    return SampleRows(
        temperature=table.temperature[owner],
        top_p=table.top_p[owner],
        top_k=table.top_k[owner],
        min_p=table.min_p[owner],
        seeds=table.seed[owner].view(np.int64),
        positions=positions,
        top_logprobs=table.num_logprobs[owner],
        edits=edits,
        forced=table.forced_tokens(owner, output_len),
    )


def _add_edits(edits: LogitEdits, index: int, row: int, drafts: int, table: SequenceTable) -> None:
    sequence = table.sequences[row]
    if sequence is None:  # released meanwhile; its sample is discarded
        return
    start, end = int(table.prompt_len[row]), int(table.len[row])
    ends = [int(token) for token in table.stop_ids[row, : table.n_stop_ids[row]]]
    if table.eos[row] >= 0:
        ends.append(int(table.eos[row]))
    tokens = table.tokens[row]
    output = np.concatenate([tokens[start:end], table.draft[row, :drafts]]) if drafts else tokens[start:end]
    edits.add_row(index, sequence.request.params, tokens[:start], output, ends)


@dataclass(slots=True)
class PromptScores:
    """Rows of a prompt step whose next prompt token is to be scored.

    rows: int64 [S] query rows. targets: int64 [S]. spans: (plan index, first target position, count) each.
    """

    rows: np.ndarray
    targets: np.ndarray
    spans: list[tuple[int, int, int]]


def prompt_scores(plan: StepPlan, table: SequenceTable) -> PromptScores | None:
    """What prompt log-probabilities need from this step; None if nobody asked."""
    row_parts, target_parts, spans = [], [], []
    starts = np.cumsum(plan.q) - plan.q
    for index in range(plan.num_seqs):
        row = int(plan.rows[index])
        sequence = table.sequences[row]
        if sequence is None or sequence.request.params.prompt_logprobs is None:
            continue
        begin = int(plan.k[index] - plan.q[index])
        count = min(int(plan.k[index]), int(table.prompt_len[row]) - 1) - begin
        if count > 0:
            row_parts.append(np.arange(count) + int(starts[index]))
            target_parts.append(table.tokens[row, begin + 1 : begin + 1 + count].astype(np.int64))
            spans.append((index, begin + 1, count))
    if not spans:
        return None
    return PromptScores(np.concatenate(row_parts), np.concatenate(target_parts), spans)
