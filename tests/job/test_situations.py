"""What users report about batch systems, one section a situation; each in this process, on a fake fleet.

Named after what people see when it goes wrong. Where a situation has more to it, its heading names the file
that goes on with it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_backend import EngineBackend
from fake_fleet import FakeFleet
from stub_backend import StubBackend

from deepinfer_ray.config.engine import EngineConfig
from deepinfer_ray.errors import ConfigError, InputError, OutputError, PlacementError
from deepinfer_ray.job import runner
from deepinfer_ray.job.signals import StopSignals
from deepinfer_ray.model.synthetic import make_checkpoint

TINY = Path(__file__).parents[1] / "data/golden/tinyB"
SMALL = ("job.rows_per_part=16",)


@pytest.fixture
def numbered(write_rows, tmp_path):
    """numbered(count) → a Parquet file of rows with ids `id0`, `id1`, … in row groups of 50."""

    def write(count, name="in.parquet", group=50, **columns):
        table = {"id": [f"id{row}" for row in range(count)], "prompt": [f"row {row}" for row in range(count)]}
        return write_rows(tmp_path / name, table | columns, group=group)

    return write


def ids_of(rows):
    return Counter(row["row_id"] for row in rows)


def sampling(*rows):
    return [json.dumps(row) for row in rows]


# 1. Bad rows (test_bad_rows.py, test_chat_rows.py, test_openai_batch.py)


def test_one_bad_row_kills_the_whole_job(job, numbered, read_output, tmp_path):
    prompts = [None, "", "x" * 1000, *("fine",) * 60, None]
    path = numbered(64, prompt=pa.array(prompts, pa.string()))
    outcome = job(input=path, id_column="id", max_model_len=200, stub=FakeFleet(), max_tokens=3, sets=SMALL)
    rows = read_output(tmp_path / "out")
    assert outcome.exit_code == 0
    assert ids_of(rows) == Counter(f"id{row}" for row in range(64))
    codes = [row["error_code"] for row in rows]
    assert codes == ["null_prompt", "empty_prompt", "prompt_too_long", *[None] * 60, "null_prompt"]


# 2. The edge of the context


def test_a_prompt_at_the_context_limit_crashes_or_hangs(job, write_rows, read_output, tmp_path):
    """Prompts of context −1, 0 and +1 tokens, through a real engine; the last token needs no place."""
    config = EngineConfig().with_values(scheduler={"max_model_len": 64, "max_seqs": 4})
    path = write_rows(tmp_path / "in.parquet", {"ids": [[5] * length for length in (63, 64, 65)]})
    options = {"token_ids_column": "ids", "max_model_len": 64, "max_tokens": 4, "model": str(TINY)}
    job(input=path, stub=EngineBackend(TINY, config), temperature=0, **options)
    shorter, full, longer = read_output(tmp_path / "out")
    assert (shorter["finish_reason"], shorter["completion_tokens"]) == ("length", 2)
    assert (full["finish_reason"], full["completion_tokens"]) == ("length", 1)
    assert longer["error_code"] == "prompt_too_long"
    assert longer["error"] == "the prompt has 65 tokens, the context takes 64"


# 3. Sampling parameters and schemas of a row


def test_a_misspelt_parameter_is_silently_ignored(job, numbered, read_output, tmp_path):
    own = sampling(
        {"temprature": 0}, {"temperature": 0}, {"top_p": 7}, {"structured_outputs": {"jsn": {}}}, {}
    )
    path = numbered(5, s=own, schema=[None, None, None, None, '{"type": '])
    job(input=path, sampling_column="s", schema_column="schema")
    codes = [row["error_code"] for row in read_output(tmp_path / "out")]
    assert codes == ["bad_sampling_params", None, "bad_sampling_params", "bad_schema", "bad_schema"]


# 4. Ids (test_source.py, test_jsonl.py)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a"], r"the id 'a' of column id occurs twice: in in.parquet, row group 0, row 0 and in"),
        (["a", None, "c"], r"the id column id is null in in.parquet, row group 0, row 1"),
        ([1, 2, 1], r"the id '1' of column id occurs twice"),
    ],
)
def test_duplicate_ids_overwrite_each_other(job, numbered, ids, message):
    with pytest.raises(InputError, match=message):
        job(input=numbered(3, id=ids), id_column="id")
    assert job.stub.closed == []  # no rank was started


def test_integer_and_string_ids_in_different_files(job, numbered, read_output, tmp_path):
    numbered(2, "in/a.parquet", id=[1, 2])
    numbered(2, "in/b.parquet", id=["x", "3"])
    job(input=tmp_path / "in", id_column="id")
    assert [row["row_id"] for row in read_output(tmp_path / "out")] == ["1", "2", "x", "3"]


# 5. Odd files (test_source.py, test_jsonl.py)


def test_an_odd_file_in_the_directory_stops_everything(job, write_rows, read_output, tmp_path):
    root = tmp_path / "in"
    nested = pa.array([[{"a": [1]}], None], pa.list_(pa.struct([("a", pa.list_(pa.int8()))])))
    write_rows(root / "nested.parquet", {"prompt": ["x", "y"], "n": nested})
    write_rows(root / "dictionary.parquet", pa.table({"prompt": pa.array(["z"]).dictionary_encode()}))
    write_rows(root / "large.parquet", pa.table({"prompt": pa.array(["l"], pa.large_string())}))
    write_rows(root / "empty.parquet", {"prompt": pa.array([], pa.string())})
    pq.ParquetWriter(root / "no_groups.parquet", pa.schema([("prompt", pa.string())])).close()
    (root / "_SUCCESS").touch()
    (root / ".part.parquet.crc").write_bytes(b"junk")
    (root / "_temporary").mkdir()
    (root / "_temporary/half.parquet").write_bytes(b"PAR1")
    outcome = job(input=root)
    assert (outcome.exit_code, outcome.summary.counts.ok) == (0, 4)
    rows = read_output(tmp_path / "out")
    assert [row["prompt"] for row in rows] == ["z", "l", "x", "y"]
    assert [row["n"] for row in rows if "n" in row] == [[{"a": [1]}], None]


def test_a_corrupt_file_is_found_after_hours(job, numbered, tmp_path):
    numbered(3, "in/a.parquet")
    content = numbered(3, "in/b.parquet").read_bytes()
    (tmp_path / "in/b.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(
        InputError, match=r"in/b.parquet cannot be read as Parquet: .*Repair it or leave it out"
    ):
        job(input=tmp_path / "in")
    assert job.stub.closed == []


# 6. The driver is killed (test_resume.py)


def test_a_kill_loses_or_doubles_rows(job, driver, numbered, read_output, tmp_path):
    path = numbered(300)
    job(input=path, output=str(tmp_path / "clean"), id_column="id", seed=3, sets=SMALL)
    process = driver({"capacity": 8, "delay_s": 0.08}, SMALL, input=path, id_column="id", seed=3)
    while not list((tmp_path / "out").glob("part-*")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    outcome = job(input=path, id_column="id", seed=3, sets=SMALL)
    assert 0 < outcome.summary.resumed_rows < 300
    assert read_output(tmp_path / "out") == read_output(tmp_path / "clean")
    assert not list((tmp_path / "out/_deepinfer").glob("tmp*"))


# 7. Ranks die


@pytest.mark.parametrize("node_loss", [False, True])
def test_a_dead_rank_takes_its_rows_along(job, numbered, read_output, tmp_path, node_loss):
    path = numbered(200)
    job(input=path, id_column="id", stub=FakeFleet(), output=str(tmp_path / "calm"), max_tokens=6)
    fleet = FakeFleet(deaths={3: 1, 9: 0, 11: 2, 25: 1}, node_loss=node_loss)
    outcome = job(input=path, id_column="id", stub=fleet, max_tokens=6, sets=SMALL)
    assert (outcome.exit_code, outcome.summary.restarts) == (0, 4)
    rows, calm = (
        {row["row_id"]: row["token_ids"] for row in read_output(tmp_path / name)} for name in ("out", "calm")
    )
    assert rows == calm


def test_one_poison_row_among_64_kills_rank_after_rank(job, numbered, read_output, tmp_path):
    prompts = ["poison" if row == 40 else f"row {row}" for row in range(64)]
    poison = [ord(letter) + 3 for letter in "poison"]
    fleet = FakeFleet(poison=lambda item: item.prompt.tolist()[1:] == poison)
    outcome = job(input=numbered(64, prompt=prompts), id_column="id", stub=fleet, max_tokens=4)
    rows = read_output(tmp_path / "out")
    assert outcome.exit_code == 0
    assert [(row["row_id"], row["error_code"]) for row in rows if row["error_code"]] == [
        ("id40", "rank_killer")
    ]
    assert len(rows) == 64
    assert rows[40]["attempts"] > 1


# 8. Ctrl-C (test_resume.py for the processes)


class Interrupting(StubBackend):
    """Sends the signal after so many results, once or twice."""

    def __init__(self, times):
        super().__init__(capacity=8, delay_s=0.02)
        self.times = times

    def poll(self, timeout_s):
        if self._given > 40 and self.times:
            self.times -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return super().poll(timeout_s)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_throws_work_away(job, numbered, read_output, tmp_path, times):
    path = numbered(300)
    outcome = job(input=path, id_column="id", stub=Interrupting(times), sets=SMALL, signals=StopSignals())
    committed = read_output(tmp_path / "out")
    assert outcome.exit_code == 130
    assert outcome.summary.counts.rows == len(committed)
    assert outcome.summary.rows_left == 300 - len(committed) > 0
    if times == 1:  # everything that was begun is finished
        assert len(committed) >= job.stub.submitted > 40
    assert job.stub.closed == [times == 1]
    job(input=path, id_column="id", sets=SMALL)
    assert ids_of(read_output(tmp_path / "out")) == Counter(f"id{row}" for row in range(300))


def test_ctrl_c_when_every_row_was_under_way_is_a_job_that_is_done(job, numbered, read_output, tmp_path):
    class Late(StubBackend):
        def poll(self, timeout_s):
            if self.submitted == 40 and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)
            return super().poll(timeout_s)

    stub = Late(delay_s=0.05)
    stub.sent = False
    outcome = job(input=numbered(40), id_column="id", stub=stub, sets=SMALL, signals=StopSignals())
    assert [line for line in job.said if line.startswith("0 rows left; all 40 rows are in")]
    assert (outcome.exit_code, outcome.summary.rows_left, stub.sent) == (0, 0, True)
    assert len(read_output(tmp_path / "out")) == 40


# 9. The output cannot be written (test_resume.py, test_object_store.py)


def test_a_read_only_output_is_noticed_after_the_model_was_loaded(job, numbered):
    with pytest.raises(
        OutputError, match=r"cannot write /sys/deepinfer-out: (Permission|Operation|Read-only)"
    ) as error:
        job(input=numbered(3), output="/sys/deepinfer-out")
    assert error.value.exit_code == 5
    assert job.stub.closed == []


@pytest.mark.parametrize("cause", ["vanished", "full"])
def test_a_full_or_vanished_disk_needs_a_new_start(job, numbered, read_output, tmp_path, monkeypatch, cause):
    path, done = numbered(300), []
    real = os.fsync

    def fsync(handle):
        done.append(handle)
        if len(done) > 30 and cause == "full":
            raise OSError(28, "No space left on device")
        real(handle)

    def vanish(stub):
        if cause == "vanished" and len(list((tmp_path / "out").glob("part-*"))) > 5:
            (tmp_path / "out").rename(tmp_path / "gone")

    monkeypatch.setattr(os, "fsync", fsync)
    stub = StubBackend(capacity=16, delay_s=0.02, on_poll=vanish)
    outcome = job(input=path, id_column="id", stub=stub, sets=SMALL)
    assert outcome.exit_code == 5
    if cause == "vanished":
        (tmp_path / "gone").rename(tmp_path / "out")
    reason = "No space left on device" if cause == "full" else "No such file or directory"
    assert reason in str(outcome.error)
    assert "run the same command again" in str(outcome.error)
    monkeypatch.setattr(os, "fsync", real)
    assert job(input=path, id_column="id", sets=SMALL).exit_code == 0
    assert ids_of(read_output(tmp_path / "out")) == Counter(f"id{row}" for row in range(300))


# 10. Skew


def test_one_long_row_at_the_end_runs_alone_for_ever(job, numbered, monkeypatch):
    """99 rows of 5 tokens and, last in the file, one of 100, on 4 ranks of 4 slots: it goes first."""
    monkeypatch.setattr(runner, "GATHER_S", 30.0)  # however slowly a busy machine reads the rows of a part
    own = sampling(*[{"max_tokens": 5}] * 99, {"max_tokens": 100})
    fleet = FakeFleet(ranks=4, slots=4)
    job(input=numbered(100, group=100, s=own), id_column="id", sampling_column="s", stub=fleet)
    assert fleet.tokens == 99 * 5 + 100
    assert fleet.steps <= 110  # last in line it would be 100 + 99 · 5 / 16
    assert max(fleet.rows_of.values()) <= 35


def test_three_rows_on_four_ranks_crowd_one_rank(job, numbered):
    fleet = FakeFleet(ranks=4)
    assert job(input=numbered(3), stub=fleet, max_tokens=5).exit_code == 0
    assert sorted(fleet.rows_of.values()) == [0, 1, 1, 1]


def test_no_rows_at_all_starts_a_cluster(job, numbered, tmp_path):
    outcome = job(input=numbered(0, id=pa.array([], pa.string()), prompt=pa.array([], pa.string())))
    assert (outcome.exit_code, outcome.summary.counts.rows) == (0, 0)
    assert job.stub.closed == []
    assert json.loads((tmp_path / "out/_deepinfer/summary.json").read_text())["rows"] == 0


# 11. Stop strings and unicode


def test_unicode_comes_back_mangled(job, numbered, read_output, tmp_path):
    texts = [
        "héllo",
        "日本語🎌",
        "a\u0301 b",
        "\x00\x07",
        "line\r\nend\u2028",
        "\U0001f468\u200d\U0001f469",
        "\ufeffx",
    ]
    items = {}

    def echo(item):
        items[bytes(token - 3 for token in item.prompt[1:]).decode()] = item
        return [5], bytes(token - 3 for token in item.prompt[1:]).decode(), "stop"

    own = sampling(*[{"stop": ["\n\n", "終わり", "🎌"]}] * len(texts))
    path = numbered(len(texts), prompt=texts, id=[f"zeile-{text}" for text in texts], s=own)
    job(input=path, id_column="id", sampling_column="s", stub=StubBackend(answer=echo), stop=["unused"])
    rows = read_output(tmp_path / "out")
    assert [row["completion"] for row in rows] == texts
    assert [row["row_id"] for row in rows] == [f"zeile-{text}" for text in texts]
    assert {item.params.stop for item in items.values()} == {("\n\n", "終わり", "🎌")}


def test_a_stop_string_that_spans_tokens_is_missed(job, write_rows, read_output, tmp_path):
    """A tiny model's noise is cut where a text of its own stands, in the middle of tokens, letters of several
    bytes included; what never comes changes nothing."""
    model = make_checkpoint(tmp_path / "model", "tiny", layers=6, experts=4)

    def run(name, **columns):
        config = EngineConfig().with_values(scheduler={"max_model_len": 96, "max_seqs": 4})
        path = write_rows(tmp_path / f"{name}.parquet", {"id": list("abcd"), "prompt": PROMPTS, **columns})
        options = {"id_column": "id", "max_model_len": 96, "max_tokens": 24, "model": str(model)}
        output = str(tmp_path / name)
        backend = EngineBackend(model, config)
        job(input=path, output=output, stub=backend, sampling_column="s", **options)
        backend.engine.close()
        return read_output(output)

    whole = [row["completion"] for row in run("whole", s=["{}"] * 4)]
    stops = [
        max(re.findall("[ -~]{4,}", text), key=len)[1:5] for text in whole
    ]  # noise is no UTF-8 elsewhere
    stops[1] = max(re.findall("[^\x00-\x7f\ufffd]", whole[1]))
    own = sampling(*[{"stop": ["never ✗", stop]} for stop in stops[:2]], {"stop": ["never ✗"]})
    own += sampling({"stop": stops[3], "include_stop_str_in_output": True})
    rows = [(row["completion"], row["finish_reason"]) for row in run("cut", s=own)]
    ends = [whole[0].find(stops[0]), whole[1].find(stops[1]), None, whole[3].find(stops[3]) + len(stops[3])]
    assert rows == [(text[:end], "stop" if end else "length") for text, end in zip(whole, ends, strict=True)]


PROMPTS = ["héllo", "x y z", "日本語🎌", "\ufeffa"]


# 12. The same tokens in every arrangement


def test_the_same_row_gives_other_tokens_in_another_batch(job, write_rows, read_output, tmp_path):
    """A real tiny model: rows in another order, another batch size, other parts; seeds follow the ids."""
    rows = [{"id": f"id{row}", "ids": [row + 3, 9, row % 5 + 7]} for row in range(10)]
    results = []
    for name, seqs, order in (("a", 8, rows), ("b", 3, random.Random(5).sample(rows, len(rows)))):
        path = write_rows(tmp_path / f"{name}.parquet", pa.Table.from_pylist(order), group=4)
        config = EngineConfig().with_values(scheduler={"max_model_len": 64, "max_seqs": seqs})
        options = {"token_ids_column": "ids", "id_column": "id", "max_tokens": 4, "model": str(TINY)}
        job(input=path, output=str(tmp_path / name), stub=EngineBackend(TINY, config), seed=7, **options)
        results.append({row["row_id"]: row["token_ids"] for row in read_output(tmp_path / name)})
    assert results[0] == results[1]
    assert len({tuple(ids) for ids in results[0].values()}) > 5


def test_more_ranks_give_other_tokens(job, numbered, read_output, tmp_path):
    results = []
    for ranks in (1, 4):
        output = tmp_path / f"{ranks}"
        fleet = FakeFleet(ranks=ranks, slots=5)
        job(input=numbered(120), id_column="id", stub=fleet, output=str(output), n=2, max_tokens=6)
        results.append([(row["row_id"], row["token_ids"]) for row in read_output(output)])
    assert results[0] == results[1]


# 13. A placement that cannot be had (tests/fleet for Ray itself)


def test_a_placement_that_cannot_be_had_leaves_half_a_cluster(job, numbered, tmp_path):
    class Nowhere(StubBackend):
        def start(self):
            raise PlacementError("8 ranks of 1 GPU were asked for, the cluster has 2 GPUs")

    outcome = job(input=numbered(20), stub=Nowhere())
    assert outcome.exit_code == 4
    assert str(outcome.error) == "8 ranks of 1 GPU were asked for, the cluster has 2 GPUs"
    assert job.stub.closed == [False]
    assert json.loads(outcome.summary.line())["rows_left"] == 20
    assert not (tmp_path / "out/_deepinfer/lease.json").exists()
    assert not list((tmp_path / "out").glob("part-*"))
    assert job(input=numbered(20)).exit_code == 0


# 14. The input changed (test_resume.py)


def test_a_changed_input_mixes_old_and_new_rows(job, numbered):
    job(input=numbered(100), stub=StubBackend(die_after=60), sets=SMALL)
    path = numbered(100, prompt=[f"other {row}" for row in range(100)])
    with pytest.raises(
        ConfigError, match=r"begun with something else: input.in.parquet.footer_sha256: .*--allow"
    ):
        job(input=path, sets=SMALL)
    with pytest.raises(ConfigError, match=r"begun for other rows or columns, its parts would not fit"):
        job(input=numbered(101), sets=SMALL, allow_changed=True)
    assert job(input=numbered(100), sets=SMALL).exit_code == 0


# 15. OpenAI batch files (test_openai_batch.py)


def test_one_malformed_line_fails_the_whole_batch(job, tmp_path):
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    lines = [json.dumps(good), "{not json", json.dumps({**good, "custom_id": "b"}), ""]
    (tmp_path / "in.jsonl").write_text("\r\n".join(lines), newline="")
    outcome = job(input=tmp_path / "in.jsonl")
    read = {
        name: [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        for name in ("results.jsonl", "errors.jsonl")
    }
    assert (outcome.exit_code, outcome.summary.counts.errors) == (0, 1)
    assert [line["custom_id"] for line in read["results.jsonl"]] == ["a", "b"]
    assert read["errors.jsonl"][0]["error"]["message"].startswith("line 2 is no JSON")
    (tmp_path / "in.jsonl").write_text("\n".join([lines[0], lines[0]]))
    with pytest.raises(InputError, match=r"'a' of column custom_id occurs twice: in in.jsonl, line 1 and in"):
        job(input=tmp_path / "in.jsonl", output=str(tmp_path / "other"))


# 16. Pipes and exit codes (tests/cli/test_generate.py)


@pytest.fixture
def command(monkeypatch, capfd, model_dir, tmp_path):
    """command(stub, words…) → (exit code, stdout, stderr) of `deepinfer-ray generate`."""

    def run(stub, *words, output="out"):
        import deepinfer_ray.cli.generate as cli
        from deepinfer_ray.cli.main import run as main

        monkeypatch.setattr(cli, "ray_backend", lambda config, engine: stub)
        arguments = ["generate", "--model", model_dir, "--output", tmp_path / output, *words]
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in arguments])
        return end.value.code or 0, *capfd.readouterr()

    return run


def test_logs_end_up_in_the_pipe(command, numbered, tmp_path):
    code, out, err = command(StubBackend(), "--input", numbered(30))
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out)["rows"] == 30
    assert "\x1b[" not in err  # no colours, no live display where nobody looks
    assert "30/30 rows (100%)" in err


def test_every_failure_exits_with_the_same_code(command, numbered, tmp_path):
    path = numbered(30, prompt=pa.array([None] * 15 + ["x"] * 15))
    code, out, err = command(StubBackend(), "--input", path, "--max-error-rate", "0.1", output="three")
    assert (code, json.loads(out)["errors"]) == (3, 15)
    assert "error: 15 of 30 rows ended in an error (50.0%), more than --max-error-rate 0.1 allows" in err
    code, out, err = command(StubBackend(die_after=3), "--input", path, output="four")
    assert (code, "error: rank 0 died" in err, json.loads(out)["rows_left"]) == (4, True, 30)
    code, out, err = command(StubBackend(), "--input", tmp_path / "nowhere", output="two")
    assert (code, out) == (2, "")
    assert "error: the input" in err
    (tmp_path / "five").mkdir()
    (tmp_path / "five/_deepinfer").write_text("a file in the way")
    code, out, err = command(StubBackend(), "--input", path, output="five")
    assert (code, out) == (5, "")
    assert "error: cannot write" in err
    assert "Traceback" not in err


def test_sixteen_situations_are_here():
    """Every numbered section of this file has a test."""
    sections = Path(__file__).read_text().split("\n# ")[1:]
    numbers = [int(section.split(".")[0]) for section in sections]
    assert numbers == list(range(1, 17))
    assert all("\ndef test_" in section for section in sections)
    assert np.unique(numbers).size == 16
