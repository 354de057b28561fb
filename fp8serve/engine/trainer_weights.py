"""Converts the tensors that a trainer sends into the tensors of the served model (weights.py).

A trainer sends all weights of the model under the names of its checkpoint. A weight in BF16, FP16 or FP32 is quantized
as the served one: with scales per tensor, row or block, in FP8 or in 4 bits. A scale per tensor follows the rule of the
delayed recipe, from the amax of the new weight. Weights in FP8 or in 4 bits arrive with their scales, as config.json
describes them. A stored input scale stays unless a new one arrives. The conversion gives the bits that loading a
directory with these tensors gives.

Our own trainer sends the tensors of the served model (`weight_q`, ...), which are not converted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import cast

import torch
from torch import Tensor

from fp8serve.engine.loading import LoadedModel, StagedWeights, parse_recipe
from fp8serve.engine.weights import check_weights
from fp8serve.errors import ModelError
from fp8serve.fp8 import ops
from fp8serve.fp8.casting import QuantizedWeight, cast_weight
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import is_finite
from fp8serve.fp8.recipe import DelayedScaling, Recipe, as_delayed, from_name
from fp8serve.fp8.scaling import Entry, ScalingState, fp8_max
from fp8serve.fp8.scaling import update as update_scales
from fp8serve.fp8.spec import QuantSpec
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_scales, open_checkpoint
from fp8serve.model.formats.scales import FILE_NAME
from fp8serve.model.storage.files import present
from fp8serve.model.stored_checkpoint import Checkpoint, StoredLinear, checkpoint_of_tensors

NAME = "The update"  # stands for a directory in messages
SAMPLE_BYTES = 1 << 12


@torch.no_grad()
def stage_tensors(tensors: Mapping[str, Tensor], loaded: LoadedModel, version: int) -> StagedWeights:
    """Converts and checks tensors from a trainer, so that invalid ones cannot make the exchange fail.

    Raises IncompleteError if a weight is missing, and ModelError or ScalesError if they do not suit the engine.
    """
    is_served = any(name.endswith(".weight_q") for name in tensors)
    served = dict(tensors) if is_served else _convert(tensors, loaded)
    check_weights(loaded.runner.model, served)
    return StagedWeights(loaded.model_dir, version, served, None)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns 12 hexadecimal digits that identify the tensors: a hash of their names, shapes and a sample of each."""
    result = blake2b(digest_size=6)
    for name in sorted(tensors):
        data = tensors[name].reshape(-1).view(torch.uint8)
        sample = data[:: max(1, len(data) // SAMPLE_BYTES)]
        result.update(f"{name} {list(tensors[name].shape)}".encode() + sample.cpu().numpy().tobytes())
    return result.hexdigest()


def _convert(tensors: Mapping[str, Tensor], loaded: LoadedModel) -> dict[str, Tensor]:
    model = loaded.runner.model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    update = checkpoint_of_tensors(tensors, loaded.model_dir, NAME)
    update.default_input_scales = {
        name: layer.input_scale for name, layer in layers.items() if layer.input_scale is not None
    }
    current = model.state_dict()
    served = {name: update[name].to(current[name]) for name in update if name.rpartition(".")[0] not in layers}
    quantizer = _Quantizer(loaded)
    groups = _scale_groups(layers)
    for name, layer in layers.items():
        matrix = _stored_matrix(update, name, layer, quantizer)
        if matrix is None:
            weight = _high_precision_weight(update, name, layer, model)
            sharing = [update[f"{other}.weight"] for other in groups.get(name, ())] or [weight]
            quantized, input_scale = quantizer.quantize(name, weight, sharing), layer.input_scale
        else:
            quantized, input_scale = matrix.quantized_weight, matrix.input_scale
        bias = None if layer.bias is None else update[f"{name}.bias"].to(layer.bias)
        parts = {
            "weight_q": quantized.q,
            "weight_scale_inv": quantized.scale_inv,
            "weight_global_scale": quantized.global_scale,
            "pre_quant_scale": layer.pre_quant_scale if matrix is None else matrix.pre_quant_scale,
            "input_scale": input_scale,
            "bias": bias,
        }
        served |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return served


def _stored_matrix(update: Checkpoint, name: str, layer: FrozenLinear, quantizer: "_Quantizer") -> StoredLinear | None:
    """Returns the quantized weight of the layer in the update; None if it is in high precision, or if the engine's
    recipe quantizes every weight anew. Raises ModelError if inputs are quantized differently."""
    if not quantizer.keeps_quantized or name not in update.linears or (matrix := update.quantized_matrix(name)) is None:
        return None
    if matrix.input_spec.independent_of_batch() != layer.input_spec:
        raise ModelError(f"{NAME} quantizes the input of {name} differently from the served model.")
    return matrix


def _high_precision_weight(update: Checkpoint, name: str, layer: FrozenLinear, model: Model) -> Tensor:
    """Returns the weight to quantize, on the layer's device. Raises ModelError if it is not finite."""
    key = f"{name}.weight"
    if key not in update:  # the head, which is tied to the embedding
        key = next(f"{owner}.weight" for owner, module in model.named_modules() if module is model.embedding)
    weight = update[key].to(layer.weight_q.device)
    if not is_finite(weight):
        raise ModelError(f"{key} holds NaN or an infinity; the training of these weights has diverged.")
    return weight if layer.pre_quant_scale is None else weight.float() / layer.pre_quant_scale


def _scale_groups(layers: Mapping[str, FrozenLinear]) -> dict[str, list[str]]:
    """Returns, for each layer that shares its weight scale with others, the names of all of them."""
    groups: dict[int, list[str]] = {}
    for name, layer in layers.items():
        if layer.shares_weight_scale:
            groups.setdefault(layer.weight_scale_inv.data_ptr(), []).append(name)
    return {name: group for group in groups.values() for name in group}


class _Quantizer:
    """Quantizes weights as those of the served model."""

    def __init__(self, loaded: LoadedModel) -> None:
        recipe = parse_recipe(loaded.options.recipe)
        self._head_name = loaded.runner.model.head_name
        self._recipe = recipe if not isinstance(recipe, str) else None
        self._delayed = as_delayed(self._recipe)
        self.keeps_quantized = self._recipe is None or self._delayed is not None
        self._directory: Checkpoint | None = None
        if recipe == "stored":
            self._directory = open_checkpoint(loaded.model_dir)
            scales = loaded.model_dir / FILE_NAME
            if present(scales):
                self._delayed = as_delayed(load_scales(scales, loaded.model_dir).recipe)

    def quantize(self, name: str, weight: Tensor, sharing: Sequence[Tensor]) -> QuantizedWeight:
        """Quantizes the weight [N, K] of a layer. `sharing` are all weights that get the same scale, if it is one for
        the whole weight."""
        if name == self._head_name:
            head = cast(Recipe, from_name("rowwise" if weight.is_cuda else "w8a16"))
            return cast_weight(weight, head.specs.linear["weight"])
        spec = self._spec(name)
        if self.keeps_quantized and spec.granularity == "tensor":
            scale = _delayed_scale(sharing, self._delayed or DelayedScaling())
            return QuantizedWeight(*ops.quantize(weight, scale=scale.to(weight.device)))
        return cast_weight(weight, spec)

    def _spec(self, name: str) -> QuantSpec:
        matrix = None if self._directory is None else self._directory.quantized_matrix(name)
        if matrix is not None:
            return matrix.specs[1]
        recipe = self._recipe or self._delayed or DelayedScaling()
        return recipe.specs.linear["weight"]


def _delayed_scale(weights: Sequence[Tensor], recipe: DelayedScaling) -> Tensor:
    """Returns the scale, FP32 [] on the CPU, that the recipe computes from the amax of these weights alone."""
    state = ScalingState.create(2, torch.device("cpu"))
    for weight in weights:
        state.stage(weight.abs().amax().float().cpu())
    update_scales([Entry(state, fp8_max(recipe, "weight"))], replace(recipe, interval=1))
    return state.scale
