"""The output columns: their names, types and order, and what happens when an input column has such a name.

Knows: the fixed schema of an output part. Does not know: where rows come from or how they are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from deepinfer_ray.errors import InputError

_TOP_LOGPROBS = pa.list_(pa.list_(pa.struct([("id", pa.int32()), ("logprob", pa.float32())])))

ROW_COLUMNS: dict[str, pa.DataType] = {
    "row_id": pa.string(),
    "completion": pa.string(),
    "reasoning": pa.string(),
    "tool_calls": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int32(),
    "completion_tokens": pa.int32(),
    "cached_tokens": pa.int32(),
    "attempts": pa.int32(),
    "token_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "prompt_logprobs": pa.list_(pa.float32()),
    "top_logprobs": _TOP_LOGPROBS,
    "error": pa.string(),
    "error_code": pa.string(),
}
"""Every column a part has beside the input's, in order; all present from the first version."""

COMPLETION_COLUMNS = frozenset(
    {
        "completion",
        "reasoning",
        "tool_calls",
        "finish_reason",
        "completion_tokens",
        "cached_tokens",
        "token_ids",
        "logprobs",
        "top_logprobs",
    }
)
"""Columns that hold one value per completion: lists in every part when a job asks for n > 1."""


def output_fields(n: int, prefix: str = "") -> list[pa.Field]:
    """The fields that follow the input columns; `prefix` goes before every name."""
    return [
        pa.field(prefix + name, pa.list_(kind) if n > 1 and name in COMPLETION_COLUMNS else kind)
        for name, kind in ROW_COLUMNS.items()
    ]


def output_schema(input_schema: pa.Schema, n: int, prefix: str = "") -> pa.Schema:
    """Input columns with unchanged types, then ours. Metadata of the input file as a whole is not kept:
    it describes that file (a pandas index, a feature list), not this one."""
    return pa.schema([*input_schema.remove_metadata(), *output_fields(n, prefix)])


def check_names(input_names: Iterable[str], prefix: str, file: str) -> None:
    """Refuse a file whose columns could not stand beside ours, before anything is loaded.

    Raises `InputError` naming the columns: one that occurs twice, or has the name of an output column.
    """
    names = list(input_names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{file} has more than one column named {', '.join(twice)}; rename one of them")
    clashes = [name for name in names if name in {prefix + ours for ours in ROW_COLUMNS}]
    if clashes:
        how = "another --output-prefix" if prefix else "--output-prefix, e.g. --output-prefix out_"
        raise InputError(
            f"{file} has the column{'s' if len(clashes) > 1 else ''} {', '.join(clashes)}, which the output "
            f"also has; rename {'them' if len(clashes) > 1 else 'it'}, or give {how}"
        )


def kept_columns(table: pa.Table, prefix: str) -> list[dict[str, Any]]:
    """Our columns of a committed part as one dict a row, names without `prefix`."""
    ours = table.select([prefix + name for name in ROW_COLUMNS]).rename_columns(list(ROW_COLUMNS))
    return ours.to_pylist()
