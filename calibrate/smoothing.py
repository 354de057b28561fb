"""Smoothing: evens out channels that are large in an input and small in the weights that read them, or the reverse.

One scale serves all channels of an input. Where a few are thousands of times larger than the others, the others become
zero in FP8. So a channel is divided by a factor where it is produced (pairs.py), and the weights that read it are
multiplied by that factor, once, in the stored weights: serving needs no further op.

    observe   the largest magnitude of every channel of every input, over all samples
    try       pair after pair of a layer: the layer in FP8 with the pair's factors and without, over some samples
    keep      the factors where they make the error of the layer's output smaller

That error is the mean over tokens of |FP8 output - output|^2 / |output|^2: the next norm divides by a token's size, and
the first token of a text, which is enormous in many models, counts as one of many. Maxima do not depend on the order of
the samples or on how they are batched; the samples that are tried are chosen by their content, and run one by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor, nn

from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.model.building import Model
from fp8serve.ranks import ALONE, Ranks

from .data import Batch, first_sequences
from .layerwise import Stream, layers, streams, within
from .observe import scale_of
from .pairs import Weights, columns, factors, folded, pairs, parameters
from .passes import Linears, hooks, in_place
from .precision import groups
from .progress import Stages
from .unfinished import Once, every_time

FACTORS = ".factors"  # suffix of the name of the channels' producer
TRIED_TOKENS = 2048
HELPS = 0.98  # fraction of the error without factors; a smaller gain may be chance
Channels = dict[str, Tensor]  # by the name of a linear, the largest magnitude of every channel of its input, FP32 [K]


@torch.no_grad()
def smooth(
    decoder: Model,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    alpha: float,
    stages: Stages | None = None,
    once: Once = every_time,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """Fold factors into the parameters of `decoder` where that helps `linears` under `recipe`.

    Returns the changed parameters by name, and the factors of every pair that was kept, FP32 [channels], by the name of
    the channels' producer and FACTORS. alpha: how much of an input's unevenness goes into the weights, 0..1. once:
    stores the changed parameters of a layer, or returns those of an earlier run.
    """
    running, tried = streams(decoder, ranks.own(batches)), streams(decoder, _chosen(batches))
    found: dict[str, Tensor] = {}
    for index in layers(decoder, "smooth", stages):
        layer = Layer(decoder, within(decoder, index, linears), index, recipe)
        kept = once(f"smooth-{index:05}", partial(_smoothed_layer, layer, running, tried, alpha, ranks))
        for stream in (*running, *tried):
            stream.advance(index)
        put(decoder, {name: tensor for name, tensor in kept.items() if not name.endswith(FACTORS)})
        found |= kept
    return found


def _chosen(batches: Sequence[Batch]) -> list[Batch]:
    """Some of the sequences; the choice does not depend on their order, batches or number."""
    every = first_sequences(batches, sum(batch.tokens for batch in batches))
    by_content = {sha256(str(sequence.ids.tolist()).encode()).digest(): sequence for sequence in every}
    return first_sequences([by_content[digest] for digest in sorted(by_content)], TRIED_TOKENS)


class Layer:
    """One layer of `decoder`, of which `linears` become FP8."""

    def __init__(self, decoder: Model, linears: Linears, index: int, recipe: Recipe) -> None:
        self.decoder, self.linears, self.index, self.recipe = decoder, linears, index, recipe
        self.weights, self.groups = parameters(decoder, index), groups(linears)

    def channels(self, running: Sequence[Stream], ranks: Ranks) -> Channels:
        """The channel maxima of every input that FP8 reads, over all ranks."""
        firsts = {names[0]: self.linears[names[0]] for names in self.groups}
        largest = {name: torch.zeros(x.in_features, device=x.weight.device) for name, x in firsts.items()}

        def make(name: str) -> Callable[..., None]:
            def hook(linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
                torch.maximum(largest[name], args[0].abs().amax(0).float(), out=largest[name])

            return hook

        with hooks(firsts, make):
            for stream in running:
                stream.run(self.index)
        shares = ranks.gather({name: x.cpu() for name, x in largest.items()})
        whole = {name: torch.stack([s[name] for s in shares]).amax(0).to(x.device) for name, x in largest.items()}
        return {name: whole[names[0]] for names in self.groups for name in names}

    def error(self, changed: Weights, channels: Channels, tried: Sequence[Stream], exact: Sequence[Tensor]) -> float:
        """The error of the layer's outputs in FP8, with some parameters `changed`. exact: the correct outputs."""
        with changed_to(self.decoder, changed):
            frozen = {name: self._freeze(name, float(channels[name].max())) for name in self.linears}
            with in_place(self.decoder, frozen):
                got = [stream.run(self.index) for stream in tried]
        errors = [_relative(one.double(), other.double()) for one, other in zip(got, exact, strict=True)]
        return float(torch.cat(errors).mean())

    def _freeze(self, name: str, amax: float) -> FrozenLinear:
        linear, asked = self.linears[name], delayed(self.recipe)
        if asked is None:
            return FrozenLinear.from_linear(linear, self.recipe)
        of_input = scale_of(amax, f"{name}.input", asked)
        of_weight = scale_of(float(linear.weight.abs().max()), f"{name}.weight", asked)
        return FrozenLinear.from_linear(linear, self.recipe, of_input, of_weight)


def _relative(got: Tensor, exact: Tensor) -> Tensor:
    """Squared errors of tokens [T] relative to their own size."""
    return (got - exact).square().sum(-1) / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


def _smoothed_layer(
    layer: Layer, running: Sequence[Stream], tried: Sequence[Stream], alpha: float, ranks: Ranks
) -> dict[str, Tensor]:
    """The parameters of a layer that change, and the factors."""
    channels, changed, kept = layer.channels(running, ranks), dict[str, Tensor](), dict[str, Tensor]()
    if not all(0 < float(x.max()) < float("inf") for x in channels.values()):
        return changed  # it cannot be calibrated, and observing will report why
    exact = [stream.run(layer.index) for stream in tried]
    least = layer.error(changed, channels, tried, exact)
    for pair in pairs(layer.decoder.config, layer.index, layer.linears):
        weights, read = layer.weights | changed, [name for name in pair.after if name in channels]
        by = factors(pair.shared(channels[read[0]]), pair.shared(columns(pair, weights)), alpha)
        if (trial := folded(pair, weights, by)) is None:
            continue
        smaller = channels | {name: channels[name] / pair.spread(by) for name in read}
        error = layer.error(changed | trial, smaller, tried, exact)
        if error < HELPS * least:
            least, changed, channels, kept = error, changed | trial, smaller, kept | {pair.before + FACTORS: by}
    return changed | kept


def put(decoder: Model, weights: Weights) -> None:
    """Make these the parameters of `decoder`."""
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        module = decoder.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(weight.to(module.get_parameter(leaf).device), requires_grad=False))


@contextmanager
def changed_to(decoder: Model, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, these are the parameters of `decoder`."""
    before = {name: decoder.get_parameter(name).detach() for name in weights}
    try:
        put(decoder, weights)
        yield
    finally:
        put(decoder, before)
