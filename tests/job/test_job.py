"""A job from Parquet to Parquet with the stub backend: rows, columns, counts, exit codes."""

from __future__ import annotations

import heapq
import json
import re
import time
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stub_backend import StubBackend

from deepinfer_ray.errors import CheckpointError, ConfigError, InputError
from deepinfer_ray.job import runner
from deepinfer_ray.job.schema import output_schema


def test_every_row_gives_one_row_in_input_order(job, write_rows, read_output, tmp_path):
    prompts = [f"prompt {i}" for i in range(1000)]
    path = write_rows(tmp_path / "in" / "a.parquet", {"prompt": prompts, "k": range(1000)}, group=300)
    outcome = job(input=path, sets=["job.rows_per_part=128"], stub=StubBackend(delay_s=0.05))
    rows = read_output(tmp_path / "out")
    assert outcome.exit_code == 0
    assert [row["prompt"] for row in rows] == prompts
    assert [row["row_id"] for row in rows[299:301]] == ["a.parquet#0:299", "a.parquet#1:0"]
    assert all(row["finish_reason"] == "length" and row["error"] is None for row in rows)
    assert rows[0]["prompt_tokens"] == 1 + len("prompt 0")
    assert rows[0]["token_ids"][-1] == 0  # the stub reverses: BOS comes last
    assert all(row["attempts"] == 1 and row["completion_tokens"] == len(row["token_ids"]) for row in rows)
    names = sorted(path.name for path in (tmp_path / "out").glob("*"))
    units = [(0, 3), (1, 3), (2, 3), (3, 1)]  # 300 rows = 128 + 128 + 44
    expected = [f"part-{unit:06d}-{sub:04d}.parquet" for unit, subs in units for sub in range(subs)]
    assert names == ["_deepinfer", *expected]
    ours = {"manifest.json", "config.json", "summary.json", "report.html", "stats"}
    assert {path.name for path in (tmp_path / "out/_deepinfer").iterdir()} == ours
    assert job.stub.most_under_way <= job.stub.capacity
    assert job.stub.closed == [True]


def test_summary_line(job, write_rows, tmp_path):
    prompts = ["a" * length for length in range(1, 41)] + [None]
    path = write_rows(tmp_path / "in.parquet", {"prompt": prompts})
    outcome = job(input=path, stub=StubBackend(fail="out_of_blocks"), max_tokens=4)
    summary = json.loads(outcome.summary.line())
    long_enough = [length + 1 for length in range(1, 41) if (length + 1) % 7]
    assert list(summary)[:8] == [
        "event",
        "rows",
        "ok",
        "errors",
        "error_codes",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
    ]
    assert summary["rows"] == 41
    assert summary["ok"] == len(long_enough)
    assert summary["error_codes"] == {"null_prompt": 1, "out_of_blocks": 40 - len(long_enough)}
    assert summary["prompt_tokens"] == sum(range(2, 42))
    assert summary["completion_tokens"] == sum(min(4, length) for length in long_enough)
    assert (summary["restarts"], summary["parts"], summary["resumed_rows"], summary["rows_left"]) == (
        2,
        1,
        0,
        0,
    )
    assert summary["output"] == str(tmp_path / "out")
    stored = json.loads((tmp_path / "out/_deepinfer/summary.json").read_text())
    assert stored == summary


@pytest.mark.parametrize("n", [1, 3])
def test_output_schema_is_fixed(job, write_rows, tmp_path, n):
    table = pa.table(
        {
            "prompt": pa.array(["x", None]),
            "ts": pa.array([1, 2], pa.timestamp("us", "UTC")),
            "nested": pa.array([[{"a": 1}], None], pa.list_(pa.struct([("a", pa.int8())]))),
            "cat": pa.array(["u", "v"]).dictionary_encode(),
            "big": pa.array(["u", "v"], pa.large_string()),
        }
    )
    path = write_rows(tmp_path / "in.parquet", table)
    job(input=path, n=n)
    part = pq.read_table(tmp_path / "out/part-000000-0000.parquet")
    expected = output_schema(table.schema, n)
    assert part.schema.names == expected.names
    assert part.schema.remove_metadata().equals(expected)
    assert part.select(table.schema.names).equals(table)


