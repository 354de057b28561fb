"""Monitors whether the inputs of FP8 layers still fit their calibrated scales while the engine serves requests.

The monitor works in windows of `drift_window` computed tokens. At the end of a window it takes the counters of every
FP8 layer (input_counters.py). On a GPU it reads them in a later step, when the device has copied them. The drift of a
layer is the amax of the last window divided by the amax in calibration. If the drift of a layer exceeds `drift_alarm`,
the monitor logs a warning that names the layer, and it logs a message when the drift is below the limit again.

With `roll_history`, the monitor also updates the scales: the end of a window is one step of delayed scaling
(docs/numerics.md), which appends the window's amax to the calibrated amax history and computes the next scale from the
history. Then inputs that exceed the calibrated range no longer saturate. But the same request may get another output
later, and cached prefixes still have the values of older scales.

Layers that read the same input share a scale, a pair of counters and a scaling state. Dynamic scales (current, rowwise,
block) are computed from every input, so these layers cannot drift and are not monitored.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.input_counters import InputCounters
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Entry, ScalingState, update
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale

log = logging.getLogger("fp8serve.engine")
E4M3_MAX = FP8_MAX[torch.float8_e4m3fn]
MAX_LOGGED_LAYERS = 3  # layers that a log message names


@dataclass(frozen=True)
class Calibration:
    """The recipe of stored scales, and the amax history, FP32 [N], of each layer's input, by the name of the layer."""

    recipe: DelayedScaling
    histories: Mapping[str, Tensor]


@dataclass
class InputMonitor:
    """The statistics of one layer's input. `amax`, `saturated` and `rows` cover the time from the start to the end of
    the last window."""

    layer: FrozenLinear
    calibrated_amax: float
    amax: float = 0.0
    saturated: int = 0  # elements
    rows: int = 0
    window_amax: float | None = None
    window_saturation: float | None = None  # fraction of elements

    @property
    def width(self) -> int:
        """The elements of a row of the input, of all ranks together."""
        shard = self.layer.input_shard
        return self.layer.in_features * (1 if shard is None else shard.size)

    @property
    def drift(self) -> float | None:
        """The amax of the last window divided by the amax in calibration, or None if there is no such window."""
        return self.window_amax / self.calibrated_amax if self.window_amax and self.calibrated_amax else None

    def close_window(self, amax: float, saturated: int, rows: int) -> None:
        """Adds the counters of a window. `rows` is the number of rows that the layer has read since the start."""
        elements = (rows - self.rows) * self.width
        self.amax, self.saturated, self.rows = max(self.amax, amax), self.saturated + saturated, rows
        self.window_amax, self.window_saturation = amax, saturated / elements if elements else 0.0

    def reset(self, calibrated_amax: float, saturated: int) -> None:
        """Resets what depends on the weights, after they were replaced. `saturated` and `rows` continue."""
        self.calibrated_amax, self.amax, self.saturated = calibrated_amax, 0.0, self.saturated + saturated
        self.window_amax = self.window_saturation = None

    def record(self, scale: float, amax: float, saturated: int, rows: int) -> dict[str, Any]:
        """Returns the numbers of `Engine.scales`. `amax` and `saturated` are of the current window, and `rows` is the
        number of rows that the layer has read since the start."""
        amax = max(self.amax, amax)
        saturated, elements = self.saturated + saturated, rows * self.width
        return {
            "amax": amax,
            "scale": scale,
            "headroom": E4M3_MAX / (amax * scale) if amax else None,
            "saturated": saturated,
            "saturation": saturated / elements if elements else 0.0,
            "calibrated_amax": self.calibrated_amax,
            "window_amax": self.window_amax,
            "window_saturation": self.window_saturation,
            "drift": self.drift,
        }


class ScaleMonitor:
    """Monitors the inputs of the FP8 layers of one engine. Raises RequestError if the option roll_history is set and
    the model has no stored scales."""

    def __init__(
        self,
        layers: Mapping[str, FrozenLinear],
        counters: InputCounters,
        calibration: Calibration,
        options: EngineOptions,
    ) -> None:
        self._layers, self.counters, self._options = layers, counters, options
        static = {name: layer for name, layer in layers.items() if layer.input_scale is not None}
        if options.roll_history and not static:
            raise RequestError("roll_history needs stored scales of inputs, and this model has none; leave it out.")
        self._inputs = {name: InputMonitor(x, _calibrated_amax(x, name, calibration)) for name, x in static.items()}
        self._recipe = calibration.recipe
        self._states = _scaling_states(static, calibration) if options.roll_history else []
        self._window_tokens = 0  # computed in the current window
        self._closed_rows: Mapping[str, int] | None = None  # of a closed window whose counters were not read yet
        self._drifting: set[str] = set()  # layers whose drift exceeds drift_alarm
        self.num_windows = 0
        if self._states:
            log.warning("Scales of inputs follow the traffic: the same request may get another output later.")

    def reset(self, calibration: Calibration) -> None:
        """Starts a new window after the weights and scales were replaced. Not possible with roll_history."""
        self._read_closed_window()
        self._window_tokens, self._drifting = 0, set()
        self.counters.copy_and_reset()
        saturated = self.counters.copied_counters().saturated
        for name, monitor in self._inputs.items():
            monitor.reset(_calibrated_amax(monitor.layer, name, calibration), saturated[name])

    def count_tokens(self, tokens: int) -> bool:
        """Counts computed tokens. Returns whether the window is complete. Call it after every step."""
        if self._closed_rows is not None and self.counters.are_copied():
            self._read_closed_window()
        self._window_tokens += tokens
        return bool(self._inputs) and self._window_tokens >= self._options.drift_window

    def close_window(self, rows: Mapping[str, int]) -> None:
        """Ends a window: updates scales that follow the traffic, and starts to copy the counters. On a CPU, this method
        also reads them and logs which layers drift; on a GPU, a later call does. `rows` is the number of rows that each
        layer has read since the start."""
        self._read_closed_window()
        self._window_tokens = 0
        self._update_scales()
        self.counters.copy_and_reset()
        self._closed_rows = rows
        if self.counters.are_copied():
            self._read_closed_window()

    def records(self, rows: Mapping[str, int]) -> list[dict[str, Any]]:
        """Returns the records of `Engine.scales`. Waits for the device."""
        self._read_closed_window()
        amaxes, saturated = self.counters.current()
        monitors = self._inputs.items()
        scales = torch.stack([_input_scale(x.layer) for _, x in monitors]).tolist() if self._inputs else []
        numbers = {
            name: monitor.record(scale, amaxes[name], saturated[name], rows[name])
            for (name, monitor), scale in zip(monitors, scales, strict=True)
        }
        unknown = dict.fromkeys(RECORDED)
        return [
            {
                "name": name,
                "input": describe_input_scale(layer),
                **numbers.get(name, unknown),
                "drifts": name in self._drifting,
            }
            for name, layer in self._layers.items()
        ]

    def stats(self) -> dict[str, Any]:
        """Returns the numbers that `Engine.stats` has about windows and drift."""
        monitors = self._inputs.values()
        drifts = [drift for monitor in monitors if (drift := monitor.drift) is not None]
        saturations = [fraction for monitor in monitors if (fraction := monitor.window_saturation) is not None]
        numbers: dict[str, Any] = {"scale_windows_total": self.num_windows, "layers_drifting": len(self._drifting)}
        numbers |= {"input_saturation_max": max(saturations)} if saturations else {}
        return numbers | ({"input_drift_max": max(drifts)} if drifts else {})

    def current_scales(self) -> ScalingCheckpoint:
        """Returns the scales that follow the traffic, with their amax histories up to the last window. Raises
        RequestError if no scale follows the traffic."""
        if not self._states:
            raise RequestError("The scales of this server do not follow the traffic; start it with --roll-history.")
        states = {id(layer.input_scale): state for layer, state in self._states}
        by_layer = {name: states[id(monitor.layer.input_scale)] for name, monitor in self._inputs.items()}
        return ScalingCheckpoint(
            self._recipe, {f"{name}.input": TensorScale(s.scale, s.amax_history) for name, s in by_layer.items()}
        )

    def _read_closed_window(self) -> None:
        """Reads the counters of a closed window, unless they were read already. Waits for them."""
        rows, self._closed_rows = self._closed_rows, None
        if rows is None:
            return
        self.num_windows += 1
        amaxes, saturated = self.counters.copied_counters()
        for name, monitor in self._inputs.items():
            monitor.close_window(amaxes[name], saturated[name], rows[name])
        self._log_drift()

    @torch.no_grad()
    def _update_scales(self) -> None:
        """Runs one step of delayed scaling in place, because other layers and CUDA graphs read the same tensors."""
        for layer, state in self._states:
            state.stage(layer.amax)
        update([Entry(state, E4M3_MAX) for _, state in self._states], self._recipe)
        for layer, state in self._states:
            layer.input_scale_inv.copy_(state.scale.reciprocal())  # type: ignore[union-attr]

    def _log_drift(self) -> None:
        """Logs the layers whose drift has exceeded the limit or fallen below it since the last window."""
        limit = self._options.drift_alarm
        drifting = {name for name, monitor in self._inputs.items() if (monitor.drift or 0) > limit}
        if started := sorted(drifting - self._drifting, key=lambda name: -(self._inputs[name].drift or 0)):
            worst = ", ".join(f"{name} ({self._inputs[name].drift:.3g} times)" for name in started[:MAX_LOGGED_LAYERS])
            log.warning(
                "The inputs of %d FP8 layers exceed %g times the calibrated maximum: %s%s. Calibrate on text like the "
                "traffic, or serve with --roll-history.",
                len(started), limit, worst, ", ..." if len(started) > MAX_LOGGED_LAYERS else "",
            )  # fmt: skip
        if ended := sorted(self._drifting - drifting):
            names = ", ".join(ended[:MAX_LOGGED_LAYERS]) + (", ..." if len(ended) > MAX_LOGGED_LAYERS else "")
            log.info("The inputs of %d FP8 layers are in the calibrated range again: %s.", len(ended), names)
        self._drifting = drifting


RECORDED = (
    "amax", "scale", "headroom", "saturated", "saturation", "calibrated_amax", "window_amax", "window_saturation",
    "drift",
)  # fmt: skip
"""The numbers of a record, which are None for a dynamic scale."""


def describe_input_scale(layer: FrozenLinear) -> str:
    """Returns the kind of a layer's input scale, for example "stored" or "per row"."""
    spec = layer.input_spec
    if not spec.is_quantized:
        return "unquantized"
    if spec.is_nvfp4:
        return "per row" if spec.row_scaled else "per tensor"
    return "stored" if spec.source == "stored" else f"per {spec.granularity}"


def _calibrated_amax(layer: FrozenLinear, name: str, calibration: Calibration) -> float:
    """Returns the largest amax of a layer's calibrated history. Without a history, returns the largest magnitude that
    does not saturate."""
    history = calibration.histories.get(name)
    amax = 0.0 if history is None else float(history.amax())
    return amax or E4M3_MAX / float(_input_scale(layer))


def _input_scale(layer: FrozenLinear) -> Tensor:
    assert layer.input_scale is not None  # a monitored layer has a scale
    return layer.input_scale


def _scaling_states(
    layers: Mapping[str, FrozenLinear], calibration: Calibration
) -> list[tuple[FrozenLinear, ScalingState]]:
    """Returns a scaling state for each distinct input scale, with the first layer that has this scale."""
    first_layers: dict[int, str] = {}
    for name, layer in layers.items():
        first_layers.setdefault(id(layer.input_scale), name)
    return [(layers[name], _scaling_state(layers[name], name, calibration)) for name in first_layers.values()]


def _scaling_state(layer: FrozenLinear, name: str, calibration: Calibration) -> ScalingState:
    """Returns a scaling state that shares the layer's scale tensor and continues its calibrated history."""
    scale, length = layer.input_scale, calibration.recipe.amax_history_len
    assert scale is not None  # the layer has a stored scale
    state = ScalingState.create(length, scale.device)
    history = calibration.histories.get(name)
    if history is None or not bool(history.any()):
        history = torch.tensor([0.0, E4M3_MAX / 2.0**calibration.recipe.margin / float(scale)])
    state.amax_history = history.to(scale.device, torch.float32).clone()
    state.resize(length)
    state.scale = scale
    return state
