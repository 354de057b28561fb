"""Curves as text for a terminal: the first one in dots of braille, further ones as letters on top of it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]
ACROSS, UP = 2, 4  # dots of one character
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of braille, by line and column
BLANK = 0x2800
MARKS = "ox+*"


def text_chart(curves: Mapping[str, Points], width: int = 72, height: int = 12) -> str:
    """`width` x `height` characters of curves, with their range at the left and below, and a line that names them.

    Values must be finite, and each curve must have a point.
    """
    every = [point for points in curves.values() for point in points]
    left, right, low, high = (of(point[i] for point in every) for i in (0, 1) for of in (min, max))
    first, *others = curves.values()
    places = _Places(left, right, low, high, width * ACROSS, height * UP)
    cells = _dots(places.line(first), width, height)
    for mark, points in zip(MARKS, others, strict=False):
        for x, y in points:
            column, line = places.of(x, y)
            cells[line // UP][column // ACROSS] = mark
    return "\n".join([*_framed(cells, low, high), _below(left, right, width), _legend(list(curves))])


class _Places:
    """Where a point lies among `columns` x `lines` dots, counted from the upper left."""

    def __init__(self, left: float, right: float, low: float, high: float, columns: int, lines: int) -> None:
        self._x, self._y = (left, right, columns), (high, low, lines)

    def of(self, x: float, y: float) -> tuple[int, int]:
        return self._place(x, *self._x), self._place(y, *self._y)

    @staticmethod
    def _place(value: float, start: float, end: float, count: int) -> int:
        """The middle, where all values are the same."""
        return round((value - start) / (end - start) * (count - 1)) if start != end else count // 2

    def line(self, points: Points) -> list[tuple[int, int]]:
        """The dots of a curve: its points, and what lies between two neighbours."""
        ends = [self.of(x, y) for x, y in points]
        return [dot for a, b in pairwise(ends) for dot in _between(a, b)] + ends[-1:]


def _between(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    """From a to b, without b."""
    count = max(abs(b[0] - a[0]), abs(b[1] - a[1]))
    return [tuple(round(s + (e - s) * i / count) for s, e in zip(a, b, strict=True)) for i in range(count)]  # type: ignore[misc]


def _dots(dots: Sequence[tuple[int, int]], width: int, height: int) -> list[list[str]]:
    """The characters that hold these dots."""
    bits = [[0] * width for _ in range(height)]
    for column, line in dots:
        bits[line // UP][column // ACROSS] |= DOTS[line % UP][column % ACROSS]
    return [[chr(BLANK + found) if found else " " for found in row] for row in bits]


def _framed(cells: Sequence[Sequence[str]], low: float, high: float) -> list[str]:
    """The highest and the lowest value stand left of the first and the last line."""
    labels = [f"{high:.4g}", *[""] * (len(cells) - 2), f"{low:.4g}"]
    size = max(map(len, labels))
    return [f"{label:>{size}} │{''.join(row).rstrip()}" for label, row in zip(labels, cells, strict=True)]


def _below(left: float, right: float, width: int) -> str:
    start, end = f"step {left:g}", f"step {right:g}"
    return f"  {start}{end:>{max(len(end) + 1, width - len(start))}}"


def _legend(names: Sequence[str]) -> str:
    marks = [chr(BLANK + 0x12), *MARKS]
    return "  " + "   ".join(f"{mark} {name}" for mark, name in zip(marks, names, strict=False))