def test_n_completions_a_row_become_lists_with_derived_seeds(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["hello", None]})
    job(input=path, n=3, seed=5, stub=StubBackend(capacity=2, delay_s=0.02))
    good, bad = read_output(tmp_path / "out")
    assert len(set(good["completion"])) == 3
    assert good["finish_reason"] == ["length"] * 3
    assert good["completion_tokens"] == [6, 6, 6]
    assert good["prompt_tokens"] == 6
    assert bad["finish_reason"] == ["error"] * 3
    assert bad["completion"] == [None] * 3
    assert bad["error_code"] == "null_prompt"
    job(input=path, seed=5, output=str(tmp_path / "one"))
    assert read_output(tmp_path / "one")[0]["completion"] == good["completion"][0]


def test_logprob_columns(job, write_rows, read_output, tmp_path):
    sampling = pa.array([{"logprobs": 1}, {"logprobs": None}])
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["ab", "cd"], "s": sampling})
    job(input=path, sampling_column="s", max_tokens=2)
    first, second = read_output(tmp_path / "out")
    assert first["top_logprobs"] == [[{"id": 101, "logprob": -0.5}], [{"id": 100, "logprob": -0.5}]]
    assert first["logprobs"] == [-0.25, -0.25]
    assert second["top_logprobs"] is None
    assert first["prompt_logprobs"] is None
    assert first["reasoning"] is None
    assert first["tool_calls"] is None


