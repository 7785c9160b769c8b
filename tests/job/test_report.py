"""The report of a job: its figures, its page, when it is written, and that no prompt is in it."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_page import ALL_CHARTS, Page, PulsingBackend
from stub_backend import StubBackend
from typer.testing import CliRunner

from deepinfer_ray.cli.main import app
from deepinfer_ray.errors import ConfigError
from deepinfer_ray.fleet.backend import ReportsStats
from deepinfer_ray.job import report_file
from deepinfer_ray.job.report import by_power_of_two, length_bounds, read_report
from deepinfer_ray.job.report_file import leave_report, write_report
from deepinfer_ray.job.report_html import render
from deepinfer_ray.job.signals import StopNow
from deepinfer_ray.job.sink import Counts
from deepinfer_ray.job.stats_file import Interval, StatsFile
from deepinfer_ray.job.store import Store

SECRET = "do not show me"


@pytest.fixture
def rows(write_rows, tmp_path):
    prompts = [f"{SECRET} {'x' * (i % 50)}" for i in range(120)] + [None, ""]
    ids = [f"row<{i}>&\"'" for i in range(122)]
    return write_rows(tmp_path / "in.parquet", {"id": ids, "prompt": prompts})


def run(job, rows, stub=None, **options):
    return job(
        input=rows,
        id_column="id",
        stub=stub or PulsingBackend(delay_s=0.05),
        max_tokens=8,
        sets=["job.rows_per_part=16"],
        **options,
    )


def test_lengths_by_power_of_two():
    counts = by_power_of_two(np.array([0, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**31 - 1]))
    assert {bucket: int(n) for bucket, n in enumerate(counts) if n} == {
        0: 1,
        1: 1,
        2: 2,
        3: 2,
        4: 1,
        10: 1,
        11: 1,
        31: 1,
    }
    assert [length_bounds(bucket) for bucket in (0, 1, 4)] == [(0, 0), (1, 1), (8, 15)]


def test_a_run_leaves_its_report(job, rows, tmp_path):
    outcome = run(job, rows)
    assert outcome.exit_code == 0
    path = tmp_path / "out/_deepinfer/report.html"
    assert job.said[-1] == f"report: {path}"
    page = Page(path.read_text())
    assert set(page.charts) == ALL_CHARTS
    assert page.svgs == len(page.charts)
    text = " ".join(page.text)
    assert "Batch job, complete" in text
    assert SECRET not in path.read_text()
    assert re.search(r"row<\d+>&\"'", text), "slowest rows are shown by id"
    assert "null_prompt" in text
    assert "empty_prompt" in text


def test_page_loads_nothing(job, rows, tmp_path):
    run(job, rows)
    html = (tmp_path / "out/_deepinfer/report.html").read_text()
    assert Page(html).urls == []
    assert set(re.findall(r"\w+://[^\s\"'<]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    assert "@import" not in html
    assert "url(" not in html
    assert "prefers-color-scheme:dark" in html


def test_figures(job, rows, tmp_path):
    outcome = run(job, rows)
    assert isinstance(job.stub, ReportsStats)
    report = read_report(Store(str(tmp_path / "out"))).as_dict()
    json.dumps(report)
    summary = outcome.summary.as_dict()
    for name in ("rows", "ok", "errors", "error_codes", "prompt_tokens", "completion_tokens", "parts"):
        assert report[name] == summary[name], name
    assert report["rows_planned"] == report["rows_read"] == 122
    assert report["finish_reasons"] == {"error": 2, "length": 120}
    assert sum(entry["rows"] for entry in report["completion_lengths"]) == 122
    assert report["longest_prompt"] == 1 + len(SECRET) + 1 + 49
    assert report["notes"] == []
    slowest = [entry["seconds"] for entry in report["slowest"]]
    assert len(slowest) == 20
    assert slowest == sorted(slowest, reverse=True)
    assert set(report["slowest"][0]) == {"row_id", "seconds", "prompt_tokens", "completion_tokens"}
    course = report["course"]
    assert len(course["runs"]) == 1
    assert course["restarts"] == 2
    steps = job.stub.pulses
    assert course["accepted_lengths"] == [2 * steps, 2 * steps, 4 * steps]
    (zero, one) = course["ranks"]
    assert zero["decode_batch"][0][1] == 6
    assert one["mfu"][0][1] == 0.125
    assert sum(zero["time_shares"].values()) == pytest.approx(1, abs=1e-3)


def test_resumed_runs_stand_behind_each_other(job, rows, tmp_path):
    assert run(job, rows, stub=PulsingBackend(die_after=60)).exit_code == 4
    store = Store(str(tmp_path / "out"))
    killed = read_report(store)
    assert any("The job is not complete" in note for note in killed.notes)
    assert "Batch job, not complete" in render(killed)
    assert run(job, rows).exit_code == 0
    report = read_report(store)
    assert len(report.course.runs) == 2
    assert report.notes == []
    assert "Pauses between the 2 runs are left out" in render(report)


def test_a_run_without_rows_and_statistics_has_a_report_too(job, write_rows, tmp_path):
    path = write_rows(tmp_path / "in.parquet", {"prompt": pa.array([], pa.string())})
    assert job(input=path).exit_code == 0
    html = (tmp_path / "out/_deepinfer/report.html").read_text()
    page = Page(html)
    assert page.charts == []
    assert "No statistics over time were written" in " ".join(page.text)


def test_many_parts_are_sampled_and_the_page_says_so(job, rows, tmp_path):
    run(job, rows)
    store = Store(str(tmp_path / "out"))
    report = read_report(store, max_parts=3)
    assert report.rows.parts == 3
    assert report.counts.rows == 122  # counts come from every footer
    assert report.notes[0] == (
        f"Lengths and finish reasons are those of {report.rows.rows} rows in 3 of 8 parts, spread evenly."
    )
    known = Counts(rows=122, ok=122)
    assert read_report(store, known, max_parts=3).counts is known


def test_columns_with_prefix_and_several_completions(job, rows, tmp_path):
    run(job, rows, output_prefix="out_", n=3)
    report = read_report(Store(str(tmp_path / "out")))
    assert report.rows.finish_reasons == {"error": 6, "length": 360}
    assert report.rows.completion_lengths.sum() == 366
    assert report.rows.prompt_lengths.sum() == 120  # a null or empty prompt has no length


def test_many_ranks_are_summed_up(tmp_path, job, rows):
    run(job, rows, stub=StubBackend())
    store = Store(str(tmp_path / "out"))
    store.make()
    file = StatsFile(store, "later", {"started": "later"})
    for t in range(1, 30):
        for rank in range(40):
            sums = {"prompt_seconds": 0.2, "decode_seconds": 0.7, "steps": 10, "decode_sequences": 80}
            file.add(Interval(str(rank), float(t), 1.0, sums, {"kv_cache_usage": rank / 40}))
    file.close()
    html = render(read_report(store))
    assert "The picture shows the first 32 of 40 ranks" in html
    for name in ("mean", "lowest", "highest"):
        assert f"{name} of 40 ranks blocks" in html
    assert len(html) < 2_000_000


def test_hours_and_minutes(tmp_path, job, rows):
    run(job, rows, stub=StubBackend())
    store = Store(str(tmp_path / "out"))
    store.make()
    for name, length, label in (("later", 600.0, "minutes"), ("laterest", 20_000.0, "hours")):
        file = StatsFile(store, name, {})
        file.add(Interval("job", length, length, {"rows": 5, "completion_tokens": 50}, {}))
        file.close()
        assert f"{label} of running" in render(read_report(store))


def test_command(job, rows, tmp_path):
    run(job, rows)
    page = tmp_path / "out/_deepinfer/report.html"
    page.unlink()
    cli = CliRunner()
    made = cli.invoke(app, ["report", str(tmp_path / "out")])
    assert made.stdout == f"{page}\n"
    assert Page(page.read_text()).charts
    page.unlink()
    printed = cli.invoke(app, ["report", str(tmp_path / "out"), "--json"])
    assert json.loads(printed.stdout)["rows"] == 122
    assert not page.exists()
    by_key = cli.invoke(app, ["report", "--set", f"job.output={tmp_path / 'out'}", "--json"])
    assert json.loads(by_key.stdout)["ok"] == 120


def test_command_refuses_what_is_no_output(tmp_path):
    cli = CliRunner()
    other = cli.invoke(app, ["report", str(tmp_path)])
    assert isinstance(other.exception, ConfigError)
    assert f"{tmp_path} is no output of `generate`" in str(other.exception)
    nothing = cli.invoke(app, ["report"])
    assert isinstance(nothing.exception, ConfigError)
    assert "give the output directory" in str(nothing.exception)


def test_a_part_that_cannot_be_read_is_named(job, rows, tmp_path):
    run(job, rows)
    bad = tmp_path / "out/part-000000-0003.parquet"
    bad.write_bytes(b"not Parquet")
    said = []
    leave_report(Store(str(tmp_path / "out")), Counts(), said.append, hurried=False)
    assert len(said) == 1
    assert f"the report could not be written: the committed part {bad} cannot be read" in said[0]
    assert f"make it with: deepinfer-ray report {tmp_path / 'out'}" in said[0]


def test_a_second_signal_costs_the_page_only(tmp_path, monkeypatch):
    def stop(*_):
        raise StopNow(15)

    monkeypatch.setattr(report_file, "read_report", stop)
    said = []
    leave_report(Store(str(tmp_path)), Counts(), said.append, hurried=True)
    assert said == [
        f"the report could not be written: stopped by SIGTERM; make it with: deepinfer-ray report {tmp_path}"
    ]


def test_hostile_names_stay_text(tmp_path, job, rows):
    run(job, rows)
    store = Store(str(tmp_path / "out"))
    report, _ = write_report(store)
    report.output = report.model = "<script>alert(1)</script>"
    report.counts.error_codes["<img src=x onerror=alert(1)>"] = 3
    report.slowest[0]["row_id"] = "</code><script>alert(2)</script>"
    page = render(report)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert Page(page).charts


def test_output_of_an_older_version(tmp_path, job, rows):
    """Parts without footer counts, a summary that is no JSON, statistics missing: still a report."""
    run(job, rows)
    out = tmp_path / "out"
    (out / "_deepinfer/summary.json").write_text("{")
    for file in (out / "_deepinfer/stats").iterdir():
        file.unlink()
    part = out / "part-000000-0000.parquet"
    table = pq.read_table(part).drop_columns(["cached_tokens"]).replace_schema_metadata(None)
    pq.write_table(table, part)
    report = read_report(Store(str(out)))
    assert report.counts.rows == 122
    assert Page(render(report)).charts == [
        "prompt-lengths",
        "completion-lengths",
        "errors",
        "finish-reasons",
        "prefix",
    ]
