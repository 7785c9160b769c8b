"""The report of a job as one HTML page that needs nothing else: no network, no script to be readable.

Knows: words, order and look of the page, which chart shows what. Does not know: files, how a figure came
about. Whatever comes from outside (paths, row ids, error codes) is escaped; a content security policy forbids
the page to load anything. Charts follow the reader's light or dark preference, or the button's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from deepinfer_ray import __version__
from deepinfer_ray.bench.svg import Lane, Line, bar_chart, format_number, line_chart, timeline_chart
from deepinfer_ray.job.course import Course, Curve, RankCourse
from deepinfer_ray.job.progress import format_duration
from deepinfer_ray.job.report import Report, length_bounds, prefix_share

SHOWN_LANES = 32
SHOWN_CURVES = 6
"""Ranks with a curve of their own; of more ranks the mean, the lowest and the highest are drawn."""

_STYLE = """
:root{color-scheme:light dark;--ground:#fbfbfa;--text:#26292e;--quiet:#676c75;--line:#dcdee2;--card:#fff;
--accent:#2f6fae;--bad:#b3402a}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--ground:#17191d;--text:#dfe2e7;
--quiet:#9aa0aa;--line:#343840;--card:#1f2227;--accent:#7fb2e5;--bad:#ec8d79}}
:root[data-theme=dark]{color-scheme:dark;--ground:#17191d;--text:#dfe2e7;--quiet:#9aa0aa;--line:#343840;
--card:#1f2227;--accent:#7fb2e5;--bad:#ec8d79}
:root[data-theme=light]{color-scheme:light}
:root[data-theme] .dr-chart,.dr-chart{color:var(--text)}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main,header,footer{max-width:780px;margin:0 auto;padding:0 16px}
header{padding-top:24px;display:flex;gap:16px;align-items:flex-start;justify-content:space-between}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 4px}
p{margin:4px 0 10px}.quiet,footer{color:var(--quiet)}code{overflow-wrap:anywhere;font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;margin:20px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.card b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.card.bad b{color:var(--bad)}
.notes{border-left:3px solid var(--accent);padding:2px 12px;margin:16px 0}
figure{margin:10px 0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px}
figure svg{display:block;max-width:100%;height:auto}
.table{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{font-weight:600}
button{font:inherit;font-size:13px;color:var(--text);background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:4px 10px;cursor:pointer;white-space:nowrap}
footer{padding-top:28px;padding-bottom:40px;font-size:13px}
@media print{button{display:none}figure,.card{break-inside:avoid}}
"""

_SCRIPT = """
(function(){
var root=document.documentElement,button=document.getElementById('theme');
button.hidden=false;
button.addEventListener('click',function(){
var dark=root.dataset.theme?root.dataset.theme==='dark':matchMedia('(prefers-color-scheme: dark)').matches;
root.dataset.theme=dark?'light':'dark';});
var drawn=[].filter.call(document.querySelectorAll('figure svg'),function(svg){
var box=svg.getBoundingClientRect();return box.width>100&&box.height>60;}).length;
root.dataset.drawn=drawn;
})();
"""


def render(report: Report) -> str:
    """The whole page."""
    title = f"Report of {report.output}"
    sections = [make(report) for make in _SECTIONS]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'; script-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{_header(report)}<main>\n{_cards(report)}{_notes(report)}{''.join(sections)}</main>\n"
        f"<footer>Made {escape(report.made)} by deepinfer_ray {escape(__version__)} from the output "
        "directory alone. <code>deepinfer-ray report OUTPUT</code> makes it anew, also while the job runs; "
        "<code>--json</code> prints its figures.</footer>\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    facts = [f"<code>{escape(report.output)}</code>"]
    if report.model:
        facts.append(f"model <code>{escape(report.model)}</code>")
    if report.created:
        facts.append(f"begun {escape(report.created)}")
    done = report.rows_planned is None or report.counts.rows >= report.rows_planned
    state = "complete" if done else "not complete"
    return (
        f"<header><div><h1>Batch job, {state}</h1><p class='quiet'>{' · '.join(facts)}</p></div>"
        '<button id="theme" type="button" hidden>light / dark</button></header>\n'
    )


def _cards(report: Report) -> str:
    counts, course = report.counts, report.course
    planned = report.rows_planned
    rows = f"{counts.rows:,}" if planned in (None, counts.rows) else f"{counts.rows:,} of {planned:,}"
    share = counts.errors / counts.rows if counts.rows else 0.0
    cards = [
        (rows, "rows with a result", False),
        (f"{counts.errors:,}", f"of them errors ({share:.2%})", counts.errors > 0),
        (format_number(counts.prompt_tokens), "prompt tokens", False),
        (format_number(counts.completion_tokens), "completion tokens", False),
    ]
    if course.seconds:
        cards += [
            (format_number(course.tokens / course.seconds), "tokens a second, both kinds", False),
            (format_duration(course.seconds), _plural(len(course.runs), "run"), False),
            (f"{course.restarts:,}", "restarts of ranks", course.restarts > 0),
        ]
    cards.append((f"{prefix_share(counts):.1%}", "of prompt tokens from the cache", False))
    body = "".join(
        f'<div class="card{" bad" if bad else ""}"><b>{escape(value)}</b>{escape(label)}</div>'
        for value, label, bad in cards
    )
    return f'<div class="cards">{body}</div>\n'


def _notes(report: Report) -> str:
    return (
        '<div class="notes">' + "".join(f"<p>{escape(note)}</p>" for note in report.notes) + "</div>\n"
        if report.notes
        else ""
    )


def _section(title: str, text: str, *charts: str) -> str:
    """text: trusted HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{text}</p>\n{''.join(charts)}</section>\n"


def _figure(name: str, svg: str) -> str:
    return f'<figure data-chart="{escape(name, quote=True)}">{svg}</figure>\n'


# ---- time


def _unit(course: Course) -> tuple[float, str]:
    """(seconds of a unit, its name) for the time axis."""
    if course.seconds > 3 * 3600:
        return 3600.0, "hours of running"
    return (60.0, "minutes of running") if course.seconds > 300 else (1.0, "seconds of running")


def _line(name: str, curve: Curve, unit: float) -> Line:
    return Line(name, [(x / unit, y) for x, y in curve])


def _throughput(report: Report) -> str:
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
    return _section(
        "Throughput",
        text,
        _figure(
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
        _figure(
            "rows",
            line_chart(
                "Rows a second", [_line("rows", course.row_speed, unit)], x_label=label, y_label="rows/s"
            ),
        ),
    )


def _phases(report: Report) -> str:
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
    table = _table(
        ["rank", *kinds],
        [
            [str(rank.rank), *(f"{rank.shares().get(kind, 0.0):.1%}" for kind in kinds)]
            for rank in lanes[: 4 * SHOWN_LANES]
        ],
    )
    text = (
        "Prefill computes prompts, decode emits tokens. Idle time in the middle means that a rank waited for "
        "rows; at the end, that others had longer ones. Starting is the time until the engine stood, down "
        "the time after a death until a new one did. Within a group of colours lengths are exact, the order "
        "is not."
    )
    if len(lanes) > len(shown):
        text += f" The picture shows the first {len(shown)} of {len(lanes)} ranks."
    return _section("Ranks over time", text, _figure("phases", chart), table)


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


def _batches(report: Report) -> str:
    course = report.course
    unit, label = _unit(course)
    lines = _curves(course.ranks, lambda rank: rank.batch, unit)
    if not lines:
        return ""
    charts = [
        _figure(
            "batch",
            line_chart("Sequences in a decode step", lines, x_label=label, y_label="sequences, mean"),
        )
    ]
    if course.in_flight:
        flight = [_line("rows in flight", course.in_flight, unit)]
        charts.append(
            _figure(
                "in-flight",
                line_chart("Rows that ranks hold", flight, x_label=label, y_label="rows, mean"),
            )
        )
    return _section(
        "Batch sizes",
        "A decode step costs nearly the same for few sequences as for many, so a full batch is what makes a "
        "rank fast. If it stays below <code>--max-num-seqs</code>, rows or cache are short.",
        *charts,
    )


def _cache(report: Report) -> str:
    course = report.course
    unit, label = _unit(course)
    lines = _curves(course.ranks, lambda rank: rank.kv_cache, unit, " blocks")
    if len(lines) <= SHOWN_CURVES // 2:
        lines += _curves(course.ranks, lambda rank: rank.state_cache, unit, " state slots")
    if not lines:
        return ""
    chart = line_chart("Share of the cache in use", lines, x_label=label, y_label="share of blocks or slots")
    return _section(
        "Cache use",
        "Blocks hold what was computed of each sequence, state slots its window. At 1 a rank is full: "
        "sequences wait, or give their blocks back and are computed again later.",
        _figure("cache", chart),
    )


def _mfu(report: Report) -> str:
    course = report.course
    unit, label = _unit(course)
    lines = _curves(course.ranks, lambda rank: rank.mfu, unit)
    if not lines:
        return ""
    chart = line_chart("Model FLOPs utilization", lines, x_label=label, y_label="share of the peak")
    return _section(
        "Use of the device",
        "Operations that the model needs, divided by what the device could do in that time.",
        _figure("mfu", chart),
    )


# ---- rows


def _lengths(report: Report) -> str:
    rows = report.rows
    charts = [
        _figure(name, _histogram(title, counts, label))
        for name, title, counts, label in (
            ("prompt-lengths", "Prompt lengths", rows.prompt_lengths, "prompt tokens"),
            ("completion-lengths", "Completion lengths", rows.completion_lengths, "completion tokens"),
        )
        if counts.any()
    ]
    if not charts:
        return ""
    return _section(
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


def _errors(report: Report) -> str:
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
        charts.append(_figure("errors", chart))
        charts.append(_table(["error_code", "rows"], [[code, f"{count:,}"] for code, count in ordered]))
    if reasons:
        ordered = reasons.most_common(8)
        chart = bar_chart(
            "How completions ended",
            [reason for reason, _ in ordered],
            {"completions": [float(count) for _, count in ordered]},
            x_label="finish_reason",
            y_label="completions",
        )
        charts.append(_figure("finish-reasons", chart))
    if not charts:
        return ""
    text = (
        "Each failed row says why in its column <code>error</code>; <code>--retry-errors</code> runs only "
        "those rows again."
        if counts.error_codes
        else "No row ended in an error."
    )
    return _section("Errors and endings", text, *charts)


def _slow(report: Report) -> str:
    if not report.slowest:
        return ""
    table = _table(
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
    return _section(
        "Slowest rows",
        "From handing a row to a rank until its result, waiting included. Only ids are kept: neither prompts "
        "nor completions are in this page.",
        table,
    )


def _prefix(report: Report) -> str:
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
    return _section(
        "Prefix reuse",
        f"{counts.cached_tokens:,} of {counts.prompt_tokens:,} prompt tokens ({share:.1%}) were not computed "
        f"but taken from the cache of a prefix that rows share; {rows.rows_with_cached_prefix:,} of "
        f"{rows.rows:,} rows began with one.",
        _figure("prefix", chart),
    )


# ---- drafts and experts


def _drafts(report: Report) -> str:
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
    return _section(
        "Accepted lengths",
        f"A step of a sequence emits one token and the drafts that were accepted: {tokens / steps:.2f} on "
        f"average{rate}.",
        _figure("accepted", chart),
    )


def _experts(report: Report) -> str:
    course = report.course
    unit, label = _unit(course)
    lines = _curves(course.ranks, lambda rank: rank.expert_load, unit)
    if not lines:
        return ""
    chart = line_chart("Expert load", lines, x_label=label, y_label="fullest rank / mean")
    return _section(
        "Expert load",
        "Tokens of the fullest rank's experts divided by those of the mean rank's: 1 is even, and a step "
        "waits for the fullest.",
        _figure("experts", chart),
    )


_SECTIONS = (
    _throughput,
    _phases,
    _batches,
    _cache,
    _mfu,
    _lengths,
    _errors,
    _slow,
    _prefix,
    _drafts,
    _experts,
)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{f'<code>{escape(cell)}</code>' if index == 0 else escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    tag = f' data-table="{escape(name, quote=True)}"' if name else ""
    return (
        f'<div class="table"><table{tag}><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>\n'
    )


def _plural(count: int, word: str) -> str:
    return f"in {count} {word}{'' if count == 1 else 's'}"
