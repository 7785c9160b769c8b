"""Which implementation serves each hot operation: vendor, tilelang or reference, and why not a faster one.

Knows: the operations, their candidates in order of preference, what each needs (spec/distributed.md §7).
Does not know: models, requests. A choice is made once, at start, for each operation by itself; that a library
is installed is never reason enough: its architecture must match and this version must call it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_ray.ops.libraries import Found, is_there

Backend = Literal["vendor", "tilelang", "reference"]

SM90, SM100 = "sm90", "sm100"
KERNELS = "deepinfer_ray.kernels"


@dataclass(frozen=True)
class Candidate:
    """One implementation. library: import name that it needs. symbol: what it calls there, or a kernel.
    architectures: where it runs. adapter: `module:function` with the reference's signature; None = this
    version does not call it.
    """

    backend: Backend
    library: str
    architectures: tuple[str, ...]
    symbol: str = ""
    adapter: str | None = None


@dataclass(frozen=True)
class Operation:
    """reference: `module:function` in torch. candidates: faster ones, the best first."""

    name: str
    reference: str
    candidates: tuple[Candidate, ...] = ()


def _vendor(library: str, symbol: str, *architectures: str) -> Candidate:
    return Candidate("vendor", library, architectures, symbol)


def _kernel(name: str) -> Candidate:
    return Candidate("tilelang", "tilelang", (SM90, SM100), name, f"{KERNELS}.{name}:run")


_OPS = "deepinfer_ray.ops"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "linear", f"{_OPS}.linear:linear", (_vendor("deep_gemm", "fp8_fp4_gemm_nt", SM100), _kernel("linear"))
    ),
    Operation(
        "grouped_linear",
        f"{_OPS}.linear:grouped_linear",
        (_vendor("deep_gemm", "fp8_einsum", SM100), _kernel("grouped_linear")),
    ),
    Operation(
        "experts",
        f"{_OPS}.linear:linear",
        (
            _vendor("deep_gemm", "fp8_fp4_mega_moe", SM100),
            _vendor("deep_gemm", "m_grouped_fp8_fp4_gemm_nt_contiguous", SM100),
            _kernel("experts"),
        ),
    ),
    Operation(
        "route",
        f"{_OPS}.moe:route",
        (
            _vendor("deep_gemm", "bf16_mega_gate", SM100),
            _vendor("tile_kernels", "moe.moe_topk_gate", SM90, SM100),
            _kernel("route"),
        ),
    ),
    Operation(
        "swiglu",
        f"{_OPS}.moe:swiglu",
        (_vendor("tile_kernels", "quant.swiglu_forward", SM90, SM100), _kernel("swiglu")),
    ),
    Operation(
        "sparse_attention",
        f"{_OPS}.attention:sparse_attention",
        (_vendor("flash_mla", "flash_mla_sparse_fwd", SM100), _kernel("sparse_attention")),
    ),
    Operation(
        "sparse_attention_blocks",
        f"{_OPS}.attention:sparse_attention_blocks",
        (_vendor("flash_mla", "flash_mla_with_kvcache", SM100), _kernel("sparse_attention_blocks")),
    ),
    Operation(
        "index_scores",
        f"{_OPS}.index:index_scores",
        (_vendor("deep_gemm", "fp8_fp4_mqa_logits", SM100), _kernel("index_scores")),
    ),
    Operation(
        "select_top",
        f"{_OPS}.index:select_top",
        (_vendor("deep_select", "interface.topk", SM100), _kernel("select_top")),
    ),
    Operation("pool_pairs", f"{_OPS}.compress:pool_pairs", (_kernel("pool_pairs"),)),
    Operation(
        "hyper_connections",
        f"{_OPS}.hyper_connections:mix",
        (
            _vendor("deep_gemm", "mega_mhc", SM100),
            _vendor("tile_kernels", "mhc", SM90, SM100),
            _kernel("hyper_connections"),
        ),
    ),
    Operation(
        "engram",
        f"{_OPS}.engram:gated_update",
        (_vendor("tile_kernels", "engram.engram_gate_fwd", SM90, SM100), _kernel("engram")),
    ),
    Operation(
        "rotate",
        f"{_OPS}.rope:rotate",
        (_vendor("tile_kernels", "transform.apply_rotary", SM90, SM100), _kernel("rotate")),
    ),
    Operation(
        "quantize_fp8",
        f"{_OPS}.formats:quantize_fp8_groups",
        (_vendor("tile_kernels", "quant.per_token_cast", SM90, SM100), _kernel("quantize_fp8")),
    ),
    Operation("rms_norm", f"{_OPS}.norm:rms_norm", (_kernel("rms_norm"),)),
)


@dataclass(frozen=True)
class Choice:
    """What serves an operation. why_not: reason by passed-over candidate (`library.symbol`), the best first.

    library: import name of what serves it; None for the reference.
    """

    operation: str
    backend: Backend
    function: str
    why_not: Mapping[str, str]
    library: str | None = None

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


def architecture(capability: tuple[int, int] | None) -> str:
    """`sm90`, `sm100` (10.0 and 10.3), another `sm…`, or `cpu` for None."""
    if capability is None:
        return "cpu"
    major, minor = capability
    return SM100 if major == 10 else f"sm{major}{minor}"


def choose(arch: str, found: Mapping[str, Found]) -> tuple[Choice, ...]:
    """What serves every operation on a device of that architecture. found: the probed libraries by name."""
    return tuple(_choose(operation, arch, found) for operation in OPERATIONS)


def _choose(operation: Operation, arch: str, found: Mapping[str, Found]) -> Choice:
    why_not: dict[str, str] = {}
    for candidate in operation.candidates:
        reason = _obstacle(candidate, arch, found)
        if not reason and candidate.adapter is not None:
            return Choice(operation.name, candidate.backend, candidate.adapter, why_not, candidate.library)
        why_not[f"{candidate.library}.{candidate.symbol}"] = reason
    return Choice(operation.name, "reference", operation.reference, why_not)


def _obstacle(candidate: Candidate, arch: str, found: Mapping[str, Found]) -> str:
    """Why a candidate cannot serve; empty if it can."""
    if arch not in candidate.architectures:
        return f"runs on {' and '.join(candidate.architectures)}, this device is {arch}"
    library = found.get(candidate.library)
    if library is None or not library.usable:
        return library.reason if library is not None else "was not looked for"
    if candidate.adapter is None:
        return "this version does not call it"
    module = candidate.adapter.partition(":")[0]
    if not is_there(module):
        return "this version has no such kernel"
    return ""