def test_default_max_tokens_is_said(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    job(input=path)
    assert "max_tokens 256 a row (the default; --max-tokens changes it)" in job.said
    job(input=path, max_tokens=3, output=str(tmp_path / "other"))
    assert not [line for line in job.said if line.startswith("max_tokens")]


def test_a_result_that_comes_twice_counts_once(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": [str(i) for i in range(200)]})
    outcome = job(input=path, stub=StubBackend(twice=True), n=2)
    assert outcome.summary.counts.rows == 200
    assert len(read_output(tmp_path / "out")) == 200


def test_a_backend_that_grows_hears_how_many_rows_are_to_come(job, write_rows, tmp_path, monkeypatch):
    """Rows that are read by then and those that are not, n completions each; bad ones are no work."""
    monkeypatch.setattr(runner, "STATUS_S", 0.0)
    heard = []

    class Growing(StubBackend):
        def expect(self, items):
            heard.append((items, self.submitted))

    path = write_rows(tmp_path / "in.parquet", {"prompt": [str(i) if i % 2 else None for i in range(4000)]})
    job(input=path, stub=Growing(capacity=16, delay_s=0.01), n=3)
    assert heard[-1] == (0, 6000)
    early = [items + submitted for items, submitted in heard if 0 < submitted < 3000]
    assert early
    assert all(abs(total - 6000) < 60 for total in early), early


def test_empty_input_is_done_at_once(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": pa.array([], pa.string())})
    outcome = job(input=path)
    assert outcome.exit_code == 0
    assert outcome.summary.counts.rows == 0
    assert "the input has no rows: 0 rows left" in job.said
    assert job.stub.closed == []  # never made


def test_limit_takes_the_first_rows(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": [str(i) for i in range(50)]}, group=20)
    job(input=path, limit=33, sets=["job.rows_per_part=16"])
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == [str(i) for i in range(33)]


def test_prefix_goes_before_every_output_column(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"], "error": ["mine"], "completion": [1]})
    with pytest.raises(
        InputError, match=r"has the columns error, completion, which the output also has.*--output-prefix"
    ):
        job(input=path)
    assert job.stub.submitted == 0
    job(input=path, output_prefix="out_")
    (row,) = read_output(tmp_path / "out")
    assert row["error"] == "mine"
    assert row["out_error"] is None
    assert row["out_row_id"] == "in.parquet#0:0"


def test_footer_says_where_rows_come_from(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a", None, "c"]})
    job(input=path, sets=["job.rows_per_part=2"], seed=9)
    footer = pq.read_metadata(tmp_path / "out/part-000000-0001.parquet").metadata
    assert footer[b"deepinfer_ray.seed"] == b"9"
    where = json.loads(footer[b"deepinfer_ray.part"])
    assert where == {"input": "in.parquet", "row_group": 0, "rows": [2, 3]}
    for name in ("version", "config_sha256", "model_sha256", "input_sha256"):
        assert footer[f"deepinfer_ray.{name}".encode()]


def test_one_long_row_holds_nobody_up(job, write_rows, read_output, tmp_path):
    """Rows of later parts run while the first part waits for its last row; its input bytes bound how many."""
    path = write_rows(tmp_path / "in.parquet", {"prompt": [str(i) for i in range(600)]})
    order = []

    class Slow(StubBackend):
        def submit(self, items):
            super().submit(items)
            if not order:  # the very first row takes longest
                self._heap[0] = (float("inf"), *self._heap[0][1:])
                heapq.heapify(self._heap)
            order.extend(item.key for item in items)

        def poll(self, timeout_s):
            if len(order) == 600 and len(self._heap) == 1:
                self._heap[0] = (0.0, *self._heap[0][1:])
            return super().poll(timeout_s)

    assert job(input=path, stub=Slow(capacity=8), sets=["job.rows_per_part=50"]).exit_code == 0
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == [str(i) for i in range(600)]


def test_open_bytes_bound_what_is_read_ahead(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["x" * 100] * 640})
    sets = ["job.rows_per_part=32", "job.max_open_bytes=4000"]  # one part alone is more
    stub = StubBackend(capacity=200, delay_s=0.01)
    assert job(input=path, stub=stub, sets=sets).exit_code == 0
    assert stub.most_under_way <= 32
    assert len(read_output(tmp_path / "out")) == 640


def test_open_rows_bound_what_a_kill_costs(job, write_rows, read_output, tmp_path):
    """Every part has a row that is late, so that all of them would be open at a time."""
    costs = []

    def cost(stub):
        committed = sum(pq.read_metadata(part).num_rows for part in (tmp_path / "out").glob("part-*"))
        costs.append(stub.submitted - committed)

    class Late(StubBackend):
        def submit(self, items):
            super().submit(items)
            late = time.monotonic() + 0.3
            self._heap = [
                (late, *rest) if len(rest[-1].prompt) > 50 else (at, *rest) for at, *rest in self._heap
            ]
            heapq.heapify(self._heap)

    prompts = ["x" * 60 if row % 16 == 3 else "x" for row in range(320)]
    path = write_rows(tmp_path / "in.parquet", {"prompt": prompts})
    sets = ["job.rows_per_part=16", "job.max_open_rows=64"]
    assert job(input=path, stub=Late(capacity=400, on_poll=cost), sets=sets).exit_code == 0
    assert 48 < max(costs) <= 64
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == prompts
    free = StubBackend(capacity=400, delay_s=0.2)
    job(input=path, output=str(tmp_path / "free"), stub=free, sets=sets[:1])
    assert free.most_under_way > 64


def test_an_output_that_is_a_file(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError, match="is a file; give a directory"):
        job(input=path)


def test_an_output_inside_the_input_is_refused(job, write_rows, tmp_path):
    write_rows(tmp_path / "data" / "a.parquet", {"prompt": ["a"]})
    with pytest.raises(ConfigError, match="lies inside the input"):
        job(input=tmp_path / "data", output=str(tmp_path / "data" / "out"))


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../{name}", "link"])
def test_an_output_in_the_models_directory_is_refused(job, write_rows, model_dir, tmp_path, spelling):
    (tmp_path / "link").symlink_to(model_dir)
    output = str(tmp_path / "link") if spelling == "link" else spelling.format(model_dir, name=model_dir.name)
    before = sorted(model_dir.iterdir())
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    with pytest.raises(ConfigError, match=r"is the model's directory, .* Give a directory of its own"):
        job(input=path, output=output)
    assert sorted(model_dir.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": ""}, "no input: give --input"),
        ({"input": ["in.parquet", ""]}, "an --input is an empty text; give a file, a directory or a glob"),
        (
            {"output": "s3:/bucket/x"},
            r"s3:/bucket/x: a URI begins with s3://. For a local .* \./s3:/bucket/x",
        ),
        ({"model": ""}, "no model: give --model"),
    ],
)
def test_places_that_are_none(job, write_rows, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    with pytest.raises(ConfigError, match=message):
        job(**{"input": "in.parquet", **options})
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_a_models_file_in_place_of_its_directory(job, write_rows, model_dir, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    with pytest.raises(CheckpointError, match=rf"config.json is a file; give its directory, {model_dir}$"):
        job(input=path, model=str(model_dir / "config.json"))


def test_chat_options_of_rows_that_are_no_chats_are_named(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    job(input=path, reasoning_effort="high")
    assert "without effect, as the rows are no chats (--messages-column): reasoning_effort" in job.said


def test_an_image_column_is_refused(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["a"]})
    with pytest.raises(ConfigError, match="--image-column x: this version takes no images"):
        job(input=path, image_column="x")


def test_too_many_errors_stop_the_job(job, write_rows, tmp_path):
    prompts = [None if i % 4 == 0 else f"p{i}" for i in range(2000)]
    path = write_rows(tmp_path / "in.parquet", {"prompt": prompts})
    outcome = job(input=path, max_error_rate=0.1, sets=["job.rows_per_part=32"])
    assert outcome.exit_code == 3
    assert "more than --max-error-rate 0.1 allows: null_prompt" in str(outcome.error)
    assert job.stub.closed == [False]
    assert outcome.summary.rows_left > 1000
    outcome = job(input=path, max_error_rate=0.3, sets=["job.rows_per_part=32"])
    assert outcome.exit_code == 0
    assert outcome.summary.counts.rows == 2000
    assert outcome.summary.counts.error_codes == Counter(null_prompt=500)


def test_few_rows_are_no_sample_until_the_job_ends(job, write_rows, tmp_path):
    prompts = [None] * 4 + [f"p{i}" for i in range(296)]
    path = write_rows(tmp_path / "in.parquet", {"prompt": prompts})
    sets = ["job.rows_per_part=10"]
    assert job(input=path, max_error_rate=0.05, sets=sets).exit_code == 0
    sets += ["job.min_rows_for_error_rate=10"]  # and the first ten rows are worse than all of them
    stub = StubBackend(capacity=8)
    outcome = job(input=path, output=str(tmp_path / "strict"), max_error_rate=0.05, sets=sets, stub=stub)
    assert outcome.exit_code == 3
    assert outcome.summary.rows_left > 200
    path = write_rows(tmp_path / "few.parquet", {"prompt": [None, "a", "b"]})
    outcome = job(input=path, output=str(tmp_path / "few"), max_error_rate=0.1)
    assert (outcome.exit_code, outcome.summary.rows_left) == (3, 0)


def test_failed_rows_are_listed_without_their_prompts(job, write_rows, tmp_path):
    secret = "a secret of 6"  # with BOS 14 ids, which the stub fails
    table = {"prompt": ["fine", None, secret, "x" * 500], "id": ["a", "b", "ü", "d"]}
    path = write_rows(tmp_path / "in.parquet", table)
    options = {"input": path, "id_column": "id", "max_model_len": 100, "output_prefix": "o_"}
    job(**options, stub=StubBackend(fail="out_of_blocks"), sets=["job.rows_per_part=2"])
    files = sorted((tmp_path / "out/_deepinfer/quarantine").iterdir())
    assert [file.name for file in files] == ["part-000000-0000.jsonl", "part-000000-0001.jsonl"]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [(line["row_id"], line["error_code"]) for line in lines] == [
        ("b", "null_prompt"),
        ("ü", "out_of_blocks"),
        ("d", "prompt_too_long"),
    ]
    assert set(lines[0]) == {"row_id", "error_code", "error"}
    (told,) = [line for line in job.said if "ended in an error" in line]
    assert told.startswith("3 of 4 rows ended in an error: ")
    assert set(re.findall(r"\w+_\w+ 1", told)) == {"null_prompt 1", "out_of_blocks 1", "prompt_too_long 1"}
    assert f"says why; {tmp_path}/out/_deepinfer/quarantine lists them" in told
    assert lines[1]["error"] == "this row does not fit"
    assert "secret" not in "".join(file.read_text() for file in files)
    job(**options, retry_errors=True)
    (left,) = files[1].read_text().splitlines()
    assert json.loads(left)["row_id"] == "d"


def test_a_part_without_failures_leaves_quarantine(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": ["sixsix"]})
    job(input=path, stub=StubBackend(fail="out_of_blocks"))
    assert len(list((tmp_path / "out/_deepinfer/quarantine").iterdir())) == 1
    job(input=path, retry_errors=True)
    assert not list((tmp_path / "out/_deepinfer/quarantine").iterdir())


def test_dead_fleet_keeps_what_is_committed(job, write_rows, read_output, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": [str(i) for i in range(600)]})
    outcome = job(input=path, stub=StubBackend(die_after=300), sets=["job.rows_per_part=32"])
    assert outcome.exit_code == 4
    assert "rank 0 died" in str(outcome.error)
    committed = len(read_output(tmp_path / "out"))
    assert 0 < committed < 300
    outcome = job(input=path, sets=["job.rows_per_part=32"])
    assert outcome.summary.resumed_rows == committed
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == [str(i) for i in range(600)]


def test_deadline_ends_in_order(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": [str(i) for i in range(2000)]})
    outcome = job(
        input=path, stub=StubBackend(capacity=8, delay_s=0.05), deadline=0.4, sets=["job.rows_per_part=8"]
    )
    assert outcome.exit_code == 0
    assert 0 < outcome.summary.counts.rows < 2000
    assert outcome.summary.rows_left == 2000 - outcome.summary.counts.rows
    assert [line for line in job.said if "rows left; the same command goes on" in line]
