"""The block drafter: context keys from target features, one non-causal block, first-order heads (speculative
spec §1, §2).

Knows: rounding point 26, which keys a block sees, the Markov and confidence heads. Does not know: sampling,
acceptance, the backbone's embedding and head (they are handed in, drafts share them).
The main forward leaves a key of every row in the rings of the draft layers. Rows that are rejected later need
no undoing: the next block, or the next step's rows, overwrite exactly those slots.

Shape letters: T rows, n sequences, N drafts, D hidden size, m residual copies, H heads, d head dimension,
K keys of a block (window + N), V vocabulary, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from deepinfer_ray.cache.plans import StepMetadata
from deepinfer_ray.cache.pool import CachePools
from deepinfer_ray.config.hf import LayerSpec, ModelConfig
from deepinfer_ray.model.attention import Attention
from deepinfer_ray.model.block import Block
from deepinfer_ray.model.step import Rotation, StepContext
from deepinfer_ray.ops.attention import sparse_attention, sparse_attention_blocks, validity_bias
from deepinfer_ray.ops.hyper_connections import collapse
from deepinfer_ray.ops.linear import linear, rounded_linear
from deepinfer_ray.ops.norm import rounded_rms_norm
from deepinfer_ray.ops.numerics import Numerics
from deepinfer_ray.ops.rope import RopeTable, rotate_tail

CONFIDENCE_CLAMP = 60.0
"""Bound of the confidence logit, behind the temperature."""


@dataclass(slots=True)
class DraftRequest:
    """What a block of every sequence starts from.

    tokens, positions, states: int64 [n], the newest token of the sequence, the position of the token before
    it (the last whose keys are in the caches) and the state slot. bound: all positions of the block lie below
    it. valid: bool [n], False on placeholder sequences; None = all are real.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor
    bound: int
    valid: torch.Tensor | None = None


@dataclass(slots=True)
class DraftBlock:
    """A block before its tokens are chosen. hidden: [n, N, D] before the output norm, input of the confidence
    head. logits: float32 [n, N, V] without the Markov term."""

    hidden: torch.Tensor
    logits: torch.Tensor


def block_keys(
    positions_n: torch.Tensor, states_n: torch.Tensor, window: int, ring: int, drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [n, window + N], stores [n, N]): ring records of what every row of a block sees, oldest first and
    -1 before the sequence's start, and where the block's own keys go.

    positions: int64 [n] of the last token whose keys are in the rings. All rows of a block see the same keys:
    `window` of them up to that position, and the whole block.
    """
    base_n1 = (states_n * ring).unsqueeze(1)
    column = torch.arange(window + drafts, device=positions_n.device)
    place_nK = positions_n.unsqueeze(1) + (column - (window - 1))
    records_nK = base_n1 + place_nK % ring
    return records_nK.masked_fill(place_nK < 0, -1), records_nK[:, window:]


def confidence_logit(
    hidden_nD: torch.Tensor, embed_nr: torch.Tensor, weight: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """float32 [n]: `(w · [h; e]) / temperature` clamped; its logistic is the probability that the draft is
    accepted if all before it are. weight: float32 [D + r], products and sum in float32."""
    width = hidden_nD.shape[1]
    total_n = (hidden_nD * weight[:width]).sum(-1) + (embed_nr * weight[width:]).sum(-1)
    return (total_n / temperature).clamp(-CONFIDENCE_CLAMP, CONFIDENCE_CLAMP)


def logistic(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + e^-x)`, the same bits at every place of a tensor (model spec §9.4)."""
    return (x.neg().exp() + 1.0).reciprocal()


