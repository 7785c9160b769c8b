"""The report where a user finds it: `OUTPUT/_deepinfer/report.html`.

Knows: when and where it is written, that a job must not fail for it. Does not know: figures, HTML.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from deepinfer_ray.job.prepare import Say
from deepinfer_ray.job.report import HURRIED_PARTS, MAX_PARTS, REPORT, Report, read_report
from deepinfer_ray.job.report_html import render
from deepinfer_ray.job.signals import StopNow
from deepinfer_ray.job.sink import Counts
from deepinfer_ray.job.store import Store, output_errors


def write_report(store: Store, max_parts: int = MAX_PARTS) -> tuple[Report, str]:
    """Read the output of any job, write the page; the report and the page's path.

    The page does not go through the job's folder for half-written files: that belongs to the job that runs,
    and goes when it ends. Raises `ConfigError` (no output of ours) and `OutputError`.
    """
    report = read_report(store, max_parts=max_parts)
    page, path = render(report).encode(), store.path(REPORT)
    with output_errors(path):
        if store.local:
            beside = f"{path}.{uuid.uuid4().hex[:8]}"
            try:
                with open(beside, "wb") as file:
                    file.write(page)
                os.replace(beside, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise
        else:
            store.write(REPORT, lambda file: file.write(page))
    return report, path


def leave_report(store: Store, counts: Counts, say: Say, *, hurried: bool) -> None:
    """At the end of a run: the page is written and its path said. counts: of all parts. hurried: the run was
    asked to stop.

    Whatever goes wrong, a second signal included, costs the page and nothing else.
    """
    try:
        report = read_report(store, counts, HURRIED_PARTS if hurried else MAX_PARTS)
        page = render(report).encode()
        store.write(REPORT, lambda file: file.write(page))
    except (Exception, StopNow) as error:
        say(
            f"the report could not be written: {error or type(error).__name__}; "
            f"make it with: deepinfer-ray report {store.location}"
        )
    else:
        say(f"report: {store.path(REPORT)}")
