"""Compares the configurations, scales and weights of two checkpoints, and lists tensors that only one of them has.

Scales are compared as quantizing multipliers: those of scales.safetensors, or those beside the weights for tensors
without an entry there. Weights are compared by their values in FP32, so that an FP8 directory can be compared with its
high-precision source. Weights of the same format are also compared by their bits. The conversion to FP32 takes a slice
of rows at a time.
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
from fp8serve.fp8.ops import e2m1
from fp8serve.fp8.ops.arithmetic import expand
from fp8serve.fp8.recipe import to_json
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.formats import transformer_engine
from fp8serve.model.formats.interop import to_quantizing_scale
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, read_scales
from fp8serve.model.storage.shards import DTYPES
from fp8serve.model.stored_checkpoint import Checkpoint, open_checkpoint

SLICE_ELEMENTS = 1 << 22  # elements that are converted to FP32 at a time
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class ScaleChange:
    """A scale that differs. `a` and `b` are its smallest and its largest quantizing multiplier in each checkpoint."""

    tensor: str
    a: tuple[float, float]
    b: tuple[float, float]
    ratio: float | None  # the b / a that is farthest from 1; None if the granularities differ


@dataclass(frozen=True)
class WeightChange:
    """A weight that differs. Changes are differences of dequantized values."""

    tensor: str
    a: str  # format and shape
    b: str
    differing: float | None  # the fraction of stored elements that differ; None if the formats differ
    largest: float | None  # the largest absolute change of an element; None if the shapes differ
    sqnr_db: float | None  # the SQNR of the change relative to a; None if no value changes or the shapes differ


@dataclass(frozen=True)
class Comparison:
    """The differences. `same_weights` and `same_scales` count the equal tensors."""

    a: str
    b: str
    config: dict[str, tuple[Any, Any]]  # by key; nested keys are joined by dots, and a missing value is None
    weights: tuple[WeightChange, ...]  # largest change first
    scales: tuple[ScaleChange, ...]  # ratio farthest from 1 first
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    same_weights: int
    same_scales: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Content:
    """The content of a model directory or of a file of scales."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    scales: dict[str, Tensor] = field(default_factory=dict)  # quantizing, per tensor, row or block

    @property
    def tensors(self) -> set[str]:
        """The names of the weights and, with a suffix, of the scales."""
        return {*(self.checkpoint or ()), *(f"{name} (scale)" for name in self.scales)}


