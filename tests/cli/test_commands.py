"""What all commands have in common: `--help`, `--config`, `--set`, one line for a mistake."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepinfer_ray.cli.main import app
from deepinfer_ray.errors import ConfigError

COMMANDS = {
    "generate": ["--model", "m", "--input", "i", "--output", "o"],
    "demo": [],
    "make-checkpoint": ["--out", "here"],
    "inspect": ["here"],
    "plan": ["--model", "m"],
    "doctor": [],
    "report": ["here"],
    "bench": ["scheduler"],
}


def test_these_are_all_commands() -> None:
    names = {each.name or each.callback.__name__.replace("_", "-") for each in app.registered_commands}
    assert names == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for flag in ("--help", "--config", "--set"):
        assert flag in result.output


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("source", ["set", "file", "environment"])
def test_a_wrong_option_stops_every_command_before_it_starts(
    command: str, source: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [command, *COMMANDS[command]]
    if source == "set":
        words += ["--set", "scheduler.max_seq=4"]
    elif source == "file":
        (tmp_path / "options.yaml").write_text("scheduler: {max_seq: 4}\n")
        words += ["--config", "options.yaml"]
    else:
        monkeypatch.setenv("DEEPINFER_RAY__SCHEDULER__MAX_SEQ", "4")
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert "did you mean 'scheduler.max_seqs'?" in str(error)
    assert not (tmp_path / "here").exists()
    assert not (tmp_path / "o").exists()


def test_commands_of_the_readme_are_spelt_right() -> None:
    """Every `deepinfer-ray …` of its shell examples has a command and flags that are there."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    shell = "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
    lines = [line for line in shell.splitlines() if line.startswith("deepinfer-ray ")]
    lines += re.findall(r"`(deepinfer-ray [^`]+)`", text)
    assert any(line.startswith("deepinfer-ray generate --model") for line in lines)
    for line in lines:
        _, command, *words = shlex.split(line)
        assert command in COMMANDS, line
        flags = {word for word in words if word.startswith("--")} - {"--help"}
        help_text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert all(re.search(rf"{flag}\b", help_text) for flag in flags), line


@pytest.mark.parametrize("start", ["DEEPINFER_RAY_", "DEEPINFER__", "DEEPINFERRAY__"])
def test_a_variable_that_was_meant_for_us_is_not_left_unread(
    start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{start}SCHEDULER__MAX_SEQS", "4")
    monkeypatch.setenv("DEEPINFER_RAY_SERVICE_HOST", "10.0.0.1")  # what Kubernetes sets beside a service
    error = CliRunner().invoke(app, ["generate"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"environment variable {start}SCHEDULER__MAX_SEQS is not read; did you mean "
        "DEEPINFER_RAY__SCHEDULER__MAX_SEQS?"
    )
