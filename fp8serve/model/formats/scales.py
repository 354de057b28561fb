"""Reads and writes `scales.safetensors`, the scaling state that calibration, serving and fine-tuning share.

An FP8 linear P has `P.input.scale` F32 [] and `P.input.amax_history` F32 [N], the same for `P.weight` and, after
gradient calibration or training, for `P.grad_output`. An FP8 KV cache has `model.layers.N.self_attn.k.scale` and
`.v.scale`. A scale quantizes: q = saturate(x * scale). The metadata contain the recipe as JSON, the models'
fingerprints and the observation counts. Nothing is pickled.

A wrong scale only makes answers worse, which is easily overlooked. Loading a file therefore raises ScalesError if a
scale is zero, negative, infinite, NaN or subnormal, if a tensor was never observed, if an amax in its history exceeds
the range of its scale, if a key is unknown, or if the file belongs to another model or version.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import Fp8ServeError, RecipeError, ScalesError, json_fault
from fp8serve.fp8.amax_rules import RULES
from fp8serve.fp8.recipe import Recipe, as_delayed, from_json, to_json
from fp8serve.fp8.scaling import fp8_max
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.encoder import is_encoder, parse_encoder_config
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.files import fsync, read_optional_json, reject_duplicate_keys
from fp8serve.model.storage.shards import Shards, open_shards, read_header, save_tensors, type_name

FORMAT, VERSION = "fp8serve.scales", "1"
FILE_NAME = "scales.safetensors"
COPY_TOLERANCE = 0.01  # relative, between a scale and its copy in the checkpoint, which may be rounded to BF16
ROLES = ("input", "weight", "grad_output", "k", "v")
# Fields of the configuration and their values that have another name in fingerprints, because they were renamed later.
_FINGERPRINT_NAMES = {"softmax_over_chosen": "weighs_chosen", "fp32_routing_weights": "wide_weights",
                      "sparsemixer_threshold": "closeness", "rope_interleaved": "neighbours_pair",
                      "all_heads": "whole", "fp32_rms": "wide_rms"}  # fmt: skip
_DERIVED = {"adaptable_linears"}  # fields that follow from others and are not part of fingerprints
_METADATA = frozenset({"format", "version", "recipe", "model", "observations", "created_by"})


@dataclass(frozen=True)
class TensorScale:
    """The scaling state of one tensor."""

    scale: Tensor  # FP32 [], quantizes
    amax_history: Tensor | None = None  # FP32 [N] (docs/numerics.md)


@dataclass(frozen=True)
class ScalingCheckpoint:
    """The content of a scales file."""

    recipe: Recipe | None
    tensors: dict[str, TensorScale]  # by "P.input", "P.weight", "P.grad_output", "model.layers.0.self_attn.k"
    model: str = ""  # fingerprints of the calibrated directory and its source, separated by spaces
    # {"batches": int, "tokens": int, "tensors": {key: int}}; `check_scales` refuses a tensor with a count of 0
    observations: dict[str, Any] = field(default_factory=dict)
    created_by: str = "fp8serve"

    def input_scale(self, linear: str) -> Tensor | None:
        """Returns the quantizing scale of the linear's input, FP32 [], or None."""
        entry = self.tensors.get(f"{linear}.input")
        return None if entry is None else entry.scale

    def weight_scale(self, linear: str) -> Tensor | None:
        """Returns the quantizing scale of the linear's weight, FP32 [], or None."""
        entry = self.tensors.get(f"{linear}.weight")
        return None if entry is None else entry.scale


def save_scales(path: Path, checkpoint: ScalingCheckpoint) -> None:
    """Writes `path` and syncs it to disk. Raises ScalesError if `load_scales` would refuse the file."""
    check_scales(checkpoint, str(path))
    tensors: dict[str, Tensor] = {}
    for key, entry in checkpoint.tensors.items():
        tensors[f"{key}.scale"] = entry.scale.float()
        if entry.amax_history is not None:
            tensors[f"{key}.amax_history"] = entry.amax_history.float()
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "recipe": to_json(checkpoint.recipe),
        "model": checkpoint.model,
        "observations": json.dumps(checkpoint.observations, allow_nan=False, sort_keys=True),
        "created_by": checkpoint.created_by,
    }
    save_tensors(path, tensors, metadata)
    fsync(path)


