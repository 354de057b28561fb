"""How the inputs of served traffic fit the scales that calibration stored, layer by layer and window by window.

A window is `drift_window` computed tokens. At its end the counters of every FP8 layer (fp8/frozen.py) are read in one
transfer and begin anew. The drift of a layer is the largest magnitude in the last window over the largest that
calibration saw; a layer that drifts beyond `drift_alarm` is named in the log, and once more when it is back.

With `roll_history` the scales follow the traffic: a window is one step of delayed scaling (docs/numerics.md), its amax
a row of the history that calibration began, and the recipe's rule makes the next scale. A cast that was in range stays
in range, but the same request may then get another answer later, and cached prefixes keep what older scales gave.

Layers that read one input share one scale, one pair of counters and here one state. Scales that follow every input by
themselves (current, rowwise, block) cannot drift, and are not watched.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Entry, ScalingState, update
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale

log = logging.getLogger("fp8serve.engine")
E4M3_MAX = FP8_MAX[torch.float8_e4m3fn]
NAMED = 3  # layers in one line of the log


@dataclass(frozen=True)
class Calibrated:
    """The rules that stored scales follow, and the amax histories, FP32 [N], that made them, by linear."""

    rules: DelayedScaling
    histories: Mapping[str, Tensor]


@dataclass
class Watched:
    """What is known of one input. amax and saturated: since the start, without the open window."""

    layer: FrozenLinear
    calibrated: float
    amax: float = 0.0
    saturated: int = 0
    rows: int = 0
    window_amax: float | None = None
    window_saturation: float | None = None

    @property
    def drift(self) -> float | None:
        """The amax of the last window divided by the calibrated one; None until a window in which the input was used
        has ended."""
        return self.window_amax / self.calibrated if self.window_amax and self.calibrated else None

    def close_window(self, amax: float, saturated: int, rows: int) -> None:
        """`rows`: how many the layer has read since the start."""
        elements = (rows - self.rows) * self.layer.in_features
        self.amax, self.saturated, self.rows = max(self.amax, amax), self.saturated + saturated, rows
        self.window_amax, self.window_saturation = amax, saturated / elements if elements else 0.0

    def begin_anew(self, calibrated: float, saturated: int) -> None:
        """Starts again with other weights and another scale; the count of elements cut off continues."""
        self.calibrated, self.amax, self.saturated = calibrated, 0.0, self.saturated + saturated
        self.window_amax = self.window_saturation = None

    def record(self, rows: int) -> dict[str, Any]:
        """The numbers of `Engine.scales`."""
        scale = float(self.layer.input_scale)  # type: ignore[arg-type]  # a watched layer has one
        amax = max(self.amax, float(self.layer.amax))
        saturated, elements = self.saturated + int(self.layer.saturated), rows * self.layer.in_features
        return {
            "amax": amax,
            "scale": scale,
            "headroom": E4M3_MAX / (amax * scale) if amax else None,
            "saturated": saturated,
            "saturation": saturated / elements if elements else 0.0,
            "calibrated_amax": self.calibrated,
            "window_amax": self.window_amax,
            "window_saturation": self.window_saturation,
            "drift": self.drift,
        }


class Traffic:
    """Watches the FP8 layers of one engine. RequestError: scales are to follow the traffic and none is stored."""

    def __init__(self, layers: Mapping[str, FrozenLinear], calibrated: Calibrated, options: EngineOptions) -> None:
        self._layers, self._options = layers, options
        stored = {name: layer for name, layer in layers.items() if layer.input_scale is not None}
        if options.roll_history and not stored:
            raise RequestError("roll_history needs stored scales of inputs, and this model has none; leave it out.")
        self._watched = {name: Watched(layer, _amax(layer, name, calibrated)) for name, layer in stored.items()}
        self._rules = calibrated.rules
        self._states = _states(stored, calibrated) if options.roll_history else []
        self._open_tokens = 0  # of the window that is open
        self._alarming: set[str] = set()
        self.num_windows = 0
        if self._states:
            log.warning("Scales of inputs follow the traffic: the same request may get another answer later.")

    def begin_anew(self, calibrated: Calibrated) -> None:
        """Starts again after weights and scales of inputs were replaced; not for scales that follow the traffic."""
        self._open_tokens, self._alarming = 0, set()
        for name, _, saturated in self._counted() if self._watched else ():
            watched = self._watched[name]
            watched.begin_anew(_amax(watched.layer, name, calibrated), saturated)
        for watched in self._watched.values():
            watched.layer.reset_counters()

    def is_over(self, tokens: int) -> bool:
        """Counts computed tokens; returns whether the window is complete."""
        self._open_tokens += tokens
        return bool(self._watched) and self._open_tokens >= self._options.drift_window

    def close_window(self, rows: Mapping[str, int]) -> None:
        """Reads and resets all counters, moves scales that follow, and names layers that began or ceased to drift.

        `rows`: how many rows every layer has read since the start.
        """
        self._open_tokens = 0
        self.num_windows += 1
        self._move_scales()
        for name, amax, saturated in self._counted():
            self._watched[name].close_window(amax, saturated, rows[name])
        for watched in self._watched.values():
            watched.layer.reset_counters()
        self._raise_alarms()

    def records(self, rows: Mapping[str, int]) -> list[dict[str, Any]]:
        """See `Engine.scales`."""
        return [self._record(name, layer, rows[name]) for name, layer in self._layers.items()]

    def stats(self) -> dict[str, Any]:
        """Numbers of the last window over all layers, if there was one."""
        drifts = [drift for watched in self._watched.values() if (drift := watched.drift) is not None]
        numbers: dict[str, Any] = {"scale_windows_total": self.num_windows, "layers_drifting": len(self._alarming)}
        cut = [share for watched in self._watched.values() if (share := watched.window_saturation) is not None]
        numbers |= {"input_saturation_max": max(cut)} if cut else {}
        return numbers | ({"input_drift_max": max(drifts)} if drifts else {})

    def rolled(self) -> ScalingCheckpoint:
        """The scales that follow the traffic, with their histories, not yet including the open window.

        RequestError: none follows it.
        """
        if not self._states:
            raise RequestError("The scales of this server do not follow the traffic; start it with --roll-history.")
        states = {id(layer.input_scale): state for layer, state in self._states}
        by_layer = {name: states[id(watched.layer.input_scale)] for name, watched in self._watched.items()}
        return ScalingCheckpoint(
            self._rules, {f"{name}.input": TensorScale(s.scale, s.amax_history) for name, s in by_layer.items()}
        )

    def _record(self, name: str, layer: FrozenLinear, rows: int) -> dict[str, Any]:
        watched = self._watched.get(name)
        numbers = dict.fromkeys(RECORDED) if watched is None else watched.record(rows)
        return {"name": name, "input": input_scale(layer), **numbers, "drifts": name in self._alarming}

    def _counted(self) -> Iterable[tuple[str, float, int]]:
        layers = [watched.layer for watched in self._watched.values()]
        amaxes = torch.stack([layer.amax for layer in layers]).tolist()
        saturated = torch.stack([layer.saturated for layer in layers]).tolist()
        return zip(self._watched, amaxes, saturated, strict=True)

    @torch.no_grad()
    def _move_scales(self) -> None:
        """One step of delayed scaling, in place: other layers and captured graphs read these very tensors."""
        for layer, state in self._states:
            state.stage(layer.amax)
        update([Entry(state, E4M3_MAX) for _, state in self._states], self._rules)
        for layer, state in self._states:
            layer.input_scale_inv.copy_(state.scale.reciprocal())  # type: ignore[union-attr]

    def _raise_alarms(self) -> None:
        limit = self._options.drift_alarm
        alarming = {name for name, watched in self._watched.items() if (watched.drift or 0) > limit}
        if began := sorted(alarming - self._alarming, key=lambda name: -(self._watched[name].drift or 0)):
            worst = ", ".join(f"{name} ({self._watched[name].drift:.3g} times)" for name in began[:NAMED])
            log.warning(
                "%d FP8 layers read inputs beyond %g times what calibration saw: %s%s. Calibrate on text like the "
                "traffic, or serve with --roll-history.",
                len(began), limit, worst, ", ..." if len(began) > NAMED else "",
            )  # fmt: skip
        if ended := sorted(self._alarming - alarming):
            names = ", ".join(ended[:NAMED]) + (", ..." if len(ended) > NAMED else "")
            log.info("%d FP8 layers read inputs in the calibrated range again: %s.", len(ended), names)
        self._alarming = alarming


RECORDED = (
    "amax", "scale", "headroom", "saturated", "saturation", "calibrated_amax", "window_amax", "window_saturation",
    "drift",
)  # fmt: skip
"""The numbers of a record; None where the scale follows every input."""


def input_scale(layer: FrozenLinear) -> str:
    """How the inputs of a layer are scaled, in a word or two."""
    spec = layer.input_spec
    if not spec.is_fp8:
        return "unquantized"
    return "stored" if spec.source == "stored" else f"per {spec.granularity}"


def _amax(layer: FrozenLinear, name: str, calibrated: Calibrated) -> float:
    """The largest magnitude that calibration saw, or, without a history, that the scale can represent."""
    history = calibrated.histories.get(name)
    seen = 0.0 if history is None else float(history.amax())
    return seen or E4M3_MAX / float(layer.input_scale)  # type: ignore[arg-type]


def _states(layers: Mapping[str, FrozenLinear], calibrated: Calibrated) -> list[tuple[FrozenLinear, ScalingState]]:
    """For each scale, a state that owns that very tensor, and the first of the layers that read it."""
    firsts: dict[int, str] = {}
    for name, layer in layers.items():
        firsts.setdefault(id(layer.input_scale), name)
    return [(layers[name], _state(layers[name], name, calibrated)) for name in firsts.values()]


def _state(layer: FrozenLinear, name: str, calibrated: Calibrated) -> ScalingState:
    scale, length = layer.input_scale, calibrated.rules.amax_history_len
    assert scale is not None  # of a stored scale
    state = ScalingState.create(length, scale.device)
    history = calibrated.histories.get(name)
    if history is None or not bool(history.any()):
        history = torch.tensor([0.0, E4M3_MAX / 2.0**calibrated.rules.margin / float(scale)])
    state.amax_history = history.to(scale.device, torch.float32).clone()
    state.resize(length)
    state.scale = scale
    return state
