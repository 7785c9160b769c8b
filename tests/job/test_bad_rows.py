"""One bad row never costs another: 2,000 rows with ten kinds of bad ones, and each kind's message."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from engine_backend import EngineBackend

from deepinfer_ray.config.engine import EngineConfig

TINY = Path(__file__).parents[1] / "data/golden/tinyB"
ROW_LIMIT = 4096
CONTEXT = 200


def broken_utf8(strings: pa.Array, rows: list[int]) -> pa.Array:
    """`strings` (large_string) with bytes that are no UTF-8 in `rows`."""
    raw = strings.cast(pa.large_binary()).to_pylist()
    for row in rows:
        raw[row] = b"caf\xe9 \xff"
    array = pa.array(raw, pa.large_binary())
    return pa.Array.from_buffers(pa.large_string(), len(array), array.buffers())


IDS_KINDS = {
    "null": (None, None, "null_prompt", "is null"),
    "empty": ("[]", None, "empty_prompt", "is an empty list"),
    "too long": (
        json.dumps([7] * (CONTEXT + 1)),
        None,
        "prompt_too_long",
        "201 tokens, the context takes 200",
    ),
    "id out of range": ("[5, 512]", None, "bad_token_id", "token id 512 at position 1 is outside [0, 512)"),
    "negative id": ("[-1, 5]", None, "bad_token_id", "token id -1 at position 0 is outside [0, 512)"),
    "null inside": ("[5, null]", None, "bad_token_id", "the token id at position 1 of column ids is null"),
    "no list": ('"hello"', None, "wrong_type", "JSON of type str, expected a list"),
    "NaN temperature": ("[5]", '{"temperature": NaN}', "bad_sampling_params", "temperature"),
    "invalid UTF-8": ("", None, "wrong_type", "column ids is not valid UTF-8 at byte 3"),
    "oversized": ("[" + "1," * ROW_LIMIT + "1]", None, "prompt_too_long", "the limit of a row is 4096"),
}


def test_two_thousand_rows_with_ten_kinds_of_bad_ones(job, write_rows, read_output, tmp_path):
    rng = np.random.default_rng(5)
    bad_rows = {
        int(row): kind for row, kind in zip(rng.permutation(2000)[:100], list(IDS_KINDS) * 10, strict=True)
    }
    ids, sampling = [], []
    for row in range(2000):
        value, parameters, *_ = IDS_KINDS[bad_rows[row]] if row in bad_rows else (f"[{row % 512}, 9]", None)
        ids.append(value)
        sampling.append(parameters)
    column = broken_utf8(
        pa.array(ids, pa.large_string()), [row for row, kind in bad_rows.items() if kind == "invalid UTF-8"]
    )
    names = [f"row-{row}" for row in rng.permutation(2000)]
    path = write_rows(tmp_path / "in.parquet", {"name": names, "ids": column, "s": sampling}, group=700)
    outcome = job(
        input=path,
        token_ids_column="ids",
        id_column="name",
        sampling_column="s",
        max_model_len=CONTEXT,
        max_tokens=8,
        sets=[f"job.max_row_bytes={ROW_LIMIT}"],
    )
    rows = read_output(tmp_path / "out")
    assert outcome.exit_code == 0
    assert Counter(row["row_id"] for row in rows) == Counter(names)
    for number, row in enumerate(rows):
        assert row["row_id"] == names[number]
        if number in bad_rows:
            _, _, code, message = IDS_KINDS[bad_rows[number]]
            assert (row["error_code"], row["finish_reason"]) == (code, "error"), bad_rows[number]
            assert message in row["error"]
            assert row["completion"] is None
            assert row["attempts"] == 0
        else:
            assert row["error_code"] is None
            assert row["token_ids"] == [9, number % 512]
    expected = Counter(IDS_KINDS[kind][2] for kind in bad_rows.values())
    assert outcome.summary.counts.error_codes == expected


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        (None, "null_prompt", "column prompt is null"),
        ("", "empty_prompt", "column prompt is an empty string"),
        ("x" * 200, "prompt_too_long", "the prompt has 201 tokens, the context takes 200"),
        ("x" * 5000, "prompt_too_long", "the prompt takes 5000 bytes, the limit of a row is 4096"),
    ],
)
def test_text_prompts(job, write_rows, read_output, tmp_path, prompt, code, message):
    path = write_rows(tmp_path / "in.parquet", {"prompt": pa.array(["ok", prompt, "x" * 199], pa.string())})
    job(input=path, max_model_len=CONTEXT, sets=["job.max_row_bytes=4096"])
    first, bad, last = read_output(tmp_path / "out")
    assert (bad["error_code"], bad["error"]) == (code, message)
    assert first["error"] is None
    assert last["error"] is None
    assert last["prompt_tokens"] == 200


def test_prompt_that_is_no_text(job, write_rows, read_output, tmp_path):
    write_rows(tmp_path / "in/a.parquet", {"prompt": pa.array([1, None])})
    write_rows(tmp_path / "in/b.parquet", {"prompt": ["fine"]})
    write_rows(
        tmp_path / "in/c.parquet", {"prompt": broken_utf8(pa.array(["", "ok"], pa.large_string()), [0])}
    )
    job(input=tmp_path / "in")
    errors = [(row["error_code"], row["error"]) for row in read_output(tmp_path / "out")]
    assert errors == [
        ("wrong_type", "column prompt is int64, a prompt is a string"),
        ("null_prompt", "column prompt is null"),
        (None, None),
        ("wrong_type", "column prompt is not valid UTF-8 at byte 3"),
        (None, None),
    ]


def test_broken_utf8_leaves_the_part_readable(job, write_rows, read_output, tmp_path):
    table = {"prompt": broken_utf8(pa.array(["", "ok"], pa.large_string()), [0])}
    job(input=write_rows(tmp_path / "in.parquet", table))
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == ["caf\ufffd \ufffd", "ok"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int8()),
        pa.list_(pa.uint64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.int64(), 2),
        pa.list_view(pa.int16()),
    ],
    ids=str,
)
def test_token_ids_of_every_integer_list(job, write_rows, read_output, tmp_path, kind):
    path = write_rows(tmp_path / "in.parquet", {"ids": pa.array([[1, 2], None, [3, 4]], kind)})
    job(input=path, token_ids_column="ids")
    rows = read_output(tmp_path / "out")
    assert [row["token_ids"] for row in rows] == [[2, 1], None, [4, 3]]
    assert [row["error_code"] for row in rows] == [None, "null_prompt", None]


def test_token_ids_of_other_types(job, write_rows, read_output, tmp_path):
    columns = {
        "a": pa.array([[], [1, None]], pa.list_(pa.int32())),
        "b": pa.array([[], [None]], pa.list_(pa.null())),
        "c": pa.array([["x"], None], pa.list_(pa.string())),
        "d": pa.array([1.5, 2.0]),
        "e": pa.array([[2**40], [2**63]], pa.list_(pa.uint64())),
        "f": pa.array(["[1, 2.0]", "[true]"]),
        "g": pa.array(["{", " "]),
        "h": pa.array([json.dumps([2**70]), "[" * 100000]),
    }
    for name, column in columns.items():
        write_rows(tmp_path / f"in/{name}.parquet", {"ids": column})
    job(input=tmp_path / "in", token_ids_column="ids")
    codes = [row["error_code"] for row in read_output(tmp_path / "out")]
    assert codes == [
        *("empty_prompt", "bad_token_id"),
        *("empty_prompt", "bad_token_id"),
        *("wrong_type", "null_prompt"),
        *("wrong_type", "wrong_type"),
        *("bad_token_id", "bad_token_id"),
        *("wrong_type", "wrong_type"),
        *("wrong_type", "empty_prompt"),
        *("bad_token_id", "wrong_type"),
    ]


SAMPLING = [
    ({"temperature": -1.0}, "temperature: Input should be greater than or equal to 0"),
    ({"temperature": math.nan}, "temperature: Input should be a finite number"),
    ({"top_k": 0}, "top_k is 0, which keeps no token"),
    ({"stop": ["a", "\ud800"]}, "stop: a stop string is no valid Unicode, it holds a lone surrogate"),
    ({"\ud800": 1}, r"unknown parameter '\ud800'"),
    ({"temprature": 1.0}, "unknown parameter 'temprature'; did you mean 'temperature'?"),
    ({"n": 2}, "n is set for the whole job (--n 1), a row cannot change it"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": "[]"}, "structured_outputs must be an object, not list"),
]


@pytest.mark.parametrize(("parameters", "message"), SAMPLING, ids=lambda value: str(value)[:30])
def test_sampling_of_a_row(job, write_rows, read_output, tmp_path, parameters, message):
    column = [json.dumps(parameters), '{"temperature": 0.25, "seq_seed": 7}', None]
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a", "b", "c"], "s": column})
    job(input=path, sampling_column="s", temperature=0.75)
    bad, own, default = read_output(tmp_path / "out")
    code = "bad_schema" if "structured_outputs" in parameters else "bad_sampling_params"
    assert bad["error_code"] == code
    assert message in bad["error"]
    assert own["completion"].startswith("7:0.25:")
    assert ":0.75:" in default["completion"]


def test_sampling_as_struct_and_map(job, write_rows, read_output, tmp_path):
    struct = pa.array(
        [{"temperature": 0.5, "stop": None}, {"temperature": math.nan, "stop": None}, None],
        pa.struct([("temperature", pa.float64()), ("stop", pa.list_(pa.string()))]),
    )
    mapping = pa.array(
        [[("temperature", "0.5")], [("temperature", "-2")], []], pa.map_(pa.string(), pa.string())
    )
    broken = pa.array(["{", "[1]", "null"])
    for name, column in {"a": struct, "b": mapping, "c": broken}.items():
        write_rows(tmp_path / f"in/{name}.parquet", {"prompt": ["x", "y", "z"], "s": column})
    job(input=tmp_path / "in", sampling_column="s")
    rows = read_output(tmp_path / "out")
    bad = "bad_sampling_params"
    assert [row["error_code"] for row in rows] == [None, bad, None, None, bad, None, bad, bad, bad]
    assert ":0.5:" in rows[0]["completion"]
    assert ":0.5:" in rows[3]["completion"]


def test_control_token_spellings_stay_text(job, write_rows, read_output, tmp_path):
    text = "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜><｜User｜></think>"
    path = write_rows(tmp_path / "in.parquet", {"prompt": [text]})
    job(input=path, max_tokens=500)
    (row,) = read_output(tmp_path / "out")
    ids = row["token_ids"][::-1]  # the stub reverses
    assert ids[0] == 0
    assert bytes(token - 3 for token in ids[1:]).decode() == text


@pytest.mark.parametrize(
    ("prompt_kind", "kept"), [("prompt", [0, *range(60, 90)]), ("ids", list(range(59, 90)))]
)
def test_truncate_left_keeps_the_newest_tokens(job, write_rows, read_output, tmp_path, prompt_kind, kept):
    ids = [0, *range(10, 90)]
    text = bytes(token - 3 for token in ids[1:]).decode()
    path = write_rows(tmp_path / "in.parquet", {"prompt": [text], "ids": [ids]})
    column = {"token_ids_column": "ids"} if prompt_kind == "ids" else {}
    job(input=path, max_model_len=41, max_tokens=10, on_too_long="truncate-left", **column)
    (row,) = read_output(tmp_path / "out")
    assert row["prompt_tokens"] == 31  # the context but for max_tokens
    assert row["token_ids"] == kept[::-1][:10]


def test_the_same_kinds_through_the_real_engine(job, write_rows, read_output, tmp_path):
    """Greedy rows of a tiny model beside all kinds of bad ones; good rows do not feel them."""
    good = [f"[{5 + row}, {9 + row}, 7]" for row in range(120)]
    greedy = '{"temperature": 0}'
    bad = [
        (value, parameters or greedy)
        for kind, (value, parameters, *_) in IDS_KINDS.items()
        if kind != "invalid UTF-8"
    ]
    mixed = [(value, greedy) for value in good]
    for place, row in enumerate(bad):
        mixed.insert(place * 12, row)
    options = {
        "token_ids_column": "ids",
        "sampling_column": "s",
        "max_model_len": CONTEXT,
        "max_tokens": 3,
        "model": str(TINY),
        "sets": [f"job.max_row_bytes={ROW_LIMIT}", "job.rows_per_part=50"],
    }
    for name, rows in {"mixed": mixed, "good": [(value, greedy) for value in good]}.items():
        table = {"ids": [value for value, _ in rows], "s": [parameters for _, parameters in rows]}
        path = write_rows(tmp_path / f"{name}.parquet", table)
        backend = EngineBackend(
            TINY, EngineConfig().with_values(scheduler={"max_model_len": CONTEXT, "max_seqs": 32})
        )
        outcome = job(input=path, output=str(tmp_path / name), stub=backend, **options)
        assert outcome.exit_code == 0
    alone = {row["ids"]: row["token_ids"] for row in read_output(tmp_path / "good")}
    beside = read_output(tmp_path / "mixed")
    assert Counter(row["error_code"] for row in beside if row["error_code"]) == Counter(
        code for kind, (_, _, code, _) in IDS_KINDS.items() if kind != "invalid UTF-8"
    )
    assert {row["ids"]: row["token_ids"] for row in beside if row["error_code"] is None} == alone
    assert all(len(ids) in (1, 2, 3) for ids in alone.values())
    assert len(set(map(tuple, alone.values()))) > 10
