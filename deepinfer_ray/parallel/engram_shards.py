"""`ShardedEngramStore`: Engram tables spread over the host memory of a group (spec/distributed.md §3.8).

Knows: which rank owns a row, one batched fetch for all layers. Does not know: hashes, how a shard was read.
Row ids go to their owners and stored bytes come back; they are decoded here, so the values are those of a
store that holds whole tables.

Shape letters: E Engram layers, T token rows, c columns, w row width, U rows asked for.
"""

from __future__ import annotations

import torch

from deepinfer_ray.ops.formats import FP8_GROUP, dequant_fp8_groups
from deepinfer_ray.ops.sync_guard import allow_sync
from deepinfer_ray.parallel.engram_store import padded_rows
from deepinfer_ray.parallel.rank_group import RankGroup


def shard_range(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """[start, stop) of the real rows that a rank owns: the last ranks of a small table may own none."""
    share = padded_rows(rows, ranks) // ranks
    return min(rank * share, rows), min((rank + 1) * share, rows)


class ShardedEngramStore:
    """`EngramStore` whose rows lie on the ranks of `group`; `fetch` is collective and takes zero rows too."""

    def __init__(
        self, group: RankGroup, rows: list[int], codes: list[torch.Tensor], scales: list[torch.Tensor]
    ) -> None:
        """rows: of each whole table. codes, scales: uint8, this rank's `shard_range` of each, on the host."""
        self.group, self.width = group, codes[0].shape[1]
        self.shares = [padded_rows(count, group.size) // group.size for count in rows]
        self.shards = [torch.cat(parts, dim=1) for parts in zip(codes, scales, strict=True)]
        """uint8 [rows of this rank, w + w/32] a layer: a row's codes and scales, as they travel."""

    def fetch(self, rows_ETc: torch.Tensor) -> torch.Tensor:
        """float32 [E, T, c·w] on the device of `rows_ETc`; zeros where the id is -1. Three collectives."""
        layers, tokens, columns = rows_ETc.shape
        ranks = self.group.size
        with allow_sync():
            wanted = rows_ETc.cpu()
        shares = torch.tensor(self.shares).view(-1, 1, 1)
        # One number for (owner, layer, row of its shard); a row that is wanted twice travels once.
        stride = max(self.shares)
        owner = wanted.div(shares, rounding_mode="floor")
        key = (owner * layers + torch.arange(layers).view(-1, 1, 1)) * stride + wanted % shares
        known = wanted >= 0
        unique_U, place = torch.unique(key[known], return_inverse=True)
        per_rank = layers * stride
        send = torch.bincount(unique_U.div(per_rank, rounding_mode="floor"), minlength=ranks)
        ones = [1] * ranks
        receive = self.group.all_to_all(send, ones, ones).tolist()
        asked = self.group.all_to_all(unique_U % per_rank, send.tolist(), receive)
        answer = self.group.all_to_all(self._take(asked, stride), receive, send.tolist())
        codes, scales = answer.split((self.width, self.width // FP8_GROUP), dim=1)
        values_Uw = dequant_fp8_groups(codes.contiguous(), scales.contiguous())
        out = values_Uw.new_zeros(layers, tokens, columns, self.width)
        out[known] = values_Uw[place]
        with allow_sync():
            return out.view(layers, tokens, columns * self.width).to(rows_ETc.device)

    def _take(self, asked: torch.Tensor, stride: int) -> torch.Tensor:
        """uint8 [rows, w + w/32]: stored bytes of (layer · stride + row) numbers."""
        layer, row = asked.div(stride, rounding_mode="floor"), asked % stride
        out = torch.empty(len(asked), self.shards[0].shape[1], dtype=torch.uint8)
        for index, shard in enumerate(self.shards):
            mine = layer == index
            out[mine] = shard.index_select(0, row[mine])
        return out
