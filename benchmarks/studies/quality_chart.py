"""A chart with one row per model of a quality study: its divergence with an interval, its bytes, its speed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8serve.charts import file_document, file_text

WIDTH, ROW, TOP = 900, 26, 64
NAMES, DOTS, BYTES, SPEED = 190, 360, 130, 130  # widths of the columns
GAP = 20
GRID, OURS, PEER = "#d0d7de", "#0969da", "#bc4c00"
Rows = Sequence[Mapping[str, Any]]


def chart(result: Mapping[str, Any], peers: Sequence[str]) -> str:
    """Returns the text of the SVG file. `result`: from `quality.study`; `peers`: names of the rows to draw in another
    colour."""
    rows: Rows = result["rows"]
    height = TOP + ROW * len(rows) + 14
    body = [
        file_text(8, 20, f"What FP8 costs {result['model']}: {result['text']['documents']} documents", "start", 14),
        *_names(rows),
        *_divergences(rows, peers, NAMES + GAP),
        *_bars(rows, peers, NAMES + DOTS + 2 * GAP, BYTES, "weights, MB", lambda row: row["bytes"] / 1e6, "{:.0f}"),
        *_bars(rows, peers, NAMES + DOTS + BYTES + 3 * GAP, SPEED, "tokens/s, batch 1",
               lambda row: row["tokens_per_second"], "{:.1f}"),
    ]  # fmt: skip
    return file_document(WIDTH, height, body)


def _names(rows: Rows) -> Iterable[str]:
    for index, row in enumerate(rows):
        yield file_text(NAMES, _middle(index) + 4, row["name"], "end")


def _divergences(rows: Rows, peers: Sequence[str], left: float) -> Iterable[str]:
    """Dots on a logarithmic axis, with lines from the low to the high end of their intervals."""
    figures = {i: row["figures"]["kl"] for i, row in enumerate(rows) if row["figures"]}
    ends = [max(f[end], 1e-6) for f in figures.values() for end in ("value", "low", "high")]
    low, high = (math.log10(min(ends)) - 0.05, math.log10(max(ends)) + 0.05) if ends else (-3.0, 0.0)

    def place(value: float) -> float:
        return left + DOTS * (math.log10(max(value, 1e-6)) - low) / (high - low)

    yield file_text(left, TOP - 26, "KL divergence from BF16, nats per token, and its 95 % interval", "start")
    for tick in _ticks(low, high):
        x, bottom = place(tick), TOP + ROW * len(rows)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{GRID}"/>'
        yield file_text(x, TOP - 8, f"{tick:g}", "middle", 11)
    for index, kl in figures.items():
        y, colour = _middle(index), _colour(rows[index]["name"], peers)
        one, other = place(kl["low"]), place(kl["high"])
        yield f'<line x1="{one:.1f}" x2="{other:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        yield f'<circle cx="{place(kl["value"]):.1f}" cy="{y}" r="4.5" fill="{colour}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 3, 5 and 7 times powers of ten between two logarithms."""
    all_ticks = [digit * 10.0**power for power in range(-6, 4) for digit in (1, 2, 3, 5, 7)]
    return [tick for tick in all_ticks if low <= math.log10(tick) <= high]


def _bars(
    rows: Rows, peers: Sequence[str], left: float, width: float, title: str, value: Any, label: str
) -> Iterable[str]:
    """A column of bars from zero, with their values. A row without a value has no bar."""
    values = [value(row) for row in rows]
    if any(values):
        yield file_text(left, TOP - 26, title, "start")
    largest = max((v for v in values if v is not None), default=1.0)
    for index, number in enumerate(values):
        if number is not None:
            length, y = (width - 50) * number / largest, _middle(index)
            colour = _colour(rows[index]["name"], peers)
            yield f'<rect x="{left}" y="{y - 6}" width="{length:.1f}" height="12" fill="{colour}" opacity="0.75"/>'
            yield file_text(left + length + 5, y + 4, label.format(number), "start", 11)


def _colour(name: str, peers: Sequence[str]) -> str:
    return PEER if name in peers else OURS


def _middle(index: int) -> float:
    return TOP + ROW * index + ROW / 2
