"""Outputs on an object store that fails, forgets and takes its time; leases where the last upload wins."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time

import pyarrow.parquet as pq
import pytest
from faulty_store import FaultyStore
from stub_backend import StubBackend

from deepinfer_ray.errors import ConfigError, OutputError
from deepinfer_ray.job import lease as lease_module
from deepinfer_ray.job import store as store_module
from deepinfer_ray.job.commits import MAX_WAITING, UPLOADS
from deepinfer_ray.job.lease import LEASE, Lease
from deepinfer_ray.job.store import Store

SMALL = ("job.rows_per_part=10",)
OUT = "faulty://bucket/out"


@pytest.fixture(autouse=True)
def faults(monkeypatch):
    FaultyStore.reset()
    monkeypatch.setattr(store_module, "PUT_DELAYS_S", (0.001, 0.001))
    monkeypatch.setattr(lease_module, "SETTLE_S", 0.01)
    return FaultyStore.faults


@pytest.fixture
def rows_file(write_rows, tmp_path):
    prompts = [None if row % 50 == 7 else f"row {row}" for row in range(200)]
    return write_rows(tmp_path / "in.parquet", {"prompt": prompts}, group=70)


def parts():
    """Rows of all visible parts, in order."""
    names = sorted(name for name in FaultyStore.objects if "/part-" in name and name.endswith(".parquet"))
    return [row for name in names for row in pq.read_table(io.BytesIO(FaultyStore.objects[name])).to_pylist()]


def test_every_object_is_put_once_and_whole(job, rows_file, read_output, tmp_path):
    assert job(input=rows_file, output=OUT, sets=SMALL).exit_code == 0
    job(input=rows_file, sets=SMALL)
    assert parts() == read_output(tmp_path / "out")
    names = {name.removeprefix("bucket/out/") for name in FaultyStore.objects}
    assert sorted(name for name in names if name.startswith("part-")) == sorted(
        path.name for path in (tmp_path / "out").glob("part-*")
    )
    assert not [name for name in FaultyStore.puts if "/tmp/" in name]
    assert {count for name, count in FaultyStore.puts.items() if "part-" in name} == {1}
    assert LEASE not in names  # given back


@pytest.mark.parametrize("kind", ["fail", "truncate"])
def test_an_upload_that_goes_wrong_is_tried_again(job, rows_file, faults, kind):
    getattr(faults, kind).update({"part-000001-0002": 2, "manifest.json": 1, "quarantine": 1})
    assert job(input=rows_file, output=OUT, sets=SMALL).exit_code == 0
    assert FaultyStore.puts["bucket/out/part-000001-0002.parquet"] == 3
    assert [row["row_id"] for row in parts()] == [f"in.parquet#{row // 70}:{row % 70}" for row in range(200)]


@pytest.mark.parametrize("kind", ["fail", "truncate"])
def test_an_upload_that_never_succeeds_leaves_nothing_behind(job, rows_file, faults, kind):
    getattr(faults, kind)["part-000001-0002"] = 99
    outcome = job(input=rows_file, output=OUT, sets=SMALL)
    assert outcome.exit_code == 5
    assert "cannot write bucket/out/part-000001-0002.parquet" in str(outcome.error)
    assert "run the same command again" in str(outcome.error)
    assert "bucket/out/part-000001-0002.parquet" not in FaultyStore.objects
    assert outcome.summary.counts.rows == len(parts())  # what became visible beside it is counted
    getattr(faults, kind).clear()
    outcome = job(input=rows_file, output=OUT, sets=SMALL)
    assert outcome.exit_code == 0
    assert len(parts()) == outcome.summary.counts.rows == 200


def test_an_interrupted_upload_leaves_nothing_behind():
    """Closing the stream shows what it had got so far; the one who interrupts cannot wait for more."""

    class Halting(io.BytesIO):
        def read(self, size=-1):
            if self.tell():
                raise KeyboardInterrupt
            return super().read(3)

    store = Store(OUT)
    whole = Halting(b"0123456789")
    whole.seek(0, io.SEEK_END)
    with pytest.raises(KeyboardInterrupt):
        store._put("results.jsonl", whole)
    assert FaultyStore.puts["bucket/out/results.jsonl"] == 1
    assert store.read("results.jsonl") is None


def test_an_error_type_of_the_stores_own():
    store = Store(OUT, sleep=lambda seconds: None)

    def fill(file):
        file.write(b"x")

    class StoreError(Exception):
        pass

    def put(self, path, data):
        raise StoreError("token expired")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyStore, "put_object", put)
        with pytest.raises(OutputError, match=r"cannot write bucket/out/a: .*token expired"):
            store.write("a", fill)


def test_a_listing_that_forgets_parts_costs_work_but_no_row(job, rows_file, faults):
    job(input=rows_file, output=OUT, sets=SMALL)
    complete = parts()
    faults.hidden = lambda name: name.endswith(("0003.parquet", "0001.parquet"))
    outcome = job(input=rows_file, output=OUT, sets=SMALL)
    assert outcome.exit_code == 0
    assert outcome.summary.resumed_rows == 140
    assert outcome.summary.counts.rows == 200
    assert parts() == complete


def test_slow_uploads_do_not_hold_up_the_ranks(job, write_rows, faults, tmp_path):
    """Uploads run beside the rows and beside each other; begun parts are bounded."""
    path = write_rows(tmp_path / "in.parquet", {"prompt": [f"row {row}" for row in range(400)]})
    faults.put_s = 0.03
    begun = []

    def look(stub):
        written = sum("part-" in name for name in list(FaultyStore.objects))
        begun.append(stub.submitted // 10 - written)

    stub = StubBackend(capacity=32, on_poll=look)
    assert job(input=path, output=OUT, stub=stub, sets=SMALL).exit_code == 0
    assert UPLOADS / 2 <= FaultyStore.most_uploading <= UPLOADS + 1  # the lease's heartbeat, for one
    assert max(begun) <= MAX_WAITING + UPLOADS + 5
    assert len(parts()) == 400


def lost(lease):
    try:
        lease.check()
    except OutputError:
        return True
    return False


def test_a_second_signal_does_not_wait_for_the_parts_in_line(job, write_rows, faults, tmp_path):
    """What is being uploaded ends; what waits for its turn is redone by the next run."""
    path = write_rows(tmp_path / "in.parquet", {"prompt": [f"row {row}" for row in range(400)]})

    def interrupt(stub):
        faults.put_s = 0.3  # from the first row on
        if stub.submitted >= 160:  # the first parts are still on their way
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    outcome = job(input=path, output=OUT, stub=StubBackend(capacity=20, on_poll=interrupt), sets=SMALL)
    assert outcome.exit_code == 130
    assert outcome.summary.counts.rows == len(parts())
    assert len(parts()) // 10 < 3 * UPLOADS  # of at least 14
    faults.put_s = 0.0
    assert job(input=path, output=OUT, sets=SMALL).exit_code == 0
    assert len(parts()) == 400


class TestLease:
    @pytest.fixture
    def store(self):
        return Store(OUT)

    def holder(self, store):
        raw = store.read(LEASE)
        return None if raw is None else json.loads(raw)["id"]

    def foreign(self, store, name, heartbeat):
        content = {"id": name, "host": "elsewhere", "pid": 7, "heartbeat": heartbeat}
        store.write(LEASE, lambda file: file.write(json.dumps(content).encode()))

    def test_a_second_driver_is_refused(self, store):
        first = Lease(store)
        first.acquire()
        with pytest.raises(ConfigError, match="another driver writes to faulty://bucket/out: process"):
            Lease(store).acquire()
        first.release()
        assert self.holder(store) is None
        Lease(store).acquire()

    def test_of_two_at_once_the_last_upload_wins(self, store):
        """The other one saw no lease either, and its upload came after ours."""
        lease = Lease(store, sleep=lambda seconds: self.foreign(store, "other", time.time()))
        with pytest.raises(ConfigError, match="process 7 on elsewhere"):
            lease.acquire()
        assert self.holder(store) == "other"

    def test_many_at_once(self, store):
        FaultyStore.faults.put_s = 0.005
        held, refused = [], []

        def drive():
            lease = Lease(store, heartbeat_s=0.05)
            try:
                lease.acquire()
            except ConfigError:
                refused.append(lease)
            else:
                held.append(lease)

        threads = [threading.Thread(target=drive) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) + len(refused) == 6
        deadline = time.monotonic() + 10
        while (
            len(held) > 1
        ):  # an upload may have come after another driver had looked: the heartbeat looks again
            assert time.monotonic() < deadline
            time.sleep(0.02)
            held = [lease for lease in held if not lost(lease)]
        assert held[0]._owner["id"] == self.holder(store)
        held[0].release()

    def test_an_upload_that_came_too_late_to_be_seen_is_seen_by_the_heartbeat(self, store):
        lease = Lease(store, heartbeat_s=0.02)
        lease.acquire()
        self.foreign(store, "late", time.time())
        deadline = time.monotonic() + 5
        while not lost(lease):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(OutputError, match="is now held by process 7; this driver stops"):
            lease.check()
        lease.release()
        assert self.holder(store) == "late"

    def test_a_dead_heartbeat_is_watched_before_it_is_taken_over(self, store):
        now = [1000.0]
        self.foreign(store, "dead", 900.0)
        slept = []
        lease = Lease(store, expiry_s=60, heartbeat_s=10, clock=lambda: now[0], sleep=slept.append)
        lease.acquire()
        assert slept[0] == 15.0
        lease.check()
        lease.release()

    def test_a_heartbeat_of_a_slow_clock_goes_on(self, store):
        """The other machine's clock is ten minutes behind; its heartbeat moves all the same."""
        self.foreign(store, "behind", 400.0)
        lease = Lease(
            store, clock=lambda: 1000.0, sleep=lambda seconds: self.foreign(store, "behind", 400.0 + seconds)
        )
        with pytest.raises(ConfigError, match="process 7 on elsewhere"):
            lease.acquire()
        assert self.holder(store) == "behind"

    def test_a_store_that_is_away_for_too_long_ends_the_driver(self, store):
        clock = [0.0]
        lease = Lease(store, expiry_s=60, heartbeat_s=1000, monotonic=lambda: clock[0])
        lease.acquire()
        clock[0] = 59.0
        lease.check()
        clock[0] = 61.0
        lease.check()  # this process was asleep: renewed on the spot
        clock[0] = 130.0
        FaultyStore.faults.fail["lease"] = 99
        with pytest.raises(OutputError, match="could not be renewed for 60 s, so another driver may have"):
            lease.check()
        FaultyStore.faults.fail.clear()
        with pytest.raises(OutputError):
            lease.check()
        lease.release()

    def test_a_heartbeat_that_fails_once_goes_on(self, store):
        lease = Lease(store, heartbeat_s=0.02)
        lease.acquire()
        FaultyStore.faults.fail["lease"] = 3
        first = json.loads(store.read(LEASE))["heartbeat"]
        deadline = time.monotonic() + 5
        while json.loads(store.read(LEASE))["heartbeat"] == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lease.check()
        lease.release()

    def test_two_jobs_at_once(self, job, rows_file):
        """The second is refused while the first runs, and writes nothing."""
        second = []

        def other(stub):
            if not second:
                try:
                    Lease(Store(OUT)).acquire()
                except ConfigError as error:
                    second.append(str(error))

        outcome = job(input=rows_file, output=OUT, stub=StubBackend(on_poll=other), sets=SMALL)
        assert outcome.exit_code == 0
        assert "another driver writes to" in second[0]
