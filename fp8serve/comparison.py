"""Compares two checkpoints: configuration, scales, weights, and the parts that only one of them has.

Scales are compared as the multipliers that quantize, whatever their files store: those of scales.safetensors where it
has them, else those beside the weights. Weights are compared by their bits where both are stored in one format, and in
any case by their values in FP32, so that an FP8 directory can be compared with its high-precision source. Weights are
read some rows at a time.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import expand
from fp8serve.fp8.recipe import to_json
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.formats import transformer_engine
from fp8serve.model.formats.interop import quantizing_scale
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, read_scales
from fp8serve.model.storage.shards import DTYPES
from fp8serve.model.stored import Checkpoint, open_checkpoint

SLICE = 1 << 22  # elements that are widened to FP32 at a time
KINDS = {kind: "FP8" if name == "F8_E4M3" else name for name, kind in DTYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class ScaleChange:
    """A tensor's scale in both. `a` and `b`: smallest and largest multiplier that quantizes."""

    tensor: str
    a: tuple[float, float]
    b: tuple[float, float]
    ratio: float | None  # the b / a that is farthest from 1; None: different granularities


@dataclass(frozen=True)
class WeightChange:
    """A weight that differs between the two. Values are those that the model computes with."""

    tensor: str
    a: str  # format and shape
    b: str
    differing: float | None  # fraction of the stored elements; None: stored in different formats
    largest: float | None  # largest change of an element; None: different shapes
    sqnr_db: float | None  # of a over the change; None: no change of values, or of different shapes


@dataclass(frozen=True)
class Comparison:
    """The differences; `same_weights` and `same_scales` count what is equal."""

    a: str
    b: str
    config: dict[str, tuple[Any, Any]]  # by key, a part of a nested one behind a dot; None: not there
    weights: tuple[WeightChange, ...]  # largest change of values first
    scales: tuple[ScaleChange, ...]  # farthest from 1 first
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    same_weights: int
    same_scales: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Side:
    """The contents of a path."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    scales: dict[str, Tensor] = field(default_factory=dict)  # quantizing, [] or by rows or blocks

    @property
    def tensors(self) -> set[str]:
        """Names of weights and, marked as such, of scales."""
        return {*(self.checkpoint or ()), *(f"{name} (scale)" for name in self.scales)}


def compare(a: Path, b: Path, advance: Advance | None = None) -> Comparison:
    """`a` and `b`: model directories, or files of scales. advance(done, in all) is called after every weight.

    ModelError, ScalesError: one of them cannot be read, or they have nothing in common.
    """
    one, other = _side(a), _side(b)
    if not one.tensors & other.tensors:
        raise ModelError(f"{a} and {b} have no weight and no scale in common, so there is nothing to compare.")
    weights, same_weights = _weights(one.checkpoint, other.checkpoint, advance)
    scales, same_scales = _scales(one.scales, other.scales)
    return Comparison(
        a=str(a),
        b=str(b),
        config=_differing(*_comparable(one, other)),
        weights=weights,
        scales=scales,
        only_in_a=tuple(sorted(one.tensors - other.tensors)),
        only_in_b=tuple(sorted(other.tensors - one.tensors)),
        same_weights=same_weights,
        same_scales=same_scales,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _side(path: Path) -> _Side:
    if path.is_file():
        state = transformer_engine.read_file(path) if transformer_engine.holds_states(path) else read_scales(path)
        return _Side(path, _recipe(state), scales=_of_state(state))
    sidecar = path / FILE_NAME
    state = read_scales(sidecar) if sidecar.is_file() else ScalingCheckpoint(None, {})
    if not (path / "config.json").exists() and state.tensors:
        return _Side(path, _recipe(state), scales=_of_state(state))
    checkpoint = open_checkpoint(path)
    config = read_text_config(path) | (_recipe(state) if state.tensors else {})
    return _Side(path, config, checkpoint, _of_checkpoint(checkpoint) | _of_state(state))


def _recipe(state: ScalingCheckpoint) -> dict[str, Any]:
    return {f"recipe in {FILE_NAME}": json.loads(to_json(state.recipe))}


def _of_state(state: ScalingCheckpoint) -> dict[str, Tensor]:
    return {name: entry.scale for name, entry in state.tensors.items()}


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    for linear in checkpoint.fp8_linears:
        stored = checkpoint.stored(linear)
        if stored is not None:
            results[f"{linear}.weight"] = stored.weight_scale_inv.reciprocal()
            if stored.input_scale is not None:
                results[f"{linear}.input"] = stored.input_scale
    return results | dict(_of_cache(checkpoint))


def _of_cache(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The scales beside the weights, whatever scales.safetensors says."""
    roles: tuple[Literal["k", "v"], ...] = ("k", "v")
    for owner in (f"model.layers.{layer}.self_attn" for layer in range(checkpoint.config.num_layers)):
        for role in roles:
            key = checkpoint.scale_key(owner, role) or checkpoint.scale_key(owner, "kv")
            if key is not None:
                note = checkpoint.shards.entries[key].note
                yield f"{owner}.{role}", quantizing_scale(key, checkpoint.shards[key], note)


