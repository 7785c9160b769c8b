"""The file of a run's statistics: bounded, readable after any kill, never a reason for a job to fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pyarrow.fs as pafs
import pytest

from deepinfer_ray.job.stats_file import FOLDER, MAX_FILES, Interval, StatsFile, read_stats, stats_files
from deepinfer_ray.job.store import Store


@pytest.fixture
def store(tmp_path):
    made = Store(str(tmp_path / "out"))
    made.make()
    return made


def second(t, who="job", **sums):
    return Interval(who, float(t), 1.0, sums or {"rows": 1}, {"in_flight": float(t)})


def total(run, key="rows"):
    return sum(interval.sums.get(key, 0) for interval in run.intervals)


def test_what_is_written_is_read_back(store):
    file = StatsFile(store, "a", {"started": "now"})
    file.add(Interval("job", 1.0, 1.0, {"rows": 3, "errors": 0}, {"in_flight": 7.5}))
    file.add(Interval("0", 1.2, 1.1, {"accepted_lengths": [1, 0, 2]}, {"kv_cache_usage": 0.25}))
    file.set("slowest", [{"row_id": "x", "seconds": 2.0}])
    file.set("slowest", [{"row_id": "y", "seconds": 3.0}])
    file.close()
    file.close()
    (run,) = read_stats(store)
    assert run.head == {"started": "now"}
    assert run.extra["slowest"] == [{"row_id": "y", "seconds": 3.0}]
    job, rank = run.intervals
    assert (job.who, job.start, job.sums, job.means) == ("job", 0.0, {"rows": 3}, {"in_flight": 7.5})
    assert rank.sums == {"accepted_lengths": [1, 0, 2]}
    assert run.seconds == 1.2


def test_merging_adds_sums_and_weighs_means_by_time():
    one = Interval("0", 2.0, 2.0, {"a": 1, "l": [1, 2]}, {"m": 1.0, "only": 5.0})
    other = Interval("0", 6.0, 1.0, {"a": 2, "l": [1, 1, 1], "b": 4}, {"m": 4.0})
    both = one.merged(other)
    assert (both.t, both.d) == (6.0, 3.0)
    assert both.sums == {"a": 3, "l": [2, 3, 1], "b": 4}
    assert both.means == {"m": 2.0, "only": 5.0}


def test_a_long_run_stays_small_and_loses_nothing(store):
    file = StatsFile(store, "a", {}, max_lines=64)
    sizes = []
    for t in range(1, 3001):
        file.add(second(t))
        file.add(second(t, "0", prompt_tokens=10))
        sizes.append(os.path.getsize(store.path(file.name)))
    file.close()
    (run,) = read_stats(store)
    assert 32 <= len(run.intervals) <= 66
    assert total(run) == 3000
    assert total(run, "prompt_tokens") == 30_000
    assert max(sizes) < 64 * 120
    for who in ("job", "0"):
        ends = [interval.t for interval in run.intervals if interval.who == who]
        assert ends == sorted(ends)
        assert sum(interval.d for interval in run.intervals if interval.who == who) == 3000
    means = [i.means["in_flight"] * i.d for i in run.intervals if i.who == "job"]
    assert sum(means) == pytest.approx(sum(range(1, 3001)), rel=1e-3)


def test_replaced_lines_do_not_pile_up(store):
    file = StatsFile(store, "a", {})
    for index in range(1000):
        file.set("slowest", [{"row_id": f"row {index}", "seconds": 1.0}])
    assert os.path.getsize(store.path(file.name)) < 70 * 60
    file.close()
    assert read_stats(store)[0].extra["slowest"][0]["row_id"] == "row 999"


def test_a_torn_line_and_foreign_files_are_left_out(store):
    file = StatsFile(store, "a", {})
    file.add(second(1))
    file.close()
    with open(store.path(file.name), "ab") as raw:
        raw.write(b'{"t":2.0,"d":1.0,"who":"job","sums":{"ro')
    for junk in (b"[1]\n", b'{"who":"job"}\n', b"\xff\xfe\n", b"3\n"):
        with open(store.path(file.name), "ab") as raw:
            raw.write(b"\n" + junk)
    (run,) = read_stats(store)
    assert total(run) == 1
    with open(store.path(f"{FOLDER}/notes.txt"), "w") as other:
        other.write("mine")
    assert stats_files(store) == [file.name]


def test_survives_a_kill(store):
    script = """
        import os, signal, sys
        from deepinfer_ray.job.stats_file import Interval, StatsFile
        from deepinfer_ray.job.store import Store
        file = StatsFile(Store(sys.argv[1]), "a", {"started": "then"})
        for t in range(1, 51):
            file.add(Interval("job", float(t), 1.0, {"rows": 1}, {}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), store.location], check=False)
    assert done.returncode == -signal.SIGKILL
    (run,) = read_stats(store)
    assert total(run) == 50
    assert run.head == {"started": "then"}
    assert store.names("_deepinfer/tmp") == []


def test_old_runs_go_first(store):
    for index in range(MAX_FILES + 5):
        StatsFile(store, f"{index:04d}", {}).close()
    names = stats_files(store)
    assert len(names) == MAX_FILES
    assert names[0].endswith("run-0005.jsonl")


def test_without_append_the_whole_file_is_put_once_a_minute(tmp_path):
    store = Store(str(tmp_path / "out"))
    store.make()
    store.local = False  # as an object store: one upload a file
    store.filesystem = pafs.LocalFileSystem()
    file = StatsFile(store, "a", {})
    for t in range(1, 60):
        file.add(second(t))
    assert total(read_stats(store)[0]) == 0
    file.add(second(60))
    assert total(read_stats(store)[0]) == 60
    file.add(second(61))
    file.close()
    assert total(read_stats(store)[0]) == 61


def test_a_disk_that_fails_ends_the_statistics_only(store, caplog, monkeypatch):
    file = StatsFile(store, "a", {})

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    file._file = Full()
    with caplog.at_level(logging.WARNING):
        for t in range(1, 10):
            file.add(second(t))
        file.close()
    assert caplog.text.count("statistics of the run are not written any more") == 1
    assert json.loads(store.read(file.name)) == {"head": {}}
