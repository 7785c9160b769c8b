"""Fused small CPU operations: the same bits as the tensor operations they stand for, in one call.

Knows: tensors' memory, when native code may run. Does not know: modules. A decode step is a thousand tiny
operations between matrix products; most of its time would be the cost of calling them.

Every function here has a plain counterpart beside the place that calls it, and tests hold both against each
other bit by bit. Arguments are contiguous float32 unless said. Call a function only where `ready` says so.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_long, c_void_p

import torch

from deepinfer_ray.ops.native.build import load as _load_library

_P, _L, _F, _I = c_void_p, c_long, c_float, c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "fake_quant_fp8": (_P, _P, _L, _I),
    "fake_quant_index": (_P, _P, _L),
    "round_values": (_P, _P, _L),
    "norm_rows": (_P, _P, _P, _P, _L, _L, _L, _F, _I),
    "mix_logits": (_P, _P, _P, _P, _P, _L, _L, _L, _F),
    "collapse_rows": (_P, _P, _P, _L, _L, _L, _I),
    "mix_coefficients": (_P, _P, _P, _P, _L, _L, _F, _I),
    "rotate_tail": (_P, _P, _P, _L, _L, _L, _L, _L, _I),
    "swiglu_logits": (_P, _P, _P, _L, _L, _F, _I, _I),
    "swiglu_values": (_P, _P, _P, _P, _P, _L, _L, _F, _I, _I),
    "combine_rows": (_P, _P, _L, _L, _L, _I),
    "route_rows": (_P, _P, _P, _P, _L, _L, _L, _F),
    "store_fp8": (_P, _P, _P, _L, _L, _L, _L),
    "load_fp8": (_P, _P, _P, _P, _L, _L, _L, _L),
    "store_fp4": (_P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _I, _I, _P),
    "load_fp4": (_P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _P),
    "head_sums": (_P, _P, _P, _L, _L, _L, _L),
    "select_rows": (_P, _P, _P, _P, _L, _L, _L),
    "candidate_rows": (_P, _P, _P, _P, _P, _L, _L, _L, _L),
    "entry_slots": (_P, _P, _P, _P, _L, _L, _L, _L),
}

_library: ctypes.CDLL | None = None
_loaded = False


def load() -> bool:
    """Build and load the library once for the process; False when there is none to use."""
    global _library, _loaded
    if not _loaded:
        _loaded = True
        library = _load_library()
        if library is not None:
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, None
        _library = library
    return _library is not None


def ready(x: torch.Tensor) -> bool:
    """Whether native code may take x: the library is loaded, x is on the CPU, no graph is recorded."""
    return _library is not None and x.is_cpu and not torch.is_grad_enabled()


def _call(name: str, *arguments: object) -> None:
    getattr(_library, name)(*arguments)


def fake_quant_fp8(x: torch.Tensor) -> torch.Tensor:
    """`formats.fake_quant_fp8` with groups of 32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _call("fake_quant_fp8", x.data_ptr(), y.data_ptr(), x.numel() // 32, False)
    return y


def fake_quant_fp8_tile(x_Tn: torch.Tensor, rows: int) -> torch.Tensor:
    """bfloat16 [rows, n]: `formats.fake_quant_fp8` of x's T rows, zero rows behind them."""
    x_Tn = x_Tn.contiguous()
    make = torch.empty if rows == x_Tn.shape[0] else torch.zeros
    y = make(rows, x_Tn.shape[1], dtype=torch.bfloat16)
    _call("fake_quant_fp8", x_Tn.data_ptr(), y.data_ptr(), x_Tn.numel() // 32, True)
    return y


def fake_quant_index(x: torch.Tensor) -> torch.Tensor:
    """`formats.fake_quant_index` with groups of 32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _call("fake_quant_index", x.data_ptr(), y.data_ptr(), x.numel() // 32)
    return y


def round_values(x: torch.Tensor) -> torch.Tensor:
    """`formats.bf16_round`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _call("round_values", x.data_ptr(), y.data_ptr(), x.numel())
    return y


def norm_rows(
    x_Tn: torch.Tensor, squares_T: torch.Tensor, weight_n: torch.Tensor, eps: float, rounded: bool
) -> torch.Tensor:
    """[T, n] normed rows from their sums of squares; x may be a column slice."""
    rows, n = x_Tn.shape
    y = torch.empty(rows, n)
    _call(
        "norm_rows",
        x_Tn.data_ptr(),
        squares_T.data_ptr(),
        weight_n.data_ptr(),
        y.data_ptr(),
        rows,
        n,
        x_Tn.stride(0),
        eps,
        rounded,
    )
    return y


def collapse_rows(a_Tm: torch.Tensor, x_TmD: torch.Tensor, rounded: bool) -> torch.Tensor:
    """[T, D]: the copies of x mixed by a."""
    rows, m, n = x_TmD.shape
    y = torch.empty(rows, n)
    _call("collapse_rows", a_Tm.data_ptr(), x_TmD.data_ptr(), y.data_ptr(), rows, m, n, rounded)
    return y


def mix_coefficients(
    product: torch.Tensor,
    squares_T: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    m: int,
    width: int,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre, post, comb) of a hyper-connection from its product `fn · z` [T, (2+m)m] and sums of squares.

    width: values in a sum. comb is a transposed view, laid out for `ops.hyper_connections.update`.
    """
    rows = product.shape[0]
    logits = torch.empty_like(product)
    _call(
        "mix_logits",
        product.data_ptr(),
        squares_T.data_ptr(),
        scale.data_ptr(),
        base.data_ptr(),
        logits.data_ptr(),
        rows,
        m,
        width,
        norm_eps,
    )
    e = logits.exp_()
    pre, post, comb = torch.empty(rows, m), torch.empty(rows, m), torch.empty(rows, m, m)
    _call(
        "mix_coefficients",
        e.data_ptr(),
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        rows,
        m,
        hc_eps,
        iterations,
    )
    return pre, post, comb.transpose(1, 2)


def rotate_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool) -> None:
    """Rotate the last values of x [T, ..., d] in place; cos and sin hold one row for each of x's T."""
    rows, dim = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    width = cos.shape[-1]
    _call(
        "rotate_tail",
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        heads,
        dim,
        width,
        x.stride(0),
        rounded,
    )


def swiglu_spread(
    gate_up: torch.Tensor,
    index_P: torch.Tensor,
    weight_P: torch.Tensor,
    limit: float,
    rounded: bool,
    out_rows: int,
) -> torch.Tensor:
    """[out_rows, M]: the activation of rows `index` of gate_up [., 2M] at the same rows, zeros elsewhere.

    gate_up: float32 or bfloat16, the result's dtype too. rounded: gate_up is rounded first, the result is Q8.
    """
    pairs, width, bf16 = index_P.numel(), gate_up.shape[-1] // 2, gate_up.dtype == torch.bfloat16
    e = torch.empty(pairs, width)
    _call(
        "swiglu_logits",
        gate_up.data_ptr(),
        index_P.data_ptr(),
        e.data_ptr(),
        pairs,
        width,
        limit,
        rounded,
        bf16,
    )
    e.exp_()
    out = torch.zeros(out_rows, width, dtype=gate_up.dtype)
    _call(
        "swiglu_values",
        gate_up.data_ptr(),
        index_P.data_ptr(),
        e.data_ptr(),
        weight_P.data_ptr(),
        out.data_ptr(),
        pairs,
        width,
        limit,
        rounded,
        bf16,
    )
    return out


def combine_rows(o_TkD: torch.Tensor, rounded: bool) -> torch.Tensor:
    """[T, D]: the slots of each row added in order."""
    rows, slots, width = o_TkD.shape
    y = torch.empty(rows, width)
    _call("combine_rows", o_TkD.data_ptr(), y.data_ptr(), rows, slots, width, rounded)
    return y


def route_rows(
    scores_TE: torch.Tensor, bias_E: torch.Tensor, k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) of `ops.moe.route` from the router scores."""
    rows, count = scores_TE.shape
    experts, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
    _call(
        "route_rows",
        scores_TE.data_ptr(),
        bias_E.data_ptr(),
        experts.data_ptr(),
        weights.data_ptr(),
        rows,
        count,
        k,
        scaling,
    )
    return experts, weights


def store_fp8(x_Nd: torch.Tensor, view: torch.Tensor, rows_N: torch.Tensor) -> None:
    """Quantize rows of x (a column slice is fine) into records `rows` of view [., d + d/32] uint8."""
    count, dim = x_Nd.shape
    _call(
        "store_fp8",
        x_Nd.data_ptr(),
        view.data_ptr(),
        rows_N.data_ptr(),
        count,
        dim,
        view.stride(0),
        x_Nd.stride(0),
    )


def load_fp8(view: torch.Tensor, rows_N: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 [N, d] of records `rows` of view [., d + d/32] uint8; zeros for negative rows."""
    return load_fp8_parts(view, view[:, dim:], rows_N, dim)


def load_fp8_parts(codes: torch.Tensor, scales: torch.Tensor, rows_N: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 [N, d] of rows of e4m3 codes and of ue8m0 scales; zeros for negative rows."""
    count = rows_N.numel()
    y = torch.empty(count, dim)
    _call(
        "load_fp8",
        codes.data_ptr(),
        scales.data_ptr(),
        rows_N.data_ptr(),
        y.data_ptr(),
        count,
        dim,
        codes.stride(0),
        scales.stride(0),
    )
    return y


def store_fp4(
    x_Nd: torch.Tensor,
    codes: torch.Tensor,
    code_rows: torch.Tensor,
    scales: torch.Tensor,
    scale_rows: torch.Tensor,
    group: int,
    e4m3: torch.Tensor | None,
    divide: bool = False,
) -> None:
    """Quantize rows of x to packed e2m1 and scales. e4m3: values of e4m3 codes (compressed KV, group 16),
    None = ue8m0 scales (index keys, group 32). divide: numeric variant `reference`."""
    x_Nd = x_Nd.contiguous()
    _call(
        "store_fp4",
        x_Nd.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        code_rows.data_ptr(),
        scale_rows.data_ptr(),
        x_Nd.shape[0],
        x_Nd.shape[1],
        codes.stride(0),
        scales.stride(0),
        group,
        e4m3 is not None,
        divide,
        None if e4m3 is None else e4m3.data_ptr(),
    )


def load_fp4(
    codes: torch.Tensor,
    code_rows: torch.Tensor,
    scales: torch.Tensor,
    scale_rows: torch.Tensor,
    dim: int,
    group: int,
    e4m3: torch.Tensor | None,
) -> torch.Tensor:
    """float32 [N, d] of packed e2m1 rows and their scale rows; e4m3: values of scale bytes, None = ue8m0."""
    count = code_rows.numel()
    y = torch.empty(count, dim)
    _call(
        "load_fp4",
        codes.data_ptr(),
        scales.data_ptr(),
        code_rows.data_ptr(),
        scale_rows.data_ptr(),
        y.data_ptr(),
        count,
        dim,
        codes.stride(0),
        scales.stride(0),
        group,
        None if e4m3 is None else e4m3.data_ptr(),
    )
    return y


def head_sums(dots_ThN: torch.Tensor, weights_Th: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] index scores from dots [T, h, N >= count], heads added in ascending order."""
    rows, heads, pitch = dots_ThN.shape
    scores = torch.empty(rows, count)
    _call(
        "head_sums",
        dots_ThN.data_ptr(),
        weights_Th.data_ptr(),
        scores.data_ptr(),
        rows,
        heads,
        count,
        pitch,
    )
    return scores


def select_rows(scores_TN: torch.Tensor, klen_T: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k] best of each row's first `klen` scores, ascending, -1 padded."""
    rows, count = scores_TN.shape
    out, keys = torch.empty(rows, k, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    _call(
        "select_rows",
        scores_TN.data_ptr(),
        klen_T.data_ptr(),
        out.data_ptr(),
        keys.data_ptr(),
        rows,
        count,
        k,
    )
    return out


def candidate_rows(scores_TN: torch.Tensor, klen_T: torch.Tensor, k: int, size: int) -> torch.Tensor:
    """int64 [T, k] candidate blocks, ascending, -1 padded."""
    rows, count = scores_TN.shape
    blocks = -(-count // size)
    out, keys = torch.empty(rows, k, dtype=torch.int64), torch.empty(blocks, dtype=torch.int64)
    best = torch.empty(blocks)
    _call(
        "candidate_rows",
        scores_TN.data_ptr(),
        klen_T.data_ptr(),
        out.data_ptr(),
        best.data_ptr(),
        keys.data_ptr(),
        rows,
        count,
        k,
        size,
    )
    return out


def entry_slots(
    entries_Tn: torch.Tensor, tables_TB: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pool slots int64 [T, n], bias float32 [T, n] 0 or -inf) of entry ids, -1 = none."""
    rows, count = entries_Tn.shape
    slots, bias = torch.empty_like(entries_Tn), torch.empty(rows, count)
    _call(
        "entry_slots",
        entries_Tn.data_ptr(),
        tables_TB.data_ptr(),
        slots.data_ptr(),
        bias.data_ptr(),
        rows,
        count,
        tables_TB.shape[1],
        size,
    )
    return slots, bias
