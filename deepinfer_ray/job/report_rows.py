"""The sections of a report that show its rows: lengths, errors and endings, the slowest, shared prefixes.

Knows: which chart shows what, and how to read it, in words. Does not know: files, the page around it. A
section without data is an empty text.
"""

from __future__ import annotations

import numpy as np

from deepinfer_ray.job.report import Report, length_bounds, prefix_share
from deepinfer_ray.job.report_elements import figure, section, table
from deepinfer_ray.svg import bar_chart


def lengths(report: Report) -> str:
    rows = report.rows
    charts = [
        figure(name, _histogram(title, counts, label))
        for name, title, counts, label in (
            ("prompt-lengths", "Prompt lengths", rows.prompt_lengths, "prompt tokens"),
            ("completion-lengths", "Completion lengths", rows.completion_lengths, "completion tokens"),
        )
        if counts.any()
    ]
    if not charts:
        return ""
    return section(
        "Lengths",
        f"Rows by length, doubling from bar to bar. The longest prompt has {rows.longest_prompt:,} tokens, "
        f"the longest completion {rows.longest_completion:,}.",
        *charts,
    )


def _histogram(title: str, counts: np.ndarray, label: str) -> str:
    used = np.flatnonzero(counts)
    buckets = range(int(used[0]), int(used[-1]) + 1)
    names = [_bucket_name(bucket) for bucket in buckets]
    values = [float(counts[bucket]) for bucket in buckets]
    return bar_chart(title, names, {"rows": values}, x_label=label, y_label="rows")


def _bucket_name(bucket: int) -> str:
    first, last = length_bounds(bucket)
    if first == last:
        return str(first)
    return f"{_binary(first)}–{_binary(last + 1) if last >= 1024 else last}"


def _binary(value: int) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def errors(report: Report) -> str:
    counts, reasons = report.counts, report.rows.finish_reasons
    charts = []
    if counts.error_codes:
        ordered = counts.error_codes.most_common(12)
        chart = bar_chart(
            "Errors by kind",
            [code for code, _ in ordered],
            {"rows": [float(count) for _, count in ordered]},
            x_label="error_code",
            y_label="rows",
        )
        charts.append(figure("errors", chart))
        charts.append(table(["error_code", "rows"], [[code, f"{count:,}"] for code, count in ordered]))
    if reasons:
        ordered = reasons.most_common(8)
        chart = bar_chart(
            "How completions ended",
            [reason for reason, _ in ordered],
            {"completions": [float(count) for _, count in ordered]},
            x_label="finish_reason",
            y_label="completions",
        )
        charts.append(figure("finish-reasons", chart))
    if not charts:
        return ""
    text = (
        "Each failed row says why in its column <code>error</code>; <code>--retry-errors</code> runs only "
        "those rows again."
        if counts.error_codes
        else "No row ended in an error."
    )
    return section("Errors and endings", text, *charts)


def slowest(report: Report) -> str:
    if not report.slowest:
        return ""
    listed = table(
        ["row id", "seconds", "prompt tokens", "completion tokens"],
        [
            [
                str(entry.get("row_id")),
                f"{entry.get('seconds', 0):,.2f}",
                f"{entry.get('prompt_tokens', 0):,}",
                f"{entry.get('completion_tokens', 0):,}",
            ]
            for entry in report.slowest
        ],
        name="slowest",
    )
    return section(
        "Slowest rows",
        "From handing a row to a rank until its result, waiting included. Only ids are kept: neither prompts "
        "nor completions are in this page.",
        listed,
    )


def prefix(report: Report) -> str:
    counts, rows = report.counts, report.rows
    if not counts.prompt_tokens:
        return ""
    share = prefix_share(counts)
    chart = bar_chart(
        "Prompt tokens",
        ["computed", "from cached prefixes"],
        {"tokens": [float(counts.prompt_tokens - counts.cached_tokens), float(counts.cached_tokens)]},
        x_label="",
        y_label="tokens",
    )
    return section(
        "Prefix reuse",
        f"{counts.cached_tokens:,} of {counts.prompt_tokens:,} prompt tokens ({share:.1%}) were not computed "
        f"but taken from the cache of a prefix that rows share; {rows.rows_with_cached_prefix:,} of "
        f"{rows.rows:,} rows began with one.",
        figure("prefix", chart),
    )
