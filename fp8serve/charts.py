"""Charts as inline SVG for reports, as SVG files for documentation, and as text for a terminal.

Drawn without a plotting library: a page with an inline library takes 4 MB and needs scripts; these take a few
kilobytes, scale to a phone and print.

    dots, sparkline, bars, curve, heat   inline; their colours come from the page's style sheet (classes s0 to s6, h,
                                         hot), tooltips are `<title>`
    svg_file                             a file with a white background and colours of its own
    text_chart                           the first curve in dots of braille, further ones as letters on top of it

Every text is escaped. A chart without values is empty text.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

Points = Sequence[tuple[float, float]]
Heat = Sequence[Sequence[float | None]]

WIDTH, HEIGHT = 460, 270  # of a chart over the layers of a model
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # room for the tick labels
SMALL_WIDTH, SMALL_HEIGHT = 240, 104  # of charts side by side
SMALL_SIDE, SMALL_TOP, SMALL_BOTTOM = 4, 14, 16
BAR_BOTTOM = 18
HEAT_TOP = 6
LOWEST = -2.0  # of a heat map: everything below has its colour
STEPS = 8
TOLERANCE = 0.01  # powers of two: the scale is rounded to FP32, and the amax too
FILE_WIDTH, PANEL, GAP = 720, 250, 26
FILE_LEFT, FILE_RIGHT, FILE_TOP, FILE_BOTTOM = 64, 130, 34, 40
COLOURS = ("#1f2328", "#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#6e7781")  # readable on white
ACROSS, UP = 2, 4  # dots of one character
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by line and column
BLANK = 0x2800
MARKS = "ox+*"


# -- axes --------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Axis:
    """Data to pixels: the values `low` to `high` lie at the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]
    log: bool = False

    @classmethod
    def upwards(cls, values: Iterable[float], log: bool, top: float, bottom: float) -> "_Axis":
        """From the first round number to the last."""
        finite = [value for value in values if math.isfinite(value)]
        ticks = (decade_ticks if log else linear_ticks)(min(finite), max(finite))
        return cls(ticks[-1], ticks[0], top, bottom, ticks, log)

    @classmethod
    def across(cls, values: Sequence[float]) -> "_Axis":
        """From the first value to the last, with the round numbers between them; of a file."""
        low, high = min(values), max(max(values), min(values) + 1e-9)
        ticks = [tick for tick in linear_ticks(low, high) if low <= tick <= high]
        return cls(low, high, FILE_LEFT, FILE_WIDTH - FILE_RIGHT, ticks)

    def pixel(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


# -- inline ------------------------------------------------------------------------------------------------------------


def _svg(width: int, height: float, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class Dot:
    """A value at an integer place on the x axis, with the text of its tooltip."""

    x: int
    y: float
    title: str


def dots(series: Mapping[str, Sequence[Dot]], x_label: str, *, log: bool = False) -> str:
    """A dot chart with a legend; `log` for a logarithmic y axis (all y > 0)."""
    points = [dot for row in series.values() for dot in row]
    if not points:
        return ""
    axis = _Axis.upwards([dot.y for dot in points], log, TOP, HEIGHT - BOTTOM)
    x_max = max(1, max(dot.x for dot in points))
    parts = []
    for value in axis.ticks:
        y = axis.pixel(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{value:.6g}</text>')
    for x in range(0, x_max + 1, max(1, math.ceil(x_max / 8))):
        parts.append(f'<text class="mid" x="{_x_pixel(x, x_max):.1f}" y="{HEIGHT - 18}">{x}</text>')
    parts.append(f'<text class="mid" x="{(LEFT + WIDTH) // 2}" y="{HEIGHT - 3}">{escape(x_label)}</text>')
    for index, row in enumerate(series.values()):
        # projections of one layer stand side by side, so that equal values do not hide each other
        aside = (index - 3) * min(2.5, 180 / (x_max + 1) / 7)
        for dot in row:
            place = f'cx="{_x_pixel(dot.x, x_max) + aside:.1f}" cy="{axis.pixel(dot.y):.1f}"'
            parts.append(f'<circle class="s{index % 7}" {place} r="3.2"><title>{escape(dot.title)}</title></circle>')
    keys = (f'<span><i class="s{i}"></i>{escape(name)}</span>' for i, name in enumerate(series))
    return f'{_svg(WIDTH, HEIGHT, parts)}<p class="legend">{"".join(keys)}</p>'


def _x_pixel(x: float, x_max: int) -> float:
    return LEFT + 8 + x / x_max * (WIDTH - LEFT - RIGHT - 16)


def sparkline(values: Sequence[float], width: int = 96, height: int = 22) -> str:
    """A line from the oldest value to the newest, from zero at the bottom to the largest at the top."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = (width - 4) / (len(values) - 1)
    path = " ".join(f"{2 + i * step:.1f},{height - 2 - v / top * (height - 4):.1f}" for i, v in enumerate(values))
    return f'<svg class="spark" viewBox="0 0 {width} {height}"><polyline points="{path}"/></svg>'


def bars(values: Sequence[float], titles: Sequence[str], labels: Mapping[int, str], hot: int) -> str:
    """A bar for each value, the first `hot` ones in another colour; labels: below, by the number of the bar."""
    wide, largest, room = SMALL_WIDTH / len(values), max(values) or 1.0, SMALL_HEIGHT - BAR_BOTTOM
    parts = []
    for index, (value, title) in enumerate(zip(values, titles, strict=True)):
        tall, look = value / largest * (room - 2), "hot" if index < hot else "h"
        place = f'x="{index * wide + 1:.1f}" y="{room - tall:.1f}" width="{wide - 2:.1f}" height="{max(tall, 0.5):.1f}"'
        parts.append(f'<rect class="{look}" {place}><title>{escape(title)}</title></rect>')
    for index, label in labels.items():
        parts.append(f'<text class="mid" x="{(index + 0.5) * wide:.1f}" y="{SMALL_HEIGHT - 4}">{label}</text>')
    return _svg(SMALL_WIDTH, SMALL_HEIGHT, parts)


def curve(values: Sequence[float], label: str, limit: float | None = None) -> str:
    """A line from left to right, from zero at the bottom, with a dashed line at `limit`."""
    if len(values) < 2:
        return ""
    top = max(*values, limit or 0.0) or 1.0
    step = (SMALL_WIDTH - 2 * SMALL_SIDE) / (len(values) - 1)
    points = " ".join(f"{SMALL_SIDE + i * step:.1f},{_curve_y(v / top):.1f}" for i, v in enumerate(values))
    parts = [_curve_line(0.0, "grid"), f'<polyline class="line" points="{points}"/>']
    if limit is not None:
        place = SMALL_WIDTH - SMALL_SIDE, _curve_y(limit / top) - 3
        parts += [_curve_line(limit / top, "zero"), _curve_text("end", *place, f"limit {limit:.4g}")]
    parts.append(_curve_text("", SMALL_SIDE, SMALL_TOP - 4, f"most {max(values):.4g}"))
    parts.append(_curve_text("mid", SMALL_WIDTH / 2, SMALL_HEIGHT - 3, label))
    return _svg(SMALL_WIDTH, SMALL_HEIGHT, parts)


def _curve_y(part: float) -> float:
    return SMALL_TOP + (1 - part) * (SMALL_HEIGHT - SMALL_TOP - SMALL_BOTTOM)


def _curve_line(part: float, look: str) -> str:
    y = f"{_curve_y(part):.1f}"
    return f'<line class="{look}" x1="{SMALL_SIDE}" x2="{SMALL_WIDTH - SMALL_SIDE}" y1="{y}" y2="{y}"/>'


def _curve_text(anchor: str, x: float, y: float, text: str) -> str:
    return f'<text class="{anchor}" x="{x:.0f}" y="{y:.1f}">{escape(text)}</text>'


def heat(rows: Heat, titles: Sequence[str], label: str) -> str:
    """A heat map: a row for each layer, a column for each batch; colour shows how near a value came to the top of its
    range.

    Values are logarithms: 0 is the top, -1 half of it, above 0 is beyond; None: no value. Rows may differ in length and
    are drawn from the right. Cells of one colour are one path, and neighbours in a row one rectangle, so that a map of
    two thousand cells takes some kilobytes.
    """
    columns = max(map(len, rows), default=0)
    if columns < 2:
        return ""
    wide, high = (WIDTH - LEFT) / columns, max(4.0, min(14.0, 240 / len(rows)))
    shapes: dict[int, list[str]] = {}
    for index, row in enumerate(rows):
        top, bottom = (round(HEAT_TOP + r * high, 1) for r in (index, index + 1))
        for step, first, count in _runs(row):
            column = columns - len(row) + first
            left, right = (round(LEFT + c * wide, 1) for c in (column, column + count))  # neighbours share their edges
            shapes.setdefault(step, []).append(f"M{left} {top}H{right}V{bottom}H{left}z")
    parts = [f'<path {_look(step)} d="{"".join(paths)}"/>' for step, paths in sorted(shapes.items())]
    for index in range(0, len(rows), max(1, math.ceil(12 / high), math.ceil(len(rows) / 10))):
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{HEAT_TOP + (index + 0.5) * high + 4:.1f}">{index}</text>')
    for index, title in enumerate(titles):
        place = f'x="{LEFT}" y="{HEAT_TOP + index * high:.1f}" width="{WIDTH - LEFT}" height="{high:.1f}"'
        parts.append(f'<rect {place} fill="transparent"><title>{escape(title)}</title></rect>')
    end = HEAT_TOP + high * len(rows) + 16
    parts.append(f'<text class="mid" x="{(LEFT + WIDTH) // 2}" y="{end:.0f}">{escape(label)}</text>')
    return _svg(WIDTH, end + 6, parts)


def heat_legend() -> str:
    lower = {step: f"{2 ** (LOWEST * (STEPS - step) / STEPS):.0%}" for step in range(0, STEPS + 1, 2)}
    keys = [
        f'<span><i class="cell h" style="opacity:{_opacity(step):.2f}"></i>{part}{" and less" * (step == 0)}</span>'
        for step, part in lower.items()
    ]
    beyond = '<span><i class="cell hot"></i>beyond, cut off</span>'
    return f'<p class="legend"><span>Part of the range:</span>{"".join(keys)}{beyond}</p>'


def _runs(row: Iterable[float | None]) -> Iterator[tuple[int, int, int]]:
    """(step, first column, how many) of neighbours of one colour."""
    start = 0
    for step, cells in groupby(None if value is None else _step(value) for value in row):
        count = len(list(cells))
        if step is not None:
            yield step, start, count
        start += count


def _step(value: float) -> int:
    """0 at the bottom to STEPS at the top of the range; one more: beyond."""
    if value > TOLERANCE:
        return STEPS + 1
    return max(0, min(STEPS, math.floor(STEPS * (1 - value / LOWEST) + 0.5)))


def _look(step: int) -> str:
    return 'class="hot"' if step > STEPS else f'class="h" fill-opacity="{_opacity(step):.2f}"'


def _opacity(step: int) -> float:
    return 0.06 + 0.94 * math.pow(step / STEPS, 1.5)


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One frame: named curves of (x, y) points; `log` for a logarithmic y axis (then y > 0)."""

    y_label: str
    curves: Mapping[str, Points]
    log: bool = False


def svg_file(title: str, panels: Sequence[Panel], x_label: str) -> str:
    """The text of an SVG file: panels above each other over a common x axis. Values that are not finite are gaps.
    Curves of the same name have the same colour in every panel."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    height = FILE_TOP + len(panels) * (PANEL + GAP) - GAP + FILE_BOTTOM
    across = _Axis.across([x for panel in panels for points in panel.curves.values() for x, _ in points])
    parts = [_file_text(FILE_LEFT, FILE_TOP - 14, title, "start", 14)]
    for index, panel in enumerate(panels):
        parts += _panel(panel, FILE_TOP + index * (PANEL + GAP), across, names)
    parts += [_file_text(across.pixel(x), height - FILE_BOTTOM + 16, f"{x:.6g}", "middle") for x in across.ticks]
    parts.append(_file_text((FILE_LEFT + FILE_WIDTH - FILE_RIGHT) / 2, height - 8, x_label, "middle"))
    for index, name in enumerate(names):
        y, left = FILE_TOP + 12 + 20 * index, FILE_WIDTH - FILE_RIGHT + 12
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="3"'
        parts.append(f'<line x1="{left}" x2="{left + 20}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
        parts.append(_file_text(left + 26, y, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {FILE_WIDTH} {height}" width="{FILE_WIDTH}" '
        f'height="{height}" font-family="sans-serif" role="img">'
        f'<rect width="{FILE_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, top: float, across: _Axis, names: list[str]) -> Iterator[str]:
    up = _Axis.upwards((y for points in panel.curves.values() for _, y in points), panel.log, top, top + PANEL)
    for tick in up.ticks:
        y = up.pixel(tick)
        right = FILE_WIDTH - FILE_RIGHT
        yield f'<line x1="{FILE_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield _file_text(FILE_LEFT - 6, y + 4, f"{tick:.6g}", "end")
    middle = top + PANEL / 2
    yield _file_text(14, middle, panel.y_label, "middle", turn=f' transform="rotate(-90 14 {middle:.1f})"')
    for name, points in panel.curves.items():
        for is_finite, piece in groupby(points, lambda point: math.isfinite(point[1])):
            if is_finite:
                path = " ".join(f"{across.pixel(x):.1f},{up.pixel(y):.1f}" for x, y in piece)
                colour = COLOURS[names.index(name) % len(COLOURS)]
                yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6">'
                yield f"<title>{escape(name)}</title></polyline>"


def _file_text(x: float, y: float, words: str, anchor: str, size: int = 12, turn: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#1f2328"{turn}>'
        f"{escape(words)}</text>"
    )


# -- text --------------------------------------------------------------------------------------------------------------


def text_chart(curves: Mapping[str, Points], width: int = 72, height: int = 12) -> str:
    """`width` x `height` characters of curves, with their range at the left and below, and a line that names them.

    Values must be finite, and each curve must have a point.
    """
    every = [point for points in curves.values() for point in points]
    left, right, low, high = (of(point[i] for point in every) for i in (0, 1) for of in (min, max))
    columns, lines = width * ACROSS, height * UP

    def place(x: float, y: float) -> tuple[int, int]:
        """The dot of a point, counted from the upper left."""
        return _nearest(x, left, right, columns), _nearest(y, high, low, lines)

    first, *others = curves.values()
    ends = [place(x, y) for x, y in first]
    bits = [[0] * width for _ in range(height)]
    for column, line in [dot for a, b in pairwise(ends) for dot in _between(a, b)] + ends[-1:]:
        bits[line // UP][column // ACROSS] |= BRAILLE[line % UP][column % ACROSS]
    cells = [[chr(BLANK + dots) if dots else " " for dots in row] for row in bits]
    for mark, points in zip(MARKS, others, strict=False):
        for x, y in points:
            column, line = place(x, y)
            cells[line // UP][column // ACROSS] = mark
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    size = max(map(len, labels))
    start, end = f"step {left:g}", f"step {right:g}"
    marks = zip([chr(BLANK + 0x12), *MARKS], curves, strict=False)
    return "\n".join(
        [
            *(f"{label:>{size}} │{''.join(row).rstrip()}" for label, row in zip(labels, cells, strict=True)),
            f"  {start}{end:>{max(len(end) + 1, width - len(start))}}",
            "  " + "   ".join(f"{mark} {name}" for mark, name in marks),
        ]
    )


def _nearest(value: float, start: float, end: float, count: int) -> int:
    """Which of `count` places; the middle, where all values are the same."""
    return round((value - start) / (end - start) * (count - 1)) if start != end else count // 2


def _between(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from a to b, without b."""
    count = max(abs(b[0] - a[0]), abs(b[1] - a[1]))
    return [tuple(round(s + (e - s) * i / count) for s, e in zip(a, b, strict=True)) for i in range(count)]  # type: ignore[misc]
