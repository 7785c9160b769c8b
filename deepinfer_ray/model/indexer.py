"""The indexer: index keys of a source, query scores, the selection of a segment (attention spec §5, §6).

Knows: which keys a row may see and how prefill and decode reach them. Does not know: main entries' bytes.

Shape letters: T rows, E entry rows, h index heads, c index head dimension, N entries, K selected, B blocks.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from deepinfer_ray.config.hf import LayerSpec, TextConfig
from deepinfer_ray.model.step import Selection, StepContext
from deepinfer_ray.ops import index as ops
from deepinfer_ray.ops.attention import validity_bias
from deepinfer_ray.ops.linear import round_up, rounded_linear
from deepinfer_ray.ops.norm import rounded_rms_norm
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import rotate_tail

SCORE_BYTES = 256 << 20
"""Memory for one tile of query rows times heads times keys; tiles do not change any bit."""


class IndexKeys(nn.Module):
    """Index keys of an index-key source, from the un-rotated compressed latents."""

    def __init__(self, text: TextConfig, layer: LayerSpec, numerics: Numerics) -> None:
        super().__init__()
        self.layer, self.ratio, self.numerics, self.eps = (
            layer.index,
            layer.ratio,
            numerics,
            text.rms_norm_eps,
        )
        self.wk = nn.Parameter(torch.empty(text.index_head_dim, text.head_dim), requires_grad=False)
        self.k_norm = nn.Parameter(torch.empty(text.index_head_dim), requires_grad=False)

    def forward(self, latent_Ed: torch.Tensor, ctx: StepContext) -> None:
        """Project, norm, rotate and store the keys of this step's entries."""
        nx, plan = self.numerics, ctx.entries[self.ratio]
        keys = rounded_rms_norm(rounded_linear(latent_Ed, self.wk, nx), self.k_norm, self.eps, nx)
        cos, sin = plan.rotation
        ctx.pools.store_index_keys(self.layer, rotate_tail(keys, cos, sin, self.numerics), plan.slots)