def compare(a: Path, b: Path, advance: Advance | None = None) -> Comparison:
    """Compares two model directories or files of scales. After each weight, calls `advance` with the number of weights
    compared so far and the number of all weights.

    Raises ModelError or ScalesError if one of them cannot be read or they have no tensor in common.
    """
    content_a, content_b = _read_content(a), _read_content(b)
    if not content_a.tensors & content_b.tensors:
        raise ModelError(f"{a} and {b} have no weight and no scale in common, so there is nothing to compare.")
    config_a, config_b = content_a.config, content_b.config
    if content_a.checkpoint is None or content_b.checkpoint is None:  # a file of scales has few keys
        common = config_a.keys() & config_b.keys()
        config_a, config_b = ({key: config[key] for key in common} for config in (config_a, config_b))
    weights, same_weights = _compare_weights(content_a.checkpoint, content_b.checkpoint, advance)
    scales, same_scales = _compare_scales(content_a.scales, content_b.scales)
    return Comparison(
        a=str(a),
        b=str(b),
        config=_config_changes(config_a, config_b),
        weights=weights,
        scales=scales,
        only_in_a=tuple(sorted(content_a.tensors - content_b.tensors)),
        only_in_b=tuple(sorted(content_b.tensors - content_a.tensors)),
        same_weights=same_weights,
        same_scales=same_scales,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _read_content(path: Path) -> _Content:
    if path.is_file():
        state = transformer_engine.read_file(path) if transformer_engine.holds_states(path) else read_scales(path)
        return _Content(path, _recipe_config(state), scales=_state_scales(state))
    scales_file = path / FILE_NAME
    state = read_scales(scales_file) if scales_file.is_file() else ScalingCheckpoint(None, {})
    if not (path / "config.json").exists() and state.tensors:
        return _Content(path, _recipe_config(state), scales=_state_scales(state))
    checkpoint = open_checkpoint(path)
    config = read_text_config(path) | (_recipe_config(state) if state.tensors else {})
    return _Content(path, config, checkpoint, _checkpoint_scales(checkpoint) | _state_scales(state))


def _recipe_config(state: ScalingCheckpoint) -> dict[str, Any]:
    return {f"recipe in {FILE_NAME}": json.loads(to_json(state.recipe))}


def _state_scales(state: ScalingCheckpoint) -> dict[str, Tensor]:
    return {name: entry.scale for name, entry in state.tensors.items()}


def _checkpoint_scales(checkpoint: Checkpoint) -> dict[str, Tensor]:
    scales: dict[str, Tensor] = {}
    for linear in checkpoint.quantized_linears:
        stored = checkpoint.quantized_matrix(linear)
        if stored is not None:
            scales[f"{linear}.weight"] = stored.quantized_weight.full_scale().reciprocal()
            if stored.input_scale is not None:
                scales[f"{linear}.input"] = stored.input_scale
    return scales | dict(_cache_scales(checkpoint))


def _cache_scales(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yields the scales of the KV cache that are stored beside the weights."""
    roles: tuple[Literal["k", "v"], ...] = ("k", "v")
    for owner in (f"model.layers.{layer}.self_attn" for layer in range(checkpoint.config.num_layers)):
        for role in roles:
            key = checkpoint.scale_key(owner, role) or checkpoint.scale_key(owner, "kv")
            if key is not None:
                note = checkpoint.shards.entries[key].note
                yield f"{owner}.{role}", to_quantizing_scale(key, checkpoint.shards[key], note)


# -- configuration ---------------------------------------------------------------------------------------------------


def _config_changes(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    changes: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*a, *b)):
        value_a, value_b = a.get(key), b.get(key)
        if isinstance(value_a, Mapping) and isinstance(value_b, Mapping):
            changes |= _config_changes(value_a, value_b, f"{prefix}{key}.")
        elif value_a != value_b:
            changes[prefix + key] = value_a, value_b
    return changes


# -- scales ----------------------------------------------------------------------------------------------------------


def _compare_scales(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[tuple[ScaleChange, ...], int]:
    common = [name for name in a if name in b]
    changed = [
        _scale_change(name, a[name].float(), b[name].float()) for name in common if not torch.equal(a[name], b[name])
    ]
    changed.sort(key=lambda c: -abs(math.log2(c.ratio)) if c.ratio and c.ratio > 0 else -math.inf)
    return tuple(changed), len(common) - len(changed)


def _scale_change(name: str, a: Tensor, b: Tensor) -> ScaleChange:
    ranges = [(float(x.min()), float(x.max())) for x in (a, b)]
    if a.shape != b.shape:
        return ScaleChange(name, ranges[0], ranges[1], None)
    ratios = (b / a).flatten()
    return ScaleChange(name, ranges[0], ranges[1], float(ratios[ratios.log2().abs().argmax()]))


# -- weights ---------------------------------------------------------------------------------------------------------


def _compare_weights(
    a: Checkpoint | None, b: Checkpoint | None, advance: Advance | None
) -> tuple[tuple[WeightChange, ...], int]:
    """Returns the weights that differ, largest change first, and the number of equal weights."""
    if a is None or b is None:
        return (), 0
    common = [name for name in a if name in b]
    changed = []
    for done, name in enumerate(common, 1):
        change = _weight_change(name, _Weight.of(a, name), _Weight.of(b, name))
        changed += [] if change is None else [change]
        if advance:
            advance(done, len(common))
    changed.sort(key=lambda c: (c.largest is not None, c.sqnr_db is None, c.sqnr_db or 0.0))
    return tuple(changed), len(common) - len(changed)


@dataclass(frozen=True)
class _Weight:
    """A stored weight, the name of its format, and its dequantizing scale (per tensor, row or block), or None."""

    format: str
    stored: Tensor
    scale_inv: Tensor | None = None
    global_scale: Tensor | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> "_Weight":
        owner = name.removesuffix(".weight")
        matrix = checkpoint.quantized_matrix(owner)
        if matrix is None or matrix.pre_quant_scale is not None:  # whose stored elements are not those of the weight
            stored = checkpoint[name]
            return cls(DTYPE_NAMES[stored.dtype], stored)
        return cls(checkpoint.weight_format(owner), *matrix.quantized_weight)

    def __str__(self) -> str:
        return f"{self.format} {list(self.shape)}"

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.stored.shape[:1], self.stored.shape[1:]
        return (*rows, 2 * columns[0]) if self.stored.dtype is torch.uint8 else tuple(self.stored.shape)

    def slices(self) -> Iterator[Tensor]:
        """Yields slices of rows of the dequantized weight in FP32."""
        rows = self.stored.reshape(len(self.stored), -1)
        count = max(1, SLICE_ELEMENTS // max(1, rows.shape[1]))
        if rows.dtype is torch.uint8 and self.scale_inv is not None:
            pairs = zip(torch.split(rows, count // 2), torch.split(self.scale_inv, count // 2), strict=True)
            yield from (e2m1.dequantize(codes, scales, self.global_scale) for codes, scales in pairs)
            return
        if self.scale_inv is None:
            yield from (part.float() for part in torch.split(rows, count))
            return
        scales = torch.broadcast_to(expand(self.scale_inv, *rows.shape), rows.shape)
        yield from (q.float() * s for q, s in zip(*(torch.split(t, count) for t in (rows, scales)), strict=True))


def _weight_change(name: str, a: _Weight, b: _Weight) -> WeightChange | None:
    """Returns the change of a weight, or None if the stored elements and scales are equal."""
    if a.shape != b.shape:
        return WeightChange(name, str(a), str(b), None, None, None)
    differing = float((_bits(a.stored) != _bits(b.stored)).double().mean()) if a.format == b.format else None
    if differing == 0 and _equal(a.scale_inv, b.scale_inv) and _equal(a.global_scale, b.global_scale):
        return None
    largest, signal, noise = 0.0, 0.0, 0.0
    for slice_a, slice_b in zip(a.slices(), b.slices(), strict=True):
        change = slice_a - slice_b
        largest = max(largest, float(change.abs().max()))
        signal += float(slice_a.square().sum(dtype=torch.float64))
        noise += float(change.square().sum(dtype=torch.float64))
    sqnr = None if signal == 0 or noise == 0 else 10 * math.log10(signal / noise)
    return WeightChange(name, str(a), str(b), differing, largest, sqnr)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype is b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.view(INTEGER_DTYPES[x.dtype.itemsize])
