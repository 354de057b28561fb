"""`scales.safetensors`: the scaling state that travels through calibrate, serve, fine-tune and serve again.

Per FP8 linear P: `P.input.scale` F32 [], `P.input.amax_history` F32 [N], the same for `P.weight` and, after gradient
calibration or training, `P.grad_output`; for an FP8 KV cache `model.layers.N.self_attn.k.scale` and `.v.scale`. `scale`
is the quantizing multiplier: q = saturate(x * scale). Recipe, fingerprints and observation counts are metadata. No
pickle: histories are tensors and the recipe is JSON.

A wrong scale only makes answers worse, which is easily overlooked. A file is therefore refused rather than served when
a scale is zero, negative, infinite, NaN or subnormal, when a tensor was never observed, when its history holds an amax
that the scale cannot represent, when a key is unknown, and when the file belongs to another model or another version.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import Fp8ServeError, RecipeError, ScalesError, json_fault
from fp8serve.fp8.amax_rules import RULES
from fp8serve.fp8.recipe import Recipe, delayed, from_json, to_json
from fp8serve.fp8.scaling import fp8_max
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.encoder import is_encoder, parse_encoder_config
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.files import fsync, no_duplicates, read_optional_json, save_tensors
from fp8serve.model.storage.shards import Shards, open_shards, read_header, type_name

FORMAT, VERSION = "fp8serve.scales", "1"
FILE_NAME = "scales.safetensors"
ROLES = ("input", "weight", "grad_output", "k", "v")
_METADATA = frozenset({"format", "version", "recipe", "model", "observations", "created_by"})


@dataclass(frozen=True)
class TensorScale:
    """scale: FP32 [], multiplies to quantize. amax_history: FP32 [N] (docs/numerics.md), None where none is kept."""

    scale: Tensor
    amax_history: Tensor | None = None


@dataclass(frozen=True)
class ScalingCheckpoint:
    """What the file holds. `tensors` is keyed "P.input", "P.weight", "P.grad_output", "model.layers.0.self_attn.k".

    model: fingerprints, separated by spaces, of the directories that the scales fit: the calibrated one and its source.
    observations: {"batches": int, "tokens": int, "tensors": {key: int}}; a key counted zero times is refused.
    """

    recipe: Recipe | None
    tensors: dict[str, TensorScale]
    model: str = ""
    observations: dict[str, Any] = field(default_factory=dict)
    created_by: str = "fp8serve"

    def input_scale(self, linear: str) -> Tensor | None:
        """FP32 [] quantizing multiplier of the linear's input, or None."""
        entry = self.tensors.get(f"{linear}.input")
        return None if entry is None else entry.scale

    def weight_scale(self, linear: str) -> Tensor | None:
        """FP32 [] quantizing multiplier of the linear's weight, or None."""
        entry = self.tensors.get(f"{linear}.weight")
        return None if entry is None else entry.scale


def save_scales(path: Path, checkpoint: ScalingCheckpoint) -> None:
    """Write and fsync `path`, having checked what `load_scales` will check; ScalesError when it would be refused."""
    check(checkpoint, str(path))
    tensors: dict[str, Tensor] = {}
    for key, entry in checkpoint.tensors.items():
        tensors[f"{key}.scale"] = entry.scale.detach().to("cpu", torch.float32, copy=True).contiguous()
        if entry.amax_history is not None:
            tensors[f"{key}.amax_history"] = (
                entry.amax_history.detach().to("cpu", torch.float32, copy=True).contiguous()
            )
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
    """Read and check `path`; with `model_dir`, also that the scales belong to the model there.

    ScalesError with one sentence for every refusal listed at the top of this module, and for a damaged file.
    """
    checkpoint = read_scales(path)
    check(checkpoint, str(path))
    if model_dir is not None:
        check_belongs(checkpoint, Path(model_dir), str(path))
    return checkpoint