def load_scales(path: Path | str, model_dir: Path | str | None = None) -> ScalingCheckpoint:
    """Returns the scales in `path`. Raises ScalesError for the reasons at the top of this module.

    If `model_dir` is given, the scales must belong to the model in that directory.
    """
    checkpoint = read_scales(path)
    check_scales(checkpoint, str(path))
    if model_dir is not None and fingerprint(model_dir) not in checkpoint.model.split():
        raise ScalesError(f"{path} belongs to another model than {model_dir}; calibrate this model instead.")
    return checkpoint


def read_scales(path: Path | str) -> ScalingCheckpoint:
    """Returns the scales in `path` without a check of their values. Raises ScalesError if it is no scales file."""
    path = Path(path)
    try:
        entries, metadata = read_header(path)
        tensors = Shards(entries)
    except Fp8ServeError as e:
        raise ScalesError(str(e)) from None
    if metadata.get("format") != FORMAT:
        raise ScalesError(f"{path} is not a scales file of fp8serve: its format is {metadata.get('format')!r}.")
    if (version := metadata.get("version")) != VERSION:
        raise ScalesError(f"{path} is of version {version!r}; this fp8serve reads version {VERSION}: calibrate again.")
    if set(metadata) != _METADATA:
        keys = sorted(set(metadata) ^ _METADATA)
        raise ScalesError(f"{path} has missing or unknown metadata: {', '.join(keys)}.")
    try:
        recipe = from_json(metadata["recipe"])
    except RecipeError as e:
        raise ScalesError(f"{path} holds a recipe that cannot be read: {e}") from None
    return ScalingCheckpoint(
        recipe,
        _read_tensors(tensors, path),
        metadata["model"],
        _parse_observations(metadata["observations"], path),
        metadata["created_by"],
    )


def _parse_observations(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as e:
        raise ScalesError(f"{path} has observations that are not valid JSON: {json_fault(e)}.") from None
    if not isinstance(value, dict) or not isinstance(value.get("tensors", {}), dict):
        raise ScalesError(f"{path} has observations that are not a JSON object.")
    return value


def _read_tensors(tensors: Shards, path: Path) -> dict[str, TensorScale]:
    by_key: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        key, _, kind = name.rpartition(".")
        if kind not in ("scale", "amax_history") or key.rpartition(".")[2] not in ROLES:
            raise ScalesError(f"{path} holds the unknown key {name!r}; it was not written by this fp8serve.")
        entry = tensors.entries[name]
        has_shape = entry.shape == () if kind == "scale" else len(entry.shape) == 1 and entry.shape[0] > 0
        if entry.dtype is not torch.float32 or not has_shape:
            expected, dtype = "F32 []" if kind == "scale" else "F32 [N]", type_name(entry.dtype)
            raise ScalesError(f"{path}: {name} is {dtype} {list(entry.shape)} where {expected} was expected.")
        by_key.setdefault(key, {})[kind] = tensors[name].clone()
    for key, parts in by_key.items():
        if "scale" not in parts:
            raise ScalesError(f"{path} holds an amax history of {key} but no scale.")
    return {key: TensorScale(parts["scale"], parts.get("amax_history")) for key, parts in by_key.items()}


def check_scales(checkpoint: ScalingCheckpoint, where: str) -> None:
    """Raises ScalesError if a scale is unusable or its tensor was never observed. `where` is the file's name."""
    if not checkpoint.tensors:
        raise ScalesError(f"{where} holds no scales.")
    for key, problem in find_problems(checkpoint):
        raise ScalesError(f"{where}: {key} {problem}; calibrate again on data that reach it.")


def find_problems(checkpoint: ScalingCheckpoint) -> Iterator[tuple[str, str]]:
    """Yields (tensor, problem) for each tensor whose scale cannot be served."""
    counts = checkpoint.observations.get("tensors", {})
    for key, entry in checkpoint.tensors.items():
        scale, history = float(entry.scale), entry.amax_history
        if not torch.finfo(torch.float32).tiny <= scale < float("inf"):  # NaN fails; 1 / subnormal may be infinite
            yield key, f"has the scale {scale}, which cannot be served"
        elif counts.get(key, 1) == 0 or (history is not None and not bool(history.any())):
            yield key, "was never observed"
        elif history is not None and not bool((history.isfinite() & (history >= 0)).all()):
            yield key, "has a negative, infinite or NaN value in its amax history"
        elif (fraction := _amax_fraction(checkpoint.recipe, key, entry)) > 1 + 2**-10:
            yield key, f"has an amax in its history that is {fraction:.3g} times what its scale represents"


def _amax_fraction(recipe: Recipe | None, key: str, entry: TensorScale) -> float:
    """Returns the history's amax as a fraction of the largest value that the scale can represent.

    If scale and history agree, it is at most 1; it is smaller if the recipe has a margin or larger amaxes have left the
    history. The result is 0 if the scale may be older than the history.
    """
    rules = as_delayed(recipe)
    if rules is None or rules.interval != 1 or entry.amax_history is None:
        return 0.0
    algo, history = rules.amax_compute_algo, entry.amax_history[1:]  # slot 0 is not in the scale yet
    lower_bound = None if callable(algo) else RULES[algo].lower_bound
    if lower_bound is None or not history.numel():
        return 0.0
    amax = lower_bound(history)
    return float(amax.double() * entry.scale.double()) / fp8_max(rules, key.rpartition(".")[2])


def check_covers(checkpoint: ScalingCheckpoint, linears: Iterable[str], where: str) -> None:
    """Raises ScalesError unless all `linears` have an input scale, and all scales belong to one of them."""
    linears = set(linears)
    for linear in sorted(linears):
        if f"{linear}.input" not in checkpoint.tensors:
            raise ScalesError(f"{where}: {linear}.input was never observed; calibrate again.")
    for key in checkpoint.tensors:
        owner, _, role = key.rpartition(".")
        if role not in ("k", "v") and owner not in linears:
            raise ScalesError(f"{where}: {key} belongs to no FP8 layer of this model.")


def fingerprint(model_dir: Path | str) -> str:
    """Returns 32 hex digits that identify the model in `model_dir`.

    They are a hash of the configuration, of the names, shapes and types of all tensors, and of 768 bytes of each. They
    do not depend on the sharding of the weights.
    """
    model_dir = Path(model_dir)
    digest = hashlib.sha256(json.dumps(_config_fields(model_dir), sort_keys=True).encode())
    shards = open_shards(model_dir)
    for name in sorted(shards):
        entry = shards.entries[name]
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}".encode())
        digest.update(_sample(shards[name]))
    return digest.hexdigest()[:32]


