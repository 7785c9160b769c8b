"""The report of a job as one HTML page that needs nothing else: no network, no script to be readable.

Knows: order and look of the page, its head and cards. Does not know: what a section shows (`report_time`,
`report_rows`), how a figure came about. Whatever comes from outside (paths, row ids, error codes) is escaped;
a content security policy forbids the page to load anything. Charts follow the reader's light or dark
preference, or the button's choice.
"""

from __future__ import annotations

from html import escape

from deepinfer_ray import __version__
from deepinfer_ray.job import report_rows, report_time
from deepinfer_ray.job.progress import format_duration
from deepinfer_ray.job.report import Report, prefix_share
from deepinfer_ray.svg import format_number

_SECTIONS = (
    report_time.throughput,
    report_time.phases,
    report_time.batches,
    report_time.cache,
    report_time.mfu,
    report_rows.lengths,
    report_rows.errors,
    report_rows.slowest,
    report_rows.prefix,
    report_time.drafts,
    report_time.experts,
)

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


def _plural(count: int, word: str) -> str:
    return f"in {count} {word}{'' if count == 1 else 's'}"
