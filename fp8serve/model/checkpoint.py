"""Loads a model directory as a network to train or to serve, from weights in BF16, FP16, FP32, FP8 or 4 bits.

Loading builds the model on the "meta" device and replaces one parameter after another, so that memory never holds two
copies of the weights. On the CPU, quantized weights and weights that already have the requested dtype stay views of the
mapped file: serving starts before the whole file was read, and processes share the page cache.

This module re-exports names of stored_checkpoint.py (opens a directory) and formats/scales.py (the file of scaling
states); other packages import them from here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8 import ops
from fp8serve.fp8.casting import cast_current_rowwise
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.layer_inputs import check_whole_blocks
from fp8serve.fp8.recipe import DelayedScaling, HeadDtype, Recipe, as_delayed, from_name, name_of
from fp8serve.model.building import AnyModel, Model, build_any_on_meta, build_on_meta
from fp8serve.model.config.decoder import is_encoder_directory
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.model.formats import interop
from fp8serve.model.formats.scales import (
    FILE_NAME,
    ScalingCheckpoint,
    TensorScale,
    check_covers,
    fingerprint,
    load_scales,
    save_scales,
)
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.network.experts import reset_token_counts
from fp8serve.model.storage.files import present
from fp8serve.model.storage.mapping import release_pages
from fp8serve.model.storage.opening import real_path
from fp8serve.model.stored_checkpoint import Checkpoint, StoredLinear, check_agreement, open_checkpoint

__all__ = [
    "Checkpoint",
    "ScalingCheckpoint",
    "StoredLinear",
    "TensorScale",
    "check_servable",
    "fingerprint",
    "kv_scales",
    "kv_scales_error",
    "load_parameters",
    "load_scales",
    "load_servable",
    "load_trainable",
    "open_checkpoint",
    "open_trainable",
    "save_scales",
]


def load_trainable(
    model_dir: Path | str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Model:
    """Loads a model to train: its weights are writable copies in `dtype`, and quantized weights are dequantized."""
    model, checkpoint = open_trainable(model_dir, dtype)
    load_parameters(model, checkpoint, checkpoint, dtype, device)
    return _finish_loading(model)


def open_trainable(model_dir: Path | str, dtype: torch.dtype = torch.float32) -> tuple[Model, Checkpoint]:
    """Returns a model to train, without weights, and the checkpoint from which `load_parameters` loads them."""
    checkpoint = open_checkpoint(model_dir)
    if checkpoint.config.head is not None:
        raise ModelError(f"{model_dir} holds a classifier; only models that generate text can be trained.")
    return build_on_meta(checkpoint.config, dtype), checkpoint


def load_parameters(
    model: Model, checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype, device: str | torch.device
) -> None:
    """Loads copies of the tensors `names` into `model` as trainable parameters. The caller must call `model.tie`
    afterwards."""
    for name in names:
        source = checkpoint[name]
        copy = source.to(device, torch.float32 if needs_fp32(name) else dtype, copy=True)
        _set_parameter(model, name, copy, trainable=not needs_fp32(name))
        release_pages(source)


def load_servable(
    model_dir: Path | str,
    recipe: Literal["stored", "bf16"] | Recipe | None = "stored",
    scales: Path | str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    head: HeadDtype = "bf16",
) -> Model:
    """Loads a model to serve: quantized linear layers become `FrozenLinear` modules, everything else is in `dtype`.

    Args:
        recipe: "stored" uses the directory's quantized weights and input scales; it quantizes a high-precision
            directory with calibrated scales. "bf16" or None dequantizes everything. A `Recipe` quantizes the weights
            while they are loaded.
        scales: file of calibrated scales; None is the directory's scales.safetensors. `DelayedScaling` needs a file.
        head: "fp8" also casts the matrix that makes logits, see `_cast_head`

    Raises ModelError or ScalesError if the directory or the scales cannot be used, or if scales are missing.
    """
    checkpoint = open_checkpoint(model_dir)
    model = build_on_meta(checkpoint.config, dtype)
    _load_frozen(model, checkpoint, recipe, scales, torch.device(device), dtype)
    _finish_loading(model)
    if head == "fp8":
        _cast_head(model)
    return model.eval()


def _finish_loading(model: Model) -> Model:
    """Ties the weights of a model whose parameters were loaded, and compares it with transformers' class, if any."""
    model.tie()
    if not isinstance(model, Decoder):
        from fp8serve.model.transformers_backend.class_trace import check_against_class

        check_against_class(model)
        reset_token_counts(model)
    return model


