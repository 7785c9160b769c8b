"""From logit rows to tokens: distribution transform, random selection, log-probabilities.

Knows: flat rows of float32 logits and how each is to be sampled (spec/speculative.md §5.2–5.8). Does not
know: sequences, drafts, prefill or decode. Row-local throughout: every reduction has a fixed order inside
its row, so a row's token and log-probabilities do not depend on the batch around it. Nothing here reads a
device value on the host.

Shape letters: N rows, V vocabulary, m alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from deepinfer_ray.cache.transfer import Staging
from deepinfer_ray.engine.diagnostics import sum_smaller
from deepinfer_ray.engine.logits_processors import MASK_BYTES, NEGATIVE_INFINITY, LogitEdits, TokenMasks
from deepinfer_ray.engine.philox import CASE_SAMPLE, random_words
from deepinfer_ray.engine.request import GREEDY_TEMPERATURE

FIXED_POINT = 2**31
"""Probabilities are compared and drawn as integers `floor(p * 2^31)`."""

LOGPROB_FLOOR = -9999.0
"""Lowest log-probability ever returned."""

_SUM_CHUNK = 8192
_MIN_STRIDED_VOCAB = 8192
_TRAVERSAL_STRIDE = 2048
_DRAWN_WORDS = 64
"""Words tried per row. One is refused with probability < 1/2, so all are with < 2^-64; a data-dependent
loop would make the host wait for the device."""


@dataclass(slots=True)
class SampleRows:
    """How N flat rows are sampled; host arrays [N].

    temperature, top_p, min_p: float32. top_k: int32, -1 = off. seeds: int64 bit patterns. positions: int64
    sample positions (spec/speculative.md §5.5). top_logprobs: int32 alternatives wanted, -1 = not even the
    token's own log-probability.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    top_logprobs: np.ndarray
    edits: LogitEdits | None = None
    forced: np.ndarray | None = None
    masks: TokenMasks | None = None
    diagnose: bool = False
    """Whether `SampleOutput.smaller` is wanted, of all rows."""

    def padded(self, count: int) -> SampleRows:
        """With further rows up to `count` whose greedy tokens nobody wants (spec/engine.md §8.6)."""
        missing = count - len(self.temperature)
        if missing == 0:
            return self

        def more(column: np.ndarray, value: float) -> np.ndarray:
            return np.concatenate([column, np.full(missing, value, column.dtype)])

        return SampleRows(
            temperature=more(self.temperature, 0.0),
            top_p=more(self.top_p, 1.0),
            top_k=more(self.top_k, -1),
            min_p=more(self.min_p, 0.0),
            seeds=more(self.seeds, 0),
            positions=more(self.positions, 0),
            top_logprobs=more(self.top_logprobs, -1),
            edits=self.edits,
            forced=None if self.forced is None else more(self.forced, -1),
            masks=self.masks,
            diagnose=self.diagnose,
        )

    def part(self, start: int, stop: int) -> SampleRows:
        """Rows [start, stop), without edits and masks."""
        rows = slice(start, stop)
        return SampleRows(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            top_logprobs=self.top_logprobs[rows],
            forced=None if self.forced is None else self.forced[rows],
            diagnose=self.diagnose,
        )

    @property
    def greedy(self) -> np.ndarray:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filtered(self) -> np.ndarray:
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)


@dataclass(slots=True)
class SampleOutput:
    """tokens: int64 [N]. bad: bool [N], rows without a usable distribution (NaN, +inf or nothing allowed).
    logprobs: float32 [N]. top_ids int64 and top_logprobs float32 [N, m], descending, ties by lower id.
    smaller: float32 [N], see `diagnostics.sum_smaller`."""

    tokens: torch.Tensor
    bad: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    smaller: torch.Tensor | None = None


class Draw(Protocol):
    """How the tokens of rows that are not greedy are drawn."""

    def __call__(
        self,
        group: RowGroup,
        logits_MV: torch.Tensor,
        logprobs_MV: torch.Tensor,
        seeds_M: torch.Tensor,
        positions_M: torch.Tensor,
    ) -> torch.Tensor:
        """int64 [M] tokens. group: which rows of the whole batch these are; logprobs: their processed
        distributions."""
        ...


def draw_fresh(
    group: RowGroup,
    logits_MV: torch.Tensor,
    logprobs_MV: torch.Tensor,
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
) -> torch.Tensor:
    """Tokens of the distributions themselves."""
    return draw_from(fixed_point_weights(logprobs_MV), seeds_M, positions_M, CASE_SAMPLE)


