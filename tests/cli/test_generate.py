"""The command line: help, errors, exit codes, clean pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from deepinfer_ray import __version__
from deepinfer_ray.cli.generate import expand_values
from deepinfer_ray.cli.main import app
from deepinfer_ray.config.load import FLAGS
from deepinfer_ray.errors import JobError

TINY = Path(__file__).parents[1] / "data/golden/tinyB"


def deepinfer(*arguments, **environment):
    """Run the command in a process of its own; stdout, stderr and returncode."""
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_ray.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "160", **environment},
        check=False,
    )


@pytest.fixture
def rows(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def test_help_names_every_flag():
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["generate", "--help"]).stdout
    assert not [flag for flag in [*FLAGS, "--config", "--set"] if f"{flag} " not in shown]
    for exit_code in ("0 done", "2 usage", "3 too many failed", "4 cluster", "5 output", "130 and 143"):
        assert exit_code in " ".join(shown.split())


def test_commands_and_version():
    shown = CliRunner().invoke(app, ["--help"]).stdout
    for command in ("generate", "demo", "make-checkpoint", "inspect", "bench"):
        assert command in shown
    assert CliRunner().invoke(app, ["--version"]).stdout == f"deepinfer-ray {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expanded"),
    [
        ("--input a b --output c", "--input a --input b --output c"),
        ("--input a --input b c", "--input a --input b --input c"),
        ("--input=a b -x d", "--input=a --input b -x d"),
        ("--output c --stop a", "--output c --stop a"),
    ],
)
def test_many_inputs_after_one_flag(words, expanded):
    assert expand_values(words.split()) == expanded.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: no input: give --input with Parquet or JSONL files, directories or globs"),
        (["--input", "IN"], "error: no output: give --output with a directory"),
        (["--input", "IN", "--output", "OUT"], "error: no model: give --model with a checkpoint directory"),
        (
            ["--input", "IN", "--output", "OUT", "--model", "/nowhere"],
            "a checkpoint directory must hold config.json",
        ),
        (["--set", "scheduler.max_seq=3"], "did you mean 'scheduler.max_seqs'"),
        (["--temperature", "-1"], "--temperature"),
        (["--deadline", "soon"], "'soon' is not a duration"),
        (["--on-too-long", "cut"], "truncate-left"),
        (["--prompt-column", "a", "--token-ids-column", "b"], "give only one of prompt_column"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: no such configuration file"),
        (
            ["--input", "IN", "--output", "OUT", "--model", TINY, "--image-column", "m"],
            "--image-column m: this version takes no images",
        ),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(rows, tmp_path, arguments, message):
    words = [{"IN": rows, "OUT": tmp_path / "out"}.get(word, word) for word in arguments]
    done = deepinfer("generate", *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unknown_flag_and_command():
    for words in (["generate", "--modle", "x"], ["generat"]):
        done = deepinfer(*words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_bug_shows_its_traceback_and_exits_1(tmp_path):
    script = (
        "import deepinfer_ray.cli.generate as g\n"
        "def broken(*a, **k): raise KeyError('a bug')\n"
        "g.load_config = broken\n"
        "from deepinfer_ray.cli.main import run\n"
        "run(['generate'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "a bug" in done.stderr


def test_precedence_of_sources(rows, tmp_path, monkeypatch):
    words = f"--input {rows} --output {tmp_path / 'out'} --model {TINY} --token-ids-column prompt"
    words += f" --config {yaml_file(tmp_path)} --set scheduler.max_seqs=5 --seed 4"
    environment = {"DEEPINFER_RAY__JOB__SAMPLING__SEED": "3", "DEEPINFER_RAY__JOB__SAMPLING__N": "2"}
    seen = run_with_stub(monkeypatch, words.split(), **environment)
    sampling = seen["config"].job.sampling
    assert (sampling.seed, sampling.n, sampling.max_tokens) == (4, 2, 7)
    assert seen["config"].scheduler.max_seqs == 5


def yaml_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("job: {sampling: {seed: 1, n: 1, max_tokens: 7}}\nscheduler: {max_seqs: 9}\n")
    return path


def run_with_stub(monkeypatch, arguments, error=None, **environment):
    """Run `generate` in this process up to the job, which is replaced; what it was given."""
    import deepinfer_ray.job.generate as job_module
    from deepinfer_ray.job.generate import Outcome
    from deepinfer_ray.job.sink import Counts
    from deepinfer_ray.job.summary import Summary

    seen = {}

    def fake(config, make_backend, say, signals):
        seen["config"] = config
        say("a line for a person")
        print("noise that something printed")
        counts = Counts(rows=1, ok=1)
        summary = Summary(counts, counts, 1.0, 0, 1, 0, 0, "out")
        return Outcome(summary, error.exit_code if error else 0, error)

    monkeypatch.setattr(job_module, "generate", fake)
    seen["result"] = CliRunner(env=environment).invoke(app, ["generate", *arguments])
    return seen


def test_stdout_holds_the_summary_alone(monkeypatch):
    result = run_with_stub(monkeypatch, [])["result"]
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout)["event"] == "summary"
    assert "a line for a person" in result.stderr
    assert "noise that something printed" in result.stderr


def test_error_of_a_run_comes_with_its_summary_and_code(monkeypatch):
    result = run_with_stub(monkeypatch, [], JobError("7 of 9 rows ended in an error"))["result"]
    assert result.exit_code == 3
    assert "error: 7 of 9 rows ended in an error" in result.stderr
    assert json.loads(result.stdout)["rows"] == 1


def test_more_gangs_at_the_start_than_are_allowed(rows, tmp_path):
    words = f"generate --input {rows} --output {tmp_path / 'out'} --model {TINY} --token-ids-column prompt"
    done = deepinfer(*words.split(), "--dp", 2, "--max-gangs", 1)
    assert done.returncode == 2
    assert "error: --max-gangs 1 is less than --dp 2" in done.stderr


def test_jobs_script_is_the_same_command():
    script = Path(__file__).parents[2] / "jobs/generate.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "error: no input: give --input" in done.stderr
