"""Weights rounded layer by layer, each for the inputs that it will get: those of layers that are in FP8 already.

    for every layer:   run it on what the layers before gave, and add up what gptq.py asks of the inputs of each linear
                       round its weights (gptq.py)
                       run it again in FP8: what the next layer reads

In memory are the hidden states of all batches, the moments of one layer's inputs, and one layer's FP8 weights where
those that are finished lie in a file (unfinished.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.decoder import Decoder

from .compare import freezer
from .data import Batch
from .gptq import Moments, compensated
from .layerwise import Stream, layers, streams, within
from .passes import Linears, hooks
from .precision import groups
from .progress import Stages
from .unfinished import Once, every_time

FrozenLinears = Mapping[str, FrozenLinear]


@torch.no_grad()
def round_weights(
    decoder: Decoder,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    stages: Stages | None = None,
    once: Once = every_time,
) -> dict[str, FrozenLinear]:
    """Every one of `linears` as it is to be served under `recipe`, with scales from `states`, by name.

    once: keeps the rounded weights of a layer, and knows those of an earlier run.
    """
    freeze, found = freezer(recipe, states), dict[str, FrozenLinear]()
    running = streams(decoder, batches)
    for index in layers(decoder, "round", stages):
        frozen = {name: freeze(name, linear) for name, linear in within(index, linears).items()}
        weights = once(f"round-{index:05}", partial(_rounded_layer, index, running, linears, frozen))
        for name, layer in frozen.items():
            layer.weight_q = weights[name].to(_device(layer))
        with _in_place(decoder, frozen):
            for stream in running:
                stream.advance(index)
        found |= frozen
    return found


def _rounded_layer(index: int, running: Sequence[Stream], linears: Linears, frozen: FrozenLinears) -> dict[str, Tensor]:
    """Compensated weights for the `frozen` linears of a layer, E4M3 [N, K] by name."""
    alike = groups(frozen)
    moments = {names[0]: Moments.zeros(frozen[names[0]].in_features, _device(frozen[names[0]])) for names in alike}

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            moments[name].add(x, dequantize(*frozen[name].cast(x)))

        return hook

    with hooks({name: linears[name] for name in moments}, watch):
        for stream in running:
            stream.run(index)
    return {
        name: compensated(linears[name].weight, moments[names[0]], frozen[name].weight_scale_inv)
        for names in alike
        for name in names
    }


def _device(layer: FrozenLinear) -> torch.device:
    return layer.weight_q.device


@contextmanager
def _in_place(decoder: Decoder, frozen: FrozenLinears) -> Iterator[None]:
    """Inside, the `frozen` linears stand in the decoder."""
    before = {name: decoder.get_submodule(name) for name in frozen}
    try:
        _put(decoder, frozen)
        yield
    finally:
        _put(decoder, before)


def _put(decoder: Decoder, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        decoder.set_submodule(name, module)
