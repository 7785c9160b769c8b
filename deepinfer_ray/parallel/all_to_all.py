"""`AllToAllExchange`: expert rows over any group of ranks, torch.distributed's above all (spec §3.6).

Knows: who owns which slot, one message with the rows and one with the results, sizes that differ by rank.
Does not know: experts' weights, routing, the placement's history.

A row travels once to each rank that owns one of its experts, as it will be multiplied: e4m3 codes and ue8m0
scales where it is quantized, float32 in mode `exact`. Results travel by (row, slot) and are put at their
slot, so the owner adds them in the same order as a single rank: expert parallelism changes no bit. (Rounded
results are bfloat16 values and travel as such.)

Shape letters: T own rows, R received rows, S sent rows, P (row, slot) pairs, k slots, D hidden size, E ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.formats import FP8_GROUP, dequant_fp8_groups, quantize_fp8_groups
from deepinfer_ray.ops.sync_guard import allow_sync
from deepinfer_ray.parallel.expert_exchange import Received
from deepinfer_ray.parallel.rank_group import RankGroup

RowFormat = Literal["fp8", "float32"]


class _Home(NamedTuple):
    """What the two directions of one exchange share. sent/received: (row, slot) pairs by rank."""

    tokens: int
    slot: torch.Tensor
    """int64 [P]: place in [T · k] of each pair that was sent out, in the order in which results return."""
    sent: list[int]
    received: list[int]


class AllToAllExchange:
    """`ExpertExchange` of one layer over a group: slot s lies on rank s // n as its local expert s mod n."""

    is_local = False

    def __init__(self, group: RankGroup, num_local_experts: int, row_format: RowFormat) -> None:
        """row_format: `fp8` for rows whose groups of 32 are quantized already (their bytes say all),
        `float32` for any."""
        if num_local_experts < 1:
            raise ConfigError(f"every expert rank needs an expert, got {num_local_experts} on each")
        self.group, self.num_local_experts, self.row_format = group, num_local_experts, row_format

    def dispatch(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> Received:
        """See `ExpertExchange`; collective, two calls."""
        ranks, n, k = self.group.size, self.num_local_experts, experts_Tk.shape[1]
        owner_Tk = torch.where(experts_Tk < 0, -1, experts_Tk.div(n, rounding_mode="floor"))
        hit_ETk = owner_Tk.unsqueeze(0) == torch.arange(ranks, device=owner_Tk.device).view(-1, 1, 1)
        with allow_sync():  # sizes of messages stand on the device
            rank_S, row_S = hit_ETk.any(-1).nonzero(as_tuple=True)
            pair_rank, pair_row, pair_slot = hit_ETk.nonzero(as_tuple=True)
            counts_E2 = torch.stack((_counts(rank_S, ranks), _counts(pair_rank, ranks)), 1).cpu()
        ones = [1] * ranks
        theirs_E2 = self.group.all_to_all(counts_E2, ones, ones)
        send, receive = counts_E2[:, 0].tolist(), theirs_E2[:, 0].tolist()
        here_Sk = hit_ETk[rank_S, row_S]
        local_Sk = torch.where(here_Sk, experts_Tk[row_S] - rank_S.unsqueeze(1) * n, -1)
        message = torch.cat(
            (
                self._pack(x_TD[row_S]),
                _as_bytes(local_Sk.int()),
                _as_bytes(weights_Tk[row_S].float().masked_fill(~here_Sk, 0.0)),
            ),
            dim=1,
        )
        arrived = self.group.all_to_all(message, send, receive)
        rows, local, weights = arrived.split((message.shape[1] - 8 * k, 4 * k, 4 * k), dim=1)
        home = _Home(
            x_TD.shape[0], pair_row * k + pair_slot, counts_E2[:, 1].tolist(), theirs_E2[:, 1].tolist()
        )
        return Received(
            self._unpack(rows, x_TD.shape[1]),
            _own(local).view(torch.int32).long(),
            _own(weights).view(torch.float32),
            home,
        )

    def combine(self, out_RkD: torch.Tensor, received: Received) -> torch.Tensor:
        """See `ExpertExchange`; collective, one call."""
        home: _Home = received.handle
        k, width = out_RkD.shape[1], out_RkD.shape[2]
        with allow_sync():
            done_PD = out_RkD[received.experts >= 0]
        if self.row_format == "fp8":
            done_PD = done_PD.to(torch.bfloat16)  # rounded already, so this loses nothing
        back_PD = self.group.all_to_all(done_PD, home.received, home.sent)
        out = out_RkD.new_zeros(home.tokens * k, width)
        return out.index_copy_(0, home.slot, back_PD.to(out.dtype)).view(home.tokens, k, width)

    def _pack(self, rows_SD: torch.Tensor) -> torch.Tensor:
        if self.row_format == "float32":
            return _as_bytes(rows_SD.float())
        codes, scales = quantize_fp8_groups(rows_SD)
        return torch.cat((codes, scales), dim=1)

    def _unpack(self, data: torch.Tensor, width: int) -> torch.Tensor:
        if self.row_format == "float32":
            return _own(data).view(torch.float32)
        codes, scales = data.split((width, width // FP8_GROUP), dim=1)
        return dequant_fp8_groups(codes.contiguous(), scales.contiguous())


def _counts(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(index, minlength=size)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [N, bytes] of contiguous rows; also of none."""
    return rows.contiguous().view(torch.uint8)


def _own(columns: torch.Tensor) -> torch.Tensor:
    """A copy: a slice of a message may start where no wider number may."""
    return columns.clone(memory_format=torch.contiguous_format)
