"""High precision and FP8 side by side over held-out batches, in the same process and on the same weights.

`compare`: one pass is in high precision; in the other every linear (and, with KV scales, the cache) is as it will be
served. The logits of both are compared. Both go layer by layer (passes.py). This costs three forward passes, because
the FP8 pass also computes every layer exactly.

`kl_shares`: the cost of each layer's FP8 in the output, its share of KL(reference || FP8 model), from one backward
pass. SQNR does not measure it: a few tokens with enormous activations dominate the power of a layer's output, but their
error counts no more than that of any other token. The relevant quantity is how far an error moves the distribution of
the next token. To second order in the error d of a layer's output [tokens, out] that is KL = E[(g . d)^2] / 2, where g
is the gradient of the log-likelihood of tokens drawn from the reference's own distribution (the Fisher information;
Martens, "New insights and perspectives on the natural gradient method", 2014). g . d is summed within a token and
squared per token: errors of different tokens are assumed independent. The shares then add up to about the KL of the
whole model. It costs about five forward passes over at most `RANKED_TOKENS` tokens, for all layers together, and the
activations of one sequence. Measuring one layer at a time would take as many passes as there are layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8serve.calibration.data import IGNORED, Batch, first_sequences
from fp8serve.calibration.measure import LOGIT_ROWS, LayerTally, TokenTally, add_logits
from fp8serve.calibration.passes import (
    Linears,
    forward,
    fp8_cache,
    hooks,
    in_fp8,
    layers,
    release_weights,
    releasing,
    streams,
    tracked,
    within,
)
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import Quality
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import Model

RANKED_TOKENS = 2048
Lossy = Callable[[str, nn.Module, Tensor], Tensor]  # (name, exact linear, input [tokens, in]) -> output in FP8


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


def kl_shares(
    decoder: Model,
    linears: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    lossy: Lossy,
    *,
    seed: int = 0,
    stages: Stages | None = None,
) -> dict[str, float]:
    """Nats per token that the FP8 of each of `linears`, exact modules of `decoder`, adds to the KL divergence.

    Empty when no token of `batches` is scored; a layer is left out when its share is not finite.
    """
    sums = dict.fromkeys(linears, 0.0)
    generator = torch.Generator(batches[0].ids.device).manual_seed(seed)
    tokens = 0
    for sequence in (stages or Stages()).steps("rank", first_sequences(batches, RANKED_TOKENS)):
        with releasing(decoder), tracked(decoder), _measured(linears, lossy, sums):
            hidden = forward(decoder, sequence)
        tokens += _pull(decoder, hidden, sequence.targets, generator)
    return {name: total / 2 / tokens for name, total in sums.items() if tokens and math.isfinite(total)}


def _measured(linears: Mapping[str, nn.Module], lossy: Lossy, sums: dict[str, float]) -> AbstractContextManager[None]:
    """Inside, every linear's output waits for its gradient g and then adds sum over tokens of (g . error)^2."""

    def make(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Tensor], exact: Tensor) -> None:
            with torch.no_grad():
                error = lossy(name, linear, args[0].detach()) - exact

            def pulled(gradient: Tensor) -> None:
                sums[name] += float((gradient.float() * error.float()).sum(-1).square().sum(dtype=torch.float64))

            exact.register_hook(pulled)  # type: ignore[no-untyped-call]

        return hook

    return hooks(linears, make)


def _pull(decoder: Model, hidden: Tensor, targets: Tensor, generator: torch.Generator) -> int:
    """Gradients of the log-likelihood of drawn tokens, down to the embedding; how many tokens were drawn."""
    scored = (targets != IGNORED).nonzero().squeeze(1)
    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        for rows in torch.split(scored, LOGIT_ROWS):
            logits = decoder.logits(leaf[rows])
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
            cross_entropy(logits, drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
    if leaf.grad is not None:
        hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
    return len(scored)