class DraftAttention(Attention):
    """Window attention of a block: the rows of a sequence share their keys, so they act as further heads."""

    def _attend(self, q_THd: torch.Tensor, latent_Td: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        ctx.pools.store_window_rows(self.index, latent_Td, ctx.window_store)
        keys_nKd = ctx.pools.load_window_rows(self.index, ctx.window_index)
        drafts = q_THd.shape[0] // keys_nKd.shape[0]
        queries = q_THd.reshape(-1, drafts * self.heads, self.dim)
        attend = sparse_attention_blocks if self.numerics.reference else sparse_attention
        sink = self.attn_sink.repeat(drafts)
        out = attend(queries, keys_nKd, ctx.window_bias, None, None, sink, self.scale)
        return out.view(q_THd.shape)


class DraftLayer(Block):
    """A backbone layer whose attention is a block's."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, numerics: Numerics) -> None:
        super().__init__(config, layer, numerics, 0)
        self.attn = DraftAttention(config.text, layer, numerics, 0)


class Drafter(nn.Module):
    """The draft layers and their heads. Build it on the meta device; `model/weights.py` fills it."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        text = config.text
        D, V, r = text.hidden_size, text.vocab_size, text.dspark_markov_rank
        self.numerics, self.eps = numerics, text.rms_norm_eps
        self.window, self.copies = text.sliding_window, text.hc_mult
        self.noise_token, self.q_rank = text.dspark_noise_token_id, text.q_lora_rank
        self.first_layer = config.topology.num_layers

        def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

        self.main_proj = weight(D, len(text.dspark_target_layer_ids) * D)
        self.main_norm = weight(D)
        self.layers = nn.ModuleList(DraftLayer(config, layer, numerics) for layer in config.topology.drafts)
        self.norm = weight(D)
        self.markov_embed = weight(V, r, dtype=torch.bfloat16)
        self.markov_head = weight(V, r)
        self.confidence = weight(D + r)
        self._table: RopeTable | None = None

    def prepare(self, plain: RopeTable) -> None:
        """plain: the rotation table of window-only layers, the backbone's own."""
        self._table = plain

    def has_rings(self, pools: CachePools) -> bool:
        """Whether the pools were laid out for drafting."""
        return self.first_layer in pools.layout.ring_offsets

    # -- context ----------------------------------------------------------------------------------------

    def write_context(
        self,
        taps_TX: torch.Tensor,
        rotation: Rotation,
        store_T: torch.Tensor,
        pools: CachePools,
        whole: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> None:
        """Leave a key of every row in the rings of all draft layers (speculative spec §1.3, §1.4).

        taps: [T, targets · D] target features. rotation: cos, sin [T, R] at the rows' positions. store: ring
        rows as of `CachePools.window_rows`; rows that are not stored lead to nobody's slot. whole: from rows
        of this rank to all rows, of which rotation and store speak.
        """
        nx = self.numerics
        projected = rounded_linear(nx.q8(taps_TX), self.main_proj, nx)
        m_TD = nx.q8(rounded_rms_norm(projected, self.main_norm, self.eps, nx))
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            k_Td = rounded_linear(m_TD, layer.attn.wq_a_wkv[self.q_rank :], nx)
            k_Td = whole(rounded_rms_norm(k_Td, layer.attn.kv_norm, self.eps, nx))
            pools.store_window_rows(layer.attn.index, rotate_tail(k_Td, *rotation, nx), store_T)

    # -- block ------------------------------------------------------------------------------------------

    def input_ids(self, tokens_n: torch.Tensor, drafts: int) -> torch.Tensor:
        """int64 [n·N]: the newest token, then noise."""
        ids_nN = tokens_n.new_full((tokens_n.shape[0], drafts), self.noise_token)
        ids_nN[:, 0] = tokens_n
        return ids_nN.view(-1)

    def forward(
        self,
        x_TD: torch.Tensor,
        request: DraftRequest,
        pools: CachePools,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[n·N, D]: the collapsed stream behind the last layer, rounded, before the output norm.

        x: embedded `input_ids`. The block's keys are stored at the positions behind `request.positions`.
        """
        ctx = self._context(x_TD.shape[0], request, pools, capture)
        x_TmD = x_TD.unsqueeze(1).expand(-1, self.copies, -1).contiguous()
        a_Tm = torch.zeros(x_TD.shape[0], self.copies, dtype=torch.float32, device=x_TD.device)
        a_Tm[:, 0] = 1.0
        for layer in self.layers:
            x_TmD, a_Tm = layer(x_TmD, a_Tm, ctx)
        return self.numerics.b(collapse(a_Tm, x_TmD))

    def _context(
        self, rows: int, request: DraftRequest, pools: CachePools, capture: dict[str, torch.Tensor] | None
    ) -> StepContext:
        assert self._table is not None, "Drafter.prepare() must run first"
        self._table.reserve(request.bound)
        sequences = request.positions.shape[0]
        drafts = rows // sequences
        keys_nK, stores_nN = block_keys(
            request.positions, request.states, self.window, pools.layout.ring_rows, drafts
        )
        offset = torch.arange(1, drafts + 1, device=keys_nK.device)
        positions_T = (request.positions.unsqueeze(1) + offset).view(-1)
        cos, sin = self._table.take(positions_T)
        rotation, back = (cos.unsqueeze(1), sin.unsqueeze(1)), (cos.unsqueeze(1), -sin.unsqueeze(1))
        valid = request.valid
        valid_T = None if valid is None else valid.unsqueeze(1).expand(-1, drafts).reshape(-1)
        return StepContext(
            meta=_bare_metadata(sequences, positions_T, request.bound),
            pools=pools,
            numerics=self.numerics,
            plain=rotation,
            compressed=rotation,  # no draft layer has a ratio
            plain_back=back,
            compressed_back=back,
            window_bias=validity_bias(keys_nK >= 0),
            window_index=pools.window_rows(keys_nK),
            window_store=pools.window_rows(stores_nN.reshape(-1)),
            valid=valid_T,
            entries={},
            max_klen={},
            capture=capture,
        )

    def normed(self, h_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] input of the vocabulary product."""
        return rounded_rms_norm(h_TD, self.norm, self.eps, self.numerics)

    # -- heads ------------------------------------------------------------------------------------------

    def markov(self, previous_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(embedding [n, r] of the token before, its term float32 [n, V] of the logits)."""
        embed_nr = self.markov_embed.index_select(0, previous_n).float()
        return embed_nr, linear(embed_nr, self.markov_head)

    def step(
        self, block: DraftBlock, place: int, previous_n: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits float32 [n, V], confidence logit float32 [n]) of draft `place`, given the token before it.

        The recurrence is first order: nothing but the token at `place - 1` (0: the newest token) matters.
        """
        embed_nr, term_nV = self.markov(previous_n)
        logits_nV = block.logits[:, place] + term_nV
        return logits_nV, confidence_logit(block.hidden[:, place], embed_nr, self.confidence, temperature)


def _bare_metadata(sequences: int, positions_T: torch.Tensor, bound: int) -> StepMetadata:
    """A decode step's metadata whose index lists nobody reads: draft layers take theirs from the context."""
    none = positions_T[:0]
    return StepMetadata(
        is_prefill=False,
        num_seqs=sequences,
        num_rows=positions_T.shape[0],
        input_ids=none,
        positions=positions_T,
        ngram_ids=none,
        valid=none,
        image_mask=None,
        seq_of_row=none,
        cu_q=none,
        last_rows=none,
        swa_store=none,
        swa_keys=none,
        ring_positions=none,
        max_length=bound,
    )
