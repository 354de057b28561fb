"""A directory becomes a module, trainable or servable, from BF16/FP16/FP32 or any FP8 spelling of `interop`.

Loading walks the parameters of a model built on "meta" and puts one tensor after another in place, so there are never
two copies of the weights. On the CPU, FP8 weights and weights already of the wanted type stay views of the mapped file:
serving starts before the file is read, and the page cache is shared between processes.

Other packages import all names that they use from here: `stored` opens a directory, `scales` is the file of scaling
states.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8 import ops
from fp8serve.fp8.casting import cast_by_content
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, HeadDtype, Recipe, delayed, from_name
from fp8serve.model.building import AnyModel, Model, build_on_meta
from fp8serve.model.config.decoder import holds_encoder
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.mixture import keeps_fp32
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
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.experts import reset_token_counts
from fp8serve.model.network.modern_encoder import encoder_class
from fp8serve.model.storage.files import present
from fp8serve.model.storage.opening import real_path
from fp8serve.model.storage.shards import release_pages
from fp8serve.model.stored import Checkpoint, StoredLinear, check_agreement, open_checkpoint

__all__ = [
    "Checkpoint",
    "ScalingCheckpoint",
    "StoredLinear",
    "TensorScale",
    "cache_refusal",
    "check_servable",
    "fill",
    "fingerprint",
    "kv_scales",
    "load_encoder",
    "load_scales",
    "load_servable",
    "load_trainable",
    "open_checkpoint",
    "outline",
    "save_scales",
]


def load_trainable(
    model_dir: Path | str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Model:
    """The model with high-precision weights of `dtype` that may be written to; FP8 weights are dequantized."""
    model, checkpoint = outline(model_dir, dtype)
    fill(model, checkpoint, checkpoint, dtype, device)
    return _complete(model)


def outline(model_dir: Path | str, dtype: torch.dtype = torch.float32) -> tuple[Model, Checkpoint]:
    """A model to be trained, without weights, and the checkpoint that `fill` takes them from."""
    checkpoint = open_checkpoint(model_dir)
    if checkpoint.config.head is not None:
        raise ModelError(f"{model_dir} holds a head of labels, and models that write text are trained here.")
    return build_on_meta(checkpoint.config, dtype), checkpoint


def fill(
    model: Model, checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype, device: str | torch.device
) -> None:
    """Puts copies of these tensors in place, as weights to be trained. Tied weights are to be tied again."""
    for name in names:
        own = torch.float32 if keeps_fp32(name) else dtype
        stored = checkpoint[name]
        _put(model, name, stored.to(device, own, copy=True), trainable=not keeps_fp32(name))
        release_pages(stored)


def load_servable(
    model_dir: Path | str,
    recipe: Literal["stored", "bf16"] | Recipe | None = "stored",
    scales: Path | str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    head: HeadDtype = "bf16",
) -> Model:
    """The model to serve: a FrozenLinear for every FP8 linear, everything else in `dtype`; `head`: see `_cast_head`.

    recipe "stored": the FP8 weights and input scales in the directory or, for a high-precision directory, its weights
    with the scales of `scales` (or of a scales.safetensors beside them). "bf16" or None: all dequantized. A `Recipe`:
    weights quantized by it now; `DelayedScaling` needs scales from one of the places named. ModelError, ScalesError:
    the directory or the scales cannot be used, or needed scales are missing.
    """
    checkpoint = open_checkpoint(model_dir)
    model = build_on_meta(checkpoint.config, dtype)
    _fill(model, checkpoint, recipe, scales, torch.device(device), dtype)
    _complete(model)
    if head == "fp8":
        _cast_head(model)
    return model.eval()


def _complete(model: Model) -> Model:
    """With its weights in place."""
    model.tie()
    if not isinstance(model, Decoder):
        from fp8serve.model.transformers_backend.trial import check_against_class

        check_against_class(model)
        reset_token_counts(model)
    return model


def check_servable(checkpoint: Checkpoint) -> None:
    """ModelError, ScalesError: what loading the directory as it is stored would raise.

    Asks what loading asks, and reads no weight: numbers in the weights, and a class that answers differently from ours
    (`check_against_class`), are found when it is loaded.
    """
    checkpoint.check_scales()
    _frozen_by(checkpoint, "stored" if checkpoint.has_scales else "bf16", None)


def load_encoder(
    model_dir: Path | str,
    recipe: Literal["stored", "bf16"] | Recipe | None = "stored",
    scales: Path | str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Encoder:
    """As `load_servable`, for an encoder. ModelError also if the directory holds none."""
    checkpoint = open_checkpoint(model_dir)
    if not isinstance(checkpoint.any_config, EncoderConfig):
        raise ModelError(f"{model_dir} holds {checkpoint.any_config.architecture}, which is not an encoder.")
    model = encoder_class(checkpoint.any_config)(checkpoint.any_config, device="meta", dtype=dtype)
    _fill(model, checkpoint, recipe, scales, torch.device(device), dtype)
    return model.eval()


def load_reader(model_dir: Path | str, *how: Any, **options: Any) -> AnyModel:
    """`load_encoder`, or `load_servable`, by what the directory holds."""
    return (load_encoder if holds_encoder(model_dir) else load_servable)(model_dir, *how, **options)


def _fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    recipe: Literal["stored", "bf16"] | Recipe | None,
    scales: Path | str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Put the checkpoint's tensors into the module, and a FrozenLinear for every FP8 linear."""
    recipe = "bf16" if recipe is None else recipe
    freezer = _Freezer(checkpoint, _frozen_by(checkpoint, recipe, scales), _named(recipe), device, dtype)
    frozen = {name: module for name in checkpoint.linears if (module := freezer(name)) is not None}
    for name in checkpoint:
        if name.rpartition(".")[0] not in frozen:
            own = torch.float32 if keeps_fp32(name) else dtype
            _put(model, name, checkpoint[name].to(device, own), trainable=False)
    for name, module in frozen.items():
        _put_module(model, name, module)


