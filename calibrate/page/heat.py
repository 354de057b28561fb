"""A heat map: a row for each layer, a column for each batch; colour shows how near a value came to the top of its
range.

Values are logarithms: 0 is the top, -1 half of it, and values above 0 are beyond the range. Cells of one colour are one
path, and neighbours in a row one rectangle, so that a map of two thousand cells takes some kilobytes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

WIDTH, LEFT, TOP = 460, 46, 6
LOWEST = -2.0  # everything below has its colour
STEPS = 8
TOLERANCE = 0.01  # powers of two: the scale is rounded to FP32, and the amax too


def heat(rows: Sequence[Sequence[float | None]], titles: Sequence[str], label: str) -> str:
    """`rows` of equal or different lengths, drawn from the right: the newest batch of each is the last; None: no value.
    Nothing to draw gives empty text."""
    columns = max(map(len, rows), default=0)
    if columns < 2:
        return ""
    wide, high = (WIDTH - LEFT) / columns, max(4.0, min(14.0, 240 / len(rows)))
    parts = [_paths(rows, columns, wide, high), _numbers(len(rows), high)]
    parts += (_row(i, title, high) for i, title in enumerate(titles))
    bottom = TOP + high * len(rows) + 16
    parts.append(f'<text class="mid" x="{(LEFT + WIDTH) // 2}" y="{bottom:.0f}">{escape(label)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {bottom + 6:.0f}" role="img">{"".join(parts)}</svg>'


def heat_legend() -> str:
    shown = [(step, f"{2 ** _lower(step):.0%}{' and less' * (step == 0)}") for step in range(0, STEPS + 1, 2)]
    keys = [f'<span><i class="cell h" style="opacity:{_opacity(step):.2f}"></i>{text}</span>' for step, text in shown]
    beyond = '<span><i class="cell hot"></i>beyond, cut off</span>'
    return f'<p class="legend"><span>Part of the range:</span>{"".join(keys)}{beyond}</p>'


def _lower(step: int) -> float:
    return LOWEST * (STEPS - step) / STEPS


def _step(value: float) -> int:
    """0 at the bottom to STEPS at the top of the range; one more: beyond."""
    if value > TOLERANCE:
        return STEPS + 1
    return max(0, min(STEPS, math.floor(STEPS * (1 - value / LOWEST) + 0.5)))


def _opacity(step: int) -> float:
    return 0.06 + 0.94 * math.pow(step / STEPS, 1.5)


def _paths(rows: Sequence[Sequence[float | None]], columns: int, wide: float, high: float) -> str:
    shapes: dict[int, list[str]] = {}
    for index, row in enumerate(rows):
        for step, first, count in _runs(row):
            column = columns - len(row) + first
            left, right = (round(LEFT + c * wide, 1) for c in (column, column + count))  # neighbours share their edges
            top, bottom = (round(TOP + r * high, 1) for r in (index, index + 1))
            shapes.setdefault(step, []).append(f"M{left} {top}H{right}V{bottom}H{left}z")
    return "".join(_path(step, parts) for step, parts in sorted(shapes.items()))


def _runs(row: Iterable[float | None]) -> Iterator[tuple[int, int, int]]:
    """(step, first column, how many) of neighbours of one colour."""
    steps = [None if value is None else _step(value) for value in row]
    start = 0
    for step, same in groupby(steps):
        count = len(list(same))
        if step is not None:
            yield step, start, count
        start += count


def _path(step: int, parts: Sequence[str]) -> str:
    look = 'class="hot"' if step > STEPS else f'class="h" fill-opacity="{_opacity(step):.2f}"'
    return f'<path {look} d="{"".join(parts)}"/>'


def _numbers(rows: int, high: float) -> str:
    """Of every few layers."""
    every = max(1, math.ceil(12 / high), math.ceil(rows / 10))
    places = ((row, TOP + (row + 0.5) * high + 4) for row in range(0, rows, every))
    return "".join(f'<text class="end" x="{LEFT - 6}" y="{y:.1f}">{row}</text>' for row, y in places)


def _row(index: int, title: str, high: float) -> str:
    """The tooltip of the row."""
    place = f'x="{LEFT}" y="{TOP + index * high:.1f}" width="{WIDTH - LEFT}" height="{high:.1f}"'
    return f'<rect {place} fill="transparent"><title>{escape(title)}</title></rect>'
