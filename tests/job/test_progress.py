"""What a person sees on stderr."""

from __future__ import annotations

import io
import re

import pytest

from deepinfer_ray.job.progress import Progress, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (185, "3m05s"), (7620, "2h07m"), (273_600, "3d04h")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.mark.parametrize("force", [None, "1"])
def test_plain_lines_when_piped(clock, monkeypatch, force):
    if force:
        monkeypatch.setenv("FORCE_COLOR", force)
    stream = io.StringIO()
    progress = Progress(1000, 200, stream=stream, clock=clock, line_interval_s=5)
    clock.now += 4
    progress.update(40, 0, 800)
    assert stream.getvalue() == ""
    clock.now += 4
    progress.update(80, 2, 1600)
    progress.note("a note")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "280/1,000 rows (28%) · 2 errors · 1,600 tokens · 200 tokens/s · ETA 1m12s",
        "a note",
    ]


def test_live_line_on_a_terminal(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(10, 0, stream=stream, clock=clock)
    clock.now += 1
    progress.update(5, 0, 50)
    progress.note("a note")
    progress.close()
    shown = stream.getvalue()
    assert "5/10 rows (50%)" in shown
    assert "a note" in shown
    assert "\x1b[?25h" in shown  # the cursor is back


def test_no_color(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    progress = Progress(10, 0, stream=Terminal(), clock=clock)
    clock.now += 1
    progress.update(5, 3, 50)
    progress.note("a note")
    progress.close()
    shown = progress._stream.getvalue()
    assert "5/10 rows (50%) · 3 errors" in shown
    assert not re.search(r"\x1b\[[\d;]*m", shown)


def test_nothing_known_yet(clock):
    assert Progress(10, 0, stream=io.StringIO(), clock=clock).line(0, 0, 0).endswith("ETA unknown")
    assert Progress(10, 10, stream=io.StringIO(), clock=clock).line(0, 0, 0).endswith("ETA 0s")
