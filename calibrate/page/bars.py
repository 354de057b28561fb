"""How the elements of a tensor are spread over the exponents of E4M3: a bar for zero and for each of the sixteen."""

from fp8serve.calibration.result import CastReport
from fp8serve.calibration.words import percent

WIDTH, HEIGHT, BOTTOM = 240, 104, 18
LABELS = {0: "0", 2: "2⁻⁶", 5: "2⁻³", 8: "1", 11: "2³", 14: "2⁶", 16: "2⁸"}  # by the number of the bar
SMALL = 2  # bars that hold zero and subnormal values


def bars(cast: CastReport) -> str:
    shares = (cast.zeros, *cast.binades)
    wide, largest = WIDTH / len(shares), max(shares) or 1.0
    body = [_bar(i, share, wide, share / largest) for i, share in enumerate(shares)]
    body += (f'<text class="mid" x="{(i + 0.5) * wide:.1f}" y="{HEIGHT - 4}">{t}</text>' for i, t in LABELS.items())
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(body)}</svg>'


def _bar(index: int, share: float, wide: float, height: float) -> str:
    room = HEIGHT - BOTTOM
    tall = height * (room - 2)
    look = "hot" if index < SMALL else "h"
    place = f'x="{index * wide + 1:.1f}" y="{room - tall:.1f}" width="{wide - 2:.1f}" height="{max(tall, 0.5):.1f}"'
    return f'<rect class="{look}" {place}><title>{_range(index)}: {percent(share)}</title></rect>'


def _range(index: int) -> str:
    if index == 0:
        return "zero"
    if index == 1:
        return "subnormal, below 2^-6"
    return f"2^{index - 8} and above" if index == 16 else f"2^{index - 8} to 2^{index - 7}"


def caption(cast: CastReport) -> str:
    """The figures for which the bars are too low."""
    return f"zero {percent(cast.zeros)}, subnormal {percent(cast.binades[0])}, largest value {percent(cast.at_top)}"