def draw_from(
    weights_MV: torch.Tensor, seeds_M: torch.Tensor, positions_M: torch.Tensor, case: int
) -> torch.Tensor:
    """int64 [M]: one token of each row's fixed-point weights by its stream of random words."""
    return select(weights_MV, random_words(seeds_M, positions_M, case, _DRAWN_WORDS))


def sample(
    logits_NV: torch.Tensor,
    rows: SampleRows,
    blacklist: torch.Tensor | None = None,
    staging: Staging | None = None,
    *,
    whole: bool | None = None,
    draw: Draw = draw_fresh,
    shift: torch.Tensor | None = None,
    best: int = 0,
) -> SampleOutput:
    """One token per row. `logits_NV` float32 is changed in place by masks and edits.

    staging: how columns reach the logits' device, by default afresh. whole: compute all rows in every way
    that some row needs and pick, so that no shape depends on who asked for what; by default on every device
    but a CPU. The same bits either way on a CPU. shift: int64 [N] added to the rows' positions. best: see
    `keep_best`; 0 = all.
    """
    staging = staging or Staging(logits_NV.device)
    mask_logits(logits_NV, rows, blacklist, staging, best)
    peak_N, tokens_N = logits_NV.max(dim=-1)
    output = SampleOutput(tokens_N, ~torch.isfinite(peak_N))
    forced_N = None
    if rows.forced is not None:
        (forced_N,) = staging.send([rows.forced])
        output.tokens = torch.where(forced_N >= 0, forced_N, tokens_N)
    greedy, wants = rows.greedy, (rows.top_logprobs >= 0) | rows.diagnose
    if greedy.all() and not wants.any():
        return output
    if rows.diagnose:
        output.smaller = torch.zeros_like(peak_N)

    if wants.any():
        width = max(0, min(int(rows.top_logprobs.max()), logits_NV.shape[1]))
        output.logprobs = torch.zeros_like(peak_N)
        if width > 0:
            output.top_ids = tokens_N.new_zeros((len(tokens_N), width))
            output.top_logprobs = peak_N.new_zeros((len(peak_N), width))
    filtered = rows.filtered
    masks = [greedy & wants, ~greedy & ~filtered, ~greedy & filtered]
    masks = [mask for mask in masks if mask.any()]
    whole = logits_NV.device.type != "cpu" if whole is None else whole
    columns, groups = _send(rows, masks, staging, whole)
    if shift is not None:
        columns.positions = columns.positions + shift
    for members, group in zip(masks, groups, strict=True):
        _sample_group(logits_NV, rows, columns, members, group, output, draw, forced_N)
    return output


def mask_logits(
    logits_NV: torch.Tensor,
    rows: SampleRows,
    blacklist: torch.Tensor | None,
    staging: Staging,
    best: int = 0,
) -> None:
    """Bans of the engine, what the rows' requests change (grammars first), then `keep_best`, in place."""
    if blacklist is not None:
        logits_NV.index_fill_(1, blacklist, NEGATIVE_INFINITY)
    if rows.masks is not None:
        rows.masks.apply(logits_NV, staging)
    if rows.edits:
        rows.edits.apply(logits_NV, staging)
    if 0 < best < logits_NV.shape[1]:
        keep_best(logits_NV, best)


