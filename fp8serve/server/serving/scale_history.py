"""How the inputs of FP8 layers have moved since their weights began to serve, in memory that does not grow.

The engine is asked every few seconds. When a history is full, neighbouring entries are merged, keeping the larger
inputs of both, and from then on twice as many samples become one entry. So it reaches from the first sample to the
last, whatever time lies between, and no peak is lost. Numbers are FP32, and all layers together have at most `NUMBERS`,
or `LEAST` entries each.
"""

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 240  # entries of a layer; even, as is LEAST
LEAST = 16
NUMBERS = 1 << 21
KEYS = ("amax", "window_amax", "scale")
"""Keys of a record of `Engine.scales`; the last of several scales in one entry is kept, and the largest of the rest."""


class ScaleHistory:
    """The history of one model. Other weights begin another history."""

    def __init__(self) -> None:
        self._begin("", [])

    def _begin(self, weight_version: str, names: Sequence[str]) -> None:
        self.weight_version = weight_version
        self._rows = {name: tuple(array("f") for _ in KEYS) for name in names}
        self._times: list[float] = []
        self._most = max(LEAST, min(MOST, NUMBERS // (len(KEYS) * max(1, len(names))) // 2 * 2))
        self._looks = 1  # samples in one entry
        self._seen = 0  # samples so far

    def take(self, weight_version: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the present records of `Engine.scales`; layers whose scales follow every input have no history."""
        known = {record["name"]: record for record in records if record["scale"] is not None}
        if weight_version != self.weight_version or self._rows.keys() != known.keys():
            self._begin(weight_version, list(known))
        is_new = self._seen % self._looks == 0
        if is_new and len(self._times) == self._most:
            self._halve()
        self._times[len(self._times) - (not is_new) :] = [time.time()]
        for name, row in self._rows.items():
            _add(row, [math.nan if known[name][key] is None else known[name][key] for key in KEYS], is_new)
        self._seen += 1

    def _halve(self) -> None:
        self._times = self._times[1::2]
        for row in self._rows.values():
            *inputs, scales = row
            for values in inputs:
                values[:] = array("f", map(_larger, values[::2], values[1::2]))
            scales[:] = scales[1::2]
        self._looks *= 2

    def of(self, layer: str) -> list[dict[str, float | None]] | None:
        """The entries of a layer, oldest first, each with `at`, the Unix time of its last sample; None: there is no
        such layer."""
        if (row := self._rows.get(layer)) is None:
            return None
        return [
            {"at": at} | {key: None if math.isnan(value) else value for key, value in zip(KEYS, entry, strict=True)}
            for at, *entry in zip(self._times, *row, strict=True)
        ]


def _add(row: tuple["array[float]", ...], entry: Sequence[float], is_new: bool) -> None:
    """Adds a sample as an entry of its own, or to the last one."""
    *inputs, scales = row
    for values, value in zip(inputs, entry, strict=False):
        values.append(value if is_new else _larger(values.pop(), value))
    scales[len(scales) - (not is_new) :] = array("f", entry[-1:])


def _larger(a: float, b: float) -> float:
    """The larger number; nan, which stands for no number, only if both are."""
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)
