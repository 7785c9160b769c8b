"""`DeepEPExchange`: expert rows through DeepEP 2.5 where the package and the device allow it (spec §3.4).

Knows: the package's names, its buffer's limits, how its expanded rows become ours. Does not know: when a step
is a prefill. Imported lazily: without the package everything else works.

DeepEP sums the experts' rows itself and rounds the sum to bfloat16, so the low bits differ from the other
transports' (spec §3.4): the combined rows come back as one slot.

Shape letters: T own rows, R received rows, k slots, D hidden size, n local experts.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_ray.errors import ConfigError
from deepinfer_ray.ops.formats import FP8_GROUP, as_bytes, dequant_fp8_groups, quantize_fp8_groups
from deepinfer_ray.parallel.expert_exchange import Received

LEAST_VERSION = (2, 5)
PACKED_SCALES = 128
"""Features whose four scales of 32 travel in one int32."""
MAX_SLOTS = 32


def find(device: torch.device | str) -> Any | None:
    """The package if this device can use it: CUDA from Hopper on, version 2.5 with `EPBuffer`. The name alone
    says nothing: an older package of another interface has the same one."""
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    try:
        package = importlib.import_module("deep_ep")
    except (ImportError, OSError, RuntimeError, AssertionError):
        return None
    return package if usable(package) else None


def usable(package: Any) -> bool:
    """Whether the package is the one that this module speaks to."""
    try:
        version = tuple(int(part) for part in str(package.__version__).split(".")[:2])
    except (AttributeError, ValueError):
        return False
    return version >= LEAST_VERSION and hasattr(package, "EPBuffer")


@dataclass(slots=True)
class DeepEPBuffer:
    """The one buffer of a process, used by all layers, and what all ranks must give alike at each call."""

    buffer: Any
    max_rows: int
    """Rows of a rank in one step, at most."""
    num_sms: int

    @classmethod
    def create(
        cls, package: Any, group: Any, *, max_rows: int, hidden: int, top_k: int, physical: int, comm_sms: int
    ) -> DeepEPBuffer:
        """Collective. group: the NCCL group, warmed up: the package takes its communicator's pointer.
        comm_sms: 0 = automatic."""
        if hidden % PACKED_SCALES or top_k > MAX_SLOTS:
            raise ConfigError(
                f"DeepEP needs a hidden size divisible by {PACKED_SCALES} and at most {MAX_SLOTS} experts a "
                f"token, got {hidden} and {top_k}; set moe.transport = torch"
            )
        buffer = package.EPBuffer(
            group,
            num_max_tokens_per_rank=max_rows,
            hidden=hidden,
            num_topk=top_k,
            use_fp8_dispatch=True,
            allow_hybrid_mode=True,
            allow_multiple_reduction=False,
            explicitly_destroy=True,
        )
        if comm_sms == 0:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
            comm_sms = min(buffer.get_theoretical_num_sms(physical, top_k), total - min(32, total // 4))
        return cls(buffer, max_rows, comm_sms)

    def destroy(self) -> None:
        """Collective; only where no rank failed."""
        self.buffer.destroy()


class DeepEPExchange:
    """`ExpertExchange` of one layer over the process's buffer."""

    is_local = False

    def __init__(self, shared: DeepEPBuffer, ranks: int, num_local_experts: int) -> None:
        self.shared, self.ranks, self.num_local_experts = shared, ranks, num_local_experts

    def dispatch(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> Received:
        """See `ExpertExchange`; x is quantized already. One received row for each (row, local expert)."""
        if x_TD.shape[0] > self.shared.max_rows:
            raise ConfigError(
                f"a step of {x_TD.shape[0]} rows exceeds the exchange buffer of {self.shared.max_rows}"
            )
        codes, scales = quantize_fp8_groups(x_TD)
        rows, _, weights, handle, event = self.shared.buffer.dispatch(
            (codes.view(torch.float8_e4m3fn), scales.contiguous().view(torch.int32)),
            topk_idx=experts_Tk.long(),
            topk_weights=weights_Tk.float(),
            num_experts=self.ranks * self.num_local_experts,
            num_max_tokens_per_rank=self.shared.max_rows,
            expert_alignment=1,
            num_sms=self.shared.num_sms,
            do_cpu_sync=True,
            do_expand=True,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        values = dequant_fp8_groups(
            as_bytes(rows[0]), rows[1].contiguous().view(torch.uint8).view(len(rows[0]), -1)
        )
        return Received(
            values,
            self._experts(handle, len(values)).unsqueeze(1),
            weights.view(-1, 1),
            (handle, x_TD.shape[0]),
        )

    def _experts(self, handle: Any, rows: int) -> torch.Tensor:
        """int64 [R]: whose rows they are, by the running sums that the handle holds; -1 behind the last."""
        ends = handle.psum_num_recv_tokens_per_expert.long()
        owner = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
        return owner.masked_fill(owner >= len(ends), -1)

    def combine(self, out_RkD: torch.Tensor, received: Received) -> torch.Tensor:
        """[T, 1, D]: the sums over all slots, rounded to bfloat16 by the transport."""
        handle, tokens = received.handle
        combined, event = self.shared.buffer.combine(
            out_RkD.squeeze(1).to(torch.bfloat16),
            handle,
            num_sms=self.shared.num_sms,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        return combined.to(out_RkD.dtype).view(tokens, 1, out_RkD.shape[2])


def buffer_rows(max_rows: int) -> int:
    """Rows that the buffer is made for: the same on all ranks, a multiple of 64."""
    return 64 * math.ceil(max_rows / 64)


assert FP8_GROUP * 4 == PACKED_SCALES
