"""Small charts as SVG text: lines, grouped bars, lanes of a timeline. No plotting library.

Knows: axes, legends, colours that read on light and on dark ground. Does not know: what the figures mean.
The ground is transparent and text takes the page's colour, so a chart may stand in an HTML report as it is;
alone it follows the viewer's light or dark preference. All text is escaped. Values that are not finite are a
`ValueError` that names their series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 52, 56
LEGEND_ROW = 18
COLOURS = ("#3b82c4", "#d9822b", "#3f9d6b", "#b5538f", "#8a7cc9", "#a58a2a", "#4aa5a8", "#c8553d")
"""Mid-tones: each has a contrast of at least 3 against white and against near-black."""
QUIET = "#8b8f96"
"""Of what is not worth attention, as idle time."""
STYLE = (
    ".dr-chart{color:#30343a;font:12px system-ui,sans-serif}"
    "@media (prefers-color-scheme:dark){.dr-chart{color:#d5d8dd}}"
    ".dr-chart text{fill:currentColor}.dr-chart .grid{stroke:currentColor;opacity:.18}"
    ".dr-chart .axis{stroke:currentColor;opacity:.6}"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points (x, y) in drawing order."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: segments (start, end, kind) in order of time."""

    name: str
    segments: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values on an axis and where they are drawn. ticks: values inside [low, high]."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Pixel of a value; values outside lie outside."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.stop - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, the first at or below `low`, the last at or
    above `high`."""
    if not low < high:
        raise ValueError(f"an axis from {low} to {high} has no length")
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def format_number(value: float) -> str:
    """A short label: 12000 is 12k, 0.5 stays 0.5."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    from_zero: bool = True,
) -> str:
    """Curves with a dot at each point. log_x: powers of two on a logarithmic axis (x > 0). from_zero: the
    y axis starts at 0, or below it if values do."""
    xs = [x for line in lines for x, _ in _checked(line)]
    ys = [y for line in lines for _, y in line.points]
    if not xs:
        raise ValueError(f"the chart {title!r} has no point")
    frame = _Frame(title, [line.name for line in lines], x_label, y_label)
    y_axis = _linear([*ys, 0.0] if from_zero else ys, frame.bottom, frame.top)
    x_axis = _powers(xs, LEFT, frame.right) if log_x else _linear(xs, LEFT, frame.right)
    frame.draw_y(y_axis)
    frame.draw_x(x_axis)
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        frame.add(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (value_x, value_y) in zip(places, line.points, strict=True):
            tip = _safe(f"{line.name}: {format_number(value_x)}, {format_number(value_y)}")
            frame.add(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{tip}</title></circle>'
            )
    return frame.render()


def bar_chart(
    title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str
) -> str:
    """Bars from zero, one of each series in each group; `series` values have the length of `groups`."""
    if not groups or not series:
        raise ValueError(f"the chart {title!r} has no bar")
    for name, values in series.items():
        if len(values) != len(groups):
            raise ValueError(f"series {name!r} has {len(values)} values for {len(groups)} groups")
        _require_finite(name, values)
    frame = _Frame(title, list(series), x_label, y_label)
    axis = _linear([0.0, *(value for values in series.values() for value in values)], frame.bottom, frame.top)
    frame.draw_y(axis)
    zero = axis.place(0.0)
    slot = (frame.right - LEFT) / len(groups)
    width = slot * 0.8 / len(series)
    for index, group in enumerate(groups):
        left = LEFT + slot * index
        frame.text(left + slot / 2, frame.bottom + 16, _cut(group, int(slot / 6.2)), "middle", full=group)
        for number, (name, values) in enumerate(series.items()):
            y = axis.place(values[index])
            tip = _safe(f"{group}, {name}: {format_number(values[index])}")
            frame.add(
                f'<rect x="{left + slot * 0.1 + width * number:.1f}" y="{min(y, zero):.1f}" '
                f'width="{width * 0.94:.1f}" height="{abs(y - zero):.1f}" '
                f'fill="{COLOURS[number % len(COLOURS)]}"><title>{tip}</title></rect>'
            )
    frame.rule(LEFT, zero, frame.right, zero, "axis")
    return frame.render()


def timeline_chart(
    title: str, lanes: Sequence[Lane], *, x_label: str, quiet: Sequence[str] = ("idle",)
) -> str:
    """Lanes under each other, each a row of coloured segments; kinds get colours in order of appearance,
    those in `quiet` a grey. Neighbours of one kind that touch are drawn as one."""
    for lane in lanes:
        _require_finite(lane.name, [value for start, end, _ in lane.segments for value in (start, end)])
        if any(end < start for start, end, _ in lane.segments):
            raise ValueError(f"lane {lane.name!r} has a segment that ends before it starts")
    merged = [Lane(lane.name, _merge(lane.segments)) for lane in lanes]
    kinds = list(dict.fromkeys(kind for lane in merged for _, _, kind in lane.segments))
    if not kinds:
        raise ValueError(f"the timeline {title!r} has no segment")
    loud = [kind for kind in kinds if kind not in quiet]
    colours = {kind: COLOURS[loud.index(kind) % len(COLOURS)] if kind in loud else QUIET for kind in kinds}
    frame = _Frame(title, kinds, x_label, "", list(colours.values()), height=TOP + BOTTOM + 34 * len(lanes))
    edges = [value for lane in merged for start, end, _ in lane.segments for value in (start, end)]
    axis = _linear(edges, LEFT, frame.right, tight=True)
    frame.draw_x(axis)
    for index, lane in enumerate(merged):
        top = frame.top + (frame.bottom - frame.top) * index / len(merged) + 4
        height = (frame.bottom - frame.top) / len(merged) - 8
        frame.text(LEFT - 8, top + height / 2 + 4, _cut(lane.name, 9), "end", full=lane.name)
        for start, end, kind in lane.segments:
            x = axis.place(start)
            tip = _safe(f"{lane.name}: {kind}, {format_number(start)} to {format_number(end)}")
            frame.add(
                f'<rect x="{x:.2f}" y="{top:.1f}" width="{axis.place(end) - x:.2f}" height="{height:.1f}" '
                f'fill="{colours[kind]}"><title>{tip}</title></rect>'
            )
    return frame.render()


class _Frame:
    """Title, legend, axes and the growing list of elements of one chart."""

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        x_label: str,
        y_label: str,
        colours: Sequence[str] = COLOURS,
        height: int = HEIGHT,
    ) -> None:
        self._title, self._parts = title, list[str]()
        self.right = WIDTH - RIGHT
        x, row = float(LEFT), 0
        for index, name in enumerate(names):
            label = _cut(name, 40)
            width = 26 + 6.6 * len(label)
            if x + width > self.right and x > LEFT:
                x, row = float(LEFT), row + 1
            y = TOP - 12 + row * LEGEND_ROW
            fill = colours[index % len(colours)]
            self.add(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" rx="2" fill="{fill}"/>')
            self.text(x + 14, y, label, "start", full=name)
            x += width
        extra = row * LEGEND_ROW
        self.height = height + extra
        self.top, self.bottom = float(TOP + extra), float(self.height - BOTTOM)
        self.text(LEFT, 18, _cut(title, 90), "start", full=title, bold=True)
        self.text((LEFT + self.right) / 2, self.height - 14, x_label, "middle")
        if y_label:
            middle = (self.top + self.bottom) / 2
            label = _safe(y_label)
            self.add(
                f'<text x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">'
                f"{label}</text>"
            )

    def add(self, element: str) -> None:
        self._parts.append(element)

    def text(
        self, x: float, y: float, text: str, anchor: str, full: str | None = None, bold: bool = False
    ) -> None:
        """full: the uncut text, shown as a tip where it differs."""
        tip = f"<title>{_safe(full)}</title>" if full is not None and full != text else ""
        weight = ' font-weight="600"' if bold else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{tip}{_safe(text)}</text>')

    def rule(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def draw_y(self, axis: Axis) -> None:
        for tick in axis.ticks:
            y = axis.place(tick)
            self.rule(LEFT, y, self.right, y, "grid")
            self.text(LEFT - 6, y + 4, format_number(tick), "end")
        self.rule(LEFT, self.top, LEFT, self.bottom, "axis")

    def draw_x(self, axis: Axis) -> None:
        for tick in axis.ticks:
            x = axis.place(tick)
            self.rule(x, self.bottom, x, self.bottom + 4, "axis")
            self.text(x, self.bottom + 17, format_number(tick), "middle")
        self.rule(LEFT, self.bottom, self.right, self.bottom, "axis")

    def render(self) -> str:
        label = _safe(self._title)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dr-chart" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" role="img" aria-label="{label}">'
            f"<style>{STYLE}</style>{''.join(self._parts)}</svg>\n"
        )


def _linear(values: Sequence[float], start: float, stop: float, tight: bool = False) -> Axis:
    """An axis around the values, ending at ticks; tight: ending at the values."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    ticks = nice_ticks(low, high)
    if not tight:
        return Axis(ticks[0], ticks[-1], start, stop, ticks)
    return Axis(low, high, start, stop, tuple(tick for tick in ticks if low <= tick <= high))


def _powers(values: Sequence[float], start: float, stop: float) -> Axis:
    if min(values) <= 0:
        raise ValueError(f"a logarithmic axis needs positive values, got {min(values)}")
    first = math.floor(math.log2(min(values)) + 1e-9)
    last = max(math.ceil(math.log2(max(values)) - 1e-9), first + 1)
    every = max((last - first) // 10, 1)
    ticks = tuple(2.0**power for power in range(first, last + 1, every))
    return Axis(2.0**first, 2.0**last, start, stop, ticks, log=True)


def _merge(segments: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    merged: list[tuple[float, float, str]] = []
    for start, end, kind in segments:
        if merged and merged[-1][2] == kind and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end, kind)
        else:
            merged.append((start, end, kind))
    return merged


def _checked(line: Line) -> Sequence[tuple[float, float]]:
    _require_finite(line.name, [value for point in line.points for value in point])
    return line.points


def _require_finite(name: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"series {name!r} has a value that is not finite: {value} at {index}")


def _safe(text: str) -> str:
    """Escaped for text and attributes; characters that XML forbids become spaces."""
    return escape("".join(c if c.isprintable() else " " for c in text), quote=True)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= max(length, 4) else text[: max(length, 4) - 1] + "…"
