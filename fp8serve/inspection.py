"""Lists the scales of a checkpoint with their tensors, directions, shapes, values and origins.

A model directory stores dequantizing scales under the names of its format. `scales.safetensors` and the `_extra_state`
tensors of Transformer Engine store quantizing scales and their amax histories. This module reads and checks a
checkpoint with the code that also serves or imports it. A scale that cannot be served is listed with the reason. If the
model cannot be loaded, because its architecture is unknown or a shard is missing, scales are recognized by their names
alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.errors import ModelError, ScalesError
from fp8serve.model.checkpoint import check_servable, kv_scales_error
from fp8serve.model.compatibility import compatibility_notes
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import ComputedBy, computed_by
from fp8serve.model.config.wrappers import unused_part_notes
from fp8serve.model.formats import interop, transformer_engine
from fp8serve.model.formats.microscaling import WidenedShards, widened_notes
from fp8serve.model.formats.scales import FILE_NAME, FORMAT, ScalingCheckpoint, find_problems, read_scales
from fp8serve.model.storage.shards import Shards, read_header
from fp8serve.model.stored_checkpoint import (
    Checkpoint,
    dropped_inputs_notes,
    find_contradictions,
    matrices_notes,
    open_checkpoint,
)

Direction = Literal["quantizes", "dequantizes", "unknown"]


@dataclass(frozen=True)
class Scale:
    """A scale tensor. `history` is its amax history, oldest first, if the file stores one."""

    tensor: str  # the scaled tensor: "model.layers.0.self_attn.q_proj.input"
    key: str  # the name of the scale in the file
    direction: Direction
    shape: list[int]
    smallest: float
    largest: float
    origin: str
    history: list[float] | None = None
    problem: str | None = None  # why the scale cannot be served


def inspect(path: Path) -> dict[str, Any]:
    """Returns a report about a model directory, a scales.safetensors, a .safetensors file of weights, or a file with
    the `_extra_state` tensors of Transformer Engine.

    The report has the keys "path", "holds", "computed_by", "scales" (each `Scale` as a dict), "notes", "problem" and
    "cache_problem". `computed_by` is "fp8serve", "transformers", or None if no model can be loaded. `notes` are
    sentences about parts that are not loaded and about programs that cannot read the checkpoint. `problem` says why
    the model cannot be served. `cache_problem` says why it only supports a BF16 cache.

    Raises ModelError or ScalesError if there is no checkpoint at `path` or it is damaged.
    """
    if path.is_file():
        return _inspect_file(path)
    if not path.is_dir():
        raise ModelError(f"There is no {path}; give a model directory or a {FILE_NAME}.")
    state = read_scales(path / FILE_NAME) if (path / FILE_NAME).is_file() else None
    if (path / "config.json").is_file():
        return _inspect_model(path, state)
    if state is None:
        raise ModelError(f"{path} holds neither config.json nor {FILE_NAME}; give a model directory.")
    return _report(path, "scales", _from_scales(state, FILE_NAME))


def _inspect_file(path: Path) -> dict[str, Any]:
    if transformer_engine.holds_states(path):
        scales = transformer_engine.read_file(path)
        return _report(path, "delayed scaling state of Transformer Engine", _from_scales(scales, path.name))
    if path.name != FILE_NAME:
        shards = Shards(*read_header(path))
        if shards.metadata.get("format") != FORMAT:
            return _report(path, "tensors of a model", _from_names(shards))
    return _report(path, "scales", _from_scales(read_scales(path), path.name))


def _inspect_model(path: Path, state: ScalingCheckpoint | None) -> dict[str, Any]:
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        headers = [read_header(file)[0] for file in sorted(path.glob("*.safetensors")) if file.name != FILE_NAME]
        shards = Shards({key: tensor for header in headers for key, tensor in header.items()}, {})
        scales = _from_names(shards) + ([] if state is None else _from_scales(state, FILE_NAME))
        return _report(path, "a model that cannot be loaded here", scales, problem=str(error).removesuffix("."))
    scales = _from_checkpoint(checkpoint)
    if state is not None:
        scales += _from_scales(state, FILE_NAME, dict(find_contradictions(checkpoint, state)))
    problem = None
    try:
        check_servable(checkpoint)
    except (ModelError, ScalesError) as error:
        problem = str(error).removesuffix(".")
    cache_problem = None if isinstance(checkpoint.any_config, EncoderConfig) else kv_scales_error(path)
    notes = [
        *unused_part_notes(path, checkpoint.omitted_modules),
        *widened_notes(checkpoint.shards),
        *matrices_notes(checkpoint),
        *dropped_inputs_notes(checkpoint),
        *compatibility_notes(checkpoint),
    ]
    computed = computed_by(checkpoint.any_config)
    return _report(path, _describe(checkpoint), scales, notes, problem, computed, cache_problem)


def _from_names(shards: Shards) -> list[Scale]:
    """Returns the tensors with the name of a scale, for models that cannot be loaded."""
    scales = []
    for key in sorted(shards, key=_natural_order):
        file = shards.entries[key].file.name
        try:
            if (result := interop.parse_scale_key(key)) is not None:
                scales.append(_scale(f"{result.owner}.{result.role}", key, "dequantizes", shards[key], file))
        except ModelError:
            scales.append(_scale(key, key, "unknown", shards[key], file, problem="has a meaning that is not known"))
    return scales


def _natural_order(key: str) -> list[tuple[int, str]]:
    """Returns a sort key by which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _report(
    path: Path,
    holds: str,
    scales: list[Scale],
    notes: Sequence[str] = (),
    problem: str | None = None,
    computed: ComputedBy | None = None,
    cache_problem: str | None = None,
) -> dict[str, Any]:
    return {
        "path": str(path),
        "holds": holds,
        "computed_by": computed,
        "scales": [asdict(scale) for scale in scales],
        "notes": list(notes),
        "problem": problem,
        "cache_problem": cache_problem,
    }


