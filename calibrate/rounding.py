"""Rounds weights layer by layer, each for the inputs that it will get from the layers that are already in FP8.

    for every layer:   run it on what the layers before gave, and add up what gptq.py asks of the inputs of each linear
                       round its weights (gptq.py)
                       run it again in FP8: what the next layer reads

Memory holds the hidden states of all batches, the products of one layer's inputs, and the FP8 weights: those of one
layer if finished ones are kept in a file (unfinished.py).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import AnyModel
from fp8serve.ranks import ALONE, Ranks

from .compare import freezer
from .data import Batch
from .gptq import compensated
from .layerwise import Stream, layers, release_weights, streams, within
from .passes import Linears, hooks, in_place
from .precision import groups
from .progress import Stages
from .unfinished import Once, every_time

FrozenLinears = Mapping[str, FrozenLinear]


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
    freeze, found = freezer(recipe, states), dict[str, FrozenLinear]()
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
        found |= frozen
    return found


def _rounded_layer(
    index: int, running: Sequence[Stream], linears: Linears, frozen: FrozenLinears, ranks: Ranks, batches: int
) -> dict[str, Tensor]:
    """Compensated weights for the `frozen` linears of a layer, E4M3 [N, K] by name. `running`: this rank's batches."""
    products = _layer_products(index, running, linears, frozen, ranks, batches)
    names = list(products)

    def weight(number: int) -> dict[str, Tensor]:
        name = names[number]
        return {name: compensated(linears[name].weight, products[name], frozen[name].weight_scale_inv)}

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
