"""High precision and FP8 side by side over held-out batches, in the same process and on the same weights.

One pass is in high precision; in the other every linear (and, with KV scales, the cache) is as it will be served. The
logits of both are compared. Both go layer by layer (layerwise.py). This costs three forward passes, because the FP8
pass also computes every layer exactly.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import Model

from .data import Batch
from .layerwise import layers, release_weights, streams, within
from .measure import LayerTally, TokenTally, add_logits
from .passes import Linears, fp8_cache, in_fp8
from .progress import Stages
from .result import Quality


@torch.no_grad()
def compare(
    decoder: Model,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    stages: Stages | None = None,
    rounded: Mapping[str, FrozenLinear] | None = None,
) -> tuple[Quality, dict[str, LayerTally]]:
    """The cost of `recipe` with the scales in `states` on `batches`: per token, and per linear.

    rounded: linears as they are served that were not rounded to nearest.
    """
    tokens, tallies = TokenTally(), {name: LayerTally() for name in linears}
    kv = {name: state.scale for name, state in states.items() if name.endswith((".k", ".v"))}
    freeze = freezer(recipe, states, rounded)
    exact, quantized = streams(decoder, batches), streams(decoder, batches, fp8_cache(kv) if kv else None)
    for index in layers(decoder, "compare", stages):
        of_layer = within(decoder, index, linears)
        frozen = {name: freeze(name, linear) for name, linear in of_layer.items()}
        for name, linear in of_layer.items():
            tallies[name].add_weight(linear.weight, frozen[name])
        for one, other in zip(exact, quantized, strict=True):
            one.advance(index)
            with in_fp8(of_layer, lambda name, linear, frozen=frozen: frozen[name], tallies):  # type: ignore[misc]
                other.advance(index)
        release_weights(frozen)
    leave = decoder.leave
    for one, other in zip(exact, quantized, strict=True):
        add_logits(tokens, one.batch.targets, (decoder, leave(other.hidden)), (decoder, leave(one.hidden)))
    return tokens.quality(compared=True), tallies


def freezer(
    recipe: Recipe, states: Mapping[str, ScalingState], rounded: Mapping[str, FrozenLinear] | None = None
) -> Callable[[str, Linear], FrozenLinear]:
    """A function that makes a linear as it is served under `recipe`, with the scales in `states` if the recipe stores
    any.

    Those in `rounded` are there already.
    """

    def freeze(name: str, linear: Linear) -> FrozenLinear:
        if rounded is not None:
            return rounded[name]
        if delayed(recipe) is None:
            return FrozenLinear.from_linear(linear, recipe)
        return FrozenLinear.from_linear(linear, recipe, states[f"{name}.input"].scale, states[f"{name}.weight"].scale)

    return freeze