class Indexer(nn.Module):
    """Scores and selects for one index source. Its projections are fused into the attention's."""

    def __init__(self, text: TextConfig, layer: LayerSpec, numerics: Numerics, columns: int) -> None:
        """columns: width of the selection, `min(index_topk, entries a sequence can have)`."""
        super().__init__()
        assert layer.index_k_source is not None
        self.layer, self.ratio, self.numerics = layer, layer.ratio, numerics
        self.key_source = layer.index_k_source
        self.columns = columns
        self.heads, self.dim = text.index_n_heads, text.index_head_dim
        self.blocks, self.block_size = text.candidate_topk_blocks, text.candidate_block_size

    def forward(self, q_Thc: torch.Tensor, weights_Th: torch.Tensor, ctx: StepContext) -> Selection:
        """Select entries for every row and publish them (and the candidate blocks, if this layer owns them).

        q: projected index queries, not yet rotated. weights: head weights, rounded. Rows with at most
        `columns` visible entries take all of them, so nothing is scored when every row is that short.
        """
        klen, longest = ctx.meta.ratios[self.ratio].klen, ctx.max_klen[self.ratio]
        source = self.layer.is_candidate_source
        overflow = source and longest > self.blocks * self.block_size
        if source:
            ctx.candidates = None
        if longest <= self.columns and not overflow:
            columns = torch.arange(self.columns, device=klen.device)
            entries = columns.masked_fill(columns >= klen.unsqueeze(1), -1)
        else:
            q_Thc, weights_Th = self._queries(q_Thc, weights_Th, ctx)
            if self.layer.reads_candidates and ctx.candidates is not None and not ctx.meta.is_prefill:
                entries = self._select_compact(q_Thc, weights_Th, ctx)
            else:
                entries = self._select_dense(q_Thc, weights_Th, ctx)
        ctx.note(f"layers.{self.layer.index}.topk", entries)
        return self._publish(entries, ctx)

    def _queries(
        self, q_Thc: torch.Tensor, weights_Th: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = ctx.compressed
        q_Thc = rotate_tail(q_Thc, cos, sin, self.numerics)
        if self.numerics.reference:
            weights_Th = self.numerics.b(weights_Th * (self.dim * self.heads) ** -0.5)
        return self.numerics.q4_index(q_Thc), weights_Th

    def _score(self, q_Thc: torch.Tensor, weights_Th: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        score = ops.index_scores_rounded if self.numerics.reference else ops.index_scores
        tile = max(1, SCORE_BYTES // (4 * self.heads * max(1, keys.shape[-2])))
        if q_Thc.shape[0] <= tile:
            return score(q_Thc, weights_Th, keys)
        parts = []
        for start in range(0, q_Thc.shape[0], tile):
            rows = slice(start, start + tile)
            own = keys if keys.dim() == 2 else keys[rows]
            parts.append(score(q_Thc[rows], weights_Th[rows], own))
        return torch.cat(parts)

    def _select_dense(self, q_Thc: torch.Tensor, weights_Th: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        klen = ctx.meta.ratios[self.ratio].klen
        scores = self._dense_scores(q_Thc, weights_Th, ctx)
        if self.layer.is_candidate_source and ctx.max_klen[self.ratio] > self.blocks * self.block_size:
            ctx.candidates = ops.candidate_blocks(scores, klen, self.blocks, self.block_size)
        elif self.layer.reads_candidates and ctx.candidates is not None:
            visible = torch.arange(scores.shape[1], device=klen.device) < klen.unsqueeze(1)
            inside = ops.candidate_mask(ctx.candidates, scores.shape[1], self.block_size)
            return ops.select_top(scores, visible & inside, self.columns)
        return ops.select_visible(scores, klen, self.columns)

    def _dense_scores(self, q_Thc: torch.Tensor, weights_Th: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, N] scores of all visible entries; columns behind a row's klen are finite or -inf."""
        if not ctx.meta.is_prefill:
            keys = ctx.pools.load_index_keys(self.key_source, ctx.visible_slots(self.ratio))
            return self._score(q_Thc, weights_Th, keys)
        plan = ctx.meta.ratios[self.ratio]
        assert plan.load_slots is not None
        keys = ctx.pools.load_index_keys(self.key_source, plan.load_slots)
        scores = q_Thc.new_full((q_Thc.shape[0], round_up(max(1, ctx.max_klen[self.ratio]))), float("-inf"))
        bounds = itertools.pairwise(ctx.meta.sequence_rows)
        for (first, end), (start, length) in zip(bounds, plan.spans, strict=True):
            if first == end or not length:
                continue
            own = keys[start : start + length]
            scores[first:end, : own.shape[0]] = self._score(q_Thc[first:end], weights_Th[first:end], own)
        return scores

    def _select_compact(
        self, q_Thc: torch.Tensor, weights_Th: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        """Decode: score only the entries inside the candidate blocks."""
        assert ctx.candidates is not None
        klen = ctx.meta.ratios[self.ratio].klen
        entries = ops.candidate_entries(ctx.candidates, klen, self.block_size)
        keys = ctx.pools.load_index_keys(self.key_source, ctx.entry_slots(self.ratio, entries))
        lengths = (entries >= 0).sum(1)
        picked = ops.select_visible(self._score(q_Thc, weights_Th, keys), lengths, self.columns)
        return entries.gather(1, picked.clamp_min(0)).masked_fill(picked < 0, -1)

    def _publish(self, entries_TK: torch.Tensor, ctx: StepContext) -> Selection:
        if ctx.meta.is_prefill:
            present = entries_TK >= 0
            ks = ctx.meta.ratios[self.ratio].ks
            assert ks is not None
            index = (entries_TK + ks.unsqueeze(1)).masked_fill(~present, -1)
            bias = validity_bias(present)
        else:
            index, bias = ctx.entry_slots_and_bias(self.ratio, entries_TK)
        ctx.selection = Selection(entries_TK, index, bias)
        return ctx.selection
