"""Where the values of a tensor fall on the grid of E4M3, and how far rounding moved them.

The grid has 16 exponents. The lowest holds zero and seven subnormal values, one step apart; each of the others holds a
binade, from 2^-6 up to 2^8, of eight values (the highest of seven: 448 is the largest). A value in a binade is rounded
by at most a sixteenth of itself, a subnormal one by up to all of itself. So the share of elements in each exponent
shows whether a scale puts a tensor where the format is precise.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX, expand

from .result import CastReport

E4M3 = torch.float8_e4m3fn
TOP_CODE = 0x7E
SLICE = 1 << 22  # elements that are widened to FP32 at a time


@dataclass
class GridTally:
    """Counts and sums over all elements that were added.

    peak: the largest magnitude, in units of the grid. channels: the largest in each column, in the tensor's units, [K].
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(128, dtype=torch.int64))  # by code without its sign
    peak: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    channels: Tensor | None = None

    def add(self, x: Tensor, q: Tensor, scale_inv: Tensor) -> None:
        """Adds x [M, K], its cast q E4M3 [M, K], and scale_inv of any granularity."""
        largest = x.abs().amax(0).float().cpu()
        self.channels = largest if self.channels is None else torch.maximum(self.channels, largest)
        codes = q.view(torch.uint8).flatten() & 0x7F
        self.counts += torch.bincount(codes, minlength=128).cpu()
        for exact, got, scale in _slices(x, q, scale_inv):
            wide, back = exact.float(), got.float() * scale
            self.peak = max(self.peak, float((wide.abs() / scale).max()))
            self.signal += float(wide.square().sum(dtype=torch.float64))
            self.noise += float((wide - back).square_().sum(dtype=torch.float64))

    def report(self) -> CastReport | None:
        """None when nothing was added."""
        elements = int(self.counts.sum())
        if elements == 0:
            return None
        zeros, *shares = (_short(int(c) / elements) for c in (self.counts[0], *self._binades()))
        top = _short(int(self.counts[TOP_CODE]) / elements)
        return CastReport(sqnr(self.signal, self.noise), self._headroom(), zeros, tuple(shares), top)

    def _binades(self) -> Tensor:
        by_exponent = self.counts.view(16, 8).sum(1)
        by_exponent[0] -= self.counts[0]
        return by_exponent

    def _headroom(self) -> float | None:
        if self.peak == 0 or not math.isfinite(self.peak):
            return None
        return round(math.log2(FP8_MAX[E4M3] / self.peak), 4) + 0.0  # avoids minus zero


def sqnr(signal: float, noise: float) -> float | None:
    """10 log10 of the ratio of two powers. None: there is no noise (or no signal), so the ratio has no meaning."""
    return None if noise == 0 or signal == 0 else 10 * math.log10(signal / noise)


def _slices(x: Tensor, q: Tensor, scale_inv: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows of each at a time."""
    rows = max(1, SLICE // max(1, q.shape[1]))
    scales = torch.broadcast_to(expand(scale_inv, *q.shape), q.shape)
    return zip(*(torch.split(t, rows) for t in (x, q, scales)), strict=True)


def _short(share: float) -> float:
    """Rounded to four digits, more than a page shows, because calibration.json has thousands of these."""
    return float(f"{share:.4g}")