# -- configuration ---------------------------------------------------------------------------------------------------


def _comparable(a: _Side, b: _Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """If one side is a file of scales, only the recipes are compared."""
    if a.checkpoint is not None and b.checkpoint is not None:
        return a.config, b.config
    shared = a.config.keys() & b.config.keys()
    return {key: a.config[key] for key in shared}, {key: b.config[key] for key in shared}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    results: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*a, *b)):
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            results |= _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            results[prefix + key] = one, other
    return results


# -- scales ----------------------------------------------------------------------------------------------------------


def _scales(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[tuple[ScaleChange, ...], int]:
    """(those that differ, how many do not)."""
    both = [name for name in a if name in b]
    changed = [
        _scale_change(name, a[name].float(), b[name].float()) for name in both if not torch.equal(a[name], b[name])
    ]
    far = sorted(changed, key=lambda c: -abs(math.log2(c.ratio)) if c.ratio and c.ratio > 0 else -math.inf)
    return tuple(far), len(both) - len(changed)


def _scale_change(name: str, a: Tensor, b: Tensor) -> ScaleChange:
    ranges = [(float(x.min()), float(x.max())) for x in (a, b)]
    if a.shape != b.shape:
        return ScaleChange(name, ranges[0], ranges[1], None)
    ratios = (b / a).flatten()
    return ScaleChange(name, ranges[0], ranges[1], float(ratios[ratios.log2().abs().argmax()]))


# -- weights ---------------------------------------------------------------------------------------------------------


def _weights(
    a: Checkpoint | None, b: Checkpoint | None, advance: Advance | None
) -> tuple[tuple[WeightChange, ...], int]:
    """(those that differ, how many do not)."""
    if a is None or b is None:
        return (), 0
    both = [name for name in a if name in b]
    changed = []
    for done, name in enumerate(both, 1):
        change = _weight_change(name, _Weight.of(a, name), _Weight.of(b, name))
        changed += [] if change is None else [change]
        if advance:
            advance(done, len(both))
    worst = sorted(changed, key=lambda c: (c.largest is not None, c.sqnr_db is None, c.sqnr_db or 0.0))
    return tuple(worst), len(both) - len(changed)


@dataclass(frozen=True)
class _Weight:
    """As it is in the file: `stored`, and its dequantizing scale, FP32 [], by rows or blocks, or None."""

    stored: Tensor
    scale_inv: Tensor | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> "_Weight":
        linear = checkpoint.stored(name.removesuffix(".weight"))
        return cls(checkpoint[name], None) if linear is None else cls(linear.weight_q, linear.weight_scale_inv)

    def __str__(self) -> str:
        return f"{KINDS[self.stored.dtype]} {list(self.stored.shape)}"

    def bits(self) -> Tensor:
        return self.stored.view(BITS[self.stored.dtype.itemsize])

    def slices(self) -> Iterator[Tensor]:
        """The values in FP32, some rows at a time."""
        rows = self.stored.reshape(len(self.stored), -1)
        count = max(1, SLICE // max(1, rows.shape[1]))
        if self.scale_inv is None:
            yield from (part.float() for part in torch.split(rows, count))
            return
        scales = torch.broadcast_to(expand(self.scale_inv, *rows.shape), rows.shape)
        yield from (q.float() * s for q, s in zip(*(torch.split(t, count) for t in (rows, scales)), strict=True))


def _weight_change(name: str, a: _Weight, b: _Weight) -> WeightChange | None:
    """None: the same values."""
    if a.stored.shape != b.stored.shape:
        return WeightChange(name, str(a), str(b), None, None, None)
    alike = a.stored.dtype == b.stored.dtype
    differing = float((a.bits() != b.bits()).double().mean()) if alike else None
    if differing == 0 and _equal(a.scale_inv, b.scale_inv):
        return None
    largest, signal, noise = 0.0, 0.0, 0.0
    for one, other in zip(a.slices(), b.slices(), strict=True):
        change = one - other
        largest = max(largest, float(change.abs().max()))
        signal += float(one.square().sum(dtype=torch.float64))
        noise += float(change.square().sum(dtype=torch.float64))
    return WeightChange(name, str(a), str(b), differing, largest, _decibels(signal, noise))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _decibels(signal: float, noise: float) -> float | None:
    return None if signal == 0 or noise == 0 else 10 * math.log10(signal / noise)
