"""The pieces of a report page: a section, a figure, a table. Text is escaped here.

Knows: HTML. Does not know: figures of a job, the page around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def section(title: str, text: str, *charts: str) -> str:
    """text and charts: trusted HTML; whoever puts foreign text into them escapes it."""
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{text}</p>\n{''.join(charts)}</section>\n"


def figure(name: str, svg: str) -> str:
    """svg: trusted; `deepinfer_ray.svg` escapes what it draws."""
    return f'<figure data-chart="{escape(name, quote=True)}">{svg}</figure>\n'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    """Cells are texts; the first column is set as code. name: for whoever looks the table up."""
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
