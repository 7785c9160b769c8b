"""One row's value of a column, whatever Arrow type carries it: text, token ids, sampling parameters.

Knows: Arrow types and how a user may have stored a value. Does not know: tokenizers, limits, outputs.
Every function gives a value or raises `RowError`; a broken neighbour never matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from deepinfer_ray.errors import RowError

Getter = Callable[[int], Any]
"""Row number within the part → the row's raw value, None for null."""


def getter(column: pa.ChunkedArray) -> Getter:
    """Access by row number to one column.

    Strings of every kind come as bytes (their UTF-8 is not checked here), lists as Arrow arrays, other types
    as Arrow scalars. Null comes as None.
    """
    array = _one_array(column)
    kind = array.type
    if _is_text(kind):
        array = array.cast(pa.large_binary())

    def value(row: int) -> Any:
        scalar = array[row]
        if not scalar.is_valid:
            return None
        if _is_text(kind):
            return scalar.as_py()
        return scalar.values if _is_list(kind) else scalar

    return value


def text(raw: Any, column: str) -> str:
    """A prompt. Codes: null_prompt, empty_prompt, wrong_type (another type, or bytes that are not UTF-8)."""
    if raw is None:
        raise RowError("null_prompt", f"column {column} is null")
    if not isinstance(raw, bytes):
        raise RowError("wrong_type", f"column {column} is {_kind(raw)}, a prompt is a string")
    decoded = _utf8(raw, "wrong_type", f"column {column}")
    if not decoded:
        raise RowError("empty_prompt", f"column {column} is an empty string")
    return decoded


def token_ids(raw: Any, column: str) -> np.ndarray:
    """Token ids, int64 or uint64 [len], not yet checked against a vocabulary.

    Takes a list of any integer type, or a string holding a JSON list. Codes: null_prompt, empty_prompt,
    wrong_type, bad_token_id (a null among the ids).
    """
    if raw is None:
        raise RowError("null_prompt", f"column {column} is null")
    if isinstance(raw, bytes):
        return _ids_of_json(raw, column)
    if not isinstance(raw, pa.Array):
        raise RowError("wrong_type", f"column {column} is {_kind(raw)}, token ids are a list of integers")
    if len(raw) == 0:
        raise RowError("empty_prompt", f"column {column} is an empty list")
    if not (pa.types.is_integer(raw.type) or pa.types.is_null(raw.type)):
        raise RowError("wrong_type", f"column {column} is a list of {raw.type}, token ids are integers")
    if raw.null_count:
        position = raw.is_null().to_pylist().index(True)
        raise RowError("bad_token_id", f"the token id at position {position} of column {column} is null")
    return raw.to_numpy(zero_copy_only=False)


def mapping(raw: Any, column: str, code: str) -> dict[str, Any]:
    """Values by name: a struct, a map or a string holding a JSON object; null gives none.

    Fields that are null are left out. Raises `RowError` with `code`.
    """
    if raw is None:
        return {}
    try:
        if isinstance(raw, pa.Array):  # a map written as a list of (key, value)
            values = dict(pair.values() for pair in raw.to_pylist())
        else:
            values = structure(raw, column, code)
    except (ValueError, TypeError) as error:
        raise RowError(code, f"column {column} cannot be read: {error}") from None
    if not isinstance(values, Mapping):
        kind = f"JSON of type {type(values).__name__}" if isinstance(raw, bytes) else _kind(raw)
        raise RowError(code, f"column {column} is {kind}, expected a struct, map or JSON object")
    return {str(name): value for name, value in values.items() if value is not None}


def structure(raw: Any, column: str, code: str) -> Any:
    """A nested value as Python: structs, maps and lists, or a string holding JSON; null gives None.

    A struct column has all fields in all rows, so fields that are null are left out; what a JSON text says is
    null stays. Raises `RowError` with `code`.
    """
    if raw is None:
        return None
    try:
        if isinstance(raw, bytes):
            return json.loads(_utf8(raw, code, f"column {column}"))
        if isinstance(raw, pa.Array):
            return _without_nulls(raw.to_pylist(maps_as_pydicts="strict"))
        return _without_nulls(raw.as_py(maps_as_pydicts="strict"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RowError(code, f"column {column} cannot be read: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def plain_text(raw: Any, column: str) -> str | None:
    """A short string, None for null. Code: wrong_type."""
    if raw is None:
        return None
    if not isinstance(raw, bytes):
        raise RowError("wrong_type", f"column {column} is {_kind(raw)}, expected a string")
    return _utf8(raw, "wrong_type", f"column {column}")


def size(raw: Any) -> int:
    """Bytes that the raw value takes."""
    if isinstance(raw, bytes):
        return len(raw)
    return int(raw.nbytes) if isinstance(raw, pa.Array) else 0


def _ids_of_json(raw: bytes, column: str) -> np.ndarray:
    if not raw.strip():
        raise RowError("empty_prompt", f"column {column} is an empty string")
    try:
        ids = json.loads(_utf8(raw, "wrong_type", f"column {column}"))
    except (ValueError, RecursionError):
        raise RowError(
            "wrong_type", f"column {column} is a string that is no JSON list of token ids"
        ) from None
    if not isinstance(ids, list):
        raise RowError(
            "wrong_type", f"column {column} holds JSON of type {type(ids).__name__}, expected a list"
        )
    return checked_list(ids, column)


def checked_list(ids: Sequence[Any], column: str) -> np.ndarray:
    """Python values as int64 [len]; codes as in `token_ids`, bad_token_id beyond 64 bits too."""
    if not ids:
        raise RowError("empty_prompt", f"column {column} is an empty list")
    for position, value in enumerate(ids):
        if value is None:
            raise RowError("bad_token_id", f"the token id at position {position} of column {column} is null")
        if type(value) is not int:
            raise RowError(
                "wrong_type",
                f"the token id at position {position} of column {column} is a {type(value).__name__}, "
                "not an integer",
            )
        if not -(2**63) <= value < 2**63:
            raise RowError(
                "bad_token_id", f"the token id at position {position} of column {column} is {value}"
            )
    return np.asarray(ids, np.int64)


def _utf8(raw: bytes, code: str, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RowError(code, f"{where} is not valid UTF-8 at byte {error.start}") from None


def _kind(raw: Any) -> str:
    return str(raw.type) if isinstance(raw, pa.Array | pa.Scalar) else "a string"


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array = column.combine_chunks()
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
        )
    )


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )
