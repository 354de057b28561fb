"""The input scales of served weights: the history of the inputs in bounded memory, and saving rolling scales.

The supervisor adds a sample to the history every few seconds. When a layer's history is full, neighbouring entries are
merged, keeping the larger input amax of both, and each later entry covers twice as many samples. So the history always
reaches from the first sample to the last, and no peak is lost. Values are FP32. All layers together store at most
MAX_VALUES values, or MIN_ENTRIES entries each if that is more.

Rolling scales are saved as a new model directory beside the original one. The engine process writes its current scales
to a private file, which takes little time. Another process then copies the weights and publishes the new directory
atomically (model/format_conversion.py). That process continues even if the client disconnects or this server ends.
"""

import asyncio
import json
import logging
import math
import tempfile
import time
from array import array
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import Fp8ServeError, MachineError, RequestError, TakenError
from fp8serve.processes import module_command
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.served_weights import ServedWeights

log = logging.getLogger("fp8serve.server")
COMMAND = module_command("fp8serve.model.format_conversion")
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


class ScaleSaver:
    """Saves one directory at a time. `work_dir` holds the file that passes between the two processes."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._lock = asyncio.Lock()

    async def save(self, served: ServedWeights, original: Path, name: str | None) -> tuple[str, int]:
        """Saves the served weights with their current scales beside the model's `original` directory.

        Returns the name of the new directory and the number of rolling scales. Raises Fault if the model has no rolling
        scale, or the directory exists or cannot be written.
        """
        original = original.resolve()
        out = original.parent / (name or f"{original.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
        if self._lock.locked():
            raise Fault(Code.ALIAS_BUSY, "Scales are already being saved.", hint="Try again when they are saved.")
        async with self._lock:
            with tempfile.TemporaryDirectory(prefix="rolled-", dir=self._work_dir) as folder:
                scales_path = Path(folder) / "moved.safetensors"
                try:
                    count = await served.engine.save_scales(scales_path)
                except RequestError as error:
                    raise Fault(Code.NOT_ROLLING, str(error)) from None
                except Fp8ServeError as error:
                    raise Fault(Code.ENGINE_DOWN, f"The engine could not save its scales: {error}") from None
                await self._write_directory(served, out, scales_path)
        log.info("saved the model with %d current scales to %s", count, out)
        return out.name, count

    async def _write_directory(self, served: ServedWeights, out: Path, scales_path: Path) -> None:
        source = served.source
        scales = [] if source.options.scales is None else ["--scales", source.options.scales]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, str(source.directory), str(out), str(scales_path), *scales, stdin=DEVNULL, stdout=PIPE,
            start_new_session=True,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise _fault_from_output(output.decode(errors="replace").strip().splitlines())


def _fault_from_output(lines: list[str]) -> Fault:
    try:
        answer = json.loads(lines[-1])
        error, message = str(answer["error"]), str(answer["message"])
    except (IndexError, ValueError, TypeError, KeyError):
        return Fault(Code.INTERNAL, "The process that saves scales failed; see the server's log.")
    if error == MachineError.__name__:
        return Fault(Code.DISK_FULL, message, hint="Check permissions and quota of the model's parent directory.")
    return Fault(Code.NAME_TAKEN if error == TakenError.__name__ else Code.NOT_ROLLING, message)