def read_scales(path: Path | str) -> ScalingCheckpoint:
    """What is in `path`, whatever its values: for showing them. ScalesError: a damaged file or one of another kind."""
    path = Path(path)
    try:
        entries, metadata = read_header(path)
        tensors = Shards(entries)
    except Fp8ServeError as e:
        raise ScalesError(str(e)) from None
    _check_metadata(metadata, path)
    return ScalingCheckpoint(
        _recipe(metadata["recipe"], path),
        _tensors(tensors, path),
        metadata["model"],
        _observations(metadata["observations"], path),
        metadata["created_by"],
    )


def _check_metadata(metadata: Mapping[str, str], path: Path) -> None:
    if metadata.get("format") != FORMAT:
        raise ScalesError(f"{path} is not a scales file of fp8serve: its format is {metadata.get('format')!r}.")
    if metadata.get("version") != VERSION:
        version = metadata.get("version")
        raise ScalesError(f"{path} is of version {version!r}; this fp8serve reads version {VERSION}: calibrate again.")
    if set(metadata) != _METADATA:
        odd = sorted(set(metadata) ^ _METADATA)
        raise ScalesError(f"{path} lacks or has unknown metadata: {', '.join(odd)}.")


def _recipe(text: str, path: Path) -> Recipe | None:
    try:
        return from_json(text)
    except RecipeError as e:
        raise ScalesError(f"{path} holds a recipe that cannot be read: {e}") from None


def _observations(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as e:
        raise ScalesError(f"{path} has observations that are not valid JSON: {json_fault(e)}.") from None
    if not isinstance(value, dict) or not isinstance(value.get("tensors", {}), dict):
        raise ScalesError(f"{path} has observations that are not a JSON object.")
    return value


def _tensors(tensors: Shards, path: Path) -> dict[str, TensorScale]:
    by_key: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        key, _, kind = name.rpartition(".")
        if kind not in ("scale", "amax_history") or key.rpartition(".")[2] not in ROLES:
            raise ScalesError(f"{path} holds the unknown key {name!r}; it was not written by this fp8serve.")
        _check_layout(tensors, name, kind, path)
        by_key.setdefault(key, {})[kind] = tensors[name].clone()
    for key, parts in by_key.items():
        if "scale" not in parts:
            raise ScalesError(f"{path} holds an amax history of {key} but no scale.")
    return {key: TensorScale(parts["scale"], parts.get("amax_history")) for key, parts in by_key.items()}


def _check_layout(tensors: Shards, name: str, kind: str, path: Path) -> None:
    entry = tensors.entries[name]
    fits = entry.shape == () if kind == "scale" else len(entry.shape) == 1 and entry.shape[0] > 0
    if entry.dtype is not torch.float32 or not fits:
        expected = "F32 []" if kind == "scale" else "F32 [N]"
        raise ScalesError(
            f"{path}: {name} is {type_name(entry.dtype)} {list(entry.shape)} where {expected} was expected."
        )


def check(checkpoint: ScalingCheckpoint, where: str) -> None:
    """ScalesError when any scale is unusable or its tensor never observed; `where` is named in the sentence."""
    if not checkpoint.tensors:
        raise ScalesError(f"{where} holds no scales.")
    for key, problem in problems(checkpoint):
        raise ScalesError(f"{where}: {problem_of(key, problem)}")


def problem_of(key: str, problem: str) -> str:
    """The sentence about the tensor `key`."""
    return f"{key} {problem}; calibrate again on data that reach it."


def problems(checkpoint: ScalingCheckpoint) -> Iterator[tuple[str, str]]:
    """(tensor, what is wrong with it) for all that cannot be served."""
    counts = checkpoint.observations.get("tensors", {})
    for key, entry in checkpoint.tensors.items():
        scale, history = float(entry.scale), entry.amax_history
        if not torch.finfo(torch.float32).tiny <= scale < float("inf"):  # NaN fails both; below, 1 / scale is infinite
            yield key, f"has the scale {scale}, which cannot be served"
        elif counts.get(key, 1) == 0 or (history is not None and not bool(history.any())):
            yield key, "was never observed"
        elif history is not None and not bool((history.isfinite() & (history >= 0)).all()):
            yield key, "has a negative, infinite or NaN value in its amax history"
        elif (reached := _reached(checkpoint.recipe, key, entry)) > 1 + 2**-10:
            yield key, f"has an amax in its history that is {reached:.3g} times what its scale represents"


def _reached(recipe: Recipe | None, key: str, entry: TensorScale) -> float:
    """The amax that made the scale, as a fraction of the scale's range: at most 1, and less with a margin or where
    larger amaxes have left the history. 0 where a scale may be older than its history."""
    rules = delayed(recipe)
    if rules is None or rules.interval != 1 or entry.amax_history is None:
        return 0.0
    algo, seen = rules.amax_compute_algo, entry.amax_history[1:]  # the staging slot is not in the scale yet
    witness = None if callable(algo) else RULES[algo].witness
    if witness is None or not seen.numel():
        return 0.0
    amax = witness(seen)
    return float(amax.double() * entry.scale.double()) / fp8_max(rules, key.rpartition(".")[2])


def check_covers(checkpoint: ScalingCheckpoint, linears: Iterable[str], where: str) -> None:
    """ScalesError unless the input of each of `linears` has a scale, and every entry belongs to an existing linear."""
    linears = set(linears)
    for linear in sorted(linears):
        if f"{linear}.input" not in checkpoint.tensors:
            raise ScalesError(f"{where}: {linear}.input was never observed; calibrate again.")
    for key in checkpoint.tensors:
        owner, _, role = key.rpartition(".")
        if role not in ("k", "v") and owner not in linears:
            raise ScalesError(f"{where}: {key} belongs to no FP8 layer of this model.")


def check_belongs(checkpoint: ScalingCheckpoint, model_dir: Path, where: str) -> None:
    """ScalesError unless the directory's fingerprint is one of those that the scales carry."""
    if fingerprint(model_dir) not in checkpoint.model.split():
        raise ScalesError(f"{where} belongs to another model than {model_dir}; calibrate this model instead.")


def fingerprint(model_dir: Path | str) -> str:
    """32 hex digits that tell models apart: sizes and switches of the config, names, shapes, types of all tensors, and
    768 bytes of each. Costs three reads per tensor whatever its size; the same for any sharding of the same weights.
    """
    model_dir = Path(model_dir)
    digest = hashlib.sha256(json.dumps(_maths(model_dir), sort_keys=True).encode())
    shards = open_shards(model_dir)
    for name in sorted(shards):
        entry = shards.entries[name]
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}".encode())
        digest.update(_sample(shards[name]))
    return digest.hexdigest()[:32]


