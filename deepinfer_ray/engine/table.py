"""The sequence table: all hot state of a rank's sequences as arrays whose row is the state slot.

Knows: columns, the token arena, the block table (spec/engine.md §14.2). Does not know: who gets a row
(scheduler), who computes it (step loop). Row 0 is the padding row and belongs to nobody.

A row released while a step that used it is not committed yet must not be written by that commit: `seq_id` of
the row is compared with the step's snapshot before every late write, and the row is handed out again only
after `Scheduler.reclaim` (spec/engine.md §14.2, row recycling).
"""

from __future__ import annotations

import numpy as np

from deepinfer_ray.engine.request import MASK_64, SamplingParams
from deepinfer_ray.engine.sequence import Sequence, Status

UNLIMITED = 2**31 - 1
NO_SEQUENCE = -1


class SequenceTable:
    """Structure of arrays with `num_rows` rows; capacity is fixed, nothing is allocated in a step.

    tokens int32 [rows, capacity] prompt + committed outputs of each row, never drafts; what lies beyond `len`
    is undefined. compressed: the same through the Engram lookup (the same array when there is none).
    logprobs float32 [rows, capacity] by token position. The arenas are lazily committed by the operating
    system: memory grows with the positions that were really used.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        capacity: int,
        num_drafts: int,
        compress: np.ndarray | None = None,
    ) -> None:
        """compress: int32 [ids] token id -> Engram id, None for none."""
        self.num_rows, self.max_blocks, self.capacity, self.num_drafts = (
            num_rows,
            max_blocks,
            capacity,
            num_drafts,
        )
        self.compress = compress

        def column(dtype: type, *shape: int) -> np.ndarray:
            return np.zeros((num_rows, *shape), dtype)

        # Identity and schedule.
        self.seq_id = np.full(num_rows, NO_SEQUENCE, np.int64)
        self.status = np.full(num_rows, Status.FREE, np.int8)
        self.admit_no = column(np.int64)
        """Order of admission; the youngest of equals is preempted first."""
        self.len = column(np.int32)
        self.prompt_len = column(np.int32)
        self.num_cached = column(np.int32)
        """Tokens whose cache is committed."""
        self.inflight = column(np.int32)
        """Tokens counted for scheduled, uncommitted steps (num_drafts + 1 each)."""
        self.n_draft = column(np.int32)
        """0 until the prompt is complete, then num_drafts."""
        self.n_blocks = column(np.int32)
        self.block_table = column(np.int32, max_blocks)
        self.sched_cnt = column(np.int32)
        self.proc_cnt = column(np.int32)
        # Speculation.
        self.draft_slot = column(np.int32)
        self.has_draft = column(np.bool_)
        self.draft = column(np.int32, num_drafts)
        """Proposals of the last committed step (after a prompt: placeholders)."""
        self.rate = column(np.float32, num_drafts)
        self.prev_rate = column(np.float32, num_drafts)
        self.n_rates = column(np.int8)
        """How many of (rate, prev_rate) are known: 0, 1, 2."""
        self.accepted = column(np.int32)
        """Drafts accepted by the last committed step."""
        self.so_status = column(np.int8)
        """Structured output: 0 not started, 1 at the border, 2 active (spec/speculative.md §7)."""
        # Stop rules and sampling.
        self.max_tokens = column(np.int32)
        self.min_tokens = column(np.int32)
        self.eos = column(np.int32)
        """EOS id, -1 when it is ignored."""
        self.stop_ids = np.full((num_rows, 0), -1, np.int32)
        """Further stop token ids, -1 padded; widened on demand."""
        self.n_stop_ids = column(np.int32)
        self.watched = column(np.bool_)
        """Whether new tokens are shown to the `on_tokens` hook (stop strings)."""
        self.temperature = column(np.float32)
        self.top_p = column(np.float32)
        self.top_k = column(np.int32)
        self.min_p = column(np.float32)
        self.seed = column(np.uint64)
        self.greedy = column(np.bool_)
        self.presence_penalty = column(np.float32)
        self.frequency_penalty = column(np.float32)
        self.repetition_penalty = column(np.float32)
        self.has_penalty = column(np.bool_)
        self.has_bias = column(np.bool_)
        self.has_grammar = column(np.bool_)
        self.num_logprobs = column(np.int32)
        """Alternatives asked for beside the token's own logprob, -1 = no logprobs at all."""
        # Arenas.
        self.tokens = np.zeros((num_rows, capacity), np.int32)
        self.compressed = self.tokens if compress is None else np.zeros((num_rows, capacity), np.int32)
        self.logprobs = np.zeros((num_rows, capacity), np.float32)
        self.forced: dict[int, np.ndarray] = {}
        """Row -> int64 ids that its first outputs must be, -1 = free."""
        self.sequences: list[Sequence | None] = [None] * num_rows
        """Cold side of each row."""

    def assign(self, row: int, sequence: Sequence, eos_token_id: int, admit_no: int) -> None:
        """Gives a free row to a sequence: its tokens move into the arena, every column is set."""
        if self.seq_id[row] != NO_SEQUENCE or row == 0:
            raise RuntimeError(f"table row {row} is not free: it belongs to sequence {int(self.seq_id[row])}")
        tokens = sequence.tokens
        assert tokens is not None, f"{sequence} has no tokens to move into row {row}"
        length = len(tokens)
        self.seq_id[row], self.status[row], self.admit_no[row] = sequence.seq_id, Status.WAITING, admit_no
        self.len[row], self.prompt_len[row] = length, sequence.prompt_len
        for column in (
            self.num_cached, self.inflight, self.n_draft, self.n_blocks, self.sched_cnt, self.proc_cnt,
            self.draft_slot, self.has_draft, self.n_rates, self.accepted, self.so_status,
        ):  # fmt: skip
            column[row] = 0
        self.tokens[row, :length] = tokens
        if self.compress is not None:
            self.compressed[row, :length] = self.compress_ids(tokens)
        if sequence.logprobs is not None:
            self.logprobs[row, : len(sequence.logprobs)] = sequence.logprobs
        self._set_params(row, sequence.request.params, sequence.request.seed, eos_token_id)
        if sequence.request.forced is not None:
            self.forced[row] = sequence.request.forced.astype(np.int64)
        self.sequences[row] = sequence
        sequence.row, sequence.tokens, sequence.logprobs = row, None, None

    def compress_ids(self, ids: np.ndarray) -> np.ndarray:
        """Engram ids of token ids; ids beyond the lookup (image sentinels) become -1."""
        if self.compress is None:
            return ids
        inside = ids < len(self.compress)
        return np.where(inside, self.compress[np.where(inside, ids, 0)], -1).astype(np.int32)

    def _set_params(self, row: int, params: SamplingParams, seed: int, eos_token_id: int) -> None:
        self.max_tokens[row] = UNLIMITED if params.max_tokens is None else params.max_tokens
        self.min_tokens[row] = params.min_tokens
        self.eos[row] = -1 if params.ignore_eos else eos_token_id
        stops = params.stop_token_ids
        if len(stops) > self.stop_ids.shape[1]:
            wider = np.full((self.num_rows, len(stops)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        self.n_stop_ids[row] = len(stops)
        self.watched[row] = bool(params.stop)
        self.temperature[row], self.top_p[row], self.top_k[row] = (
            params.temperature,
            params.top_p,
            params.top_k,
        )
        self.min_p[row], self.greedy[row] = params.min_p, params.greedy
        self.seed[row] = np.uint64(seed & MASK_64)
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.has_penalty[row] = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.has_bias[row] = bool(params.logit_bias)
        self.has_grammar[row] = params.structured_outputs is not None
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def clear(self, row: int) -> None:
        """Takes the row from its sequence. The caller has freed its blocks and returns the slot later."""
        sequence = self.sequences[row]
        if sequence is not None:
            sequence.row = 0
        self.sequences[row] = None
        self.forced.pop(row, None)
        self.seq_id[row], self.status[row] = NO_SEQUENCE, Status.FREE
        self.n_blocks[row] = self.len[row] = self.num_cached[row] = self.inflight[row] = self.draft_slot[
            row
        ] = 0
        self.n_stop_ids[row], self.watched[row] = 0, False

    def forced_tokens(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray | None:
        """int64 [n] what outputs `places` (from 0) of table rows must be, -1 = free; None = all are free."""
        if not self.forced:
            return None
        tokens = np.full(len(rows), -1, np.int64)
        for row, ids in self.forced.items():
            mine = np.flatnonzero((rows == row) & (places < len(ids)))
            tokens[mine] = ids[places[mine]]
        return tokens

    def output_tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the row's outputs: int32 tokens, float32 logprobs."""
        span = slice(int(self.prompt_len[row]), int(self.len[row]))
        return self.tokens[row, span].copy(), self.logprobs[row, span].copy()

    def blocks_of(self, row: int) -> list[int]:
        return self.block_table[row, : self.n_blocks[row]].tolist()
