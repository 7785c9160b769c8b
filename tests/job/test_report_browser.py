"""The report in a real browser: it opens from a file, without network, and its charts are drawn.

Chromium is a system package (Debian: `apt-get install chromium`); `make test-browser` runs these tests alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile

import pytest
from report_page import ALL_CHARTS, Page, PulsingBackend

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def browser():
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert found, f"none of {', '.join(BROWSERS)} is installed; apt-get install -y chromium"
    return found


@pytest.fixture
def dump(browser):
    """dump(path, switches…) → (DOM after the page's script ran, what the browser logged)."""

    def open_page(path, *switches):
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--disable-gpu"),
                    *("--disable-background-networking", "--no-first-run", "--disable-extensions"),
                    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0"),
                    *(f"--user-data-dir={profile}", "--window-size=900,1200", *switches),
                    *("--dump-dom", path.as_uri()),
                ],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=True,
            )
        return done.stdout, done.stderr

    return open_page


@pytest.fixture
def page(job, write_rows, tmp_path):
    rows = write_rows(tmp_path / "in.parquet", {"prompt": [f"row {'x' * i}" for i in range(60)] + [None]})
    job(input=rows, stub=PulsingBackend(delay_s=0.05), max_tokens=8, sets=["job.rows_per_part=16"])
    return tmp_path / "out/_deepinfer/report.html"


@pytest.mark.parametrize(
    "switches", [(), ("--blink-settings=preferredColorScheme=0",)], ids=["light", "dark"]
)
def test_report_opens_and_its_charts_are_drawn(page, dump, switches):
    dom, log = dump(page, *switches)
    seen = Page(dom)
    assert set(seen.charts) == ALL_CHARTS
    drawn = re.search(r'<html[^>]* data-drawn="(\d+)"', dom)
    assert drawn, "the page's script did not run"
    assert int(drawn[1]) == len(ALL_CHARTS)
    assert seen.svgs == len(ALL_CHARTS)
    assert '<button id="theme" type="button">' in dom  # shown by the script
    complaints = [line for line in log.splitlines() if "CONSOLE" in line]
    assert complaints == []
