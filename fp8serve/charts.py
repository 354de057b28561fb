"""Charts as inline SVG for reports, as SVG files for the documentation, and as text for terminals.

No plotting library is used, because a page with such a library takes 4 MB and needs scripts. These charts take a few
kilobytes.

    dots, sparkline, bars, curve, heat   inline SVG; the style sheet of the page defines the colours (classes s0 to s6,
                                         h, hot), and tooltips are `<title>`
    svg_file                             an SVG file with a white background and its own colours
    text_chart, text_sparkline           text: the first curve in braille dots, further curves as letters over it; bars

All labels are escaped. A chart without values is an empty string.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

Points = Sequence[tuple[float, float]]
HeatRows = Sequence[Sequence[float | None]]

# Sizes are in pixels.
WIDTH, HEIGHT = 460, 270  # a chart over the layers of a model
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # its margins, for tick labels
SMALL_WIDTH, SMALL_HEIGHT = 240, 104  # charts side by side
SMALL_SIDE, SMALL_TOP, SMALL_BOTTOM = 4, 14, 16  # their margins
BAR_BOTTOM = 18
HEAT_TOP = 6
HEAT_MIN_LOG2 = -2.0  # heat maps show smaller values in the same colour
HEAT_STEPS = 8  # the number of shades
HEAT_TOLERANCE_LOG2 = 0.01  # scale and amax are rounded to FP32, so a value may exceed the range slightly
FILE_WIDTH, PANEL_HEIGHT, PANEL_GAP = 720, 250, 26
FILE_LEFT, FILE_RIGHT, FILE_TOP, FILE_BOTTOM = 64, 130, 34, 40  # margins of a file
COLOURS = ("#1f2328", "#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#6e7781")  # readable on white
DOT_COLUMNS, DOT_ROWS = 2, 4  # braille dots of one character
BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits by row and column
BRAILLE_BLANK = 0x2800
CURVE_LETTERS = "ox+*"
TEXT_BARS = "▁▂▃▄▅▆▇█"
MAX_TEXT_BARS = 32


# -- axes --------------------------------------------------------------------------------------------------------------


def linear_ticks(low: float, high: float) -> list[float]:
    """Returns three to seven ticks that enclose `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    raw = max(high - low, abs(high) / 100, 1e-30) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [n * step for n in range(first, max(last, first + 2) + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Returns ticks of a logarithmic axis that enclose `low` to `high`: powers of ten, at most eight of them. Within
    two decades, 2 and 5 times the powers are ticks, too."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if high / low < 100 else (1,)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 7)
    return ticks[first : last + every : every]


@dataclass(frozen=True)
class _Axis:
    """An axis that maps the values `low` to `high` to the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]
    log: bool = False

    @classmethod
    def vertical(cls, values: Iterable[float], log: bool, top: float, bottom: float) -> "_Axis":
        """Returns an axis from the lowest to the highest tick, at the pixels `bottom` to `top`."""
        finite = [value for value in values if math.isfinite(value)]
        ticks = (decade_ticks if log else linear_ticks)(min(finite), max(finite))
        return cls(ticks[-1], ticks[0], top, bottom, ticks, log)

    @classmethod
    def horizontal(cls, values: Sequence[float]) -> "_Axis":
        """Returns the x axis of a file, from the smallest value to the largest, with the ticks between them."""
        low, high = min(values), max(max(values), min(values) + 1e-9)
        ticks = [tick for tick in linear_ticks(low, high) if low <= tick <= high]
        return cls(low, high, FILE_LEFT, FILE_WIDTH - FILE_RIGHT, ticks)

    def pixel(self, value: float) -> float:
        low, high, x = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (x - low) / (high - low) * (self.end - self.start)


# -- inline ------------------------------------------------------------------------------------------------------------


def _svg(width: int, height: float, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class Dot:
    """A value at an integer position on the x axis. `title` is its tooltip."""

    x: int
    y: float
    title: str


def dots(series: Mapping[str, Sequence[Dot]], x_label: str, *, log: bool = False) -> str:
    """Returns a dot chart with a legend. With `log`, the y axis is logarithmic and all values must be positive."""
    points = [dot for row in series.values() for dot in row]
    if not points:
        return ""
    axis = _Axis.vertical([dot.y for dot in points], log, TOP, HEIGHT - BOTTOM)
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
        # the projections of a layer are drawn side by side, so that equal values do not hide each other
        shift = (index - 3) * min(2.5, 180 / (x_max + 1) / 7)
        for dot in row:
            center = f'cx="{_x_pixel(dot.x, x_max) + shift:.1f}" cy="{axis.pixel(dot.y):.1f}"'
            parts.append(f'<circle class="s{index % 7}" {center} r="3.2"><title>{escape(dot.title)}</title></circle>')
    legend = (f'<span><i class="s{i}"></i>{escape(name)}</span>' for i, name in enumerate(series))
    return f'{_svg(WIDTH, HEIGHT, parts)}<p class="legend">{"".join(legend)}</p>'


def _x_pixel(x: float, x_max: int) -> float:
    return LEFT + 8 + x / x_max * (WIDTH - LEFT - RIGHT - 16)


def sparkline(values: Sequence[float]) -> str:
    """Returns a small line chart of the values, oldest first. Its y axis goes from zero to the largest value."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = 92 / (len(values) - 1)
    path = " ".join(f"{2 + i * step:.1f},{20 - v / top * 18:.1f}" for i, v in enumerate(values))
    return f'<svg class="spark" viewBox="0 0 96 22"><polyline points="{path}"/></svg>'


def bars(values: Sequence[float], titles: Sequence[str], labels: Mapping[int, str], hot: int) -> str:
    """Returns a bar chart. The first `hot` bars have another colour. `labels` maps the index of a bar to its label on
    the x axis."""
    width, largest, max_height = SMALL_WIDTH / len(values), max(values) or 1.0, SMALL_HEIGHT - BAR_BOTTOM
    parts = []
    for index, (value, title) in enumerate(zip(values, titles, strict=True)):
        height, css_class = value / largest * (max_height - 2), "hot" if index < hot else "h"
        position = f'x="{index * width + 1:.1f}" y="{max_height - height:.1f}"'
        size = f'width="{width - 2:.1f}" height="{max(height, 0.5):.1f}"'
        parts.append(f'<rect class="{css_class}" {position} {size}><title>{escape(title)}</title></rect>')
    for index, label in labels.items():
        parts.append(f'<text class="mid" x="{(index + 0.5) * width:.1f}" y="{SMALL_HEIGHT - 4}">{label}</text>')
    return _svg(SMALL_WIDTH, SMALL_HEIGHT, parts)


def curve(values: Sequence[float], label: str, limit: float | None = None) -> str:
    """Returns a line chart whose y axis starts at zero, with a dashed line at `limit`."""
    if len(values) < 2:
        return ""
    top = max(*values, limit or 0.0) or 1.0
    step = (SMALL_WIDTH - 2 * SMALL_SIDE) / (len(values) - 1)
    points = " ".join(f"{SMALL_SIDE + i * step:.1f},{_curve_y(v / top):.1f}" for i, v in enumerate(values))
    parts = [_curve_line(0.0, "grid"), f'<polyline class="line" points="{points}"/>']
    if limit is not None:
        x, y = SMALL_WIDTH - SMALL_SIDE, _curve_y(limit / top) - 3
        parts += [_curve_line(limit / top, "zero"), _curve_text("end", x, y, f"limit {limit:.4g}")]
    parts.append(_curve_text("", SMALL_SIDE, SMALL_TOP - 4, f"most {max(values):.4g}"))
    parts.append(_curve_text("mid", SMALL_WIDTH / 2, SMALL_HEIGHT - 3, label))
    return _svg(SMALL_WIDTH, SMALL_HEIGHT, parts)


def _curve_y(fraction: float) -> float:
    return SMALL_TOP + (1 - fraction) * (SMALL_HEIGHT - SMALL_TOP - SMALL_BOTTOM)


def _curve_line(fraction: float, css_class: str) -> str:
    y = f"{_curve_y(fraction):.1f}"
    return f'<line class="{css_class}" x1="{SMALL_SIDE}" x2="{SMALL_WIDTH - SMALL_SIDE}" y1="{y}" y2="{y}"/>'


def _curve_text(anchor: str, x: float, y: float, text: str) -> str:
    return f'<text class="{anchor}" x="{x:.0f}" y="{y:.1f}">{escape(text)}</text>'


def heat(rows: HeatRows, titles: Sequence[str], label: str) -> str:
    """Returns a heat map with a row for each layer and a column for each batch. The colour of a cell shows what
    fraction of the FP8 range an amax used.

    A cell is the base-2 logarithm of this fraction, so cells above 0 exceed the range. None is a missing value. Rows of
    different lengths are aligned at the right. All cells of one colour share an SVG path, and neighbouring ones of them
    share a rectangle, so that a map of two thousand cells takes a few kilobytes.
    """
    columns = max(map(len, rows), default=0)
    if columns < 2:
        return ""
    width, height = (WIDTH - LEFT) / columns, max(4.0, min(14.0, 240 / len(rows)))
    rectangles: dict[int, list[str]] = {}
    for index, row in enumerate(rows):
        top, bottom = (round(HEAT_TOP + r * height, 1) for r in (index, index + 1))
        for step, first, count in _runs(row):
            column = columns - len(row) + first
            left, right = (round(LEFT + c * width, 1) for c in (column, column + count))  # neighbours share edges
            rectangles.setdefault(step, []).append(f"M{left} {top}H{right}V{bottom}H{left}z")
    parts = [f'<path {_fill(step)} d="{"".join(paths)}"/>' for step, paths in sorted(rectangles.items())]
    for index in range(0, len(rows), max(1, math.ceil(12 / height), math.ceil(len(rows) / 10))):
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{HEAT_TOP + (index + 0.5) * height + 4:.1f}">{index}</text>')
    for index, title in enumerate(titles):
        box = f'x="{LEFT}" y="{HEAT_TOP + index * height:.1f}" width="{WIDTH - LEFT}" height="{height:.1f}"'
        parts.append(f'<rect {box} fill="transparent"><title>{escape(title)}</title></rect>')
    label_y = HEAT_TOP + height * len(rows) + 16
    parts.append(f'<text class="mid" x="{(LEFT + WIDTH) // 2}" y="{label_y:.0f}">{escape(label)}</text>')
    return _svg(WIDTH, label_y + 6, parts)


def heat_legend() -> str:
    steps = range(0, HEAT_STEPS + 1, 2)
    percents = {step: f"{2 ** (HEAT_MIN_LOG2 * (HEAT_STEPS - step) / HEAT_STEPS):.0%}" for step in steps}
    shades = [
        f'<span><i class="cell h" style="opacity:{_opacity(step):.2f}"></i>{percent}{" and less" * (step == 0)}</span>'
        for step, percent in percents.items()
    ]
    saturated = '<span><i class="cell hot"></i>beyond, cut off</span>'
    return f'<p class="legend"><span>Part of the range:</span>{"".join(shades)}{saturated}</p>'


def _runs(row: Iterable[float | None]) -> Iterator[tuple[int, int, int]]:
    """Yields the shade (see `_step`), the first column and the number of cells for each run of cells of one shade."""
    start = 0
    for step, cells in groupby(None if value is None else _step(value) for value in row):
        count = len(list(cells))
        if step is not None:
            yield step, start, count
        start += count


def _step(value: float) -> int:
    """Returns the shade of a value, which is HEAT_STEPS at the end of the range and HEAT_STEPS + 1 beyond it."""
    if value > HEAT_TOLERANCE_LOG2:
        return HEAT_STEPS + 1
    return max(0, min(HEAT_STEPS, math.floor(HEAT_STEPS * (1 - value / HEAT_MIN_LOG2) + 0.5)))


def _fill(step: int) -> str:
    return 'class="hot"' if step > HEAT_STEPS else f'class="h" fill-opacity="{_opacity(step):.2f}"'


def _opacity(step: int) -> float:
    return 0.06 + 0.94 * math.pow(step / HEAT_STEPS, 1.5)


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A frame with named curves of (x, y) points. With `log`, the y axis is logarithmic and y must be positive."""

    y_label: str
    curves: Mapping[str, Points]
    log: bool = False


def svg_file(title: str, panels: Sequence[Panel], x_label: str) -> str:
    """Returns the text of an SVG file with panels above each other over a common x axis. Values that are not finite are
    gaps in a curve. Curves of the same name have the same colour in every panel."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    height = FILE_TOP + len(panels) * (PANEL_HEIGHT + PANEL_GAP) - PANEL_GAP + FILE_BOTTOM
    x_axis = _Axis.horizontal([x for panel in panels for points in panel.curves.values() for x, _ in points])
    parts = [file_text(FILE_LEFT, FILE_TOP - 14, title, "start", 14)]
    for index, panel in enumerate(panels):
        parts += _panel(panel, FILE_TOP + index * (PANEL_HEIGHT + PANEL_GAP), x_axis, names)
    parts += [file_text(x_axis.pixel(x), height - FILE_BOTTOM + 16, f"{x:.6g}", "middle") for x in x_axis.ticks]
    parts.append(file_text((FILE_LEFT + FILE_WIDTH - FILE_RIGHT) / 2, height - 8, x_label, "middle"))
    for index, name in enumerate(names):
        y, left = FILE_TOP + 12 + 20 * index, FILE_WIDTH - FILE_RIGHT + 12
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="3"'
        parts.append(f'<line x1="{left}" x2="{left + 20}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
        parts.append(file_text(left + 26, y, name, "start"))
    return file_document(FILE_WIDTH, height, parts)


def file_document(width: int, height: int, parts: Iterable[str]) -> str:
    """Returns the text of an SVG file with `parts` on a white background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" role="img">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, top: float, x_axis: _Axis, names: list[str]) -> Iterator[str]:
    y_values = (y for points in panel.curves.values() for _, y in points)
    y_axis = _Axis.vertical(y_values, panel.log, top, top + PANEL_HEIGHT)
    for tick in y_axis.ticks:
        y = y_axis.pixel(tick)
        right = FILE_WIDTH - FILE_RIGHT
        yield f'<line x1="{FILE_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield file_text(FILE_LEFT - 6, y + 4, f"{tick:.6g}", "end")
    middle = top + PANEL_HEIGHT / 2
    yield file_text(14, middle, panel.y_label, "middle", attributes=f' transform="rotate(-90 14 {middle:.1f})"')
    for name, points in panel.curves.items():
        for is_finite, piece in groupby(points, lambda point: math.isfinite(point[1])):
            if is_finite:
                path = " ".join(f"{x_axis.pixel(x):.1f},{y_axis.pixel(y):.1f}" for x, y in piece)
                colour = COLOURS[names.index(name) % len(COLOURS)]
                yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6">'
                yield f"<title>{escape(name)}</title></polyline>"


def file_text(x: float, y: float, text: str, anchor: str, size: int = 12, attributes: str = "") -> str:
    """Returns a label of an SVG file. `anchor` is SVG's `text-anchor`: start, middle or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#1f2328"{attributes}>'
        f"{escape(text)}</text>"
    )


# -- text --------------------------------------------------------------------------------------------------------------


def text_chart(curves: Mapping[str, Points], width: int = 72, height: int = 12) -> str:
    """Returns a chart of `width` x `height` characters with the ranges of both axes and a legend.

    Values must be finite, and each curve must have a point.
    """
    all_points = [point for points in curves.values() for point in points]
    left, right, low, high = (select(point[i] for point in all_points) for i in (0, 1) for select in (min, max))
    columns, rows = width * DOT_COLUMNS, height * DOT_ROWS

    def to_dot(x: float, y: float) -> tuple[int, int]:
        """Returns the column and the row of the dot of a point, counted from the upper left."""
        return _nearest_index(x, left, right, columns), _nearest_index(y, high, low, rows)

    first, *others = curves.values()
    ends = [to_dot(x, y) for x, y in first]
    bits = [[0] * width for _ in range(height)]
    for column, row in [dot for a, b in pairwise(ends) for dot in _line_dots(a, b)] + ends[-1:]:
        bits[row // DOT_ROWS][column // DOT_COLUMNS] |= BRAILLE_DOTS[row % DOT_ROWS][column % DOT_COLUMNS]
    cells = [[chr(BRAILLE_BLANK + dots) if dots else " " for dots in line] for line in bits]
    for letter, points in zip(CURVE_LETTERS, others, strict=False):
        for x, y in points:
            column, row = to_dot(x, y)
            cells[row // DOT_ROWS][column // DOT_COLUMNS] = letter
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    label_width = max(map(len, labels))
    start, end = f"step {left:g}", f"step {right:g}"
    legend = zip([chr(BRAILLE_BLANK + 0x12), *CURVE_LETTERS], curves, strict=False)
    return "\n".join(
        [
            *(f"{label:>{label_width}} │{''.join(line).rstrip()}" for label, line in zip(labels, cells, strict=True)),
            f"  {start}{end:>{max(len(end) + 1, width - len(start))}}",
            "  " + "   ".join(f"{symbol} {name}" for symbol, name in legend),
        ]
    )


def text_sparkline(values: Sequence[float]) -> str:
    """Returns the last values as a row of bar characters, scaled to the largest value. All values must be positive."""
    tail = values[-MAX_TEXT_BARS:]
    return "".join(TEXT_BARS[round(value / max(tail) * (len(TEXT_BARS) - 1))] for value in tail)


def _nearest_index(value: float, start: float, end: float, count: int) -> int:
    """Returns the nearest of `count` positions from `start` to `end`, or the middle one if the range is empty."""
    return round((value - start) / (end - start) * (count - 1)) if start != end else count // 2


def _line_dots(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the dots of a line from `a` to `b`, without `b`."""
    count = max(abs(b[0] - a[0]), abs(b[1] - a[1]))
    return [tuple(round(s + (e - s) * i / count) for s, e in zip(a, b, strict=True)) for i in range(count)]  # type: ignore[misc]
