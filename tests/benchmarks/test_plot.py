"""The chart: well-formed, every point at its place, and what is compared with 1.0 shows it."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks import plot
from benchmarks.compare import Interval

SVG = "{http://www.w3.org/2000/svg}"
LINES = {"4": [Interval(1.3, 1.2, 1.4), Interval(0.9, 0.85, 1.0)], "goodput": [Interval(1.5, 1.4, 1.6)] * 2}


def draw(lines: dict[str, list[Interval]], title: str = "pair") -> ElementTree.Element:
    labels = [str(i) for i in range(len(next(iter(lines.values()))))]
    return ElementTree.fromstring(plot.chart(lines, labels, title=title, x_title="at once", y_title="speedup"))


def test_each_line_has_its_points_and_bars_in_its_own_colour() -> None:
    groups = draw(LINES).findall(f"{SVG}g")
    assert len(groups) == 2
    assert len({group.get("stroke") for group in groups}) == 2
    for group in groups:
        assert len(group.findall(f"{SVG}circle")) == len(group.findall(f"{SVG}line")) == 2


def test_points_stand_where_the_scale_says_and_within_their_bars() -> None:
    """Ticks give the scale: the pixel of each value follows from the labels of the axis alone."""
    root = draw(LINES)
    ticks = {
        float(t.text or ""): float(t.get("y", "")) - 4
        for t in root.findall(f"{SVG}text")
        if t.get("text-anchor") == "end"
    }
    (low, at_low), (high, at_high) = min(ticks.items()), max(ticks.items())
    assert low <= 0.85
    assert high >= 1.6
    for group, line in zip(root.findall(f"{SVG}g"), LINES.values(), strict=True):
        for circle, bar, point in zip(group.findall(f"{SVG}circle"), group.findall(f"{SVG}line"), line, strict=True):
            pixels = [float(circle.get("cy", "")), float(bar.get("y1", "")), float(bar.get("y2", ""))]
            expected = [at_low + (v - low) / (high - low) * (at_high - at_low) for v in point]
            assert pixels == pytest.approx(expected, abs=0.11)
            assert circle.get("cx") == bar.get("x1") == bar.get("x2")


@pytest.mark.parametrize("value", [0.98, 1.0, 3.0, 30.0])
def test_one_is_always_on_the_chart(value: float) -> None:
    root = draw({"off again": [Interval(value, value, value)]})
    one = next(line for line in root.findall(f"{SVG}line") if line.get("id") == "one")
    assert plot.TOP <= float(one.get("y1", "")) <= plot.HEIGHT - plot.BOTTOM
    ticks = [t for t in root.findall(f"{SVG}text") if t.get("text-anchor") == "end"]
    assert 2 <= len(ticks) <= plot.MAX_TICKS + 1


def test_names_are_text() -> None:
    assert "<b>" in "".join(draw(LINES, title="a <b> & c").itertext())


def test_the_bars_of_one_label_do_not_cover_each_other() -> None:
    xs = re.findall(r'<circle cx="([\d.]+)"', plot.chart(LINES, ["1", "8"], title="", x_title="", y_title=""))
    assert len(set(xs)) == 4


def test_a_line_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4 has 2 points for 1 labels"):
        plot.chart(LINES, ["1"], title="", x_title="", y_title="")
