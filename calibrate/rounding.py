"""Weights rounded layer by layer, each for the inputs that it will get: those of layers that are in FP8 already.

    for every layer:   run it on what the layers before gave, and add up what gptq.py asks of the inputs of each linear
                       round its weights (gptq.py)
                       run it again in FP8: what the next layer reads

In memory are the hidden states of all batches, the moments of one layer's inputs, and the FP8 weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.decoder import INPUTS, Decoder

from .compare import freezer
from .data import Batch
from .gptq import Moments, compensated
from .passes import Linears, attending, hooks
from .progress import Stages

FrozenLinears = Mapping[str, FrozenLinear]


@torch.no_grad()
def round_weights(
    decoder: Decoder,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    stages: Stages | None = None,
) -> dict[str, FrozenLinear]:
    """Every one of `linears` as it is to be served under `recipe`, with scales from `states`, by name."""
    freeze, found = freezer(recipe, states), dict[str, FrozenLinear]()
    streams = [_Stream(decoder, batch) for batch in batches]
    for index in (stages or Stages()).steps("round", range(decoder.config.num_layers)):
        prefix = f"model.layers.{index}."
        frozen = {name: freeze(name, linear) for name, linear in linears.items() if name.startswith(prefix)}
        _round_layer(index, streams, linears, frozen)
        with _in_place(decoder, frozen):
            for stream in streams:
                stream.advance(index)
        found |= frozen
    return found


def _round_layer(index: int, streams: Sequence["_Stream"], linears: Linears, frozen: FrozenLinears) -> None:
    """Give the `frozen` linears of a layer compensated weights."""
    groups = [[f"model.layers.{index}.{name}" for name in group] for group in INPUTS]
    moments = {names[0]: Moments.zeros(frozen[names[0]].in_features, _device(frozen[names[0]])) for names in groups}

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            moments[name].add(x, dequantize(*frozen[name].cast(x)))

        return hook

    with hooks({name: linears[name] for name in moments}, watch):
        for stream in streams:
            stream.run(index)
    for names in groups:
        for name in names:
            layer = frozen[name]
            layer.weight_q = compensated(linears[name].weight, moments[names[0]], layer.weight_scale_inv)


def _device(layer: FrozenLinear) -> torch.device:
    return layer.weight_q.device


class _Stream:
    """The hidden state of a batch on its way through the decoder, BF16 [tokens, hidden]."""

    def __init__(self, decoder: Decoder, batch: Batch) -> None:
        self._layers, self._attend = decoder.model.layers, attending(decoder, batch)
        self._hidden = decoder.model.embed(batch.ids)
        self._rotations = decoder.model.rotary.rotations(batch.positions, self._hidden.dtype)

    def run(self, index: int) -> Tensor:
        """What the layer makes of the hidden state, which stays as it is."""
        layer: Callable[..., Tensor] = self._layers[index]
        return layer(self._hidden, self._rotations[index], self._attend)

    def advance(self, index: int) -> None:
        self._hidden = self.run(index)


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
