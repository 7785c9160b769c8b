"""From a plan to what the forward pass reads: one host-to-device copy a step, placeholder rows included.

Knows: plans, the sequence table, the metadata builders, how a step's rows are filled up on a device. Does not
know: the model, sampling, when a step runs.

On a device the rows of a step are filled up to a multiple of 16 with placeholders (spec/engine.md §8.6), and
decode metadata lives in one buffer at a fixed address, its shapes a matter of the batch alone: a captured
graph needs that. Libraries choose by the number of rows how they add up a product, so the low bits of a row
depend on it; `runtime.batch_invariant` fills all steps of a kind up to one number.

Shape letters: n sequences, T rows, G n-gram order, M sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_ray.cache.checks import StepLimits
from deepinfer_ray.cache.metadata import StepMetadata, TruncationMode, build_decode, build_prefill
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.engine.draft_length import give_out_on_device
from deepinfer_ray.engine.inputs import (
    HistoryReader,
    InFlight,
    StepRows,
    gather_in_flight,
    repaired_positions,
    rows_of_lengths,
)
from deepinfer_ray.engine.plan import StepPlan
from deepinfer_ray.engine.settings import SchedulerSettings
from deepinfer_ray.ops.linear import ROW_TILE, round_up

DEVICE_ROWS = ROW_TILE
"""Rows of a step on a device are a multiple of this."""
PLACEHOLDER_TOKENS = 128
"""Longest placeholder of a prompt step: block 0 holds it."""


@dataclass(frozen=True, slots=True)
class RowMultiples:
    """What the numbers of rows in a step are multiples of: query rows of decode and prompt steps, sampled
    rows. 1 = as they come. whole_tables: whether decode steps have all columns of the block tables."""

    decode: int = 1
    prompt: int = 1
    sample: int = 1
    whole_tables: bool = False

    @classmethod
    def of(
        cls, device: torch.device, settings: SchedulerSettings, batch_invariant: bool = False
    ) -> RowMultiples:
        """batch_invariant: the most that a step can have, so that all steps of a kind are alike. How a prompt
        is cut into chunks is still seen in the low bits of its index scores."""
        if device.type == "cpu":
            return cls()  # products on a CPU do not depend on the number of rows
        if not batch_invariant:
            return cls(DEVICE_ROWS, DEVICE_ROWS, DEVICE_ROWS)
        most = settings.max_seqs * (1 + settings.num_drafts)
        return cls(round_up(most), round_up(settings.token_budget), round_up(settings.max_seqs), True)


@dataclass(slots=True)
class StepInputs:
    """sample_rows: int64 [M], query rows whose next token is drawn: those of the members, then row 0 again up
    to the multiple. q: int64 [n], rows of each sequence where only the device knows them, else None."""

    meta: StepMetadata
    sample_rows: torch.Tensor
    q: torch.Tensor | None = None


def _filled(array: np.ndarray, count: int, value: int) -> np.ndarray:
    """The array with `count` more rows of `value`."""
    if count == 0:
        return array
    return np.concatenate([array, np.full((count, *array.shape[1:]), value, array.dtype)])


def _placeholders(rows: int, longest: int) -> np.ndarray:
    """int32 lengths of the fewest sequences that have `rows` tokens together, at most `longest` each."""
    lengths = np.full(-(-rows // longest), longest, np.int32)
    if rows % longest:
        lengths[-1] = rows % longest
    return lengths


class InputBuilder:
    """Builds the inputs of every step of one loop, in step order and on one stream."""

    def __init__(
        self,
        pools: CachePools,
        limits: StepLimits,
        reader: HistoryReader,
        ratios: tuple[int, ...],
        multiples: RowMultiples,
        varlen: bool = False,
        vocab_size: int = 1,
        truncation: TruncationMode = "off",
        keep_tokens: int = 0,
    ) -> None:
        """multiples: above 1 shapes are fixed. varlen: rows are given out by the newest confidences.
        vocab_size: bound of the ids of `trial`. truncation, keep_tokens: spec/attention.md §13.2."""
        self.pools, self.device, self.multiples = pools, pools.device, multiples
        self.varlen, self._vocab_size = varlen, vocab_size
        self._truncation, self._keep_tokens = truncation, keep_tokens
        self._limits, self._reader, self._ratios = limits, reader, ratios
        self._prompts, self._decodes = Staging(self.device), Staging(self.device, fixed=True)
        compress = reader.table.compress
        self._lookup = (
            None if compress is None else torch.from_numpy(compress.astype(np.int64)).to(self.device)
        )

    def build(self, plan: StepPlan, members: np.ndarray, in_flight: InFlight | None) -> StepInputs:
        """members: int64 plan indices that are sampled. in_flight: results of the uncommitted step before,
        where this one has sequences of it; None = the host knows all tokens. An empty plan gives placeholders
        alone."""
        rows = StepRows.of(plan)
        count = len(rows.positions)
        multiple = self.multiples.prompt if plan.is_prompt else self.multiples.decode
        more = -count % multiple if count else multiple
        tail = _placeholders(more, PLACEHOLDER_TOKENS if plan.is_prompt else 1)
        k = plan.k
        if self.varlen and in_flight is not None:  # a sequence may yet get all rows that there are
            k = plan.k - plan.q + np.int32(in_flight.drafts.shape[1] + 1)
        arguments: dict[str, Any] = {
            "q": np.concatenate([plan.q, tail]),
            "k": np.concatenate([k, tail]),
            "state_ids": _filled(plan.rows, len(tail), 0),
            "block_tables": _filled(self._tables(plan), len(tail), 0),
            "valid": np.arange(count + more) < count if multiple > 1 or more else None,
            **self._tokens(plan, rows, more, in_flight is not None),
        }
        last_rows = np.cumsum(plan.q) - 1
        extras = [_filled(last_rows[members], -len(members) % self.multiples.sample, 0)]
        if in_flight is not None:
            extras += self._overlapped(plan, rows, len(tail), more)
        if plan.is_prompt:
            meta = build_prefill(
                self.pools.layout,
                self._ratios,
                **arguments,
                truncation=self._truncation,
                keep_tokens=self._keep_tokens,
                total=np.concatenate([self._reader.table.len[plan.rows], tail]),
                staging=self._prompts,
                extras=extras,
            )
        else:
            meta = build_decode(
                self.pools.layout,
                self._ratios,
                **arguments,
                staging=self._decodes,
                extras=extras,
                fixed_shape=multiple > 1,
                whole_tables=self.multiples.whole_tables,
                expand=in_flight is None,
            )
        q_n = None
        if in_flight is not None:
            q_n = self._repair(meta, in_flight, plan.num_seqs, count)
            meta.expand()
        return StepInputs(meta, meta.extras[0], q_n)

    def trial(self, rows: int) -> StepMetadata:
        """A decode step of as many sequences as rows, real to the model and nobody's, for timing."""
        rows = -(-rows // self.multiples.decode) * self.multiples.decode
        ones, zeros = np.ones(rows, np.int64), np.zeros(rows, np.int64)
        return build_decode(
            self.pools.layout,
            self._ratios,
            q=ones,
            k=ones,
            state_ids=zeros,
            block_tables=np.zeros((rows, self._reader.table.max_blocks), np.int32),
            input_ids=np.arange(rows) % self._vocab_size,
            ngram_ids=np.full((rows, self._reader.order), self._reader.pad, np.int64),
            staging=self._decodes,
            fixed_shape=self.multiples.decode > 1,
            whole_tables=self.multiples.whole_tables,
        )

    def _tables(self, plan: StepPlan) -> np.ndarray:
        table = self._reader.table
        tables = table.block_table[plan.rows]
        if not plan.is_empty:
            self._limits.check(
                is_prefill=plan.is_prompt,
                q=plan.q,
                k=plan.k,
                state_ids=plan.rows,
                block_tables=tables,
                num_blocks_of=table.n_blocks[plan.rows],
            )
        return tables

    def _tokens(self, plan: StepPlan, rows: StepRows, more: int, later: bool) -> dict[str, np.ndarray]:
        """Token ids and windows of all rows; zeros where the device fills them in `later`."""
        order, count = self._reader.order, len(rows.positions)
        if later or plan.is_empty:
            ids_T, ngrams_TG = np.zeros(count, np.int64), np.zeros((count, order), np.int64)
        else:
            ids_T, ngrams_TG = self._reader.tokens(plan, rows)
        return {
            "input_ids": _filled(ids_T, more, 0),
            "ngram_ids": _filled(ngrams_TG, more, self._reader.pad),
        }

    def _overlapped(self, plan: StepPlan, rows: StepRows, sequences: int, more: int) -> list[np.ndarray]:
        """What `_repair` reads; placeholders are fresh sequences of token 0."""
        fresh_ids, fresh_compressed, window = self._reader.overlapped(plan)
        return [
            _filled(plan.remap, sequences, -1),
            _filled(plan.k - plan.q, sequences, 0),
            _filled(fresh_ids, sequences, 0),
            _filled(fresh_compressed, sequences, self._reader.pad),
            _filled(window, sequences, self._reader.pad),
            _filled(rows.row_in_seq, more, 0),
        ]

    def _repair(
        self, meta: StepMetadata, in_flight: InFlight, sequences: int, count: int
    ) -> torch.Tensor | None:
        """Lengths, positions and tokens that follow from the step in flight (spec/speculative.md §3.5).

        sequences, count: of the plan, without placeholders. Returns the rows of each
        sequence if they changed.
        """
        _, remap, base, fresh_ids, fresh_compressed, window, row_in_seq = meta.extras
        q_n = None
        if in_flight.drafts.shape[1]:
            if self.varlen and in_flight.confidence is not None:
                q_n = give_out_on_device(in_flight.confidence, remap[:sequences], count)
                meta.cu_q, meta.seq_of_row, row_in_seq = rows_of_lengths(
                    torch.cat([q_n, q_n.new_ones(len(remap) - sequences)]), meta.num_rows
                )
            rows = (meta.seq_of_row, row_in_seq)
            meta.positions = repaired_positions(base, remap, in_flight, rows)
            assert meta.expansion is not None
            meta.expansion.short = None  # which rows see less than a window is not known here
        meta.input_ids, meta.ngram_ids = gather_in_flight(
            remap,
            fresh_ids,
            fresh_compressed,
            window,
            in_flight,
            self._lookup,
            self._reader.pad,
            (meta.seq_of_row, row_in_seq),
            order=self._reader.order,
        )
        return q_n
