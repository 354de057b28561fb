"""The history of the inputs of FP8 layers since their weights began to serve, in bounded memory.

The supervisor adds a sample every few seconds. When a layer's history is full, neighbouring entries are merged, keeping
the larger input amax of both, and each later entry covers twice as many samples. So the history always reaches from the
first sample to the last, and no peak is lost. Values are FP32. All layers together store at most MAX_VALUES values, or
MIN_ENTRIES entries each if that is more.
"""

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ENTRIES = 240  # of a layer; even, as is MIN_ENTRIES, because entries are merged in pairs
MIN_ENTRIES = 16
MAX_VALUES = 1 << 21
KEYS = ("amax", "window_amax", "scale")
"""The values of an entry. Merging keeps the larger amax and window amax, and the later scale."""


class ScaleHistory:
    """The history of the weights that a model currently serves. New weights start a new history."""

    def __init__(self) -> None:
        self._start("", [])

    def _start(self, weight_version: str, layers: Sequence[str]) -> None:
        self.weight_version = weight_version
        self._columns = {name: tuple(array("f") for _ in KEYS) for name in layers}
        self._times: list[float] = []
        self._max_entries = max(MIN_ENTRIES, min(MAX_ENTRIES, MAX_VALUES // (len(KEYS) * max(1, len(layers))) // 2 * 2))
        self._samples_per_entry = 1
        self._num_samples = 0

    def add(self, weight_version: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds a sample: the current records of `Engine.scales`. Layers without a stored scale have no history."""
        by_layer = {record["name"]: record for record in records if record["scale"] is not None}
        if weight_version != self.weight_version or self._columns.keys() != by_layer.keys():
            self._start(weight_version, list(by_layer))
        is_new_entry = self._num_samples % self._samples_per_entry == 0
        if is_new_entry and len(self._times) == self._max_entries:  # merge pairs of entries
            self._times = self._times[1::2]
            for *inputs, scales in self._columns.values():
                for values in inputs:
                    values[:] = array("f", map(_larger, values[::2], values[1::2]))
                scales[:] = scales[1::2]
            self._samples_per_entry *= 2
        self._times[len(self._times) - (not is_new_entry) :] = [time.time()]
        for name, (*inputs, scales) in self._columns.items():
            *amaxes, scale = (math.nan if by_layer[name][key] is None else by_layer[name][key] for key in KEYS)
            for values, value in zip(inputs, amaxes, strict=True):
                values.append(value if is_new_entry else _larger(values.pop(), value))
            scales[len(scales) - (not is_new_entry) :] = array("f", [scale])
        self._num_samples += 1

    def entries(self, layer: str) -> list[dict[str, float | None]] | None:
        """Returns the entries of a layer, oldest first, or None for an unknown layer.

        Besides `KEYS`, an entry has `at`, the Unix time of its last sample.
        """
        if (columns := self._columns.get(layer)) is None:
            return None
        return [
            {"at": at} | {key: None if math.isnan(value) else value for key, value in zip(KEYS, values, strict=True)}
            for at, *values in zip(self._times, *columns, strict=True)
        ]


def _larger(a: float, b: float) -> float:
    """Returns the larger number. NaN stands for a missing value and is returned only if both are NaN."""
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)