def _config_fields(model_dir: Path) -> dict[str, Any]:
    """Returns the fields of the configuration that change a forward pass.

    Fingerprints in existing files depend on the names of these fields. A field that was added later therefore counts
    only if its value differs from its default.
    """
    raw = read_optional_json(model_dir / "config.json")
    if is_encoder(raw):
        values = asdict(parse_encoder_config(raw))
        added_later = {name for name in ("head", "layer_windows", "layer_thetas") if not values[name]}
        return {name: value for name, value in values.items() if name not in {"dtype"} | added_later}
    config = read_config(model_dir)
    excluded = {"dtype", "bos_token_id", "eos_token_ids", "layer_ropes"}
    if config.softmax_scale == config.head_dim**-0.5:
        excluded.add("softmax_scale")
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in excluded}
    defaults = {f.name for f in fields(config) if values.get(f.name) == f.default}
    changed = [(name, _to_dict(value)) for name, value in values.items() if name not in defaults]
    return _with_fingerprint_names(changed) | _rope_fields(config)


def _with_fingerprint_names(items: list[tuple[str, Any]]) -> dict[str, Any]:
    names = _FINGERPRINT_NAMES
    return {names.get(k, k): names.get(v, v) if isinstance(v, str) else v for k, v in items if k not in _DERIVED}


def _rope_fields(config: ModelConfig) -> dict[str, Any]:
    first, *others = dict.fromkeys(config.layer_ropes)
    if first is None or others:
        return {"layer_ropes": [_to_dict(rope) for rope in config.layer_ropes]}
    return {"rope_theta": first.theta, "rope_scaling": _to_dict(first.scaling)}


def _to_dict(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return asdict(value, dict_factory=_with_fingerprint_names)


def _sample(tensor: Tensor, size: int = 256) -> bytes:
    """Returns the first, middle and last `size` bytes of the tensor, or all bytes of a small tensor."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if len(flat) <= 3 * size:
        return flat.numpy().tobytes()
    middle = len(flat) // 2
    return b"".join(flat[i : i + size].numpy().tobytes() for i in (0, middle, len(flat) - size))