def keep_best(logits_NV: torch.Tensor, count: int) -> None:
    """All but the `count` largest logits of each row to minus infinity, in place; of equals the lower ids
    stay (spec/speculative.md §5.7). What comes after sees those alone, the normaliser too. Ids stay what they
    are, so a draft outside the target's best has probability 0 and is rejected. NaN stays.
    """
    step = max(1, MASK_BYTES // (8 * logits_NV.shape[1]))
    for part_MV in logits_NV.split(step):
        least_M1 = part_MV.topk(count, dim=-1).values[:, -1:]
        equal_MV = part_MV == least_M1
        room_M1 = count - (part_MV > least_M1).sum(-1, keepdim=True)
        dropped_MV = (part_MV < least_M1) | (equal_MV & (equal_MV.cumsum(-1) > room_M1))
        part_MV.masked_fill_(dropped_MV, NEGATIVE_INFINITY)


@dataclass(slots=True)
class _Columns:
    """`SampleRows` on the device; float32 and int64 [N]."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(slots=True)
class RowGroup:
    """Which rows are meant: the listed ones, or, computed with all others, those under a mask."""

    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    listed: RowGroup | None = None
    """Those of the group whose alternatives are wanted, by row of the group (`inner`) and by logit row."""
    inner: torch.Tensor | None = None

    def take(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`target` with the group's rows replaced."""
        if self.index is not None:
            return target.index_copy(0, self.index, values)
        if self.mask is not None:
            return torch.where(self.mask.view(-1, *[1] * (values.dim() - 1)), values, target)
        return values


def _send(
    rows: SampleRows, masks: list[np.ndarray], staging: Staging, whole: bool
) -> tuple[_Columns, list[RowGroup]]:
    """The columns and one group for each mask, all in one copy."""
    arrays = [rows.temperature, rows.top_p, rows.min_p, rows.top_k, rows.seeds, rows.positions]
    wants = rows.top_logprobs > 0
    for members in masks:
        listed = members & wants
        if whole:
            arrays += [members, listed]
        else:
            arrays += [np.flatnonzero(part) for part in (members, listed, listed[members])]
    tensors = iter(staging.send(arrays))
    columns = _Columns(*(next(tensors) for _ in range(6)))
    groups = []
    for members in masks:
        group, listed_group = (
            RowGroup(mask=next(tensors).bool()) if whole else RowGroup(index=next(tensors)) for _ in range(2)
        )
        inner = None if whole else next(tensors)
        if members.all():
            group = RowGroup()
        if (members & wants).any():
            group.listed, group.inner = listed_group, inner
        groups.append(group)
    return columns, groups


def _sample_group(
    logits_NV: torch.Tensor,
    rows: SampleRows,
    columns: _Columns,
    members: np.ndarray,
    group: RowGroup,
    output: SampleOutput,
    draw: Draw,
    forced_N: torch.Tensor | None,
) -> None:
    """Rows of one kind: all greedy, all unfiltered or all filtered."""
    block_MV, one = group.take(logits_NV), int(members.argmax())
    if rows.greedy[one]:
        logprobs_MV = log_distribution(block_MV)
        tokens_M = group.take(output.tokens)
    else:
        logprobs_MV = log_distribution(block_MV, group.take(columns.temperature))
        if rows.filtered[one]:
            logprobs_MV = filter_distribution(
                block_MV,
                logprobs_MV,
                group.take(columns.top_p),
                group.take(columns.top_k),
                group.take(columns.min_p),
            )
        seeds, positions = group.take(columns.seeds), group.take(columns.positions)
        tokens_M = draw(group, block_MV, logprobs_MV, seeds, positions)
        if forced_N is not None:
            forced_M = group.take(forced_N)
            tokens_M = torch.where(forced_M >= 0, forced_M, tokens_M)
        output.tokens = group.put(output.tokens, tokens_M)
    if output.logprobs is not None:
        chosen_M1 = logprobs_MV.gather(1, tokens_M[:, None])
        output.logprobs = group.put(output.logprobs, chosen_M1[:, 0].clamp_min(LOGPROB_FLOOR))
    if output.smaller is not None:
        output.smaller = group.put(output.smaller, sum_smaller(logprobs_MV, tokens_M))
    if group.listed is not None and output.top_ids is not None and output.top_logprobs is not None:
        listed_LV = logprobs_MV if group.inner is None else logprobs_MV.index_select(0, group.inner)
        values, ids = listed_LV.sort(dim=-1, descending=True, stable=True)
        width = output.top_ids.shape[1]
        output.top_ids = group.listed.put(output.top_ids, ids[:, :width])
        output.top_logprobs = group.listed.put(
            output.top_logprobs, values[:, :width].clamp_min(LOGPROB_FLOOR)
        )


def row_sum(values_NV: torch.Tensor) -> torch.Tensor:
    """float32 [N, 1] sums in an order that depends on V alone.

    Chunks keep torch from splitting a single long row over threads, which it does only when N is 1.
    """
    size = values_NV.shape[-1]
    if size <= _SUM_CHUNK:
        return values_NV.sum(-1, keepdim=True)
    padded = F.pad(values_NV, (0, -size % _SUM_CHUNK))
    return padded.unflatten(-1, (-1, _SUM_CHUNK)).sum(-1).sum(-1, keepdim=True)


def log_distribution(logits_NV: torch.Tensor, temperature_N: torch.Tensor | None = None) -> torch.Tensor:
    """`lp_v = (l_v - max) / T - log Σ exp((l - max) / T)`, float32 [N, V]; T = 1 without temperatures."""
    shifted_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    if temperature_N is not None:
        shifted_NV = shifted_NV * (1.0 / temperature_N[:, None])
    return shifted_NV - row_sum(shifted_NV.exp()).log()


def filter_distribution(
    logits_NV: torch.Tensor,
    logprobs_NV: torch.Tensor,
    top_p_N: torch.Tensor,
    top_k_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    """Log-distribution after min-p, then top-p and top-k together, renormalised (spec/speculative.md §5.3).

    Tokens are ranked by logit descending, ties by lower id. One stays iff the fixed-point mass ranked before
    it is at most `top_p` and its rank is below `top_k`; both count on the distribution that min-p leaves.
    """
    floor_N1 = logprobs_NV.amax(-1, keepdim=True) + min_p_N[:, None].log()
    below_NV = logprobs_NV < floor_N1  # nothing where min_p is 0
    logprobs_NV = logprobs_NV.masked_fill(below_NV, NEGATIVE_INFINITY)
    mass_N1 = row_sum(logprobs_NV.exp())
    # A row without min-p keeps its bits: it was normalised already.
    logprobs_NV = torch.where(min_p_N[:, None] > 0, logprobs_NV - mass_N1.log(), logprobs_NV)

    survivors_NV = logits_NV.masked_fill(below_NV, NEGATIVE_INFINITY)
    order_NV = survivors_NV.sort(dim=-1, descending=True, stable=True).indices
    weights_NV = fixed_point_weights(logprobs_NV).gather(1, order_NV)
    before_NV = weights_NV.cumsum(-1) - weights_NV
    limit_N = (top_p_N.double() * FIXED_POINT).floor().long()
    limit_N = torch.where(top_p_N >= 1, torch.iinfo(torch.int64).max, limit_N)
    vocab = logits_NV.shape[-1]
    ranks_N = torch.where(top_k_N > 0, top_k_N.long(), vocab)
    kept_NV = (before_NV <= limit_N[:, None]) & (
        torch.arange(vocab, device=logits_NV.device) < ranks_N[:, None]
    )
    dropped_NV = torch.ones_like(kept_NV).scatter(1, order_NV, ~kept_NV)
    logprobs_NV = logprobs_NV.masked_fill(dropped_NV, NEGATIVE_INFINITY)
    return logprobs_NV - row_sum(logprobs_NV.exp()).log()


def fixed_point_weights(logprobs_NV: torch.Tensor) -> torch.Tensor:
    """`floor(exp(lp) * 2^31)` as int64; NaN counts as 0."""
    return (logprobs_NV.exp() * float(FIXED_POINT)).nan_to_num(0.0, posinf=0.0).long()


def select(weights_NV: torch.Tensor, words_NK: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the token whose share of the total a random word hits (spec/speculative.md §5.4).

    weights: int64 [N, V] fixed-point. words: int64 [N, K] uniform 32-bit. The first word below the largest
    multiple of the total is taken modulo the total; tokens are passed in the order (v mod D, v div D).
    Rows of zero total give a token without meaning; their owners are flagged elsewhere.
    """
    vocab = weights_NV.shape[-1]
    stride = _TRAVERSAL_STRIDE if vocab >= _MIN_STRIDED_VOCAB else vocab
    grid_NED = F.pad(weights_NV, (0, -vocab % stride)).unflatten(-1, (-1, stride))
    columns_ND = grid_NED.sum(1)
    ends_ND = columns_ND.cumsum(-1)
    total_N1 = ends_ND[:, -1:].clamp_min(1)
    limit_N1 = (2**32 - 1) // total_N1 * total_N1
    usable_NK = words_NK < limit_N1
    first_N1 = usable_NK.to(torch.int8).argmax(-1, keepdim=True)
    remainder_N1 = words_NK.gather(1, first_N1) % total_N1

    column_N1 = (ends_ND <= remainder_N1).sum(-1, keepdim=True).clamp_max(stride - 1)
    inside_N1 = remainder_N1 - (ends_ND - columns_ND).gather(1, column_N1)
    depth = grid_NED.shape[1]
    stack_NE = grid_NED.gather(2, column_N1[:, :, None].expand(-1, depth, 1))[:, :, 0]
    level_N1 = (stack_NE.cumsum(-1) <= inside_N1).sum(-1, keepdim=True).clamp_max(depth - 1)
    return (level_N1 * stride + column_N1)[:, 0].clamp_max(vocab - 1)


def prompt_logprobs(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """float32 [N]: plain log-softmax (T = 1, no filter, no mask) of each row at its next token."""
    picked_N1 = log_distribution(logits_NV).gather(1, targets_N[:, None])
    return picked_N1[:, 0].clamp_min(LOGPROB_FLOOR)
