"""The sections of a report that show the course of time: speed, ranks, batch, cache, device, drafts, experts.

Knows: which chart shows what, and how to read it, in words. Does not know: files, the page around it. A
section without data is an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_ray.job.course import Course, Curve, RankCourse
from deepinfer_ray.job.report import Report
from deepinfer_ray.job.report_elements import figure, section, table
from deepinfer_ray.svg import Lane, Line, bar_chart, format_number, line_chart, timeline_chart

SHOWN_LANES = 32
SHOWN_CURVES = 6
"""Ranks with a curve of their own; of more ranks the mean, the lowest and the highest are drawn."""


def _unit(course: Course) -> tuple[float, str]:
    """(seconds of a unit, its name) for the time axis."""
    if course.seconds > 3 * 3600:
        return 3600.0, "hours of running"
    return (60.0, "minutes of running") if course.seconds > 300 else (1.0, "seconds of running")


def _line(name: str, curve: Curve, unit: float) -> Line:
    return Line(name, [(x / unit, y) for x, y in curve])


def throughput(report: Report) -> str:
    course = report.course
    if not course.completion_speed:
        return ""
    unit, label = _unit(course)
    text = (
        "Tokens as the ranks computed them, rows as their results came in."
        if course.measured
        else "Tokens and rows as results came in: all of a row at once, so long rows make late peaks."
    )
    if len(course.runs) > 1:
        begins = ", ".join(format_number(run["begin"] / unit) for run in course.runs[1:])
        text += f" Pauses between the {len(course.runs)} runs are left out; later runs begin at {begins}."
    return section(
        "Throughput",
        text,
        figure(
            "throughput",
            line_chart(
                "Tokens a second",
                [
                    _line("prompt tokens", course.prompt_speed, unit),
                    _line("completion tokens", course.completion_speed, unit),
                ],
                x_label=label,
                y_label="tokens/s",
            ),
        ),
        figure(
            "rows",
            line_chart(
                "Rows a second", [_line("rows", course.row_speed, unit)], x_label=label, y_label="rows/s"
            ),
        ),
    )


def phases(report: Report) -> str:
    course = report.course
    lanes = [rank for rank in course.ranks if rank.segments]
    if not lanes:
        return ""
    unit, label = _unit(course)
    shown = lanes[:SHOWN_LANES]
    chart = timeline_chart(
        "What each rank did",
        [
            Lane(f"rank {rank.rank}", [(a / unit, b / unit, kind) for a, b, kind in rank.segments])
            for rank in shown
        ],
        x_label=label,
    )
    kinds = list(dict.fromkeys(kind for rank in lanes for _, _, kind in rank.segments))
    shares = table(
        ["rank", *kinds],
        [
            [str(rank.rank), *(f"{rank.shares().get(kind, 0.0):.1%}" for kind in kinds)]
            for rank in lanes[: 4 * SHOWN_LANES]
        ],
    )
    text = (
        "Prefill computes prompts, decode emits tokens. Idle time in the middle means that a rank waited for "
        "rows; at the end, that others had longer ones. Starting is the time until the engine stood, down "
        "the time after a death until a new one did; one that joins or leaves has no colour while it is not "
        "there. Within a group of colours lengths are exact, the order is not."
    )
    if len(lanes) > len(shown):
        text += f" The picture shows the first {len(shown)} of {len(lanes)} ranks."
    return section("Ranks over time", text, figure("phases", chart), shares)


def _curves(
    ranks: Sequence[RankCourse], curve: Callable[[RankCourse], Curve], unit: float, suffix: str = ""
) -> list[Line]:
    """One curve a rank, or of many ranks the mean, the lowest and the highest."""
    known = [(rank.rank, curve(rank)) for rank in ranks if curve(rank)]
    if len(known) <= SHOWN_CURVES:
        return [_line(f"rank {number}{suffix}", points, unit) for number, points in known]
    values: dict[float, list[float]] = {}
    for _, points in known:
        for x, y in points:
            values.setdefault(x, []).append(y)
    ordered = sorted(values.items())
    return [
        _line(f"{name} of {len(known)} ranks{suffix}", [(x, float(pick(ys))) for x, ys in ordered], unit)
        for name, pick in (("mean", np.mean), ("lowest", min), ("highest", max))
    ]


def batches(report: Report) -> str:
    course = report.course
    unit, label = _unit(course)
    lines = _curves(course.ranks, lambda rank: rank.batch, unit)
    if not lines:
        return ""
    charts = [
        figure(
            "batch",
            line_chart("Sequences in a decode step", lines, x_label=label, y_label="sequences, mean"),
        )
    ]
    if course.in_flight:
        flight = [_line("rows in flight", course.in_flight, unit)]
        charts.append(
            figure(
                "in-flight",
                line_chart("Rows that ranks hold", flight, x_label=label, y_label="rows, mean"),
            )
        )
    return section(
        "Batch sizes",
        "A decode step costs nearly the same for few sequences as for many, so a full batch is what makes a "
        "rank fast. If it stays below <code>--max-num-seqs</code>, rows or cache are short.",
        *charts,
    )


def cache(report: Report) -> str:
    course = report.course
    unit, label = _unit(course)
    lines = _curves(course.ranks, lambda rank: rank.kv_cache, unit, " blocks")
    if len(lines) <= SHOWN_CURVES // 2:
        lines += _curves(course.ranks, lambda rank: rank.state_cache, unit, " state slots")
    if not lines:
        return ""
    chart = line_chart("Share of the cache in use", lines, x_label=label, y_label="share of blocks or slots")
    return section(
        "Cache use",
        "Blocks hold what was computed of each sequence, state slots its window. At 1 a rank is full: "
        "sequences wait, or give their blocks back and are computed again later.",
        figure("cache", chart),
    )


def _one_curve_a_rank(
    course: Course,
    curve: Callable[[RankCourse], Curve],
    name: str,
    chart: str,
    y_label: str,
    head: str,
    text: str,
) -> str:
    """A section with one chart; nothing where no rank has that figure."""
    unit, label = _unit(course)
    lines = _curves(course.ranks, curve, unit)
    if not lines:
        return ""
    return section(head, text, figure(name, line_chart(chart, lines, x_label=label, y_label=y_label)))


def mfu(report: Report) -> str:
    return _one_curve_a_rank(
        report.course,
        lambda rank: rank.mfu,
        "mfu",
        "Model FLOPs utilization",
        "share of the peak",
        "Use of the device",
        "Operations that the model needs, divided by what the device could do in that time.",
    )


def drafts(report: Report) -> str:
    accepted, verified = report.course.accepted_lengths, report.course.verified_lengths
    if not sum(accepted):
        return ""
    steps = sum(accepted)
    tokens = sum(length * count for length, count in enumerate(accepted))
    offered = sum(length * count for length, count in enumerate(verified))
    chart = bar_chart(
        "Drafts accepted in a step",
        [str(length) for length in range(len(accepted))],
        {"steps of a sequence": [float(count) for count in accepted]},
        x_label="accepted drafts",
        y_label="steps",
    )
    rate = f", {tokens / offered:.1%} of those verified" if offered else ""
    return section(
        "Accepted lengths",
        f"A step of a sequence emits one token and the drafts that were accepted: {tokens / steps:.2f} on "
        f"average{rate}.",
        figure("accepted", chart),
    )


def experts(report: Report) -> str:
    return _one_curve_a_rank(
        report.course,
        lambda rank: rank.expert_load,
        "experts",
        "Expert load",
        "fullest rank / mean",
        "Expert load",
        "Tokens of the fullest rank's experts divided by those of the mean rank's: 1 is even, and a step "
        "waits for the fullest.",
    )
