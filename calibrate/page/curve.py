"""A line of values from left to right, from zero at the bottom, with a dashed line at their limit."""

from collections.abc import Sequence
from html import escape

from fp8serve.calibration.words import number

WIDTH, HEIGHT = 240, 104
LEFT, RIGHT, TOP, BOTTOM = 4, 4, 14, 16


def curve(values: Sequence[float], label: str, limit: float | None = None) -> str:
    """Nothing to draw, of less than two values, gives empty text."""
    if len(values) < 2:
        return ""
    top = max(*values, limit or 0.0) or 1.0
    step = (WIDTH - LEFT - RIGHT) / (len(values) - 1)
    points = " ".join(f"{LEFT + i * step:.1f},{_y(v / top):.1f}" for i, v in enumerate(values))
    body = [_line(0.0, "grid"), f'<polyline class="line" points="{points}"/>']
    if limit is not None:
        body += [_line(limit / top, "zero"), _text("end", WIDTH - RIGHT, _y(limit / top) - 3, f"limit {number(limit)}")]
    body += [_text("", LEFT, TOP - 4, f"most {number(max(values))}"), _text("mid", WIDTH / 2, HEIGHT - 3, label)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(body)}</svg>'


def _y(part: float) -> float:
    return TOP + (1 - part) * (HEIGHT - TOP - BOTTOM)


def _line(part: float, look: str) -> str:
    return f'<line class="{look}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(part):.1f}" y2="{_y(part):.1f}"/>'


def _text(anchor: str, x: float, y: float, text: str) -> str:
    return f'<text class="{anchor}" x="{x:.0f}" y="{y:.1f}">{escape(text)}</text>'
