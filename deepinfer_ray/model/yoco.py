"""The border between producer and consumer layers (attention spec §13).

Knows: the layer loop, what consumer layers see when only the end of a prompt is replayed in them. Does not
know: layers' insides. Layers from `n_prefill_layer` on share one set of compressed entries and feed the
future only through their window rings.

Mode `mask`: all rows are computed, rows before the kept ones see no window keys. Mode `compact`: they are not
computed at all; of a chunk that lies before the kept rows one placeholder row stays. The entries of the first
consumer layer are made from all rows in every mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from deepinfer_ray.cache.plans import ConsumerPlan, StepMetadata
from deepinfer_ray.model.block import Block
from deepinfer_ray.model.row_share import Mover, RowShare
from deepinfer_ray.model.step import StepContext


def run_layers(
    blocks: Sequence[Block],
    x_TmD: torch.Tensor,
    a_Tm: torch.Tensor,
    engram_rows: torch.Tensor | None,
    ctx: StepContext,
    taps: list[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run consecutive layers on residual copies X and carried mix a; returns both behind the last.

    engram_rows: [Engram layers, T, width] fetched rows. taps: where the mean of the copies that enter a
    target layer is appended, behind the layer's Engram update and rounded.
    """
    for block in blocks:
        if block.engram is not None and block.layer.engram is not None:
            assert engram_rows is not None
            x_TmD = block.engram(x_TmD, engram_rows[block.layer.engram], ctx.meta.image_mask)
        if taps is not None and block.layer.is_target:
            taps.append(ctx.numerics.b(x_TmD.mean(1)))
        x_TmD, a_Tm = block(x_TmD, a_Tm, ctx)
    return x_TmD, a_Tm


def consumer_metadata(meta: StepMetadata, plan: ConsumerPlan) -> StepMetadata:
    """The step as consumer layers see it: other window keys, in mode `compact` fewer rows."""
    ratios = {
        ratio: replace(entry, klen=plan.klen[ratio], ks=plan.ks[ratio])
        for ratio, entry in meta.ratios.items()
    }
    rows = plan.rows
    return replace(
        meta,
        num_rows=plan.num_rows,
        input_ids=meta.input_ids if rows is None else meta.input_ids[rows],
        positions=plan.positions,
        ngram_ids=meta.ngram_ids if rows is None else meta.ngram_ids[rows],
        valid=plan.valid,
        image_mask=plan.image_mask,
        seq_of_row=plan.seq_of_row,
        cu_q=plan.cu_q,
        last_rows=plan.last_rows,
        swa_store=plan.swa_store,
        swa_keys=plan.swa_keys,
        ratios=ratios,
        consumer=None,
        sequence_rows=plan.sequence_rows,
    )


def enter_consumers(
    share: RowShare, meta: StepMetadata, plan: ConsumerPlan
) -> tuple[RowShare, StepMetadata, Mover | None]:
    """(this rank's share of the rows of consumer layers, what they query, what brings rows there).

    None in place of the last: the rows stay where they are.
    """
    whole = consumer_metadata(meta, plan)
    if plan.rows is None:
        return share, share.metadata(whole), None
    ends, kept = np.array(meta.sequence_rows[1:]), np.diff(plan.sequence_rows)
    rows = [np.arange(end - count, end) for end, count in zip(ends, kept, strict=True)]
    new, mover = share.moved(np.concatenate(rows), plan.sequence_rows)
    return new, new.metadata(whole), mover
