"""What `bench` prints: piped output is never cut, and a narrow terminal gets paragraphs."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from deepinfer_ray.cli import bench

RESULT = {
    "name": "spec",
    "machine": {"processor": "a CPU", "cores": 2},
    "date": "2026-11-29",
    "rows": [{f"a_column_with_a_long_name_{n}": f"value {n}" for n in range(8)}],
}


def test_piped_tables_are_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    bench._print_rows(RESULT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "spec · a CPU · 2 cores · 2026-11-29"
    assert [word.strip() for word in lines[2].split("┃")[1:-1]] == list(RESULT["rows"][0])  # type: ignore[index]


def test_a_narrow_terminal_gets_every_name_and_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal(**options: Any) -> Console:
        return Console(**{**options, "force_terminal": True, "color_system": None, "width": 60})

    monkeypatch.setattr(bench, "Console", terminal)
    bench._print_rows(RESULT)
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"a_column_with_a_long_name_{n}: value {n}" in text for n in range(8))
