"""The index plans of one step as data: which rows go in, what they may see, where their records live.

Knows: the fields that a forward pass needs beside weights (attention spec §11, engine spec §8), and how some
of them follow from others on the device. Does not know: how they are made (`cache/metadata.py`).

Shape letters: n sequences, T query rows, G n-gram order, W window, S ring rows, C state ring rows,
r compression ratio, E entry rows, K gathered entries, B blocks a table.
All index tensors are int64 on the model's device (torch indexes with int64), -1 means "none".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class RatioPlan:
    """What one compression ratio needs in a step (attention spec §4.3, §11).

    Entry rows: in prefill each sequence owns `max(1, ⌊k/r⌋ - ⌊q_start/r⌋)` of them, a dummy included; in
    decode there is one per query row, and only rows in `closing` produce an entry.
    """

    ratio: int
    entry_positions: torch.Tensor
    """[E] position (first token) of every entry row produced; 0 on rows that produce none."""
    entry_slots: torch.Tensor
    """[E] pool slot `block * (128/r) + offset` of every entry row, -1 where nothing is produced."""
    klen: torch.Tensor
    """[T] entries visible to each query row: floor((pos+1)/r)."""
    entry_ring: torch.Tensor
    """[E, r] flat ring row `slot * C + pos % C` of the group's members. Prefill: -1 for members of this
    step. Decode: all members (they are stored first), -1 on rows that close no group."""
    # Prefill only.
    entry_rows: torch.Tensor | None = None
    """[E, r] row of the step's new tokens that each member of the group comes from, -1 = from the ring."""
    load_slots: torch.Tensor | None = None
    """[K] pool slots of the gathered prefix of all sequences, -1 = a zero row; K = sum max(1, floor(k/r))."""
    ks: torch.Tensor | None = None
    """[T] first gathered row of the query row's sequence."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """On the host, a pair a sequence: first gathered row, entries visible to its last query row."""
    # Decode only.
    closing: torch.Tensor | None = None
    """[E'] query rows whose entry row is computed, ascending: those that close a group (all for ratio 1), or
    every row in a step of fixed shape."""


@dataclass(slots=True)
class ConsumerPlan:
    """What layers at and behind `n_prefill_layer` see under truncation (attention spec §13.2).

    Fields have the meaning of `StepMetadata`, for the T' kept rows. Compressed visibility is never truncated.
    """

    rows: torch.Tensor | None
    """[T'] kept rows of the step; None in mode `mask`, where all rows are computed."""
    num_rows: int
    positions: torch.Tensor
    valid: torch.Tensor
    image_mask: torch.Tensor | None
    seq_of_row: torch.Tensor
    cu_q: torch.Tensor
    last_rows: torch.Tensor
    swa_store: torch.Tensor
    """[T'] ring record, also -1 on a placeholder row (one that lies before the rectangle)."""
    swa_keys: torch.Tensor
    """[T', W] rows of the buffer [history n*W | kept rows T']."""
    klen: dict[int, torch.Tensor]
    ks: dict[int, torch.Tensor]
    sequence_rows: list[int]
    """On the host: `cu_q`."""


@dataclass(slots=True)
class StepMetadata:
    """All index tensors of one step. A step is all prefill or all decode.

    Decode rows may be more than one per sequence (verification): rows of a sequence are adjacent, ascending.
    """

    is_prefill: bool
    num_seqs: int
    num_rows: int
    input_ids: torch.Tensor
    """[T] token ids; ids outside the vocabulary embed to zero."""
    positions: torch.Tensor
    """[T] absolute positions."""
    ngram_ids: torch.Tensor
    """[T, G] compressed ids of the tokens at pos, pos-1, …; see model spec §3.4. G = 0 without Engram."""
    valid: torch.Tensor
    """[T] bool, False on placeholder rows: the router drops them."""
    image_mask: torch.Tensor | None
    """[T] bool, True inside an image span; None = no image in the step."""
    seq_of_row: torch.Tensor
    """[T] index of the row's sequence in the step."""
    cu_q: torch.Tensor
    """[n+1] exclusive prefix sums of rows per sequence."""
    last_rows: torch.Tensor
    """[n] last query row of each sequence (the row that is sampled after prefill)."""
    swa_store: torch.Tensor
    """[T] ring record `state * S + pos % S`, -1 = not stored (only the last S rows of a chunk are)."""
    swa_keys: torch.Tensor
    """[T, W] window keys, oldest first, -1 padded. Prefill: rows of the buffer
    [history n*W | chunk T]. Decode: ring records."""
    ring_positions: torch.Tensor
    """[T] flat compression-state row `state * C + pos % C` of each row, -1 = not stored."""
    ratios: dict[int, RatioPlan] = field(default_factory=dict)
    # Prefill only.
    swa_history: torch.Tensor | None = None
    """[n*W] ring records of the W positions before each chunk, -1 = zero row."""
    consumer: ConsumerPlan | None = None
    """The plan of consumer layers when a truncation mode is on; None = they see what the others see."""
    # Decode only.
    block_tables: torch.Tensor | None = None
    """[T, B] block ids of the row's sequence, 0 padded."""
    max_klen: dict[int, int] = field(default_factory=dict)
    """ratio -> a bound of klen, known on the host (no device read is needed to size buffers): the largest
    klen itself, or in a decode step of fixed shape what the columns of the block table can hold."""
    # On the host.
    max_length: int = 0
    """All positions lie below this."""
    all_valid: bool = True
    """Whether the step has no placeholder row."""
    sequence_rows: list[int] = field(default_factory=list)
    """Prefill: `cu_q`."""
    extras: list[torch.Tensor] = field(default_factory=list)
    """What the caller sent along."""
    expansion: DecodeExpansion | None = None
    """Decode: how the other index tensors follow from what was sent."""

    def expand(self) -> None:
        """Decode: compute on the device what follows from the arrays that were sent; once when the step is
        built, and again as the first part of a captured graph (spec/engine.md §8.3)."""
        assert self.expansion is not None
        self.expansion.apply(self)


@dataclass(slots=True)
class DecodeExpansion:
    """What a decode step's rows follow from: positions and sequences of the step, and these arrays of its
    sequences. The host sends no more than that (spec/engine.md §8.3)."""

    window: int
    ring_rows: int
    state_rows: int
    block_tokens: int
    ratios: tuple[int, ...]
    states: torch.Tensor
    """[n] state slots."""
    tables: torch.Tensor
    """[n, B]."""
    one_row_each: bool
    """Whether sequences and rows are the same."""
    short: torch.Tensor | None
    """[X] rows that see fewer keys than the window holds; None = any may (steps of fixed shape)."""
    valid: torch.Tensor | None
    """[T] int64, 0 on placeholder rows."""

    def apply(self, meta: StepMetadata) -> None:
        pos_T, seq_T = meta.positions, meta.seq_of_row
        meta.last_rows = meta.cu_q[1:] - 1
        if self.valid is None:
            meta.valid = torch.ones(len(pos_T), dtype=torch.bool, device=pos_T.device)
        else:
            meta.valid = self.valid.bool()
        # Rows of a sequence share its table: one copy went up, the device spreads it.
        if self.one_row_each:
            tables_TB, state_T = self.tables, self.states
        else:
            tables_TB, state_T = self.tables.index_select(0, seq_T), self.states.index_select(0, seq_T)
        meta.block_tables = tables_TB
        base_T = state_T * self.ring_rows
        meta.swa_store = base_T + pos_T % self.ring_rows
        meta.swa_keys = self._window_keys(pos_T, base_T)
        state_base_T = state_T * self.state_rows
        meta.ring_positions = state_base_T + pos_T % self.state_rows
        page_T = pos_T // self.block_tokens
        at_T = pos_T - page_T * self.block_tokens
        block_T = tables_TB.gather(1, page_T.unsqueeze(1)).squeeze(1)
        for ratio in self.ratios:
            meta.ratios[ratio] = self._ratio_plan(ratio, meta, state_base_T, block_T, at_T)

    def _window_keys(self, pos_T: torch.Tensor, base_T: torch.Tensor) -> torch.Tensor:
        first_T = (pos_T - (self.window - 1)).clamp_(min=0) % self.ring_rows
        keys_TW = _ring_windows(self.window, self.ring_rows, pos_T.device).index_select(0, first_T)
        keys_TW.add_(base_T.unsqueeze(1))
        column = torch.arange(self.window, device=pos_T.device)
        if self.short is None:
            keys_TW.masked_fill_(column > pos_T.unsqueeze(1), -1)
        elif len(self.short):
            cut = keys_TW.index_select(0, self.short)
            cut.masked_fill_(column > pos_T.index_select(0, self.short).unsqueeze(1), -1)
            keys_TW.index_copy_(0, self.short, cut)
        return keys_TW

    def _ratio_plan(
        self,
        ratio: int,
        meta: StepMetadata,
        state_base_T: torch.Tensor,
        block_T: torch.Tensor,
        at_T: torch.Tensor,
    ) -> RatioPlan:
        pos_T = meta.positions
        rows_T = torch.arange(len(pos_T), device=pos_T.device)
        if ratio == 1:
            slots_T = block_T * self.block_tokens + at_T
            return RatioPlan(1, pos_T, slots_T, pos_T + 1, meta.ring_positions.unsqueeze(1), closing=rows_T)
        # A row that closes a group lies in its entry's block: the block is a multiple of the group.
        klen_T = (pos_T + 1) // ratio
        open_T = klen_T * ratio != pos_T + 1
        first_T = (klen_T - 1) * ratio
        slots_T = block_T * (self.block_tokens // ratio) + at_T // ratio
        member = torch.arange(ratio, device=pos_T.device)
        members_Tr = (first_T.unsqueeze(1) + member) % self.state_rows + state_base_T.unsqueeze(1)
        return RatioPlan(
            ratio,
            entry_positions=first_T.masked_fill_(open_T, 0),
            entry_slots=slots_T.masked_fill_(open_T, -1),
            klen=klen_T,
            entry_ring=members_Tr.masked_fill_(open_T.unsqueeze(1), -1),
            closing=rows_T if self.short is None else rows_T[~open_T],
        )


@functools.lru_cache(maxsize=16)
def _ring_windows(window: int, ring_rows: int, device: torch.device) -> torch.Tensor:
    """int64 [S, W]: ring offsets of W consecutive positions, the first at offset f; row f."""
    with torch.inference_mode(False):
        first = torch.arange(ring_rows, device=device).unsqueeze(1)
        return (first + torch.arange(window, device=device)) % ring_rows