def check_servable(checkpoint: Checkpoint) -> None:
    """Raises the ModelError or ScalesError that `load_servable` would raise for the directory, without reading weights.

    Only loading detects NaN in weights and a difference from transformers' class (`check_against_class`).
    """
    checkpoint.check_scales()
    _scale_source(checkpoint, "stored" if checkpoint.has_scales else "bf16", None)


def load_any_servable(
    model_dir: Path | str,
    recipe: Literal["stored", "bf16"] | Recipe | None = "stored",
    scales: Path | str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> AnyModel:
    """Loads a language model or an encoder to serve. The arguments and errors are those of `load_servable`."""
    if not is_encoder_directory(model_dir):
        return load_servable(model_dir, recipe, scales, device, dtype)
    checkpoint = open_checkpoint(model_dir)
    model = build_any_on_meta(checkpoint.any_config, dtype)
    _load_frozen(model, checkpoint, recipe, scales, torch.device(device), dtype)
    return model.eval()


def _load_frozen(
    model: nn.Module,
    checkpoint: Checkpoint,
    recipe: Literal["stored", "bf16"] | Recipe | None,
    scales: Path | str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Loads the checkpoint's tensors into the module and replaces every quantized linear layer by a `FrozenLinear`."""
    recipe = "bf16" if recipe is None else recipe
    explicit_recipe = None if isinstance(recipe, str) else recipe
    freezer = _Freezer(checkpoint, _scale_source(checkpoint, recipe, scales), explicit_recipe, device, dtype)
    frozen = {name: module for name in checkpoint.linears if (module := freezer(name)) is not None}
    for name in checkpoint:
        if name.rpartition(".")[0] not in frozen:
            tensor = checkpoint[name].to(device, torch.float32 if needs_fp32(name) else dtype)
            _set_parameter(model, name, tensor, trainable=False)
    for name, module in frozen.items():
        model.set_submodule(name, module)


def _scale_source(
    checkpoint: Checkpoint, recipe: str | Recipe, scales: Path | str | None
) -> ScalingCheckpoint | Literal["bf16", "stored", "recipe"]:
    """Returns the source of the scales.

    A `ScalingCheckpoint` holds calibrated scales. "stored" means the directory's quantized weights, "recipe" that the
    recipe computes scales from the weights, and "bf16" that nothing is quantized.
    """
    if isinstance(recipe, str) and recipe not in ("stored", "bf16"):
        raise ModelError(f"recipe {recipe!r} is not 'stored', 'bf16' or a Recipe.")
    if recipe == "bf16" or (isinstance(recipe, Recipe) and as_delayed(recipe) is None):
        if scales is not None:
            raise ScalesError(f"{scales} was given, but this recipe uses no stored scales; leave one of the two out.")
        return "recipe" if isinstance(recipe, Recipe) else "bf16"
    state = _read_scaling_state(checkpoint, None if scales is None else Path(scales))
    needs_no_scales = recipe == "stored" and checkpoint.runs_in_high_precision
    if state is None and not checkpoint.quantized_linears and not needs_no_scales:
        raise ModelError(
            f"{checkpoint.path} is not quantized and has no {FILE_NAME}; calibrate it first, give --scales FILE, "
            "or choose --recipe current, rowwise, block, mxfp8 or bf16."
        )
    return state or "stored"


def _read_scaling_state(checkpoint: Checkpoint, scales: Path | None) -> ScalingCheckpoint | None:
    """Reads the scaling state from the file `scales` or, if it is None, from the directory's scales.safetensors.

    Returns None if the directory has no such file, or one that only holds scales of a KV cache. The directory's file
    must agree with the `input_scale` tensors of its checkpoint.
    """
    path = checkpoint.path / FILE_NAME if scales is None else real_path(scales)
    if scales is None and not present(path):
        return None
    state = load_scales(path, checkpoint.path)
    if scales is None and not any(key.endswith(".input") for key in state.tensors):
        return None
    if as_delayed(state.recipe) is None:
        raise ScalesError(
            f"{path} is for the recipe {name_of(state.recipe)!r}, which computes the scales of inputs while serving, "
            "so it scales no linear layers; serve the model with that recipe, or calibrate it with the recipe delayed."
        )
    linears = checkpoint.quantized_linears or checkpoint.linears
    check_covers(state, linears, str(path))
    if scales is None:
        check_agreement(checkpoint, state, str(path))
    return state


@dataclass(frozen=True)
class _Freezer:
    """Makes the `FrozenLinear` of a linear layer, or returns None if the layer runs in high precision."""

    checkpoint: Checkpoint
    source: ScalingCheckpoint | Literal["bf16", "stored", "recipe"]  # see `_scale_source`
    recipe: Recipe | None  # None for "stored" and "bf16"
    device: torch.device
    dtype: torch.dtype

    def __call__(self, linear: str) -> FrozenLinear | None:
        if self.source == "bf16" or (self.recipe is not None and self.recipe.override_linear_precision[0]):
            return None
        if isinstance(self.source, ScalingCheckpoint):
            return self._from_scales(linear, self.source)
        if self.recipe is not None and self.source == "recipe":
            specs, stored = self.recipe.specs.linear, self.checkpoint.quantized_matrix(linear)
            if specs["weight"].is_4bit and stored is not None and stored.weight_spec.name == specs["weight"].name:
                return self._frozen(linear, replace(stored, input_spec=specs["input"].for_serving()))
            check_whole_blocks(self.recipe, self.checkpoint.shapes[f"{linear}.weight"][1], linear)
            module = self._high_precision_linear(linear)
            frozen = FrozenLinear.from_linear(module, self.recipe, out_dtype=self.dtype)
            release_pages(module.weight)
            return frozen
        return self._from_stored(linear)

    def _from_stored(self, linear: str) -> FrozenLinear | None:
        matrix = self.checkpoint.quantized_matrix(linear)
        if matrix is None:
            return None
        if as_delayed(self.recipe) is not None and matrix.input_scale is None:
            raise ScalesError(
                f"{self.checkpoint.path} stores no input scales (its inputs are quantized dynamically); calibrate it, "
                "or leave out --recipe delayed."
            )
        return self._frozen(linear, matrix)

    def _from_scales(self, linear: str, state: ScalingCheckpoint) -> FrozenLinear | None:
        """Makes the layer with the input scale of `state`.

        FP8 weights of the checkpoint are used unchanged if their scales have the layout of the state's recipe. Other
        weights are quantized with the state's scale or, under a recipe with current scaling, with their own amax.
        """
        input_scale = state.input_scale(linear)
        if input_scale is None:
            return None
        matrix = self.checkpoint.quantized_matrix(linear)
        spec = (as_delayed(state.recipe) or DelayedScaling()).specs.linear["weight"]
        matrix = None if matrix is None or matrix.weight_spec.is_4bit else matrix
        if matrix is not None and tuple(matrix.weight_scale_inv.shape) == spec.scale_shape(*matrix.weight_q.shape):
            return self._frozen(linear, replace(matrix, input_scale=input_scale, input_spec=interop.STATIC))
        weight = self.checkpoint[f"{linear}.weight"].to(self.device)
        if spec.source == "current":
            weight_q, weight_scale_inv = cast_current_rowwise(weight, spec)
        else:
            weight_q, weight_scale_inv = ops.quantize(weight, scale=state.weight_scale(linear))
        release_pages(weight)
        return self._frozen(linear, StoredLinear(weight_q, weight_scale_inv, spec, input_scale, interop.STATIC))

    def _frozen(self, linear: str, matrix: StoredLinear) -> FrozenLinear:
        bias, global_scale = f"{linear}.bias", matrix.weight_global_scale
        weight = matrix.weight_q.to(self.device).contiguous()
        if weight.data_ptr() != matrix.weight_q.data_ptr():  # copied, as alternating rows of a stack are
            release_pages(matrix.weight_q)
        return FrozenLinear(
            weight,
            matrix.weight_scale_inv.to(self.device).contiguous(),
            self._parameter(bias) if bias in self.checkpoint else None,
            None if matrix.input_scale is None else matrix.input_scale.to(self.device),
            matrix.input_spec,
            out_dtype=self.dtype,
            weight_global_scale=None if global_scale is None else global_scale.to(self.device),
            pre_quant_scale=None if matrix.pre_quant_scale is None else matrix.pre_quant_scale.to(self.device),
        )

    def _high_precision_linear(self, linear: str) -> nn.Linear:
        """Returns the layer with its weight in the stored dtype, from which the caller quantizes it."""
        weight, bias = f"{linear}.weight", f"{linear}.bias"
        rows, cols = self.checkpoint.shapes[weight]
        module = nn.Linear(cols, rows, bias=bias in self.checkpoint, device="meta")
        _set_parameter(module, "weight", self.checkpoint[weight].to(self.device), trainable=False)
        if bias in self.checkpoint:
            _set_parameter(module, "bias", self._parameter(bias), trainable=False)
        return module

    def _parameter(self, name: str) -> Tensor:
        return self.checkpoint[name].to(self.device, self.dtype)


def kv_scales(model_dir: Path | str, scales: Path | str | None = None) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns each layer's (k, v) scales, FP32 scalars that quantize an FP8 KV cache; empty if the model has none.

    They come from the file `scales`, else from the directory's scales.safetensors, else from the checkpoint's tensors.
    Raises ScalesError or ModelError if a scale is unusable, a layer lacks one, or the model lacks a scale's layer.
    """
    path = real_path(scales) if scales is not None else Path(model_dir) / FILE_NAME
    state = load_scales(path, model_dir) if scales is not None or present(path) else None
    checkpoint = open_checkpoint(model_dir)
    if state is not None and scales is None:
        check_agreement(checkpoint, state, str(path))
    owners = [f"model.layers.{layer}.self_attn" for layer in range(checkpoint.config.num_layers)]
    entries = [(owner, key, model_dir) for owner, key in checkpoint.cache_scales()]
    states = () if state is None else (key for key in state.tensors if key.endswith((".self_attn.k", ".self_attn.v")))
    entries += [(key.rpartition(".")[0], key, path) for key in states]
    if unknown := [(key, file) for owner, key, file in entries if owner not in owners]:
        key, file = unknown[0]
        raise ScalesError(f"{file} holds {key}, the KV-cache scale of a layer that the model does not have.")
    by_layer = {}
    for layer, owner in enumerate(owners):
        pair = _kv_pair(checkpoint, state, owner)
        if pair is not None:
            by_layer[layer] = pair
    if by_layer and len(by_layer) != checkpoint.config.num_layers:
        raise ScalesError(
            f"{model_dir} has KV-cache scales for {len(by_layer)} of {checkpoint.config.num_layers} layers."
        )
    return by_layer


def kv_scales_error(model_dir: Path | str, scales: Path | str | None = None) -> str | None:
    """Returns the message with which `kv_scales` refuses the model's scales, or None if it accepts them."""
    try:
        kv_scales(model_dir, scales)
    except (ModelError, ScalesError) as error:
        return str(error)
    return None


def _kv_pair(checkpoint: Checkpoint, state: ScalingCheckpoint | None, owner: str) -> tuple[Tensor, Tensor] | None:
    keys = [key for role in interop.KV if (key := checkpoint.scale_key(owner, role)) is not None]
    if len(keys) > 1 and checkpoint.scale_key(owner, "kv") is not None:
        raise ScalesError(f"{checkpoint.path} holds both {keys[0]} and {keys[-1]}; keep one scale for each of k and v.")
    k, v = (_kv_scale(checkpoint, state, owner, role) for role in ("k", "v"))
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise ScalesError(f"{checkpoint.path}: {owner} has a KV-cache scale for only one of k and v.")
    return k, v


def _kv_scale(
    checkpoint: Checkpoint, state: ScalingCheckpoint | None, owner: str, role: Literal["k", "v"]
) -> Tensor | None:
    entry = None if state is None else state.tensors.get(f"{owner}.{role}")
    if entry is not None:
        return entry.scale
    key = checkpoint.scale_key(owner, role) or checkpoint.scale_key(owner, "kv")
    if key is None:
        return None
    return interop.to_quantizing_scale(key, checkpoint.shards[key], checkpoint.shards.entries[key].note)


def _set_parameter(module: nn.Module, name: str, value: Tensor, trainable: bool) -> None:
    """Makes `value` the parameter `name` of `module`, without a copy."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=trainable))


def _cast_head(model: Model) -> None:
    """Replaces the head of `model`, the matrix that makes logits, by a `FrozenLinear` in place.

    The head is the largest matrix of a small model (21 % of SmolLM2's parameters), and every decoding step reads all
    of it; FP8 halves these bytes. Each output channel has a scale from its own amax. On a CPU inputs stay in BF16
    (recipe w8a16), which is as fast there and more accurate. A GPU multiplies only operands of one type, so there each
    token's input is cast, too (recipe rowwise). A tied head becomes a separate matrix; the embedding stays in `dtype`.
    """
    weight = cast(Tensor, model.head.weight)
    recipe = cast(Recipe, from_name("rowwise" if weight.is_cuda else "w8a16"))
    frozen = FrozenLinear.from_linear(cast(nn.Linear, model.head), recipe, out_dtype=weight.dtype)
    release_pages(weight)
    model.set_submodule(model.head_name, frozen)
