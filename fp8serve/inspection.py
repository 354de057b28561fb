"""Every scale in a checkpoint: what it scales, in which direction, its shape and values, and where it came from.

Scales are stored in three kinds of places. A model directory stores dequantizing multipliers under the names of its
format; `scales.safetensors` stores quantizing multipliers and the amax histories they were made from, and so do the
`_extra_state` tensors of Transformer Engine. All are read and checked by the same code that serves or imports them:
scales that cannot be served are shown and marked with the reason. If the model itself cannot be loaded (an unknown
architecture, a missing shard), its tensors are shown by their names alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fp8serve.errors import ModelError, ScalesError
from fp8serve.model.checkpoint import cache_refusal, check_servable
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import ComputedBy, computed_by
from fp8serve.model.config.wrappers import left_out_notes
from fp8serve.model.formats import interop, transformer_engine
from fp8serve.model.formats.scales import FILE_NAME, FORMAT, ScalingCheckpoint, problems, read_scales
from fp8serve.model.readers import reader_notes
from fp8serve.model.storage.shards import Shards, read_header
from fp8serve.model.stored import Checkpoint, contradictions, matrices_note, open_checkpoint

Direction = Literal["quantizes", "dequantizes", "unknown"]

HISTORY_SHOWN = 32
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Scale:
    """One scale tensor. `history` holds the amaxes it was made from, oldest first, where the file keeps them."""

    tensor: str  # what it scales: "model.layers.0.self_attn.q_proj.input"
    key: str  # its name in the file
    direction: Direction
    shape: list[int]
    smallest: float
    largest: float
    origin: str
    history: list[float] | None = None
    problem: str | None = None  # why it cannot be served


def inspect(path: Path) -> dict[str, Any]:
    """{"path", "holds", "computed_by", "scales": [Scale as a dict, ...], "notes", "problem", "cache_problem"} of a
    model directory, of a scales.safetensors, of a .safetensors file of weights, or of one with the `_extra_state`
    tensors of Transformer Engine.

    `computed_by` is "fp8serve", "transformers", or None where no model can be loaded.
    `notes` are sentences on what the model loses here and on which programs cannot read it; `problem` says why nothing
    in it can be served, or is None; `cache_problem` says why only a BF16 cache can be used with it, or is None. A model
    that cannot be loaded is still shown, its tensors by their names alone.

    ModelError, ScalesError: there is nothing to inspect, or it is damaged.
    """
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise ModelError(f"There is no {path}; give a model directory or a {FILE_NAME}.")
    state = read_scales(path / FILE_NAME) if (path / FILE_NAME).is_file() else None
    if (path / "config.json").is_file():
        return _of_model(path, state)
    if state is None:
        raise ModelError(f"{path} holds neither config.json nor {FILE_NAME}; give a model directory.")
    return _report(path, "scales", _from_scales(state, FILE_NAME))


def _of_file(path: Path) -> dict[str, Any]:
    if transformer_engine.holds_states(path):
        scales = transformer_engine.read_file(path)
        return _report(path, "delayed scaling state of Transformer Engine", _from_scales(scales, path.name))
    if path.name != FILE_NAME:
        shards = Shards(*read_header(path))
        if shards.metadata.get("format") != FORMAT:
            return _report(path, "tensors of a model", _from_names(shards))
    return _report(path, "scales", _from_scales(read_scales(path), path.name))


def _of_model(path: Path, state: ScalingCheckpoint | None) -> dict[str, Any]:
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        result = _from_names(_present(path)) + ([] if state is None else _from_scales(state, FILE_NAME))
        return _report(path, "a model that cannot be loaded here", result, problem=str(error).removesuffix("."))
    result = _from_checkpoint(checkpoint)
    if state is not None:
        result += _from_scales(state, FILE_NAME, dict(contradictions(checkpoint, state)))
    problem = _refusal(checkpoint)
    cache = None if isinstance(checkpoint.any_config, EncoderConfig) else cache_refusal(path)
    notes = [*left_out_notes(path, checkpoint.left_out), *matrices_note(checkpoint), *reader_notes(checkpoint)]
    return _report(path, _describe(checkpoint), result, notes, problem, computed_by(checkpoint.any_config), cache)


def _present(path: Path) -> Shards:
    """The tensors of all existing weight files, whatever an index says."""
    headers = [read_header(file)[0] for file in sorted(path.glob("*.safetensors")) if file.name != FILE_NAME]
    return Shards({key: tensor for header in headers for key, tensor in header.items()}, {})


def _from_names(shards: Shards) -> list[Scale]:
    """Tensors that are named like a scale; the architecture may be unknown."""
    named = [_named(shards, key) for key in sorted(shards, key=_natural)]
    return [scale for scale in named if scale is not None]


def _named(shards: Shards, key: str) -> Scale | None:
    file = shards.entries[key].file.name
    try:
        result = interop.classify(key)
    except ModelError:
        return _scale(key, key, "unknown", shards[key], file, problem="has a meaning that is not known")
    tensor = "" if result is None else f"{result.owner}.{result.role}"
    return _scale(tensor, key, "dequantizes", shards[key], file) if tensor else None


def _natural(key: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _refusal(checkpoint: Checkpoint) -> str | None:
    """Why loading the model fails."""
    try:
        check_servable(checkpoint)
    except (ModelError, ScalesError) as error:
        return str(error).removesuffix(".")
    return None


def _report(
    path: Path,
    holds: str,
    scales: list[Scale],
    notes: Sequence[str] = (),
    problem: str | None = None,
    computed: ComputedBy | None = None,
    cache: str | None = None,
) -> dict[str, Any]:
    results = [asdict(s) for s in scales]
    about = {"path": str(path), "holds": holds, "computed_by": computed}
    return about | {"scales": results, "notes": list(notes), "problem": problem, "cache_problem": cache}


def _describe(checkpoint: Checkpoint) -> str:
    count, config = len(checkpoint.fp8_linears), checkpoint.any_config
    if checkpoint.quantization is None:
        return f"{config.architecture} with weights in high precision"
    in_fp8 = ", ".join([f"{count} FP8 linear layers", *(f"{name} in FP8" for name in checkpoint.fp8_matrices)])
    return f"{config.architecture} with {in_fp8}, as {checkpoint.quantization.producer} writes them"


def _from_checkpoint(checkpoint: Checkpoint) -> list[Scale]:
    attention = [f"model.layers.{i}.self_attn" for i in range(checkpoint.any_config.num_layers)]
    in_fp8 = (*checkpoint.fp8_linears, *checkpoint.fp8_matrices)
    places = [(owner, role) for owner in in_fp8 for role in ("input", "weight")]
    places += [(owner, role) for owner in attention for role in ("k", "v", "kv")]
    results = [_stored(checkpoint, owner, role) for owner, role in places]  # type: ignore[arg-type]
    return [scale for scale in results if scale is not None]


def _stored(checkpoint: Checkpoint, owner: str, role: interop.Role) -> Scale | None:
    key, quantization = checkpoint.scale_key(owner, role), checkpoint.quantization
    if key is None:
        return None
    producer = "?" if quantization is None else quantization.producer
    origin = f"{checkpoint.shards.entries[key].file.name} ({producer})"
    scheme = None if quantization is None or role != "input" else quantization.find_scheme(owner)
    scale = _scale(f"{owner}.{role}", key, "dequantizes", checkpoint.shards[key], origin)
    if scheme is None or scheme.input_spec.source == "stored":
        return scale
    return replace(scale, origin=f"{origin}, not read: inputs are scaled dynamically", problem=None)


def _from_scales(scales: ScalingCheckpoint, file: str, more: Mapping[str, str] | None = None) -> list[Scale]:
    wrong = {**(more or {}), **dict(problems(scales))}
    counts = scales.observations.get("tensors", {})
    return [
        _scale(
            tensor,
            f"{tensor}.scale",
            "quantizes",
            entry.scale,
            f"{file}: {counts[tensor]} observations" if tensor in counts else file,
            None if entry.amax_history is None else _oldest_first(entry.amax_history),
            wrong.get(tensor),
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
    wide = value.float().flatten()
    if not len(wide):
        return Scale(tensor, key, direction, list(value.shape), 0.0, 0.0, origin, history, problem or "is empty")
    bad = wide[~(wide.isfinite() & (wide > 0))]
    low, high = (float(bad[0]), float(bad[0])) if len(bad) else (float(wide.min()), float(wide.max()))
    if len(bad) and problem is None:
        problem = f"holds {low}, which cannot be served"
    return Scale(tensor, key, direction, list(value.shape), low, high, origin, history, problem)


def _oldest_first(history: Tensor) -> list[float]:
    """The recorded amaxes of a history: slot 0 stages the present step, 1 is the oldest; zeros are unused."""
    values: list[float] = history.tolist()
    return [amax for amax in (*values[1:], values[0]) if amax != 0]


def sparkline(history: list[float]) -> str:
    """The newest amaxes as a row of bars from zero to the largest."""
    newest = history[-HISTORY_SHOWN:]
    top = max(newest, default=0.0)
    return "".join(_BARS[round(amax / top * (len(_BARS) - 1))] for amax in newest) if top else ""