def _named(recipe: str | Recipe) -> Recipe | None:
    """The recipe that was asked for; None for "stored" and "bf16"."""
    return None if isinstance(recipe, str) else recipe


def _frozen_by(
    checkpoint: Checkpoint, recipe: str | Recipe, scales: Path | str | None
) -> ScalingCheckpoint | Literal["bf16", "stored", "recipe"]:
    """Where scales come from: a scaling state, nowhere, the directory's FP8 tensors, or the weights themselves."""
    if isinstance(recipe, str) and recipe not in ("stored", "bf16"):
        raise ModelError(f"recipe {recipe!r} is not 'stored', 'bf16' or a Recipe.")
    named = _named(recipe)
    if recipe == "bf16" or (named is not None and delayed(named) is None):
        if scales is not None:
            raise ScalesError(f"{scales} was given, but this recipe uses no stored scales; leave one of the two out.")
        return "bf16" if named is None else "recipe"
    state = _find_scales(checkpoint, None if scales is None else Path(scales))
    stays_as_stored = recipe == "stored" and checkpoint.runs_in_high_precision
    if state is None and not checkpoint.fp8_linears and not stays_as_stored:
        raise ModelError(
            f"{checkpoint.path} is not quantized and has no {FILE_NAME}; calibrate it first, give --scales FILE, "
            "or choose --recipe current, rowwise, block or bf16."
        )
    return state or "stored"


def _find_scales(checkpoint: Checkpoint, chosen: Path | None) -> ScalingCheckpoint | None:
    """The scaling state of `given`, else of the file in the directory, whose scales are the exact inverses of the
    stored `input_scale`; None where there is no file or it holds only a KV cache's scales."""
    path = checkpoint.path / FILE_NAME if chosen is None else real_path(chosen)
    if chosen is None and not present(path):
        return None
    state = load_scales(path, checkpoint.path)
    if chosen is None and not any(key.endswith(".input") for key in state.tensors):
        return None
    linears = checkpoint.fp8_linears or checkpoint.linears
    check_covers(state, linears, str(path))
    if chosen is None:
        check_agreement(checkpoint, state, str(path))
    return state


@dataclass(frozen=True)
class _Freezer:
    """Freezes each linear; None leaves it in high precision."""

    checkpoint: Checkpoint
    source: ScalingCheckpoint | Literal["bf16", "stored", "recipe"]
    recipe: Recipe | None  # see `_named`
    device: torch.device
    dtype: torch.dtype

    def __call__(self, linear: str) -> FrozenLinear | None:
        if self.source == "bf16" or (self.recipe is not None and self.recipe.override_linear_precision[0]):
            return None
        if isinstance(self.source, ScalingCheckpoint):
            return self._from_scales(linear, self.source)
        if self.recipe is not None and self.source == "recipe":
            module = self._linear(linear)
            frozen = FrozenLinear.from_linear(module, self.recipe, out_dtype=self.dtype)
            release_pages(module.weight)
            return frozen
        return self._from_stored(linear)

    def _from_stored(self, linear: str) -> FrozenLinear | None:
        stored = self.checkpoint.stored(linear)
        if stored is None:
            return None
        if delayed(self.recipe) is not None and stored.input_scale is None:
            raise ScalesError(
                f"{self.checkpoint.path} stores no input scales (its inputs are quantized dynamically); calibrate it, "
                "or leave out --recipe delayed."
            )
        return self._frozen(linear, stored)

    def _from_scales(self, linear: str, state: ScalingCheckpoint) -> FrozenLinear | None:
        """Stored FP8 weights are used as they are if their scales have the layout of the state's recipe. Other weights
        are quantized by the state's scale, or by their content where the recipe does so."""
        input_scale = state.input_scale(linear)
        if input_scale is None:
            return None
        stored = self.checkpoint.stored(linear)
        spec = (delayed(state.recipe) or DelayedScaling()).specs.linear["weight"]
        if stored is not None and tuple(stored.weight_scale_inv.shape) == spec.scale_shape(*stored.weight_q.shape):
            return self._frozen(linear, replace(stored, input_scale=input_scale, input_spec=interop.STATIC))
        weight = self.checkpoint[f"{linear}.weight"].to(self.device)
        if spec.source == "current":
            weight_q, weight_scale_inv = cast_by_content(weight, spec)
        else:
            weight_q, weight_scale_inv = ops.quantize(weight, scale=state.weight_scale(linear))
        release_pages(weight)
        return self._frozen(linear, StoredLinear(weight_q, weight_scale_inv, input_scale, interop.STATIC))

    def _frozen(self, linear: str, stored: StoredLinear) -> FrozenLinear:
        bias = f"{linear}.bias"
        return FrozenLinear(
            stored.weight_q.to(self.device),
            stored.weight_scale_inv.to(self.device),
            self._parameter(bias) if bias in self.checkpoint else None,
            None if stored.input_scale is None else stored.input_scale.to(self.device),
            stored.input_spec,
            out_dtype=self.dtype,
        )

    def _linear(self, linear: str) -> nn.Linear:
        """The layer in high precision, with the weight in its stored precision, because it is quantized next."""
        weight, bias = f"{linear}.weight", f"{linear}.bias"
        rows, cols = self.checkpoint.shapes[weight]
        module = nn.Linear(cols, rows, bias=bias in self.checkpoint, device="meta")
        _put(module, "weight", self.checkpoint[weight].to(self.device), trainable=False)
        if bias in self.checkpoint:
            _put(module, "bias", self._parameter(bias), trainable=False)
        return module

    def _parameter(self, name: str) -> Tensor:
        return self.checkpoint[name].to(self.device, self.dtype)


