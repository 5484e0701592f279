"""A line chart with interval bars as plain SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from math import ceil, floor

from benchmarks.compare import Interval

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 44, 56  # margins; the legend is in the right one
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito
TICK_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # between ticks
MAX_TICKS = 8
BAR_DISTANCE = 7  # pixels between the bars of neighbouring lines


class Scale:
    """Values to pixels, from a tick below the lowest to one above the highest; 1.0 is always shown."""

    def __init__(self, lines: Mapping[str, Sequence[Interval]]) -> None:
        low = min(1.0, *(point.low for line in lines.values() for point in line))
        high = max(1.0, *(point.high for line in lines.values() for point in line))
        self.step = next((s for s in TICK_STEPS if (high - low) / s <= MAX_TICKS - 2), TICK_STEPS[-1])
        self._first, self._last = floor(low / self.step), ceil(high / self.step)
        if self._first == self._last:
            self._last += 1

    @property
    def ticks(self) -> list[float]:
        return [i * self.step for i in range(self._first, self._last + 1)]

    def y(self, value: float) -> float:
        share = (value / self.step - self._first) / (self._last - self._first)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def chart(
    lines: Mapping[str, Sequence[Interval]], labels: Sequence[str], *, title: str, x_title: str, y_title: str
) -> str:
    """One line per name, with one point per label. Raises ValueError if a line has another number of points."""
    for name, line in lines.items():
        if len(line) != len(labels):
            raise ValueError(f"{name} has {len(line)} points for {len(labels)} labels")
    scale = Scale(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 26, title, size=15),
        *_axes(scale, labels, x_title, y_title),
    ]
    for place, ((name, line), colour) in enumerate(zip(lines.items(), cycle(COLOURS), strict=False)):
        shift = (place - (len(lines) - 1) / 2) * BAR_DISTANCE
        points = [(_x(i, len(labels)) + shift, point) for i, point in enumerate(line)]
        parts += [_line(points, scale, colour), *_legend(place, name, colour)]
    return "\n".join([*parts, "</svg>", ""])


def _x(place: int, count: int) -> float:
    width = WIDTH - LEFT - RIGHT
    return LEFT + width * (place + 0.5) / count


def _axes(scale: Scale, labels: Sequence[str], x_title: str, y_title: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in scale.ticks:
        parts.append(_level(scale.y(tick), 'stroke="#dddddd"'))
        parts.append(_text(LEFT - 8, scale.y(tick) + 4, f"{tick:.2f}", anchor="end"))
    parts.append(_level(scale.y(1.0), 'id="one" stroke="#333333" stroke-width="1.5"'))
    parts += [_text(_x(i, len(labels)), bottom + 20, label, anchor="middle") for i, label in enumerate(labels)]
    parts.append(_text((LEFT + right) / 2, HEIGHT - 14, x_title, anchor="middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_title)}</text>'
    )
    return parts


def _level(y: float, style: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {style}/>'


def _line(points: Sequence[tuple[float, Interval]], scale: Scale, colour: str) -> str:
    path = " ".join(f"{x:.1f},{scale.y(point.value):.1f}" for x, point in points)
    parts = [f'<g stroke="{colour}" fill="{colour}"><polyline points="{path}" fill="none" stroke-width="2"/>']
    for x, point in points:
        parts.append(f'<circle cx="{x:.1f}" cy="{scale.y(point.value):.1f}" r="3.5"/>')
        ends = f'y1="{scale.y(point.low):.1f}" y2="{scale.y(point.high):.1f}"'
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke-width="1.5"/>')
    return "\n".join([*parts, "</g>"])


def _legend(place: int, name: str, colour: str) -> list[str]:
    x, y = WIDTH - RIGHT + 14, TOP + 12 + 22 * place
    return [
        f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>',
        _text(x + 28, y, name),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
