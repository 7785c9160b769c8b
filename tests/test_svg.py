"""Charts are well-formed, place values where the axis says, and escape what they are given."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from deepinfer_ray.svg import (
    COLOURS,
    QUIET,
    Lane,
    Line,
    bar_chart,
    format_number,
    line_chart,
    nice_ticks,
    timeline_chart,
)

NS = "{http://www.w3.org/2000/svg}"


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == NS + "svg"
    return root


def texts(root: ET.Element) -> list[str]:
    return ["".join(t for t in [*e.itertext()]) for e in root.iter(NS + "text")]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, (0, 2, 4, 6, 8, 10)),
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (3, 97, (0, 20, 40, 60, 80, 100)),
        (-5, 5, (-6, -4, -2, 0, 2, 4, 6)),
        (0.78, 0.99, (0.75, 0.8, 0.85, 0.9, 0.95, 1.0)),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert nice_ticks(low, high) == ticks


def test_axis_without_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="an axis from 3 to 3 has no length"):
        nice_ticks(3, 3)


@pytest.mark.parametrize(
    ("value", "label"),
    [(0.0, "0"), (0.25, "0.25"), (1500, "1500"), (12000, "12k"), (3_400_000, "3.4M"), (-2e9, "-2G")],
)
def test_labels_are_short(value: float, label: str) -> None:
    assert format_number(value) == label


def test_line_chart_puts_points_where_the_axis_says() -> None:
    root = parse(line_chart("t", [Line("a", [(0, 0), (5, 5), (10, 10)])], x_label="x", y_label="y"))
    dots = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter(NS + "circle")]
    assert dots[1] == pytest.approx(((dots[0][0] + dots[2][0]) / 2, (dots[0][1] + dots[2][1]) / 2))
    assert dots[0][1] > dots[2][1]  # y grows upwards
    labels = {
        t.text: float(t.get("y", 0)) - 4 for t in root.iter(NS + "text") if t.get("text-anchor") == "end"
    }
    assert labels["10"] == pytest.approx(dots[2][1])
    assert labels["0"] == pytest.approx(dots[0][1])


def test_logarithmic_axis_spaces_powers_of_two_evenly() -> None:
    line = Line("a", [(1, 1), (4, 1), (16, 1)])
    root = parse(line_chart("t", [line], x_label="x", y_label="y", log_x=True))
    xs = [float(c.get("cx", 0)) for c in root.iter(NS + "circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    with pytest.raises(ValueError, match="logarithmic axis needs positive values, got 0"):
        line_chart("t", [Line("a", [(0, 1)])], x_label="x", y_label="y", log_x=True)


def test_bars_have_the_height_of_their_values() -> None:
    root = parse(bar_chart("t", ["g", "h"], {"a": [1, 2], "b": [4, -2]}, x_label="x", y_label="y"))
    bars = [r for r in root.iter(NS + "rect") if r.find(NS + "title") is not None]
    heights = [float(bar.get("height", 0)) for bar in bars]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.3)
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.3)
    assert heights[3] == pytest.approx(2 * heights[0], abs=0.3)
    bottom = float(bars[0].get("y", 0)) + heights[0]
    assert float(bars[3].get("y", 0)) == pytest.approx(bottom, abs=0.2)  # a negative bar hangs from zero
    assert {bar.get("fill") for bar in bars} == set(COLOURS[:2])


def test_timeline_merges_neighbours_and_greys_idle_time() -> None:
    lane = Lane("rank 0", [(0, 1, "decode"), (1, 2, "decode"), (2, 3, "idle"), (4, 5, "decode")])
    root = parse(timeline_chart("t", [lane], x_label="s"))
    bars = [r for r in root.iter(NS + "rect") if r.find(NS + "title") is not None]
    assert [bar.get("fill") for bar in bars] == [COLOURS[0], QUIET, COLOURS[0]]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.05)
    assert "rank 0: decode, 0 to 2" in [e.text for e in root.iter(NS + "title")]


def test_all_text_is_escaped_and_forbidden_characters_are_dropped() -> None:
    evil = "</text><script>alert('1')</script>&\x00\x1b\""
    for svg in (
        line_chart(evil, [Line(evil, [(0, 1), (1, 2)])], x_label=evil, y_label=evil),
        bar_chart(evil, [evil], {evil: [1]}, x_label=evil, y_label=evil),
        timeline_chart(evil, [Lane(evil, [(0, 1, evil)])], x_label=evil),
    ):
        root = parse(svg)
        assert root.find(f".//{NS}script") is None
        assert any("<script>" in text for text in texts(root))
        assert "\x00" not in svg
        assert "\x1b" not in svg


def test_a_long_name_is_cut_but_kept_as_a_tip() -> None:
    name = "workload " * 20
    root = parse(line_chart("t", [Line(name, [(0, 1), (1, 1)])], x_label="x", y_label="y"))
    assert name in [e.text for e in root.iter(NS + "title")]
    assert any(t.endswith("…") for t in texts(root))


def test_a_wide_legend_wraps_and_makes_the_chart_taller() -> None:
    def height(count: int) -> int:
        lines = [Line(f"a name of some length {i}", [(0, i), (1, i)]) for i in range(count)]
        return int(parse(line_chart("t", lines, x_label="x", y_label="y")).get("height", 0))

    assert height(12) > height(2)


def test_colours_read_on_light_and_dark_ground() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in (*COLOURS, QUIET):
        own = luminance(colour)
        assert 1.05 / (own + 0.05) >= 2.6, colour
        assert (own + 0.05) / (luminance("#14161a") + 0.05) >= 3, colour
    assert not re.search(r"background", line_chart("t", [Line("a", [(0, 1)])], x_label="", y_label=""))


def test_values_that_cannot_be_drawn_name_their_series() -> None:
    with pytest.raises(ValueError, match=r"series 'a' has a value that is not finite: nan at 3"):
        line_chart("t", [Line("a", [(0, 1), (1, math.nan)])], x_label="x", y_label="y")
    with pytest.raises(ValueError, match="series 'b' has 1 values for 2 groups"):
        bar_chart("t", ["g", "h"], {"b": [1]}, x_label="x", y_label="y")
    with pytest.raises(ValueError, match="lane 'c' has a segment that ends before it starts"):
        timeline_chart("t", [Lane("c", [(2, 1, "x")])], x_label="x")
    with pytest.raises(ValueError, match="the chart 'none' has no point"):
        line_chart("none", [], x_label="x", y_label="y")
    with pytest.raises(ValueError, match="the timeline 'none' has no segment"):
        timeline_chart("none", [Lane("c", [])], x_label="x")