def _maths(model_dir: Path) -> dict[str, Any]:
    """The configuration without keys that do not change a forward pass, so that a new eos token is not another model.

    Fingerprints in existing files were made from these names. A field that was added later counts only where its value
    differs from what all models had before.
    """
    raw = read_optional_json(model_dir / "config.json")
    if is_encoder(raw):
        of_encoder = asdict(parse_encoder_config(raw))
        later = {name for name in ("head", "layer_windows", "layer_thetas") if not of_encoder[name]}
        return {name: x for name, x in of_encoder.items() if name not in {"dtype"} | later}
    config = read_config(model_dir)
    notes = {"dtype", "bos_token_id", "eos_token_ids", "layer_ropes"}
    if config.softmax_scale == config.head_dim**-0.5:
        notes.add("softmax_scale")
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in notes}
    later = {f.name for f in fields(config) if values.get(f.name) == f.default}
    return {name: _plain(value) for name, value in values.items() if name not in later} | _ropes(config)


def _ropes(config: ModelConfig) -> dict[str, Any]:
    first, *others = dict.fromkeys(config.layer_ropes)
    if first is None or others:
        return {"layer_ropes": [_plain(rope) for rope in config.layer_ropes]}
    return {"rope_theta": first.theta, "rope_scaling": _plain(first.scaling)}


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _sample(tensor: Tensor, size: int = 256) -> bytes:
    """The first, middle and last bytes; all of a small tensor."""
    flat = tensor.reshape(-1).view(torch.uint8)
    if len(flat) <= 3 * size:
        return flat.numpy().tobytes()
    middle = len(flat) // 2
    return b"".join(flat[i : i + size].numpy().tobytes() for i in (0, middle, len(flat) - size))
