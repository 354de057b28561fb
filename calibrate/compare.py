"""Compares a model in high precision with the same model quantized on held-out batches, in one process.

`compare` measures the total error. One pass computes in high precision. In the other pass every linear (and the KV
cache, if it has scales) computes as it will be served. Then the logits of both passes are compared. Both passes run
layer by layer (passes.py). This costs three forward passes, because the quantized pass also computes every layer
exactly.

`kl_shares` measures how much quantizing each layer adds to KL(reference || model), with one backward pass. SQNR cannot
measure this: a few tokens with enormous activations dominate the power of a layer's output, although an error
of such a token counts no more than an error of any other token. What matters is how far an error moves the
distribution of the next token. Let d be the error of a layer's output [tokens, out], and let g be the gradient of the
log-likelihood of tokens that are sampled from the reference's own distribution. To second order in d the divergence is
KL = E[(g . d)^2] / 2 (the Fisher information; Martens, "New insights and perspectives on the natural gradient method",
2014). g . d is summed within a token and squared per token, which assumes that errors of different tokens are
independent. The shares then add up to about the KL divergence of the whole model. The cost for all layers together is
about five forward passes over at most `KL_SHARE_TOKENS` tokens, and the memory for the activations of one sequence; on
a GPU, of as many sequences as fit. Measuring one layer at a time would need one pass per layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8serve.calibration.data import Batch, first_sequences, join_sequences, scored_rows
from fp8serve.calibration.measure import LayerTally, TokenTally, add_logits, read_tallies
from fp8serve.calibration.passes import (
    Linears,
    backpropagate_loss,
    entries_of_layer,
    forward,
    forward_hooks,
    fp8_cache,
    layer_indices,
    layerwise_passes,
    release_weights,
    releasing_layers,
    run_in_fp8,
    with_activation_gradients,
)
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.result import Quality
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import Recipe, as_delayed
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.building import Model

KL_SHARE_TOKENS = 2048
QuantizedOutput = Callable[[str, nn.Module, Tensor], Tensor]  # (name, exact linear, input [tokens, in]) -> output


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
    """Compares `decoder` in high precision with the same model under `recipe` and the scales in `states`.

    Returns the quality over all tokens of `batches`, and statistics for every linear. `rounded` holds the frozen
    linears to use; if it is None, the linears are rounded to nearest.
    """
    tokens, tallies = TokenTally(), {name: LayerTally() for name in linears}
    kv = {name: state.scale for name, state in states.items() if name.endswith((".k", ".v"))}
    freeze = freeze_function(recipe, states, rounded)
    exact_passes = layerwise_passes(decoder, batches)
    fp8_passes = layerwise_passes(decoder, batches, fp8_cache(kv) if kv else None)
    for index in layer_indices(decoder, "compare", stages):
        layer_linears = entries_of_layer(decoder, index, linears)
        frozen = {name: freeze(name, linear) for name, linear in layer_linears.items()}
        for name, linear in layer_linears.items():
            tallies[name].add_weight(linear.weight, frozen[name])
        for exact, quantized in zip(exact_passes, fp8_passes, strict=True):
            exact.advance(index)
            with run_in_fp8(layer_linears, lambda name, linear, frozen=frozen: frozen[name], tallies):  # type: ignore[misc]
                quantized.advance(index)
        release_weights(frozen)
    norm = decoder.apply_final_norm
    for exact, quantized in zip(exact_passes, fp8_passes, strict=True):
        add_logits(tokens, exact.batch.targets, (decoder, norm(quantized.hidden)), (decoder, norm(exact.hidden)))
    read_tallies(tallies.values())
    return tokens.quality(compared=True), tallies


def freeze_function(
    recipe: Recipe, states: Mapping[str, ScalingState], rounded: Mapping[str, FrozenLinear] | None = None
) -> Callable[[str, Linear], FrozenLinear]:
    """Returns a function that converts a linear, given by its name, into the FrozenLinear that serves it.

    The function returns the linears in `rounded`, if that is given. Otherwise it rounds to nearest, with the present
    scales of `states` if `recipe` is delayed scaling.
    """
    # Freezing checks scales on the host, so all of them are read in one transfer here.
    scales = read_scales(states) if rounded is None and as_delayed(recipe) is not None else {}

    def freeze(name: str, linear: Linear) -> FrozenLinear:
        if rounded is not None:
            return rounded[name]
        if as_delayed(recipe) is None:
            return FrozenLinear.from_linear(linear, recipe)
        return FrozenLinear.from_linear(linear, recipe, scales[f"{name}.input"], scales[f"{name}.weight"])

    return freeze


def read_scales(states: Mapping[str, ScalingState]) -> dict[str, Tensor]:
    """Returns the scales of all states, FP32 [] on the CPU, in one transfer from the device."""
    scales = [state.scale for state in states.values()]
    return dict(zip(states, torch.stack(scales).cpu().unbind(), strict=True)) if scales else {}


def kl_shares(
    decoder: Model,
    linears: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    quantized_output: QuantizedOutput,
    stages: Stages | None = None,
) -> dict[str, float]:
    """Returns the nats per token that quantizing each of `linears` adds to the KL divergence, by name.

    `linears` are exact modules of `decoder`. The result is empty if `batches` have no scored token, and it has no entry
    for a layer with a share that is not finite.
    """
    sums: dict[str, Tensor] = {}
    generator = torch.Generator(batches[0].ids.device).manual_seed(0)

    def loss_of_samples(logits: Tensor, rows: Tensor) -> Tensor:
        sampled = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
        return cross_entropy(logits, sampled, reduction="sum")

    tokens = 0
    sequences = first_sequences(batches, KL_SHARE_TOKENS)
    if (limit := _tokens_per_pass(linears)) is not None:
        sequences = join_sequences(sequences, limit)
    for sequence in (stages or Stages()).steps("rank", sequences):
        errors = _summed_squared_errors(linears, quantized_output, sums)
        with releasing_layers(decoder), with_activation_gradients(decoder), errors:
            hidden = forward(decoder, sequence)
        scored = scored_rows(sequence.targets)
        backpropagate_loss(decoder, hidden, scored, loss_of_samples)
        tokens += len(scored)
    totals = dict.fromkeys(linears, 0.0)
    if sums:
        totals |= zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)
    return {name: total / 2 / tokens for name, total in totals.items() if tokens and math.isfinite(total)}


def _tokens_per_pass(linears: Mapping[str, nn.Module]) -> int | None:
    """Returns how many tokens a forward and backward pass over `linears` may have on their GPU, or None on a CPU.

    A pass keeps about three BF16 tensors with the size of each linear's input or output. Half of the free memory is
    left for everything else.
    """
    weights = [cast(Tensor, linear.weight) for linear in linears.values()]
    if not weights or not weights[0].is_cuda:
        return None
    free, _ = torch.cuda.mem_get_info(weights[0].device)
    return max(1, free // 2 // sum(6 * sum(weight.shape) for weight in weights))


def _summed_squared_errors(
    linears: Mapping[str, nn.Module], quantized_output: QuantizedOutput, sums: dict[str, Tensor]
) -> AbstractContextManager[None]:
    """Inside the context, the backward pass adds the sum over tokens of (g . d)^2 of every linear to `sums`, FP64 [].

    The sums stay on the device, so no layer waits for it.
    """

    def hook(name: str, linear: nn.Module, args: tuple[Tensor], exact: Tensor) -> None:
        with torch.no_grad():
            error = quantized_output(name, linear, args[0].detach()) - exact

        def add_to_sum(gradient: Tensor) -> None:
            total = (gradient.float() * error.float()).sum(-1).square().sum(dtype=torch.float64)
            sums[name] = sums[name] + total if name in sums else total

        exact.register_hook(add_to_sum)  # type: ignore[no-untyped-call]

    return forward_hooks(linears, hook)