def _describe(checkpoint: Checkpoint) -> str:
    quantization, config = checkpoint.quantization, checkpoint.any_config
    if quantization is None:
        return f"{config.architecture} with weights in high precision"
    formats = [checkpoint.weight_format(name) for name in checkpoint.quantized_linears]
    parts = [f"{formats.count(name)} {name} linear layers" for name in dict.fromkeys(formats)]
    widened = len(checkpoint.shards.widened) if isinstance(checkpoint.shards, WidenedShards) else 0
    parts += [f"{widened} weights that run in BF16"] if widened else [] if parts else ["0 FP8 linear layers"]
    parts += [f"{name} in {checkpoint.weight_format(name)}" for name in checkpoint.quantized_matrices]
    return f"{config.architecture} with {', '.join(parts)}, as {quantization.producer} writes them"


def _from_checkpoint(checkpoint: Checkpoint) -> list[Scale]:
    attention = [f"model.layers.{i}.self_attn" for i in range(checkpoint.any_config.num_layers)]
    quantized_layers = (*checkpoint.quantized_linears, *checkpoint.quantized_matrices)
    tensors = [(layer, role) for layer in quantized_layers for role in ("input", "weight", "global", "pre_quant")]
    tensors += [(layer, role) for layer in attention for role in ("k", "v", "kv")]
    scales = [_stored_scale(checkpoint, layer, role) for layer, role in tensors]  # type: ignore[arg-type]
    return [scale for scale in scales if scale is not None]


def _stored_scale(checkpoint: Checkpoint, owner: str, role: interop.Role) -> Scale | None:
    key, quantization = checkpoint.scale_key(owner, role), checkpoint.quantization
    if key is None:
        return None
    producer = "?" if quantization is None else quantization.producer
    origin = f"{checkpoint.shards.entries[key].file.name} ({producer})"
    scheme = None if quantization is None or role != "input" else quantization.find_scheme(owner)
    direction: Direction = "quantizes" if key.endswith(interop.ENCODING_SUFFIXES) else "dequantizes"
    if role == "pre_quant":
        return _scale(f"{owner}.{role}", key, "unknown", checkpoint.shards[key], f"{origin}, multiplies inputs")
    scale = _scale(f"{owner}.{role}", key, direction, checkpoint.shards[key], origin)
    if scheme is None or scheme.input_spec.source == "stored":
        return scale
    reason = "are scaled dynamically" if scheme.input_spec.is_quantized else "stay in BF16"
    return replace(scale, origin=f"{origin}, not read: inputs {reason}", problem=None)


def _from_scales(
    scales: ScalingCheckpoint, file: str, further_problems: Mapping[str, str] | None = None
) -> list[Scale]:
    problems_by_tensor = {**(further_problems or {}), **dict(find_problems(scales))}
    counts = scales.observations.get("tensors", {})
    return [
        _scale(
            tensor,
            f"{tensor}.scale",
            "quantizes",
            entry.scale,
            f"{file}: {counts[tensor]} observations" if tensor in counts else file,
            None if entry.amax_history is None else _oldest_first(entry.amax_history),
            problems_by_tensor.get(tensor),
        )
        for tensor, entry in scales.tensors.items()
    ]


def _scale(
    tensor: str,
    key: str,
    direction: Direction,
    value: Tensor,
    origin: str,
    history: list[float] | None = None,
    problem: str | None = None,
) -> Scale:
    # bytes are exponents of MX blocks
    values = (value.view(torch.float8_e8m0fnu) if value.dtype is torch.uint8 else value).float().flatten()
    if not len(values):
        return Scale(tensor, key, direction, list(value.shape), 0.0, 0.0, origin, history, problem or "is empty")
    invalid = values[~(values.isfinite() & (values > 0))]
    low, high = (float(invalid[0]), float(invalid[0])) if len(invalid) else (float(values.min()), float(values.max()))
    if len(invalid) and problem is None:
        problem = f"holds {low}, which cannot be served"
    return Scale(tensor, key, direction, list(value.shape), low, high, origin, history, problem)


def _oldest_first(history: Tensor) -> list[float]:
    """Returns the recorded amaxes of an amax history. Slot 0 is the current step, slot 1 the oldest; zeros are unused
    slots."""
    values: list[float] = history.tolist()
    return [amax for amax in (*values[1:], values[0]) if amax != 0]
