"""DeepSeek-V4.1's text stack: token rows in, hidden rows and logits out (model spec §3).

Knows: embedding, the two halves of the layer stack, the final mix. Does not know: requests, sampling, where
weights come from (`model/weights.py`), who owns cache blocks.

Shape letters: T rows, m residual copies, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_ray.cache.metadata import StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.hf import LayerSpec, ModelConfig
from deepinfer_ray.model.block import Block
from deepinfer_ray.model.drafter import DraftBlock, Drafter, DraftRequest
from deepinfer_ray.model.head import Head
from deepinfer_ray.model.row_share import RowShare
from deepinfer_ray.model.step import build_context
from deepinfer_ray.model.yoco import enter_consumers, run_layers
from deepinfer_ray.ops import native
from deepinfer_ray.ops.engram import EngramHash
from deepinfer_ray.ops.hyper_connections import rounded_collapse
from deepinfer_ray.ops.linear import round_up
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import RopeTable, inverse_frequencies, yarn_frequencies
from deepinfer_ray.parallel.engram_store import EngramStore
from deepinfer_ray.parallel.model_ranks import ModelRanks
from deepinfer_ray.parallel.rank_group import SingleRank


@dataclass(slots=True)
class ModelOutput:
    """Result of one forward pass."""

    hidden: torch.Tensor
    """[T, D] rows behind the final norm: input of `logits`; zeros where consumer layers dropped a row."""
    taps: torch.Tensor | None
    """[T, targets · D] inputs of the drafter's target layers, None unless asked for."""


