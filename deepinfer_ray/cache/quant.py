"""Cached vectors to bytes and back: one codec for each record kind.

Knows: the recipe of each kind (attention spec §9) and how a record splits into codes and scales.
Does not know: where a record lies in a pool.

Shape letters: N vectors, d values a vector, c code bytes, s scale bytes.
"""

from __future__ import annotations

import torch

from deepinfer_ray.cache.layout import RecordFormat
from deepinfer_ray.ops import formats


def encode(
    record: RecordFormat, x_Nd: torch.Tensor, *, divide: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [N, c] and scales [N, s] of float32 vectors [N, d]; s = 0 for raw float32 records.

    divide: true divisions in the compressed-KV recipe (numeric variant `reference`, attention spec §9.3).
    """
    if x_Nd.shape[-1] != record.width:
        raise ValueError(
            f"a {record.kind} record holds {record.width} values, got a vector of {x_Nd.shape[-1]}"
        )
    match record.kind:
        case "fp8":
            return formats.quantize_fp8_groups(x_Nd)
        case "fp4_kv":
            return formats.quantize_kv(x_Nd, divide=divide)
        case "fp4_index":
            return formats.quantize_index(x_Nd)
        case "f32":
            data = x_Nd.detach().to(torch.float32).contiguous().view(torch.uint8)
            return data, data.new_empty(data.shape[0], 0)


def decode(record: RecordFormat, codes_Nc: torch.Tensor, scales_Ns: torch.Tensor) -> torch.Tensor:
    """float32 [N, d] of code bytes [N, c] and scale bytes [N, s]; exact (every value fits bf16)."""
    match record.kind:
        case "fp8":
            return formats.dequant_fp8_groups(codes_Nc, scales_Ns)
        case "fp4_kv":
            return formats.dequant_kv(codes_Nc, scales_Ns)
        case "fp4_index":
            return formats.dequant_index(codes_Nc, scales_Ns)
        case "f32":
            return codes_Nc.contiguous().view(torch.float32)


def encode_record(record: RecordFormat, x_Nd: torch.Tensor, *, divide: bool = False) -> torch.Tensor:
    """uint8 [N, record.bytes]: codes and scales of each vector side by side (an interleaved record)."""
    codes, scales = encode(record, x_Nd, divide=divide)
    return torch.cat((codes, scales), dim=-1) if record.scale_bytes else codes


def decode_record(record: RecordFormat, bytes_NB: torch.Tensor) -> torch.Tensor:
    """float32 [N, d] of interleaved records [N, record.bytes]."""
    return decode(record, bytes_NB[:, : record.data_bytes], bytes_NB[:, record.data_bytes :])
