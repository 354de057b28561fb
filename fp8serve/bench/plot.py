"""Curves as one self-contained SVG file: panels above each other over a common x axis, with colours and text.

The documentation shows it as an image, so it has its own white background and needs no style sheet, script or font.
Values that are not finite are gaps. The ticks are those of the calibration report's charts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fp8serve.calibration.charts import decade_ticks, linear_ticks

WIDTH, PANEL, GAP = 720, 250, 26
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 34, 40
COLOURS = ("#1f2328", "#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#6e7781")  # readable on white
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One frame: named curves of (x, y) points; `log` for a logarithmic y axis (then y > 0)."""

    y_label: str
    curves: Mapping[str, Points]
    log: bool = False


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
    def across(cls, xs: Sequence[float]) -> "_Axis":
        """From the first value to the last, with the round numbers between them."""
        low, high = min(xs), max(max(xs), min(xs) + 1e-9)
        ticks = [tick for tick in linear_ticks(low, high) if low <= tick <= high]
        return cls(low, high, LEFT, WIDTH - RIGHT, ticks)

    @classmethod
    def upwards(cls, panel: "Panel", top: float) -> "_Axis":
        """From round number to round number."""
        ys = [y for points in panel.curves.values() for _, y in points if math.isfinite(y)]
        ticks = (decade_ticks if panel.log else linear_ticks)(min(ys), max(ys))
        return cls(ticks[0], ticks[-1], top + PANEL, top, ticks, panel.log)

    def pixel(self, value: float) -> float:
        low, high, place = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (place - low) / (high - low) * (self.end - self.start)


def svg(title: str, panels: Sequence[Panel], x_label: str) -> str:
    """The whole file's text. Curves of the same name have the same colour in every panel."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    height = TOP + len(panels) * (PANEL + GAP) - GAP + BOTTOM
    xs = [x for panel in panels for points in panel.curves.values() for x, _ in points]
    across = _Axis.across(xs)
    body = [_text(LEFT, TOP - 14, title, "start", 14)]
    for index, panel in enumerate(panels):
        body += _panel(panel, TOP + index * (PANEL + GAP), across, names)
    body += [_text(across.pixel(x), height - BOTTOM + 16, f"{x:.6g}", "middle") for x in across.ticks]
    body += [_text((LEFT + WIDTH - RIGHT) / 2, height - 8, x_label, "middle"), *_legend(names)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" role="img"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f"{''.join(body)}</svg>\n"
    )


def _panel(panel: Panel, top: float, across: _Axis, names: list[str]) -> Iterable[str]:
    up = _Axis.upwards(panel, top)
    for tick in up.ticks:
        y = up.pixel(tick)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield _text(LEFT - 6, y + 4, f"{tick:.6g}", "end")
    middle = top + PANEL / 2
    yield _text(14, middle, panel.y_label, "middle", turn=f' transform="rotate(-90 14 {middle:.1f})"')
    for name, points in panel.curves.items():
        for piece in _pieces(points):
            path = " ".join(f"{across.pixel(x):.1f},{up.pixel(y):.1f}" for x, y in piece)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6">'
            yield f"<title>{escape(name)}</title></polyline>"


def _pieces(points: Points) -> Iterable[list[tuple[float, float]]]:
    """Runs of points with finite values."""
    piece: list[tuple[float, float]] = []
    for x, y in points:
        if math.isfinite(y):
            piece.append((x, y))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _legend(names: Sequence[str]) -> Iterable[str]:
    for index, name in enumerate(names):
        y = TOP + 12 + 20 * index
        colour = COLOURS[index % len(COLOURS)]
        left, right = WIDTH - RIGHT + 12, WIDTH - RIGHT + 32
        yield f'<line x1="{left}" x2="{right}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>'
        yield _text(WIDTH - RIGHT + 38, y, name, "start")


def _text(x: float, y: float, words: str, anchor: str, size: int = 12, turn: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#1f2328"{turn}>'
        f"{escape(words)}</text>"
    )
