"""Which rows of a prefill step this rank computes: all of them, or its share among context parallel ranks.

Knows: metadata of a share, rows back to the whole step (spec/attention.md §14). Does not know: layers.
Caches are whole on every rank: what is stored is gathered first, what is queried stays apart.

Shape letters: T rows of the step, M rows of this rank, C ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from deepinfer_ray.cache.plans import StepMetadata
from deepinfer_ray.parallel.mirror import MirrorLayout, Redistribution
from deepinfer_ray.parallel.rank_group import RankGroup


class RowShare:
    """The rows of one layout of one step. Without other ranks everything here is the identity."""

    def __init__(
        self, group: RankGroup, starts: Sequence[int], device: torch.device | str, *, rounded: bool
    ) -> None:
        """starts: first row of each sequence and, last, the number of rows. rounded: gathered values are
        bfloat16 values (they may be float32 tensors) unless `gather` is told otherwise."""
        self.group, self.device, self.rounded = group, torch.device(device), rounded
        self.starts = list(starts)
        self.layout: MirrorLayout | None = None
        if group.size > 1:
            self.layout = MirrorLayout.of(np.diff(np.asarray(starts, np.int64)), group.size)
            self._index = self._to_device(self.layout.index(group.rank))
            self._reverse = self._to_device(self.layout.reverse())

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)  # the host must not wait here

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[M, …] this rank's rows of a tensor [T, …]; zeros (False) where padding is."""
        return rows if self.layout is None else take_rows(rows, self._index)

    def metadata(self, meta: StepMetadata) -> StepMetadata:
        """What this rank's rows query. What the step stores and loads stays that of all rows."""
        if self.layout is None:
            return meta
        padding = self._index < 0
        valid = self.take(meta.valid)
        ratios = {
            ratio: replace(
                plan, klen=self.take(plan.klen), ks=None if plan.ks is None else self.take(plan.ks)
            )
            for ratio, plan in meta.ratios.items()
        }
        return replace(
            meta,
            num_rows=self.layout.num_local,
            input_ids=self.take(meta.input_ids).masked_fill(padding, -1),
            positions=self.take(meta.positions),
            ngram_ids=self.take(meta.ngram_ids),
            valid=valid,
            image_mask=None if meta.image_mask is None else self.take(meta.image_mask),
            seq_of_row=self.take(meta.seq_of_row),
            swa_keys=self.take(meta.swa_keys).masked_fill(padding.unsqueeze(1), -1),
            ratios=ratios,
            all_valid=meta.all_valid and self.layout.num_local * self.group.size == self.starts[-1],
            sequence_rows=self.layout.local_starts.tolist(),
        )

    def gather(self, rows: torch.Tensor, rounded: bool | None = None) -> torch.Tensor:
        """[T, …] of all ranks' rows [M, …] in the step's order; collective."""
        if self.layout is None:
            return rows
        return self._all(rows, rounded).index_select(0, self._reverse)

    def _all(self, rows: torch.Tensor, rounded: bool | None) -> torch.Tensor:
        """[C·M, …]: one rank behind the other."""
        narrow = self.rounded if rounded is None else rounded
        sent = rows.to(torch.bfloat16) if narrow and rows.dtype == torch.float32 else rows
        return self.group.gather(sent).flatten(0, 1).to(rows.dtype)

    def moved(self, kept: np.ndarray, starts: Sequence[int]) -> tuple[RowShare, Mover]:
        """The share of the rows `kept` (int64, ascending; `starts` as above), and what brings rows there."""
        new = RowShare(self.group, starts, self.device, rounded=self.rounded)
        if self.layout is None or new.layout is None:
            return new, Mover(self, self._to_device(kept), None)
        plan, rank = Redistribution.between(self.layout, kept, new.layout), self.group.rank
        return new, Mover(self, self._to_device(plan.packs[rank]), self._to_device(plan.takes[rank]))


class Mover:
    """Brings rows of one layout to that of some of them."""

    def __init__(self, share: RowShare, pack: torch.Tensor, takes: torch.Tensor | None) -> None:
        self._share, self._pack, self._takes = share, pack, takes

    def __call__(self, rows: torch.Tensor, rounded: bool | None = None) -> torch.Tensor:
        """[M', …] of the kept rows of this rank; collective."""
        packed = take_rows(rows, self._pack)
        if self._takes is None:
            return packed
        return take_rows(self._share._all(packed, rounded), self._takes)


def take_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N, …] rows at `index`, zeros where it is -1."""
    taken = rows.index_select(0, index.clamp_min(0))
    shape = (-1,) + (1,) * (rows.dim() - 1)
    return taken.masked_fill_((index < 0).view(shape), 0)
