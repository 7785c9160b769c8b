"""`bench policy` through the command: rows as JSON, plots into a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfer_ray.bench import policy
from deepinfer_ray.cli import main
from deepinfer_ray.errors import ConfigError


def test_rows_are_printed_and_plots_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"study": "headroom", "policy": "strict", "gain": 1.0}

    def plots(rows: list[dict[str, Any]], directory: Path) -> list[Path]:
        assert rows == [row]
        return [directory / "policy-headroom-gain.svg"]

    monkeypatch.setattr(policy, "run", lambda: [row])
    monkeypatch.setattr(policy, "plots", plots)
    result = CliRunner().invoke(main.app, ["bench", "policy", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["name"], printed["rows"]) == ("policy", [row])
    assert set(printed) == {"name", "machine", "date", "rows"}
    assert f"wrote {tmp_path / 'policy-headroom-gain.svg'}" in result.stderr


def test_plots_of_a_benchmark_without_any_are_refused_before_it_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["bench", "scheduler", "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "the benchmark scheduler draws no plots; leave out --out" in str(result.exception)
