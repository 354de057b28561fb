"""Rounds weights layer by layer with GPTQ, using the inputs that each layer gets from the FP8 layers before it.

    for every layer:   run the layer on the output of the layer before, and sum X^T X over the inputs X of each linear
                       round its weights
                       run the layer again in FP8 to compute the input of the next layer

Memory holds the hidden states of all batches, the products of one layer's inputs, and the FP8 weights of all layers, or
of one layer only if the results of finished layers are stored in files (stage_results.py).

GPTQ (Frantar et al., arXiv 2210.17323) compensates for errors; here it rounds to E4M3 or E2M1. Rounding to nearest
minimizes the error of every single weight. What matters is the error of the output over its inputs X [tokens, K],
|X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T) with H = X^T X. X are the inputs after their cast to FP8, because the errors
of this cast are correlated with the inputs; weights rounded for uncast inputs have a larger error (docs/studies.md).

Columns are rounded one after the other, and later columns compensate for the error of a column as far as the inputs are
correlated: with U^T U = H^-1, U upper triangular, the error e of column j changes the columns k > j by -e U[j, k] /
U[j, j]. Columns with large inputs are rounded first, because nothing compensates for the errors of the last columns.
The scales do not change, so the result is served like a weight that is rounded to nearest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fp8serve.calibration.compare import freeze_function
from fp8serve.calibration.data import Batch
from fp8serve.calibration.passes import (
    LayerwisePass,
    Linears,
    entries_of_layer,
    forward_hooks,
    layer_indices,
    layerwise_passes,
    release_weights,
    replaced_modules,
)
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.stage_results import LoadOrCompute, always_compute
from fp8serve.calibration.techniques.precision import input_groups
from fp8serve.fp8.casting import QuantizedWeight
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops import e2m1
from fp8serve.fp8.ops.arithmetic import FP8_MAX, dequantize, expand
from fp8serve.fp8.ops.four_bit import pack_codes
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import AnyModel
from fp8serve.ranks import ALONE, Ranks

E4M3 = torch.float8_e4m3fn
DAMPING = 0.01  # this fraction of the diagonal's mean is added to the diagonal: X^T X of few tokens is singular
BLOCK_COLUMNS = 64  # columns that are rounded before one product updates all later columns
FrozenLinears = Mapping[str, FrozenLinear]
RoundValues = Callable[[Tensor], Tensor]  # rounds FP32 numbers to those of a format


def round_compensated(weight: Tensor, products: Tensor, scale_inv: Tensor) -> Tensor:
    """Rounds a weight [N, K] to E4M3 [N, K] with GPTQ.

    `products` is X^T X, FP32 [K, K]. `scale_inv` is the scale that dequantizes, FP32 [], [N, 1] or [N / 128, K / 128].
    A column whose inputs are all zero is rounded to nearest.
    """
    return _round_columns(weight, products, expand(scale_inv, *weight.shape), _round_e4m3).to(E4M3)


def round_compensated_4bit(weight: Tensor, products: Tensor, scales: QuantizedWeight) -> Tensor:
    """Does the same for E2M1 with the scales of a weight that was rounded to nearest; returns codes uint8 [N, K/2]."""
    scale_inv = e2m1.expand_scale(scales.scale_inv) * (1 if scales.global_scale is None else scales.global_scale)
    return pack_codes(e2m1.to_codes(_round_columns(weight, products, scale_inv, e2m1.round_e2m1)))


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX[E4M3], FP8_MAX[E4M3]).to(E4M3).float()


def _round_columns(weight: Tensor, products: Tensor, scale_inv: Tensor, round_values: RoundValues) -> Tensor:
    """Returns the rounded weight divided by its scales, FP32 [N, K]."""
    order = products.diagonal().argsort(descending=True)
    scale = scale_inv.float().reciprocal().broadcast_to(weight.shape)[:, order]
    factors = _factors(products[order][:, order])
    scaled = weight.float()[:, order] * scale
    rounded = torch.empty_like(scaled)
    for start in range(0, scaled.shape[1], BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, scaled.shape[1])
        errors = _round_block(scaled, scale, factors, rounded, start, end, round_values)
        scaled[:, end:] -= (errors @ factors[start:end, end:]) * scale[:, end:]
    result = torch.empty_like(rounded)
    result[:, order] = rounded
    return result


def _factors(products: Tensor) -> Tensor:
    """Returns U [K, K] with U^T U = H^-1, every row divided by its diagonal element; H is the damped `products`."""
    matrix = products.double()  # overwritten by every step, because it is the largest tensor in memory
    matrix.diagonal().add_(DAMPING * matrix.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    torch.linalg.cholesky(matrix, out=matrix)
    torch.cholesky_inverse(matrix, out=matrix)
    torch.linalg.cholesky(matrix, upper=True, out=matrix)
    return matrix.div_(matrix.diagonal().clone().unsqueeze(1)).float()


def _round_block(
    scaled: Tensor, scale: Tensor, factors: Tensor, rounded: Tensor, start: int, end: int, round_values: RoundValues
) -> Tensor:
    """Rounds the columns from start to end of `scaled` into `rounded`; returns the errors of these weights."""
    errors = torch.empty_like(scaled[:, start:end])
    for j in range(start, end):
        rounded[:, j] = round_values(scaled[:, j])
        errors[:, j - start] = error = (scaled[:, j] - rounded[:, j]) / scale[:, j]
        scaled[:, j + 1 : end] -= torch.outer(error, factors[j, j + 1 : end]) * scale[:, j + 1 : end]
    return errors


@torch.no_grad()
def round_weights(
    decoder: AnyModel,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    stages: Stages | None = None,
    load_or_compute: LoadOrCompute = always_compute,
    ranks: Ranks = ALONE,
) -> dict[str, FrozenLinear]:
    """Rounds the weights of `linears`; returns the linears as they are served under `recipe`, by name.

    The scales come from `states`. `load_or_compute` returns the stored weights of a layer, if there are any.
    """
    freeze, result = freeze_function(recipe, states), dict[str, FrozenLinear]()
    passes = layerwise_passes(decoder, ranks.shard(batches))
    for index in layer_indices(decoder, "round", stages):
        frozen = {name: freeze(name, linear) for name, linear in entries_of_layer(decoder, index, linears).items()}
        compute = partial(_rounded_layer, index, passes, linears, frozen, ranks, len(batches))
        weights = load_or_compute(f"round-{index:05}", compute)
        for name, layer in frozen.items():
            layer.weight_q = weights[name].to(_device(layer))
        with replaced_modules(decoder, frozen):
            for layerwise_pass in passes:
                layerwise_pass.advance(index)
        release_weights(frozen)
        result |= frozen
    return result


def _rounded_layer(
    index: int, passes: Sequence[LayerwisePass], linears: Linears, frozen: FrozenLinears, ranks: Ranks, batches: int
) -> dict[str, Tensor]:
    """Returns the rounded weights of a layer by name, E4M3 [N, K] or codes uint8 [N, K/2].

    `passes` are those of this rank's batches.
    """
    products = _layer_products(index, passes, linears, frozen, ranks, batches)
    names = list(products)

    def round_weight(number: int) -> dict[str, Tensor]:
        name = names[number]
        weight, layer = linears[name].weight, frozen[name]
        if layer.is_4bit:
            return {name: round_compensated_4bit(weight, products[name], layer.quantized_weight)}
        return {name: round_compensated(weight, products[name], layer.weight_scale_inv)}

    def empty_weight(number: int) -> dict[str, Tensor]:
        name = names[number]
        return {name: torch.empty_like(frozen[name].weight_q, memory_format=torch.contiguous_format)}

    parts = ranks.compute_in_turn(len(names), round_weight, empty_weight)
    return {name: tensor for part in parts for name, tensor in part.items()}


def _layer_products(
    index: int, passes: Sequence[LayerwisePass], linears: Linears, frozen: FrozenLinears, ranks: Ranks, batches: int
) -> dict[str, Tensor]:
    """Returns X^T X over all batches for each linear of a layer; linears with the same input share a tensor."""
    groups = input_groups(frozen)
    first_linears = {names[0]: frozen[names[0]] for names in groups}
    totals = _zeros(first_linears)

    def batch_products(number: int) -> dict[str, Tensor]:
        return _products_of(passes[number // ranks.size], index, linears, first_linears)

    for part in ranks.compute_in_turn(batches, batch_products, lambda number: _zeros(first_linears)):
        for name, total in totals.items():
            total += part[name]
    return {name: totals[names[0]] for names in groups for name in names}


def _zeros(layers: FrozenLinears) -> dict[str, Tensor]:
    return {n: torch.zeros(x.in_features, x.in_features, device=_device(x)) for n, x in layers.items()}


def _products_of(
    layerwise_pass: LayerwisePass, index: int, linears: Linears, frozen: FrozenLinears
) -> dict[str, Tensor]:
    """Returns X^T X of one batch. Ranks add batches up in order, so the sums are bit-equal to those of one process."""
    products = _zeros(frozen)

    def hook(name: str, linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        x = dequantize(*frozen[name].cast(args[0].reshape(-1, args[0].shape[-1]))).float()
        products[name].addmm_(x.t(), x)

    with forward_hooks({name: linears[name] for name in products}, hook):
        layerwise_pass.run(index)
    return products


def _device(layer: FrozenLinear) -> torch.device:
    return layer.weight_q.device
