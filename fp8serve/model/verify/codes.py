"""Statistics of the codes of an FP8 weight, counted once per weight: a table of 256 counts and each group's largest.

A weight is read from the mapped file a few million codes at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fp8serve.fp8.spec import Granularity

_MAGNITUDE, _PART = 0x7F, 2**22


@dataclass(frozen=True)
class Codes:
    """counts: how often each byte occurs, int64 [256]. largest: FP32, the largest magnitude in each group that shares a
    scale; NaN does not count."""

    counts: Tensor
    largest: Tensor
    values: Tensor  # FP32 [256], the value of each byte

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def num_nan(self) -> int:
        return int(self.counts[self.values.isnan()].sum())

    @property
    def rms(self) -> float:
        squares = self.values.double().square() * self.counts
        return float((squares[squares.isfinite()].sum() / max(self.total, 1)).sqrt())

    def at(self, magnitude: float) -> int:
        """The number of codes with this magnitude."""
        return int(self.counts[self.values.abs() == magnitude].sum())


def codes_of(stored: Tensor, kind: Granularity) -> Codes:
    """The statistics of an FP8 weight [N, K], or a stack of them, with one scale for each `kind`."""
    values = byte_values(stored.dtype)
    raw = stored.view(torch.uint8).flatten(0, -2)  # [experts * rows, columns]
    counts, rows = torch.zeros(256, dtype=torch.int64), []
    for part in _parts(raw):
        counts += torch.bincount(part.flatten(), minlength=256)
        if kind != "tensor":
            rows.append(_largest_of_rows(part, values, kind))
    if kind == "tensor" or not rows:
        seen = values.abs()[(counts > 0) & ~values.isnan()]
        return Codes(counts, seen.amax().reshape(1) if len(seen) else torch.zeros(1), values)
    largest = torch.cat(rows)
    if kind == "block128x128":
        in_rows = largest.reshape(-1, stored.shape[-2], largest.shape[-1]).transpose(-1, -2)
        largest = _blocked(in_rows).flatten()
    return Codes(counts, largest, values)


def _parts(raw: Tensor) -> Iterator[Tensor]:
    """Some rows at a time."""
    step = max(1, _PART // max(raw.shape[1], 1))
    return (raw[first : first + step] for first in range(0, len(raw), step))


def _largest_of_rows(raw: Tensor, values: Tensor, kind: Granularity) -> Tensor:
    """[rows] or, for blocks, [rows, blocks]."""
    magnitudes = torch.nan_to_num(values[: _MAGNITUDE + 1], nan=0.0)[(raw & _MAGNITUDE).long()]
    return magnitudes.amax(-1) if kind == "row" else _blocked(magnitudes)


def _blocked(values: Tensor, size: int = 128) -> Tensor:
    """The largest of every `size` along the last dimension; the last block may be smaller."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size))
    return padded.reshape(*values.shape[:-1], -1, size).amax(-1)


@cache
def byte_values(dtype: torch.dtype) -> Tensor:
    """FP32 [256]: the value of each byte in this FP8 type."""
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
