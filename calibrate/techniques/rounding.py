"""Rounds weights layer by layer with GPTQ, each for the inputs that it will get from the layers already in FP8.

    for every layer:   run it on what the layers before gave, and add up X^T X of the inputs X of each linear
                       round its weights
                       run it again in FP8: what the next layer reads

Memory holds the hidden states of all batches, the products of one layer's inputs, and the FP8 weights: those of one
layer if finished ones are kept in a file (unfinished.py).

Rounding is error-compensated: GPTQ (Frantar et al., arXiv 2210.17323) on the grid of E4M3. Rounding to nearest makes
every weight's own error small. But the error of the layer's output over its inputs X [tokens, K] matters,
|X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T) with H = X^T X. X are the inputs as the layer reads them, after their cast to
FP8: the errors of that cast are correlated with the inputs, and weights that are fitted to uncast inputs do worse
(docs/studies.md).

Columns are rounded one after the other, and the columns after them compensate for their errors, as far as inputs are
correlated: with U^T U = H^-1, U upper triangular, the error e of column j changes the columns k > j by -e U[j, k] /
U[j, j]. Columns with large inputs come first, because the errors of the last ones are not compensated. The scales do
not change: the result is served like a weight that was rounded to nearest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fp8serve.calibration.compare import freezer
from fp8serve.calibration.data import Batch
from fp8serve.calibration.passes import Linears, Stream, hooks, in_place, layers, release_weights, streams, within
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.techniques.precision import groups
from fp8serve.calibration.unfinished import Once, every_time
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import FP8_MAX, dequantize, expand
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import AnyModel
from fp8serve.ranks import ALONE, Ranks

E4M3 = torch.float8_e4m3fn
DAMPING = 0.01  # this fraction of the diagonal's mean is added to it, because X^T X of few tokens is singular
COLUMNS = 64  # columns rounded before one product updates the columns after them
FrozenLinears = Mapping[str, FrozenLinear]


def round_compensated(weight: Tensor, products: Tensor, scale_inv: Tensor, damping: float = DAMPING) -> Tensor:
    """weight [N, K] rounded to E4M3 [N, K] by its dequantizing scale, FP32 [], [N, 1] or [N / 128, K / 128].

    products: X^T X [K, K], FP32. A column that no input reaches is rounded to nearest.
    """
    order = products.diagonal().argsort(descending=True)
    scale = expand(scale_inv.float().reciprocal(), *weight.shape).broadcast_to(weight.shape)[:, order]
    factors = _factors(products[order][:, order], damping)
    left = weight.float()[:, order] * scale  # in units of the grid; a row or block of columns has its own
    rounded = torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS):
        end = min(start + COLUMNS, left.shape[1])
        errors = _round(left, scale, factors, rounded, start, end)
        left[:, end:] -= (errors @ factors[start:end, end:]) * scale[:, end:]
    result = torch.empty_like(rounded)
    result[:, order] = rounded
    return result.to(E4M3)


def _factors(products: Tensor, damping: float) -> Tensor:
    """U [K, K] with U^T U = H^-1, every row divided by its diagonal element. H: the products, damped.

    Every step overwrites the one matrix in FP64, which is the largest thing in memory.
    """
    matrix = products.double()
    matrix.diagonal().add_(damping * matrix.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    torch.linalg.cholesky(matrix, out=matrix)
    torch.cholesky_inverse(matrix, out=matrix)
    torch.linalg.cholesky(matrix, upper=True, out=matrix)
    return matrix.div_(matrix.diagonal().clone().unsqueeze(1)).float()


def _round(left: Tensor, scale: Tensor, factors: Tensor, rounded: Tensor, start: int, end: int) -> Tensor:
    """Rounds the columns start to end of `left` into `rounded`; their errors [N, end - start], in units of weights."""
    errors = torch.empty_like(left[:, start:end])
    for j in range(start, end):
        rounded[:, j] = left[:, j].clamp(-FP8_MAX[E4M3], FP8_MAX[E4M3]).to(E4M3).float()
        errors[:, j - start] = error = (left[:, j] - rounded[:, j]) / scale[:, j]
        left[:, j + 1 : end] -= torch.outer(error, factors[j, j + 1 : end]) * scale[:, j + 1 : end]
    return errors


@torch.no_grad()
def round_weights(
    decoder: AnyModel,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    stages: Stages | None = None,
    once: Once = every_time,
    ranks: Ranks = ALONE,
) -> dict[str, FrozenLinear]:
    """Every one of `linears` as it will be served under `recipe`, with scales from `states`, by name.

    once: stores the rounded weights of a layer, or returns those of an earlier run.
    """
    freeze, result = freezer(recipe, states), dict[str, FrozenLinear]()
    running = streams(decoder, ranks.own(batches))
    for index in layers(decoder, "round", stages):
        frozen = {name: freeze(name, linear) for name, linear in within(decoder, index, linears).items()}
        weights = once(
            f"round-{index:05}", partial(_rounded_layer, index, running, linears, frozen, ranks, len(batches))
        )
        for name, layer in frozen.items():
            layer.weight_q = weights[name].to(_device(layer))
        with in_place(decoder, frozen):
            for stream in running:
                stream.advance(index)
        release_weights(frozen)
        result |= frozen
    return result


def _rounded_layer(
    index: int, running: Sequence[Stream], linears: Linears, frozen: FrozenLinears, ranks: Ranks, batches: int
) -> dict[str, Tensor]:
    """Compensated weights for the `frozen` linears of a layer, E4M3 [N, K] by name. `running`: this rank's batches."""
    products = _layer_products(index, running, linears, frozen, ranks, batches)
    names = list(products)

    def weight(number: int) -> dict[str, Tensor]:
        name = names[number]
        return {name: round_compensated(linears[name].weight, products[name], frozen[name].weight_scale_inv)}

    def no_weight(number: int) -> dict[str, Tensor]:
        name = names[number]
        return {name: torch.empty_like(frozen[name].weight_q, memory_format=torch.contiguous_format)}

    parts = ranks.in_turn(len(names), weight, no_weight)
    return {name: tensor for part in parts for name, tensor in part.items()}


def _layer_products(
    index: int, running: Sequence[Stream], linears: Linears, frozen: FrozenLinears, ranks: Ranks, batches: int
) -> dict[str, Tensor]:
    """X^T X of the inputs of a layer's linears by name, over all batches; one tensor where they read the same input."""
    alike = groups(frozen)
    watched = {names[0]: frozen[names[0]] for names in alike}
    totals = _nothing(watched)

    def of_batch(number: int) -> dict[str, Tensor]:
        return _products_of(running[number // ranks.size], index, linears, watched)

    for part in ranks.in_turn(batches, of_batch, lambda number: _nothing(watched)):
        for name, total in totals.items():
            total += part[name]
    return {name: totals[names[0]] for names in alike for name in names}


def _nothing(layers: FrozenLinears) -> dict[str, Tensor]:
    return {n: torch.zeros(x.in_features, x.in_features, device=_device(x)) for n, x in layers.items()}


def _products_of(stream: Stream, index: int, linears: Linears, frozen: FrozenLinears) -> dict[str, Tensor]:
    """The products of one batch: ranks add them up in the order of batches, with the same bits as one process."""
    products = _nothing(frozen)

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            x = dequantize(*frozen[name].cast(args[0].reshape(-1, args[0].shape[-1]))).float()
            products[name].addmm_(x.t(), x)

        return hook

    with hooks({name: linears[name] for name in products}, watch):
        stream.run(index)
    return products


def _device(layer: FrozenLinear) -> torch.device:
    return layer.weight_q.device
