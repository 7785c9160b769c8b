"""Which files are read, how they are cut into parts, and what is refused before a model loads."""

from __future__ import annotations

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deepinfer_ray.errors import ConfigError, InputError
from deepinfer_ray.job.ids import check_ids
from deepinfer_ray.job.plan import plan_input
from deepinfer_ray.job.source import read_parts
from deepinfer_ray.job.store import resolve


def plan(*paths, rows_per_part=100, **options):
    return plan_input([str(path) for path in paths], rows_per_part=rows_per_part, **options)


def names(a_plan):
    return [file.name for file in a_plan.files]


@pytest.fixture
def tree(write_rows, tmp_path):
    """data/{a,b}.parquet, data/sub/c.parquet, and what lies around in such directories."""
    root = tmp_path / "data"
    for name in ("b", "a", "sub/c"):
        write_rows(root / f"{name}.parquet", {"prompt": [name]})
    write_rows(root / "_temporary/x.parquet", {"prompt": ["x"]})
    write_rows(root / ".hidden.parquet", {"prompt": ["x"]})
    (root / "_SUCCESS").write_bytes(b"")
    (root / "readme.txt").write_text("hello")
    return root


def test_directory_in_name_order_without_hidden_files(tree):
    found = plan(tree)
    assert names(found) == ["a.parquet", "b.parquet", "sub/c.parquet"]
    assert found.ignored_files == 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("**/*.parquet", ["a.parquet", "b.parquet", "sub/c.parquet"]),
        ("s*/?.parquet", ["sub/c.parquet"]),
        ("[!a].parquet", ["b.parquet"]),
        ("a.parquet", ["a.parquet"]),
    ],
)
def test_globs(tree, pattern, expected):
    assert names(plan(tree / pattern)) == expected


def test_a_file_counts_once_however_often_it_is_named(tree):
    assert names(plan(tree, tree / "a.parquet", tree / "*.parquet")) == [
        "a.parquet",
        "b.parquet",
        "sub/c.parquet",
    ]


def test_equal_names_below_two_inputs_keep_their_folders(write_rows, tmp_path):
    for folder in ("x", "y"):
        write_rows(tmp_path / folder / "a.parquet", {"prompt": ["p"]})
    assert names(plan(tmp_path / "x", tmp_path / "y")) == ["x/a.parquet", "y/a.parquet"]


def test_uri(tree):
    assert names(plan(f"file://{tree}/sub")) == ["c.parquet"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "the input .*nowhere does not exist"),
        ("*.json", r"the input .*\*.json has no Parquet or JSONL file"),
        ("text", r"has no Parquet or JSONL file \(1 files there do not end in .parquet or .jsonl\)"),
    ],
)
def test_no_file(tree, tmp_path, path, message):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/readme.txt").write_text("x")
    with pytest.raises(InputError, match=message):
        plan(tmp_path / path)


@pytest.mark.parametrize("content", [b"", b"no parquet at all", b"PAR1" + b"x" * 100 + b"PAR1"])
def test_a_file_that_is_no_parquet(tree, content):
    (tree / "broken.parquet").write_bytes(content)
    with pytest.raises(
        InputError, match=r"broken.parquet cannot be read as Parquet: .*Repair it or leave it out"
    ):
        plan(tree)


def test_a_file_of_another_kind_is_told_what_is_read(tmp_path):
    (tmp_path / "x.csv").write_text("prompt\nhello\n")
    with pytest.raises(InputError, match=r"a parquet file\. Input is Parquet \(.parquet\) or JSON lines"):
        plan(tmp_path / "x.csv")


