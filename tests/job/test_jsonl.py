"""JSON lines as input: rows, columns, and all that may be wrong with a line."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stub_backend import StubBackend

from deepinfer_ray.errors import InputError
from deepinfer_ray.job import jsonl
from deepinfer_ray.job.ids import check_ids
from deepinfer_ray.job.plan import plan_input
from deepinfer_ray.job.source import read_parts


@pytest.fixture
def lines(tmp_path):
    """lines(name, *objects or raw texts) → path of a file with one line each."""

    def write(name, *rows, end="\n"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_bytes("".join(text + end for text in texts).encode(errors="surrogatepass"))
        return path

    return write


def plan(*paths, rows_per_part=100, **options):
    return plan_input([str(path) for path in paths], rows_per_part=rows_per_part, **options)


def rows_of(a_plan):
    return [row for _, table in read_parts(a_plan.iter_parts()) for row in table.to_pylist()]


def test_every_line_gives_a_row(job, lines, read_output, tmp_path):
    path = lines("in.jsonl", *({"prompt": f"p{i}", "k": i} for i in range(300)))
    job(input=path, sets=["job.rows_per_part=128"])
    rows = read_output(tmp_path / "out")
    assert [(row["prompt"], row["k"]) for row in rows] == [(f"p{i}", i) for i in range(300)]
    assert rows[129]["row_id"] == "in.jsonl#0:129"
    assert len(list((tmp_path / "out").glob("part-*"))) == 3


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n \t\n"])
def test_line_ends_and_blank_lines(lines, end):
    path = lines("in.jsonl", {"prompt": "a\nb"}, {"prompt": "c"}, end=end)
    assert [row["prompt"] for row in rows_of(plan(path))] == ["a\nb", "c"]
    path.write_bytes(path.read_bytes().rstrip())  # no end after the last line
    assert [row["prompt"] for row in rows_of(plan(path))] == ["a\nb", "c"]


def test_byte_order_mark(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}')
    assert [row["prompt"] for row in rows_of(plan(tmp_path / "in.jsonl"))] == ["a", "b"]


BAD_LINES = [
    ("{not", "line 2 is no JSON: Expecting property name enclosed in double quotes at column 2"),
    ("[1, 2]", "line 2 holds list, a row is a JSON object"),
    ('"text"', "line 2 holds str, a row is a JSON object"),
    ('{"prompt": "caf\udce9"}', "line 2 is not valid UTF-8 at byte 15"),
    ("[" * 100_000, "line 2 is no JSON: "),
    ('{"prompt": 5}', "column prompt holds int in line 2, expected a string"),
    ('{"prompt": ["x"]}', "column prompt holds list in line 2, expected a string"),
    (r'{"prompt": "\ud800"}', "column prompt is not valid UTF-8 at byte 0"),
    (r'{"\udfff": 1}', "line 2 has a key that holds a lone surrogate"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_one_error_row(job, tmp_path, read_output, line, message):
    good = b'{"prompt": "fine", "id": "a"}\n'
    raw = line.encode(errors="surrogateescape")
    (tmp_path / "in.jsonl").write_bytes(good + raw + b"\n" + good.replace(b'"a"', b'"b"'))
    job(input=tmp_path / "in.jsonl", id_column="id") if "prompt" not in line else job(
        input=tmp_path / "in.jsonl"
    )
    first, bad, last = read_output(tmp_path / "out")
    assert (bad["error_code"], bad["finish_reason"]) == ("wrong_type", "error")
    assert bad["error"].startswith(message)
    assert bad["row_id"] == "in.jsonl#0:1"
    assert first["error"] is None
    assert last["error"] is None


def test_types_of_columns(lines):
    rows = [
        {
            "i": 1,
            "f": 1,
            "b": True,
            "s": "x",
            "list": [1, {"a": "ü"}],
            "mixed": 5,
            "big": 2**70,
            "none": None,
        },
        {"i": None, "f": 2.5, "b": False, "s": "y", "list": None, "mixed": "five", "big": 1, "late": "z"},
    ]
    found = plan(lines("in.jsonl", *rows))
    types = {field.name: field.type for field in found.files[0].schema}
    text = pa.string()
    assert types == {
        **{"i": pa.int64(), "f": pa.float64(), "b": pa.bool_(), "s": text, "list": text},
        **{"mixed": text, "big": text, "none": text, "late": text},
    }
    assert rows_of(found) == [
        {**rows[0], "f": 1.0, "list": '[1, {"a": "ü"}]', "mixed": "5", "big": str(2**70), "late": None},
        {**rows[1], "big": "1", "none": None},
    ]


def test_files_share_one_schema(job, lines, tmp_path):
    lines("in/a.jsonl", {"prompt": "x", "k": 1})
    lines("in/sub=1/b.jsonl", {"prompt": "y", "k": 0.5, "extra": True})
    lines("in/c.ndjson", {"prompt": "z"})
    job(input=tmp_path / "in")
    schemas = [pq.read_schema(part) for part in sorted((tmp_path / "out").glob("part-*"))]
    assert len(schemas) == 3
    assert {schema.field("k").type for schema in schemas} == {pa.float64()}
    assert schemas[0].names[:4] == ["prompt", "k", "extra", "sub"]
    assert all(schema.remove_metadata().equals(schemas[0].remove_metadata()) for schema in schemas)


def test_blocks(lines, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_ROWS", 7)
    path = lines("in.jsonl", *({"prompt": f"ü{i}"} for i in range(25)), end="\r\n\r\n")
    found = plan(path, rows_per_part=3, limit=20)
    assert found.files[0].row_groups == (7, 7, 7, 4)
    parts = list(found.iter_parts())
    assert [part.name for part in parts][2:4] == ["part-000000-0002.parquet", "part-000001-0000.parquet"]
    assert parts[3].row_name(1) == "in.jsonl#0:8"
    assert [row["prompt"] for row in rows_of(found)] == [f"ü{i}" for i in range(20)]
    skipped = [table.to_pylist() for _, table in read_parts(parts[1::2])]
    assert [row["prompt"] for table in skipped for row in table] == [
        f"ü{part.row_base + part.start + i}" for part in parts[1::2] for i in range(part.rows)
    ]


def test_a_long_line_spans_chunks(lines, monkeypatch):
    monkeypatch.setattr(jsonl, "_CHUNK", 16)
    path = lines("in.jsonl", {"prompt": "x" * 100}, {"prompt": ""}, {"prompt": "y" * 50})
    assert [len(row["prompt"]) for row in rows_of(plan(path))] == [100, 0, 50]
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 80)
    with pytest.raises(InputError, match=r"in.jsonl has a line of more than 80 bytes, line 1"):
        plan(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '[{"prompt": "a"}, {"prompt": "b"}]',
            "line 1 holds list, a row is a JSON object. JSON lines hold one object",
        ),
        ('{\n "prompt": "a"\n}', "has no line that is a JSON object: line 1 is no JSON"),
        ("\x00\x01", "has no line that is a JSON object"),
    ],
)
def test_files_that_are_no_json_lines(tmp_path, content, message):
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        plan(tmp_path / "in.jsonl")


def test_empty_files(job, lines, tmp_path):
    lines("in/a.jsonl")
    (tmp_path / "in/b.jsonl").write_text("\n\n")
    found = plan(tmp_path / "in")
    assert (found.rows, list(found.iter_parts())) == (0, [])
    lines("in/c.jsonl", {"prompt": "x"})
    assert job(input=tmp_path / "in").summary.counts.ok == 1


def test_a_compressed_file_and_one_without_ending(lines, tmp_path):
    lines("in.jsonl.gz", {"prompt": "x"})
    with pytest.raises(InputError, match=r"in.jsonl.gz is compressed as a whole; decompress it first"):
        plan(tmp_path / "in.jsonl.gz")
    assert rows_of(plan(lines("rows", {"prompt": "x"}))) == [{"prompt": "x"}]
    assert rows_of(plan(lines("rows.json", {"prompt": "x"}))) == [{"prompt": "x"}]


def test_too_many_keys(lines, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_COLUMNS", 3)
    with pytest.raises(InputError, match="has more than 3 different keys"):
        plan(lines("in.jsonl", *({str(i): 1} for i in range(4))))


def test_a_missing_column(job, lines):
    with pytest.raises(InputError, match=r"in.jsonl has no column prompt; its columns are: text"):
        job(input=lines("in.jsonl", {"text": "x"}))


class TestIds:
    def test_duplicate_and_null_name_the_line(self, lines):
        path = lines("in.jsonl", {"id": "a"}, "", {"id": "b"}, "{", {"id": "a"})
        with pytest.raises(
            InputError, match=r"'a' of column id occurs twice: in in.jsonl, line 1 and in in.jsonl, line 5"
        ):
            check_ids(plan(path), "id")
        with pytest.raises(InputError, match=r"the id column id is null in in.jsonl, line 2"):
            check_ids(plan(lines("in.jsonl", {"id": "a"}, {"x": "b"})), "id")

    def test_surrogates(self, lines):
        with pytest.raises(InputError, match=r"the id column id of in.jsonl, line 1, is no valid Unicode"):
            check_ids(plan(lines("in.jsonl", {"id": "\ud800"})), "id")

    def test_integers_and_limit(self, lines):
        path = lines("in.jsonl", {"id": 1}, {"id": "x"}, {"id": 1})
        check_ids(plan(path, limit=2), "id")
        with pytest.raises(InputError, match="'1' of column id occurs twice"):
            check_ids(plan(path), "id")


def test_chat_rows_with_nested_values(job, lines, read_output, tmp_path, spell):
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "s": {"temperature": 0.5, "thinking": False}},
        {"messages": '[{"role": "user", "content": "hi"}]', "s": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ]
    stub = StubBackend(answer=lambda item: (spell("a</think>b"), "", "stop"))
    job(input=lines("in.jsonl", *rows), messages_column="messages", sampling_column="s", stub=stub)
    assert [row["completion"] for row in read_output(tmp_path / "out")] == ["ab", "b", "b"]


def test_resume_and_changes(job, lines, read_output, tmp_path):
    path = lines("in.jsonl", *({"prompt": f"p{i}"} for i in range(200)))
    sets = ["job.rows_per_part=16"]
    assert job(input=path, stub=StubBackend(die_after=100), sets=sets).exit_code == 4
    assert job(input=path, sets=sets).summary.resumed_rows > 0
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == [f"p{i}" for i in range(200)]
    lines("in.jsonl", *({"prompt": f"q{i}"} for i in range(200)))
    with pytest.raises(Exception, match=r"input.in.jsonl.footer_sha256"):
        job(input=path, sets=sets)


def test_a_file_that_changed_while_it_was_read(lines):
    path = lines("in.jsonl", {"k": 1}, {"k": 2})
    parts = list(plan(path).iter_parts())
    lines("in.jsonl", {"k": "one"}, {"k": 2})
    with pytest.raises(InputError, match=r"in.jsonl has changed since the job was planned"):
        list(read_parts(parts))
    lines("in.jsonl", {"k": 1})
    with pytest.raises(InputError, match=r"in.jsonl ends early: row group 0 has 0 rows, it had 2"):
        list(read_parts(parts))
