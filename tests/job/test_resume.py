"""Resume: after any end, with anything changed, beside another driver."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from stub_backend import StubBackend

from deepinfer_ray.errors import ConfigError, OutputError
from deepinfer_ray.job.lease import Lease
from deepinfer_ray.job.store import Store

SMALL_PARTS = ("job.rows_per_part=16",)


@pytest.fixture
def rows_file(write_rows, tmp_path):
    prompts = [None if i % 50 == 3 else f"row {i}" for i in range(400)]
    return write_rows(
        tmp_path / "in.parquet", {"prompt": prompts, "id": [f"id{i}" for i in range(400)]}, group=150
    )


def test_second_run_of_a_finished_job_has_nothing_to_do(job, rows_file):
    first = job(input=rows_file)
    second = job(input=rows_file)
    assert second.exit_code == 0
    assert "resuming: 400 rows are committed, 0 rows left" in job.said
    assert job.stub.closed == []  # no backend was started
    assert second.summary.counts == first.summary.counts
    assert second.summary.resumed_rows == 400
    assert second.summary.as_dict()["tokens_per_second"] == 0.0


def test_kill_at_random_moments_loses_and_doubles_nothing(job, driver, rows_file, read_output, tmp_path):
    options = {"input": rows_file, "id_column": "id", "seed": 3}
    job(**options, output=str(tmp_path / "clean"), sets=SMALL_PARTS)
    clean = read_output(tmp_path / "clean")
    rng = random.Random(11)
    kills = 0
    for _ in range(6):
        process = driver({"capacity": 8, "delay_s": 0.06}, SMALL_PARTS, **options)
        deadline = time.monotonic() + 10
        before = len(list((tmp_path / "out").glob("part-*")))
        while len(list((tmp_path / "out").glob("part-*"))) == before and time.monotonic() < deadline:
            if process.poll() is not None:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if kills == 3:
            break
    assert kills == 3
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert 0 < len(done) < 26
    (tmp_path / "out/_deepinfer/tmp").mkdir(exist_ok=True)
    (tmp_path / "out/_deepinfer/tmp/part-000009-0000.parquet.abc").write_bytes(b"half a part")
    outcome = job(**options, sets=SMALL_PARTS)
    assert outcome.exit_code == 0
    assert [line for line in job.said if line.startswith("removed ") and "half-written" in line]
    assert read_output(tmp_path / "out") == clean
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part-*") if p.name in done} == done
    left = {
        str(path.relative_to(tmp_path / "out/_deepinfer"))
        for path in (tmp_path / "out/_deepinfer").rglob("*")
    }
    runs = {name for name in left if name.startswith("stats/run-")}
    assert len(runs) == 4
    failed = {name for name in left if name.startswith("quarantine/part-")}
    assert len(failed) == 8
    ours = {"manifest.json", "config.json", "summary.json", "report.html", "stats", "quarantine"}
    assert left - runs - failed == ours


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_finishes_the_open_parts(job, driver, rows_file, read_output, tmp_path, number, code):
    process = driver({"capacity": 8, "delay_s": 0.1}, SMALL_PARTS, input=rows_file)
    wait_for_a_part(tmp_path / "out")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    assert f"{signal.Signals(number).name}: stopping after" in err
    assert "once more stops at once" in err
    assert "rows left; the same command goes on where this run ended" in err
    summary = json.loads(out)
    committed = read_output(tmp_path / "out")
    assert summary["rows"] == len(committed) > 0
    assert summary["rows_left"] == 400 - len(committed) > 0
    assert not (tmp_path / "out/_deepinfer/lease.json").exists()
    job(input=rows_file, sets=SMALL_PARTS)
    assert len(read_output(tmp_path / "out")) == 400


def test_second_signal_stops_at_once(driver, rows_file, tmp_path):
    process = driver({"capacity": 8, "delay_s": 30.0}, SMALL_PARTS, input=rows_file)
    wait_for(lambda: (tmp_path / "out/_deepinfer/config.json").exists())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5)
    assert process.returncode == 130, err
    assert json.loads(out)["rows_left"] == 400


def test_killed_driver_on_this_machine_is_taken_over_at_once(job, driver, rows_file, tmp_path):
    process = driver({"delay_s": 60.0}, input=rows_file)
    wait_for(lambda: (tmp_path / "out/_deepinfer/lease.json").exists())
    with pytest.raises(ConfigError, match=rf"another driver writes to .*: process {process.pid} on "):
        job(input=rows_file)
    process.kill()
    process.communicate()
    assert job(input=rows_file).exit_code == 0


class TestChanges:
    """What a resume refuses, and what `--allow-changed` lets pass."""

    @pytest.fixture(autouse=True)
    def _half_done(self, job, rows_file):
        outcome = job(input=rows_file, stub=StubBackend(die_after=200), sets=SMALL_PARTS, temperature=0.5)
        assert outcome.exit_code == 4

    def test_sampling(self, job, rows_file):
        with pytest.raises(ConfigError, match=r"settings.sampling.temperature: 0.5 → 0.75.*--allow-changed"):
            job(input=rows_file, temperature=0.75)
        assert job(input=rows_file, temperature=0.75, allow_changed=True).exit_code == 0
        assert "by your leave: settings.sampling.temperature: 0.5 → 0.75" in " ".join(job.said)

    def test_model(self, job, rows_file, model_dir, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(model_dir, other)
        with open(other / "config.json", "a", encoding="utf-8") as file:
            file.write("\n")
        with pytest.raises(ConfigError, match=r"model.config.json: [0-9a-f]{12}… → [0-9a-f]{12}…"):
            job(input=rows_file, temperature=0.5, model=str(other))

    def test_input_of_other_rows(self, job, rows_file, write_rows):
        write_rows(rows_file, {"prompt": ["x"] * 401, "id": [str(i) for i in range(401)]}, group=150)
        message = r"begun for other rows or columns, its parts would not fit: input.in.parquet.footer_sha256"
        for allow in (False, True):
            with pytest.raises(ConfigError, match=message):
                job(input=rows_file, temperature=0.5, allow_changed=allow)

    def test_input_of_equal_shape(self, job, rows_file, write_rows):
        write_rows(rows_file, {"prompt": ["x"] * 400, "id": [str(i) for i in range(400)]}, group=150)
        with pytest.raises(ConfigError, match=r"input.in.parquet.size: \d+ → \d+"):
            job(input=rows_file, temperature=0.5)
        assert job(input=rows_file, temperature=0.5, allow_changed=True).exit_code == 0

    def test_columns_of_the_output_never_change(self, job, rows_file):
        for change in ({"n": 2}, {"output_prefix": "o_"}):
            with pytest.raises(ConfigError, match="begun for other rows or columns"):
                job(input=rows_file, temperature=0.5, allow_changed=True, **change)

    def test_part_size_stays_as_planned(self, job, rows_file, read_output, tmp_path):
        assert job(input=rows_file, temperature=0.5, sets=["job.rows_per_part=64"]).exit_code == 0
        told = "parts keep the rows of the first start; job.rows_per_part counts for a new output"
        assert told in job.said
        job(input=rows_file, temperature=0.5, sets=SMALL_PARTS)
        assert told not in job.said
        assert len(list((tmp_path / "out").glob("part-*"))) == 10 + 10 + 7
        assert len(read_output(tmp_path / "out")) == 400

    def test_an_unreadable_part(self, job, rows_file, tmp_path):
        part = min((tmp_path / "out").glob("part-*"))
        part.write_bytes(b"PAR1")
        with pytest.raises(
            OutputError, match=rf"{part.name} cannot be read.*Delete it and run the same command"
        ):
            job(input=rows_file, temperature=0.5)
        part.unlink()
        assert job(input=rows_file, temperature=0.5).exit_code == 0


def test_retry_errors_runs_failed_rows_alone(job, rows_file, read_output, tmp_path):
    job(input=rows_file, stub=StubBackend(fail="out_of_blocks"), sets=SMALL_PARTS, id_column="id")
    before = {row["row_id"]: row for row in read_output(tmp_path / "out")}
    failed = [row for row in before.values() if row["error_code"] == "out_of_blocks"]
    assert failed
    outcome = job(input=rows_file, retry_errors=True, id_column="id")
    rows = read_output(tmp_path / "out")
    assert job.stub.submitted == len(failed)
    assert outcome.summary.counts.error_codes == {"null_prompt": 8}
    assert [row["row_id"] for row in rows] == list(before)
    for row in rows:
        if before[row["row_id"]]["error_code"] is None:
            assert row == before[row["row_id"]]
        elif before[row["row_id"]]["error_code"] == "out_of_blocks":
            assert row["finish_reason"] == "length"


def test_foreign_files_are_left_alone(job, rows_file, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    job(input=rows_file)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_parts_without_a_manifest_are_refused(job, rows_file, tmp_path):
    job(input=rows_file)
    (tmp_path / "out/_deepinfer/manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"holds parts but no _deepinfer/manifest.json"):
        job(input=rows_file)


def test_manifest_is_written_once(job, rows_file, tmp_path, model_dir):
    job(input=rows_file, stub=StubBackend(die_after=100), sets=SMALL_PARTS)
    manifest = tmp_path / "out/_deepinfer/manifest.json"
    first = manifest.read_bytes()
    content = json.loads(first)
    assert content["inputs"][0]["row_groups"] == [150, 150, 100]
    assert content["inputs"][0]["rows_per_part"] == [16, 16, 16]
    assert set(content["model"]) == {"config.json", "tokenizer.json"}
    assert content["config"]["model"]["path"] == str(model_dir)
    job(input=rows_file, sets=SMALL_PARTS)
    assert manifest.read_bytes() == first


def test_vanished_output(job, rows_file, tmp_path):
    def vanish(stub):
        if stub.submitted > 100:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)

    outcome = job(input=rows_file, stub=StubBackend(delay_s=0.05, on_poll=vanish), sets=SMALL_PARTS)
    assert outcome.exit_code == 5
    assert "No such file or directory" in str(outcome.error)
    assert "run the same command again" in str(outcome.error)


def test_full_disk(job, rows_file, tmp_path, monkeypatch):
    written = 0
    real = os.fsync

    def full(handle):
        nonlocal written
        written += 1
        if written > 12:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    outcome = job(input=rows_file, sets=SMALL_PARTS)
    assert outcome.exit_code == 5
    assert "cannot write" in str(outcome.error)
    assert "No space left on device" in str(outcome.error)
    monkeypatch.setattr(os, "fsync", real)
    assert job(input=rows_file, sets=SMALL_PARTS).exit_code == 0


@pytest.fixture
def break_disk(monkeypatch):
    """break_disk(stage, errno, after=parts): from then on that stage of writing a part fails; undone by
    `monkeypatch.undo`."""
    import deepinfer_ray.job.store as module

    def arm(stage, number, after):
        parts = []

        def fails(path):
            if not re.search(r"part-[\d-]+\.parquet", str(path)):
                return False
            parts.append(path)
            return len(parts) > after

        class Full(io.FileIO):
            def write(self, data):
                raise OSError(number, os.strerror(number))

        def opened(path, mode, **options):
            if stage in ("open", "write") and fails(path):
                if stage == "open":
                    raise OSError(number, os.strerror(number), path)
                return Full(path, "w")
            return open(path, mode, **options)

        def replace(source, target):
            if stage == "rename" and fails(target):
                raise OSError(number, os.strerror(number), source)
            os.rename(source, target)

        monkeypatch.setattr(module, "open", opened, raising=False)
        monkeypatch.setattr(os, "replace", replace)

    return arm


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("open", errno.EROFS),
        ("open", errno.EACCES),
        ("write", errno.ENOSPC),
        ("write", errno.EDQUOT),
        ("rename", errno.EIO),
    ],
)
def test_a_disk_that_fails_while_a_part_is_written(
    job, rows_file, read_output, tmp_path, break_disk, monkeypatch, stage, number
):
    break_disk(stage, number, after=5)
    outcome = job(input=rows_file, id_column="id", sets=SMALL_PARTS)
    assert outcome.exit_code == 5
    reason = (
        rf"out/part-[\d-]+\.parquet: {os.strerror(number)}\. What is committed is safe: free .* run the same"
    )
    assert re.search(reason, str(outcome.error))
    committed = len(read_output(tmp_path / "out"))
    assert (outcome.summary.parts, outcome.summary.counts.rows) == (5, committed)
    assert 0 < outcome.summary.rows_left == 400 - committed
    assert not list((tmp_path / "out/_deepinfer").glob("tmp*"))
    assert job.stub.closed == [False]
    monkeypatch.undo()
    assert job(input=rows_file, id_column="id", sets=SMALL_PARTS).summary.resumed_rows == committed
    assert [row["row_id"] for row in read_output(tmp_path / "out")] == [f"id{i}" for i in range(400)]


class TestLease:
    @pytest.fixture
    def store(self, tmp_path):
        store = Store(str(tmp_path / "out"))
        store.make()
        return store

    def test_expired_heartbeat_of_another_machine_is_taken_over(self, store):
        now = [1000.0]
        holder = {"id": "x", "host": "elsewhere", "pid": 1, "heartbeat": 950.0}
        store.write("_deepinfer/lease.json", lambda file: file.write(json.dumps(holder).encode()))
        lease = Lease(store, expiry_s=60, clock=lambda: now[0], sleep=lambda seconds: None)
        with pytest.raises(ConfigError, match="process 1 on elsewhere, last heartbeat 50 s ago"):
            lease.acquire()
        now[0] = 1011.0
        lease.acquire()
        lease.release()
        assert store.read("_deepinfer/lease.json") is None

    def test_heartbeat_goes_on(self, store):
        lease = Lease(store, heartbeat_s=0.02)
        lease.acquire()
        first = json.loads(store.read("_deepinfer/lease.json"))["heartbeat"]
        wait_for(lambda: json.loads(store.read("_deepinfer/lease.json"))["heartbeat"] > first)
        lease.check()
        lease.release()

    def test_lost_lease_stops_the_driver(self, store):
        lease = Lease(store, heartbeat_s=0.02)
        lease.acquire()
        holder = {"id": "other", "host": "elsewhere", "pid": 7, "heartbeat": time.time()}
        store.write("_deepinfer/lease.json", lambda file: file.write(json.dumps(holder).encode()))

        def lost():
            try:
                lease.check()
            except OutputError as error:
                return "is now held by process 7; this driver stops" in str(error)
            return False

        wait_for(lost)
        lease.release()
        assert json.loads(store.read("_deepinfer/lease.json"))["id"] == "other"


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def wait_for_a_part(output: Path):
    wait_for(lambda: any(pq.read_metadata(path) for path in output.glob("part-*")))