def test_parts_are_fixed_row_ranges_of_row_groups(write_rows, tmp_path):
    path = write_rows(tmp_path / "a.parquet", {"prompt": [str(i) for i in range(25)]}, group=10)
    parts = [(part.name, part.start, part.stop) for part in plan(path, rows_per_part=4).iter_parts()]
    assert parts == [
        ("part-000000-0000.parquet", 0, 4),
        ("part-000000-0001.parquet", 4, 8),
        ("part-000000-0002.parquet", 8, 10),
        ("part-000001-0000.parquet", 0, 4),
        ("part-000001-0001.parquet", 4, 8),
        ("part-000001-0002.parquet", 8, 10),
        ("part-000002-0000.parquet", 0, 4),
        ("part-000002-0001.parquet", 4, 5),
    ]


def test_wide_rows_go_into_smaller_parts(write_rows, tmp_path):
    prompts = [str(i).zfill(1000) for i in range(100)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": prompts}), path, use_dictionary=False, compression="none")
    parts = list(plan(path, part_bytes=10_800).iter_parts())
    assert {part.rows for part in parts} == {10}


def test_empty_row_groups_and_files_keep_their_number(tmp_path):
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for rows in (["a"], [], ["b", "c"]):
            writer.write_table(pa.table({"prompt": pa.array(rows, pa.string())}))
    pq.write_table(schema.empty_table(), tmp_path / "b.parquet")
    found = plan(tmp_path)
    assert found.rows == 3
    last = list(found.iter_parts())[-1]
    assert last.name.startswith(f"part-{len(found.files[0].row_groups) - 1:06d}-")


@pytest.mark.parametrize("limit", [0, 1, 14, 25, 99])
def test_limit(write_rows, tmp_path, limit):
    path = write_rows(tmp_path / "a.parquet", {"prompt": [str(i) for i in range(25)]}, group=10)
    found = plan(path, rows_per_part=4, limit=limit)
    tables = [table for _, table in read_parts(found.iter_parts())]
    prompts = [value for table in tables for value in table["prompt"].to_pylist()]
    assert prompts == [str(i) for i in range(min(25, limit))]
    assert found.rows == len(prompts)


def test_reading_skips_what_is_committed(write_rows, tmp_path):
    path = write_rows(tmp_path / "a.parquet", {"k": range(3000)}, group=1300)
    parts = list(plan(path, rows_per_part=90).iter_parts())[::3]
    for part, table in read_parts(parts):
        first = part.unit * 1300 + part.start
        assert table["k"].to_pylist() == list(range(first, first + part.rows))


def test_odd_columns_survive(job, read_output, tmp_path):
    table = pa.table(
        {
            "prompt": pa.array([f"p{i % 3}" for i in range(700)]).dictionary_encode(),
            "large": pa.array([f"l{i}" for i in range(700)], pa.large_string()),
            "tags": pa.array([{"a": [i, None]} for i in range(700)]),
            "nothing": pa.nulls(700),
            "bytes": pa.array([bytes([i % 256]) for i in range(700)], pa.binary(1)),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=350)
    job(input=tmp_path / "in.parquet", sets=["job.rows_per_part=300"])
    parts = sorted((tmp_path / "out").glob("part-*"))
    written = pa.concat_tables([pq.ParquetFile(part).read().select(table.schema.names) for part in parts])
    assert written.schema.equals(table.schema)
    assert written.to_pylist() == table.to_pylist()


def test_files_of_different_types_keep_their_own(job, write_rows, tmp_path):
    write_rows(tmp_path / "in/a.parquet", {"prompt": ["x"], "k": pa.array([1], pa.int32())})
    write_rows(tmp_path / "in/b.parquet", {"prompt": pa.nulls(1), "k": pa.array(["s"])})
    job(input=tmp_path / "in")
    types = [pq.read_schema(part).field("k").type for part in sorted((tmp_path / "out").glob("part-*"))]
    assert types == [pa.int32(), pa.string()]


@pytest.mark.parametrize("flag", ["prompt_column", "token_ids_column", "id_column", "sampling_column"])
def test_missing_column(job, write_rows, tmp_path, flag):
    write_rows(tmp_path / "in/a.parquet", {"prompt": ["x"], "other": [1]})
    write_rows(tmp_path / "in/b.parquet", {"prompt": ["x"]})
    message = rf"b.parquet has no column other; its columns are: prompt. Give another with --{flag}"
    with pytest.raises(InputError, match=message.replace("_", "-")):
        job(input=tmp_path / "in", **{flag: "other"})


def test_a_misspelt_column_of_a_wide_table_is_told_in_few_words(job, write_rows, tmp_path):
    columns = {f"c{number}": [1] for number in range(3000)} | {"prompt": ["x"]}
    path = write_rows(tmp_path / "in.parquet", columns)
    with pytest.raises(InputError) as caught:
        job(input=path, prompt_column="promt")
    text = str(caught.value)
    assert text.startswith("in.parquet has no column promt; did you mean prompt? its columns are: c0, c1, ")
    assert text.endswith(", c19 and 2,981 more. Give another with --prompt-column")
    outcome = job(input=path)
    assert outcome.exit_code == 0
    assert pq.read_schema(tmp_path / "out/part-000000-0000.parquet").names[:3001] == list(columns)


def test_two_columns_of_one_name(job, tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"in.parquet has more than one column named prompt"):
        job(input=tmp_path / "in.parquet")


class TestIds:
    @pytest.fixture
    def check(self, write_rows, tmp_path):
        def run(*ids, **options):
            for number, column in enumerate(ids):
                write_rows(tmp_path / f"in/{number}.parquet", {"id": column}, group=300)
            check_ids(plan(tmp_path / "in", **options), "id")

        return run

    def test_unique_ids_pass(self, check):
        check(
            [f"a{i}" for i in range(700)],
            pa.array(range(700), pa.uint64()),
            pa.array(["x"]).dictionary_encode(),
        )

    def test_an_empty_string_is_an_id(self, job, write_rows, read_output, tmp_path):
        job(
            input=write_rows(tmp_path / "in.parquet", {"prompt": ["a", "b"], "id": ["", "x"]}), id_column="id"
        )
        assert [row["row_id"] for row in read_output(tmp_path / "out")] == ["", "x"]

    def test_duplicate_in_another_file(self, check):
        first, second = [f"a{i}" for i in range(700)], [f"b{i}" for i in range(650)]
        second[640] = "a333"
        message = (
            r"the id 'a333' of column id occurs twice: in 0.parquet, row group 1, row 33 "
            r"and in 1.parquet, row group 2, row 40; ids must be unique"
        )
        with pytest.raises(InputError, match=message):
            check(first, second)

    def test_integer_and_string_of_equal_digits(self, check):
        with pytest.raises(InputError, match="the id '7' of column id occurs twice"):
            check([7], ["7"])

    def test_null(self, check):
        with pytest.raises(InputError, match=r"the id column id is null in 0.parquet, row group 1, row 5"):
            check([None if i == 305 else str(i) for i in range(400)])

    def test_type(self, check):
        with pytest.raises(
            InputError, match=r"0.parquet: the id column id is double; ids are strings or integers"
        ):
            check([1.5])

    def test_rows_beyond_the_limit_do_not_matter(self, check):
        check(["a", "b", "a", None], limit=2)

    def test_refused_before_anything_is_written(self, job, write_rows, tmp_path):
        path = write_rows(tmp_path / "in.parquet", {"prompt": ["a", "b"], "id": ["x", "x"]})
        with pytest.raises(InputError, match="occurs twice"):
            job(input=path, id_column="id")
        assert not (tmp_path / "out/_deepinfer/manifest.json").exists()


class TestDamage:
    """A file whose footer is fine and whose data is not: its rows are errors, the other files go on."""

    @pytest.fixture
    def damaged(self, write_rows, tmp_path):
        """Rows 0 to 299 are readable, the data page of those from 300 on is not."""
        first, second = (
            pa.table({"prompt": [f"row {i}" * 20 for i in rows], "k": rows})
            for rows in (range(300), range(300, 900))
        )
        path = tmp_path / "in/b.parquet"
        path.parent.mkdir()
        with pq.ParquetWriter(path, first.schema, use_dictionary=False, compression="none") as writer:
            writer.write_table(first)
            writer.write_table(second)
        start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
        content = bytearray(path.read_bytes())
        content[start : start + 2000] = b"\xff" * 2000
        path.write_bytes(content)
        write_rows(tmp_path / "in/a.parquet", {"prompt": ["x"], "k": [1]})
        write_rows(tmp_path / "in/c.parquet", {"prompt": ["y"], "k": [2]})
        return tmp_path / "in"

    def test_rows_are_errors(self, job, read_output, damaged, tmp_path):
        outcome = job(input=damaged, sets=["job.rows_per_part=100"])
        rows = read_output(tmp_path / "out")
        assert outcome.exit_code == 0
        assert outcome.summary.counts.error_codes == {"unreadable_input": 600}
        assert len(rows) == 902
        bad = [row for row in rows if row["error"]]
        assert [row["row_id"] for row in bad] == [f"b.parquet#1:{row}" for row in range(600)]
        assert bad[0]["error"].startswith(
            "the input file b.parquet, row group 1, cannot be read from row 0 on: "
        )
        assert (bad[0]["prompt"], bad[0]["k"], bad[0]["finish_reason"]) == (None, None, "error")
        assert rows[-1]["prompt"] == "y"

    def test_limit_of_errors_stops_the_job(self, job, damaged):
        outcome = job(input=damaged, max_error_rate=0.1)
        assert outcome.exit_code == 3
        assert "unreadable_input" in str(outcome.error)

    def test_ids_that_cannot_be_read_are_refused(self, job, damaged):
        with pytest.raises(
            InputError, match=r"the id column prompt of .*b.parquet, row group 1, cannot be read"
        ):
            job(input=damaged, id_column="prompt")
        assert job.stub.closed == []

    def test_ids_of_damaged_rows(self, job, read_output, damaged, tmp_path):
        with pytest.raises(InputError, match="occurs twice"):
            job(input=damaged, id_column="k")
        job(input=damaged / "b.parquet", id_column="k")
        rows = read_output(tmp_path / "out")
        assert [row["row_id"] for row in rows[298:302]] == ["298", "299", "b.parquet#1:0", "b.parquet#1:1"]

    def test_a_file_that_changed_ends_the_job(self, write_rows, tmp_path):
        path = write_rows(tmp_path / "a.parquet", {"prompt": [str(i) * 50 for i in range(5000)]})
        parts = list(plan(path).iter_parts())
        write_rows(path, {"prompt": ["other"]})
        with pytest.raises(
            InputError, match=r"a.parquet ends early: row group 0 has 1 rows, it had 5000 when"
        ):
            list(read_parts(parts))
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(InputError, match=r"a.parquet cannot be read as Parquet"):
            list(read_parts(parts))

    def test_a_required_column(self, tmp_path, job, read_output):
        schema = pa.schema([pa.field("prompt", pa.string(), nullable=False)])
        path = tmp_path / "in.parquet"
        pq.write_table(
            pa.table({"prompt": [f"{i}" * 90 for i in range(500)]}, schema=schema),
            path,
            use_dictionary=False,
            compression="none",
        )
        content = bytearray(path.read_bytes())
        content[100:2000] = b"\xff" * 1900
        path.write_bytes(content)
        job(input=path)
        assert {row["error_code"] for row in read_output(tmp_path / "out")} == {"unreadable_input"}


class TestPartitions:
    """Folders named key=value become columns."""

    def test_columns_and_types(self, job, write_rows, read_output, tmp_path):
        root = tmp_path / "in"
        write_rows(root / "year=2024/lang=en%20us/a.parquet", {"prompt": ["x", "y"]})
        write_rows(root / "year=7/lang=__HIVE_DEFAULT_PARTITION__/b.parquet", {"prompt": ["z"]})
        job(input=root, sets=["job.rows_per_part=1"])
        rows = read_output(tmp_path / "out")
        assert [(row["prompt"], row["year"], row["lang"]) for row in rows] == [
            ("x", 2024, "en us"),
            ("y", 2024, "en us"),
            ("z", 7, None),
        ]
        assert rows[2]["row_id"] == "year=7/lang=__HIVE_DEFAULT_PARTITION__/b.parquet#0:0"
        assert pq.read_schema(tmp_path / "out/part-000000-0000.parquet").names[:3] == [
            "prompt",
            "year",
            "lang",
        ]

    def test_leading_zeros_stay(self, write_rows, tmp_path):
        for month in ("01", "11"):
            write_rows(tmp_path / f"month={month}/a.parquet", {"prompt": ["x"]})
        found = plan(tmp_path / "*/*.parquet")
        assert [file.partitions for file in found.files] == [{"month": "01"}, {"month": "11"}]
        (_, table), _ = read_parts(found.iter_parts())
        assert table.schema.field("month").type == pa.string()

    def test_a_column_of_the_file_wins(self, write_rows, tmp_path):
        path = write_rows(tmp_path / "k=1/a.parquet", {"prompt": ["x"], "k": ["own"]})
        ((_, table),) = read_parts(plan(path).iter_parts())
        assert table.to_pylist() == [{"prompt": "x", "k": "own"}]

    def test_a_folder_is_no_id(self, job, write_rows, tmp_path):
        path = write_rows(tmp_path / "k=1/a.parquet", {"prompt": ["x"]})
        with pytest.raises(InputError, match="the id column k is a folder's name"):
            job(input=path, id_column="k")

    def test_a_folder_with_the_name_of_an_output_column(self, job, write_rows, tmp_path):
        path = write_rows(tmp_path / "error=1/a.parquet", {"prompt": ["x"]})
        with pytest.raises(InputError, match="has the column error, which the output also has"):
            job(input=path)


def test_parquet_and_jsonl_do_not_mix(tree):
    (tree / "b.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(
        InputError, match=r"holds Parquet and JSONL files, e.g. a.parquet and b.jsonl; give one kind"
    ):
        plan(tree)
    assert names(plan(tree / "**/*.parquet")) == ["a.parquet", "b.parquet", "sub/c.parquet"]


def test_a_glob_that_would_read_the_output(job, write_rows, tmp_path):
    write_rows(tmp_path / "data/a.parquet", {"prompt": ["a"]})
    with pytest.raises(ConfigError, match="lies inside the input"):
        job(input=tmp_path / "data/**/*.parquet", output=str(tmp_path / "data/out"))


def test_every_location_fsspec_opens(job, write_rows, read_output, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(write_rows(tmp_path / "k=v/a.parquet", {"prompt": ["x"]})), "/bucket/k=v/a.parquet")
    try:
        job(input="memory://bucket/k*/*.parquet", output="memory://bucket/out")
        memory.get("/bucket/out/", str(tmp_path / "copy"), recursive=True)
    finally:
        memory.rm("/bucket", recursive=True)
    (row,) = read_output(tmp_path / "copy")
    assert (row["prompt"], row["k"], row["row_id"]) == ("x", "v", "k=v/a.parquet#0:0")


@pytest.mark.parametrize(
    ("location", "seconds"), [("gs://bucket/x/*.parquet", 120), ("gs://bucket/x?retry_limit_seconds=5", 5)]
)
def test_google_s_storage_is_not_tried_for_a_quarter_of_an_hour(location, seconds):
    filesystem, path = resolve(location)
    assert path == ("bucket/x/*.parquet" if seconds == 120 else "bucket/x")
    _, (options,) = filesystem.__reduce__()
    assert options["retry_time_limit"].total_seconds() == seconds


@pytest.mark.parametrize("location", ["nowhere://bucket/x", "s3:/bucket", "hdfs2://x"])
def test_a_location_that_nobody_opens(job, location):
    with pytest.raises((ConfigError, InputError), match=rf"{location}"):
        job(input=location)
