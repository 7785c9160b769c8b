"""The index plans of one step: which rows go in, what they may see, where their cache records live.

Knows: lengths, block tables, state slots, the cache geometry (spec/attention.md §11, spec/engine.md §8).
Does not know: requests, sampling, weights. Everything that a forward pass needs beside token ids is built
here and nowhere else.

Shape letters: n sequences, T query rows, G n-gram order, W window, R ring rows, r compression ratio.
All index tensors are int64 on the model's device (torch indexes with int64), -1 means "none".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class RatioPlan:
    """What one compression ratio needs in a step (spec/attention.md §4.3, §11)."""

    ratio: int
    entry_positions: torch.Tensor
    """[E] position (first token) of every entry row produced; 0 on rows that produce none."""
    entry_slots: torch.Tensor
    """[E] pool slot `block * (128/r) + offset` of every entry row, -1 where nothing is produced."""
    klen: torch.Tensor
    """[T] entries visible to each query row: floor((pos+1)/r)."""
    # Prefill only.
    entry_rows: torch.Tensor | None = None
    """[E, r] row of the step's new tokens that each member of the group comes from, -1 = from the ring."""
    entry_ring: torch.Tensor | None = None
    """[E, r] flat ring row `slot * C + pos % C` of members that precede this chunk, -1 = from the step."""
    load_slots: torch.Tensor | None = None
    """[K] pool slots of the gathered prefix of all sequences, -1 = a zero row; K = sum max(1, floor(k/r))."""
    ks: torch.Tensor | None = None
    """[T] first gathered row of the query row's sequence."""


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
    """[T, G] compressed ids of the tokens at pos, pos-1, …; see spec/model.md §3.4."""
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
    """[T] ring record `state * R + pos % R`, -1 = not stored (only the last R rows of a chunk are)."""
    swa_keys: torch.Tensor
    """[T, W] window keys, oldest first, -1 padded. Prefill: rows of the buffer
    [history n*W | chunk T]. Decode: ring records."""
    ring_positions: torch.Tensor
    """[T] flat compression-state row `state * C + pos % C` of each row, -1 = not stored."""
    ratios: dict[int, RatioPlan] = field(default_factory=dict)
    # Prefill only.
    swa_history: torch.Tensor | None = None
    """[n*W] ring records of the W positions before each chunk, -1 = zero row."""
    # Decode only.
    block_tables: torch.Tensor | None = None
    """[T, B] block ids of the row's sequence, 0 padded."""
    seq_rows_closing: dict[int, torch.Tensor] = field(default_factory=dict)
    """ratio -> [E'] rows that close a group (decode; every row for ratio 1)."""
