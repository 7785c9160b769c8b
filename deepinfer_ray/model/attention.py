"""One layer's attention: projections, window ring, compressed entries, output (attention spec §2–§8).

Knows: the order of operations of a layer in prefill and decode (attention spec §12.1), rounding points 7–17.
Does not know: hyper-connections, index plans (they come with the step), how records are stored.

Shape letters: T rows, D hidden size, H heads, d head dimension, R rotated dimensions, W window columns,
K selected entries, G output groups.
"""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_ray.config.hf import LayerSpec, TextConfig
from deepinfer_ray.model.compressor import Compressor
from deepinfer_ray.model.indexer import Indexer, IndexKeys
from deepinfer_ray.model.step import Rotation, Selection, StepContext
from deepinfer_ray.ops.attention import sparse_attention, sparse_attention_blocks
from deepinfer_ray.ops.linear import linear, quantized_linear, rounded_grouped_linear
from deepinfer_ray.ops.norm import rounded_rms_norm
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import rotate_tail

GATHER_BYTES = 64 << 20
"""Memory for the gathered keys of one tile of rows; tiles do not change any bit."""


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Attention(nn.Module):
    """Attention of one backbone layer. Projections of the same input are fused by rows."""

    def __init__(self, text: TextConfig, layer: LayerSpec, numerics: Numerics, columns: int) -> None:
        """columns: width of the selection (0 for a window-only layer)."""
        super().__init__()
        D, H, d, G = text.hidden_size, text.num_attention_heads, text.head_dim, text.o_groups
        self.layer, self.index, self.ratio, self.numerics = layer, layer.index, layer.ratio, numerics
        self.heads, self.dim, self.groups, self.eps = H, d, G, text.rms_norm_eps
        self.q_rank, self.rope_dim = text.q_lora_rank, text.qk_rope_head_dim
        self.scale = d**-0.5
        index_dim = text.index_n_heads * text.index_head_dim if layer.is_index_source else 0
        self.wq_a_wkv = _weight(text.q_lora_rank + d, D)
        self.wq_b = _weight(H * d + index_dim, text.q_lora_rank)
        self.q_norm = _weight(text.q_lora_rank)
        self.kv_norm = _weight(d)
        self.attn_sink = _weight(H)
        self.wo_a = _weight(G, H // G * d, text.o_lora_rank)
        self.wo_b = _weight(D, G * text.o_lora_rank)
        # Unquantized projections of the un-quantized input: [wgate; compressor.wkv; weights_proj].
        self.entry_rows = d * layer.ratio if layer.is_kv_source else 0
        head_rows = text.index_n_heads if layer.is_index_source else 0
        self.side = _weight(self.entry_rows + head_rows, D) if self.entry_rows + head_rows else None
        self.compressor = Compressor(text, layer, numerics) if layer.is_kv_source else None
        self.index_keys = IndexKeys(text, layer, numerics) if layer.is_index_k_source else None
        self.indexer = Indexer(text, layer, numerics, columns) if layer.is_index_source else None

    def forward(self, v_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, D] output of the layer's attention for normed input v; caches are read and written."""
        nx, rows = self.numerics, v_TD.shape[0]
        side = None if self.side is None else linear(v_TD, self.side)
        if self.compressor is not None and side is not None:
            self._store_entries(self._entry_projection(side, ctx), ctx)

        q_kv = quantized_linear(v_TD, self.wq_a_wkv, nx)
        q_low = rounded_rms_norm(q_kv[:, : self.q_rank], self.q_norm, self.eps, nx)
        latent = rounded_rms_norm(q_kv[:, self.q_rank :], self.kv_norm, self.eps, nx)
        q_all = quantized_linear(q_low, self.wq_b, nx)
        width = self.heads * self.dim
        q_THd = q_all[:, :width].view(rows, self.heads, self.dim)
        # Queries and the window latent turn by the same angles: the latent goes along as one more head.
        cos, sin = ctx.compressed if self.ratio else ctx.plain
        turned = rotate_tail(torch.cat((q_THd, latent.unsqueeze(1)), dim=1), cos, sin, nx)
        q_THd, latent = turned[:, : self.heads], turned[:, self.heads]

        if self.indexer is not None:
            assert side is not None
            q_index = q_all[:, width:].view(rows, self.indexer.heads, self.indexer.dim)
            self.indexer(q_index, nx.b(side[:, self.entry_rows :]), ctx)
        o_THd = nx.b(self._attend(q_THd, latent, ctx))
        return self._project(o_THd, ctx.compressed_back if self.ratio else ctx.plain_back)

    def _entry_projection(self, side: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """[T, ratio · d] scores and latents of all rows of the step, whoever computed them."""
        share, projected = ctx.share, side[:, : self.entry_rows]
        if ctx.entry_input is not None:
            assert self.side is not None
            share, projected = ctx.entry_share, linear(ctx.entry_input, self.side[: self.entry_rows])
        # Latents of ratio 1 are rounded next; scores and latents of ratio 2 are pooled as they are.
        return projected if share is None else share.gather(projected, share.rounded and self.ratio == 1)

    def _store_entries(self, projected: torch.Tensor, ctx: StepContext) -> None:
        assert self.compressor is not None
        if self.ratio == 2:
            projected = projected.view(-1, 2, self.dim)
        latents = self.compressor(projected, ctx)
        if latents is not None and self.index_keys is not None:
            self.index_keys(latents, ctx)

    def _attend(self, q_THd: torch.Tensor, latent_Td: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        window, window_rows = self._window(latent_Td, ctx)
        selection = ctx.selection if self.ratio else None
        rows, width = ctx.window_index.shape
        columns = width + (0 if selection is None else selection.index.shape[1])
        tile = max(1, GATHER_BYTES // (4 * self.dim * columns))
        if rows <= tile:
            return self._attend_rows(q_THd, window, window_rows, selection, slice(0, rows), ctx)
        parts = [
            self._attend_rows(q_THd, window, window_rows, selection, slice(start, start + tile), ctx)
            for start in range(0, rows, tile)
        ]
        return torch.cat(parts)

    def _window(self, latent_Td: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(buffer that holds the window keys or None = the ring, index [T, W] into it); stores the rows.

        Prefill reads the ring before the chunk overwrites it, and sees its own rows as they will be read
        back; decode stores first, so that rows of one verification see each other.
        """
        pools, meta = ctx.pools, ctx.meta
        if not meta.is_prefill:
            pools.store_window_rows(self.index, latent_Td, ctx.window_store)
            return None, ctx.window_index
        assert meta.swa_history is not None
        latent_Td = ctx.whole(latent_Td)
        history = pools.load_window(self.index, meta.swa_history)
        buffer = torch.cat((history, self.numerics.q8(latent_Td), latent_Td.new_zeros(1, self.dim)))
        pools.store_window_rows(self.index, latent_Td, ctx.window_store)
        return buffer, ctx.window_index

    def _attend_rows(
        self,
        q_THd: torch.Tensor,
        buffer: torch.Tensor | None,
        window_index: torch.Tensor,
        selection: Selection | None,
        rows: slice,
        ctx: StepContext,
    ) -> torch.Tensor:
        """Attention of a tile of rows; every row gathers its own keys."""
        if buffer is None:
            window = ctx.pools.load_window_rows(self.index, window_index[rows])
        else:
            window = buffer[window_index[rows]]
        entries, bias = None, None
        if selection is not None:
            entries, bias = self._entries(selection, rows, ctx), selection.bias[rows]
        attend = sparse_attention_blocks if self.numerics.reference else sparse_attention
        return attend(q_THd[rows], window, ctx.window_bias[rows], entries, bias, self.attn_sink, self.scale)

    def _entries(self, selection: Selection, rows: slice, ctx: StepContext) -> torch.Tensor:
        """[rows, K, d] selected entries of the KV source."""
        source = self.layer.kv_source
        assert source is not None
        total = selection.index.shape[0]
        whole = rows.start == 0 and rows.stop >= total
        if whole and source in selection.keys:
            return selection.keys[source]
        index = selection.index[rows]
        if ctx.meta.is_prefill:
            keys = self._gathered(source, ctx)[index]
        else:
            keys = ctx.pools.load_entries(source, index)
        if whole:
            selection.keys[source] = keys
        return keys

    def _gathered(self, source: int, ctx: StepContext) -> torch.Tensor:
        """Prefill: entries of all sequences' prefixes, loaded once per source; index -1 is the zero row."""
        if source not in ctx.gathered:
            slots = ctx.meta.ratios[self.ratio].load_slots
            assert slots is not None
            entries = ctx.pools.load_entries(source, slots)
            ctx.gathered[source] = torch.cat((entries, entries.new_zeros(1, self.dim)))
        return ctx.gathered[source]

    def _project(self, o_THd: torch.Tensor, back: Rotation) -> torch.Tensor:
        nx, rows = self.numerics, o_THd.shape[0]
        # Values are keys and carry their rotation: turn the sum back by the query's angle.
        o_THd = rotate_tail(o_THd, *back, nx)
        if not nx.reference:
            o_THd = nx.q8(o_THd)
        z_TGO = rounded_grouped_linear(o_THd.view(rows, self.groups, -1), self.wo_a, nx)
        return quantized_linear(z_TGO.reshape(rows, -1), self.wo_b, nx)