class TextModel(nn.Module):
    """The backbone. Build it on the meta device; `model/weights.py` fills it."""

    def __init__(self, config: ModelConfig, numerics: Numerics, max_positions: int | None = None) -> None:
        """max_positions: bound of every position, by default `max_position_embeddings`.

        It also bounds the width of a selection, so equal bounds are part of bitwise equality.
        """
        super().__init__()
        text = config.text
        self.config, self.numerics = config, numerics
        self.max_positions = max_positions or text.max_position_embeddings
        self.embed = nn.Parameter(
            torch.empty(text.vocab_size, text.hidden_size, dtype=torch.bfloat16), requires_grad=False
        )
        self.blocks = nn.ModuleList(
            Block(config, layer, numerics, self._columns(layer)) for layer in config.topology.backbone
        )
        self.head = Head(text, numerics)
        self.engram_store: EngramStore | None = None
        self.ranks = ModelRanks()
        """Set by the loader: who computes the other rows of a prefill step."""
        self.drafter: Drafter | None = None
        """Set by the loader when drafts are wanted."""
        self._tables: tuple[RopeTable, RopeTable] | None = None
        self._hash: EngramHash | None = None

    def _columns(self, layer: LayerSpec) -> int:
        """Columns of the selection: no more than entries can exist, a constant of the model."""
        if layer.ratio == 0:
            return 0
        return min(self.config.text.index_topk, round_up(self.max_positions // layer.ratio))

    def prepare(self, device: torch.device | str = "cpu") -> None:
        """Build what is derived from the config alone; call once after the weights are loaded."""
        native.load()
        text, dim = self.config.text, self.config.text.qk_rope_head_dim
        plain = inverse_frequencies(dim, text.rope_theta)
        scaling = text.rope_scaling
        if scaling is None:
            compressed = inverse_frequencies(dim, text.compress_rope_theta)
        else:
            compressed = yarn_frequencies(
                dim,
                text.compress_rope_theta,
                scaling.factor,
                scaling.original_max_position_embeddings,
                scaling.beta_fast,
                scaling.beta_slow,
            )
        self._tables = (
            RopeTable(plain, self.max_positions, device),
            RopeTable(compressed, self.max_positions, device),
        )
        self._hash = EngramHash(self.config.engram, device) if text.has_engram else None
        if self.drafter is not None:
            self.drafter.prepare(self._tables[0])

    def forward(
        self,
        meta: StepMetadata,
        pools: CachePools,
        *,
        with_taps: bool = False,
        embeds: torch.Tensor | None = None,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> ModelOutput:
        """Run one step; caches are updated in place. Collective where ranks share experts, tables or rows.

        with_taps: also return the drafter's target features, of the rows that this rank computed. embeds:
        [T, D] rows that replace the embedding (image rows merged in). capture: tests only, receives inner
        tensors.
        """
        if self._tables is None:
            raise RuntimeError("TextModel.prepare() must run before the first forward pass")
        share = RowShare(
            self.ranks.cp if meta.is_prefill else SingleRank(),
            meta.sequence_rows,
            meta.positions.device,
            rounded=not self.numerics.exact,
        )
        mine = share.metadata(meta)
        ctx = build_context(mine, pools, self.numerics, *self._tables, capture, share)
        x_TD = self.embed_tokens(mine.input_ids) if embeds is None else share.take(embeds)
        m = self.config.text.hc_mult
        x_TmD = x_TD.unsqueeze(1).expand(-1, m, -1).contiguous()
        a_Tm = torch.zeros(x_TD.shape[0], m, dtype=torch.float32, device=x_TD.device)
        a_Tm[:, 0] = 1.0
        ctx.note("layers.0.h_in", x_TmD)
        rows = self.engram_rows(mine)
        drafter = self.drafter if self.drafter is not None and self.drafter.has_rings(pools) else None
        taps: list[torch.Tensor] | None = [] if with_taps or drafter is not None else None
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        border = self.config.topology.n_prefill_layer
        x_TmD, a_Tm = run_layers(blocks[:border], x_TmD, a_Tm, rows, ctx, taps)
        if meta.consumer is not None:
            # The first consumer makes its entries from all rows; what is dropped is dropped behind that.
            entry_input = blocks[border].attn_input(a_Tm, x_TmD)
            new, mine, mover = enter_consumers(share, meta, meta.consumer)
            if mover is not None:
                x_TmD, a_Tm = mover(x_TmD), mover(a_Tm, rounded=False)
                taps = None if taps is None else [mover(tap) for tap in taps]
                if rows is not None:
                    rows = mover(rows.transpose(0, 1)).transpose(0, 1)
            ctx = build_context(mine, pools, self.numerics, *self._tables, capture, new)
            ctx.entry_input, ctx.entry_share = entry_input, share
            share = new
        x_TmD, a_Tm = run_layers(blocks[border:], x_TmD, a_Tm, rows, ctx, taps)
        h_TD = rounded_collapse(a_Tm, x_TmD, self.numerics)
        ctx.note("final_hidden", h_TD)
        features = torch.cat(taps, dim=-1) if taps else None
        if drafter is not None and features is not None:
            stored = meta.positions if meta.consumer is None else meta.consumer.positions
            drafter.write_context(features, self._tables[0].take(stored), ctx.window_store, pools, ctx.whole)
        hidden = ctx.whole(self.head.normed(h_TD))
        if meta.consumer is not None and meta.consumer.rows is not None:
            every = hidden.new_zeros(meta.num_rows, hidden.shape[1])
            hidden = every.index_copy_(0, meta.consumer.rows, hidden)
        return ModelOutput(hidden, features if with_taps else None)

    def embed_tokens(self, ids_T: torch.Tensor) -> torch.Tensor:
        """float32 [T, D]; ids outside the vocabulary give zero rows."""
        vocab = self.embed.shape[0]
        rows = self.embed.index_select(0, ids_T.clamp(0, vocab - 1)).float()
        return rows.masked_fill_(((ids_T < 0) | (ids_T >= vocab)).unsqueeze(-1), 0.0)

    def engram_rows(self, meta: StepMetadata) -> torch.Tensor | None:
        """[Engram layers, T, width] table rows of all Engram layers in one fetch; None without Engram."""
        if self._hash is None:
            return None
        if self.engram_store is None:
            raise RuntimeError(
                "the model has Engram layers but no Engram store; load it with model/weights.py"
            )
        return self.engram_store.fetch(self._hash(meta.ngram_ids, meta.image_mask))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] of hidden rows (after the final norm)."""
        return self.head.logits(hidden_ND)

    # -- drafts -----------------------------------------------------------------------------------------

    def draft_block(
        self,
        request: DraftRequest,
        pools: CachePools,
        drafts: int,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> DraftBlock:
        """One block of `drafts` proposals for every sequence, their tokens not chosen yet."""
        assert self.drafter is not None, "the model was loaded without its drafter"
        x_TD = self.embed_tokens(self.drafter.input_ids(request.tokens, drafts))
        h_TD = self.drafter(x_TD, request, pools, capture)
        logits_TV = self.head.logits(self.drafter.normed(h_TD))
        shape = (request.tokens.shape[0], drafts, -1)
        return DraftBlock(h_TD.view(shape), logits_TV.view(shape))

    def draft_step(
        self, block: DraftBlock, place: int, previous_n: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits float32 [n, V], confidence logit float32 [n]) of draft `place`; see `Drafter.step`."""
        assert self.drafter is not None, "the model was loaded without its drafter"
        return self.drafter.step(block, place, previous_n, temperature)