def kv_scales(model_dir: Path | str, scales: Path | str | None = None) -> dict[int, tuple[Tensor, Tensor]]:
    """Per layer the (k, v) multipliers, FP32 [], that quantize an FP8 KV cache; empty when the model stores none.

    From `scales` if given, else scales.safetensors in the directory, else the checkpoint's own keys in any spelling.
    ScalesError, ModelError: a scale is unusable, a layer has only one of the two, or there is no such layer.
    """
    path = real_path(scales) if scales is not None else Path(model_dir) / FILE_NAME
    state = load_scales(path, model_dir) if scales is not None or present(path) else None
    checkpoint = open_checkpoint(model_dir)
    if state is not None and scales is None:
        check_agreement(checkpoint, state, str(path))
    owners = [f"model.layers.{layer}.self_attn" for layer in range(checkpoint.config.num_layers)]
    stored = [(owner, key, model_dir) for owner, key in checkpoint.cache_scales()]
    states = () if state is None else (key for key in state.tensors if key.endswith((".self_attn.k", ".self_attn.v")))
    stored += [(key.rpartition(".")[0], key, path) for key in states]
    if stray := [(key, place) for owner, key, place in stored if owner not in owners]:
        key, place = stray[0]
        raise ScalesError(f"{place} holds {key}, the KV-cache scale of a layer that the model does not have.")
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


def cache_refusal(model_dir: Path | str, scales: Path | str | None = None) -> str | None:
    """Why an FP8 cache cannot use the model's scales of keys and values; None where it can, or where there are none."""
    try:
        kv_scales(model_dir, scales)
    except (ModelError, ScalesError) as refusal:
        return str(refusal)
    return None


def _kv_pair(checkpoint: Checkpoint, state: ScalingCheckpoint | None, owner: str) -> tuple[Tensor, Tensor] | None:
    stored = [key for role in interop.KV if (key := checkpoint.scale_key(owner, role)) is not None]
    if len(stored) > 1 and checkpoint.scale_key(owner, "kv") is not None:
        raise ScalesError(
            f"{checkpoint.path} holds both {stored[0]} and {stored[-1]}; keep one scale for each of k and v."
        )
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
    return interop.quantizing_scale(key, checkpoint.shards[key], checkpoint.shards.entries[key].note)


def _put(module: nn.Module, name: str, value: Tensor, trainable: bool) -> None:
    """Make `value` the parameter `name` of `module`, without a copy."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=trainable))


def _put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def _cast_head(model: Model) -> None:
    """Replaces the head of `model`, the matrix that makes logits, by one in FP8, in place, for serving.

    It is the largest of a small model: 21 % of SmolLM2's parameters, read whole for every token. In FP8 a step reads
    half of it. Each output channel has a scale from its own amax. On a CPU inputs stay in BF16, as in the recipe w8a16,
    which is as fast there and more accurate. A GPU multiplies only operands of one type, so there each token's input is
    cast, as in the recipe rowwise. A row of logits does not depend on other rows. A head that is tied to the embedding
    becomes a separate matrix, and the embedding stays as it is.
    """
    weight = cast(Tensor, model.head.weight)
    recipe = cast(Recipe, from_name("rowwise" if weight.is_cuda else "w8a16"))
    frozen = FrozenLinear.from_linear(cast(nn.Linear, model.head), recipe, out_dtype=weight.dtype)
    release_pages(weight)
    _put_module(model, model.head_name, frozen)
