"""Two drawings as inline SVG text: one dot per layer and projection, and a line of a few dozen values.

Drawn without a plotting library: a page with an inline library takes 4 MB and needs scripts; these take a few
kilobytes, scale to a phone and print. Colours come from the page's style sheet (classes s0 to s6), tooltips are
`<title>`. Every text is escaped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # room for the tick labels


@dataclass(frozen=True)
class Dot:
    """A value at an integer place on the x axis, with the text of its tooltip."""

    x: int
    y: float
    title: str


def dots(series: Mapping[str, Sequence[Dot]], x_label: str, *, log: bool = False) -> str:
    """A dot chart with a legend; `log` for a logarithmic y axis (all y > 0). Nothing to draw gives empty text."""
    points = [dot for row in series.values() for dot in row]
    if not points:
        return ""
    axis = _Axis.around([dot.y for dot in points], log)
    x_max = max(1, max(dot.x for dot in points))
    body = [_grid(axis), _x_ticks(x_max, x_label)]
    for index, row in enumerate(series.values()):
        body += [_circle(dot, index, x_max, axis) for dot in row]
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(body)}</svg>'
    return svg + legend(list(series))


def legend(names: Sequence[str]) -> str:
    keys = (f'<span><i class="s{i}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(keys)}</p>'


def sparkline(values: Sequence[float], width: int = 96, height: int = 22) -> str:
    """A line from the oldest value to the newest, from zero at the bottom to the largest at the top."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = (width - 4) / (len(values) - 1)
    path = " ".join(f"{2 + i * step:.1f},{height - 2 - v / top * (height - 4):.1f}" for i, v in enumerate(values))
    return f'<svg class="spark" viewBox="0 0 {width} {height}"><polyline points="{path}"/></svg>'


@dataclass(frozen=True)
class _Axis:
    """A vertical axis that runs from its first round tick to its last."""

    ticks: list[float]
    log: bool

    @classmethod
    def around(cls, values: Sequence[float], log: bool) -> "_Axis":
        low, high = min(values), max(values)
        return cls(decade_ticks(low, high) if log else linear_ticks(low, high), log)

    def pixel(self, value: float) -> float:
        bottom, top, place = (math.log10(v) if self.log else v for v in (self.ticks[0], self.ticks[-1], value))
        return TOP + (top - place) / (top - bottom) * (HEIGHT - TOP - BOTTOM)


def linear_ticks(low: float, high: float) -> list[float]:
    """Three to seven multiples of 1, 2 or 5 times a power of ten that enclose low..high."""
    raw = max(high - low, abs(high) / 100, 1e-30) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [n * step for n in range(first, max(last, first + 2) + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that enclose low..high, thinned; within two decades with 2 and 5 times them as well."""
    whole = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    fine = [m * 10.0**d for d in whole for m in (1, 2, 5)]
    marks = fine if high / low < 100 else [10.0**d for d in whole]
    first = max(i for i, m in enumerate(marks) if m <= low)
    last = min(i for i, m in enumerate(marks) if m >= high)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 7)
    return marks[first : last + every : every]


def _x_pixel(x: float, x_max: int) -> float:
    return LEFT + 8 + x / x_max * (WIDTH - LEFT - RIGHT - 16)


def _grid(axis: _Axis) -> str:
    parts = []
    for value in axis.ticks:
        y = axis.pixel(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{value:.6g}</text>')
    return "".join(parts)


def _x_ticks(x_max: int, label: str) -> str:
    step = max(1, math.ceil(x_max / 8))
    places = range(0, x_max + 1, step)
    marks = (f'<text class="mid" x="{_x_pixel(x, x_max):.1f}" y="{HEIGHT - 18}">{x}</text>' for x in places)
    return "".join(marks) + f'<text class="mid" x="{(LEFT + WIDTH) // 2}" y="{HEIGHT - 3}">{escape(label)}</text>'


def _circle(dot: Dot, index: int, x_max: int, axis: _Axis) -> str:
    # projections of one layer stand side by side, so that equal values do not hide each other
    x = _x_pixel(dot.x, x_max) + (index - 3) * min(2.5, 180 / (x_max + 1) / 7)
    return (
        f'<circle class="s{index % 7}" cx="{x:.1f}" cy="{axis.pixel(dot.y):.1f}" r="3.2">'
        f"<title>{escape(dot.title)}</title></circle>"
    )
