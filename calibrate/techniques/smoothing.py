"""Smoothing: scales channels that are large in an input and small in the weights that read them, or the reverse.

One scale serves all channels of an input. If a few channels are thousands of times larger than the other channels, the
others underflow to zero in FP8. So the producer of a channel divides it by a factor, and the weights that read the
channel are multiplied by the same factor. This is done once, in the stored weights, so serving needs no additional op.

    observe   the largest magnitude of every channel of every input, over all samples
    try       pair after pair: run the layer in FP8 with and without the factors of the pair, over some samples
    apply     the factors that reduce the error of the layer's output

The error is the mean over tokens of |FP8 output - output|^2 / |output|^2. It is relative to the size of each token,
because the next norm divides by this size, and because the first token of a text is enormous in many models. Maxima do
not depend on the order of the samples or on batches. The samples of the trials are selected by their content and run
one by one, so the result does not depend on these either.

A pair is a producer of channels and the linears that read them:

    a norm      and the projections that read it
    v_proj      and o_proj: attention sums values, which is linear; query heads with the same value head share factors
    up_proj     and down_proj: the product with the gate is linear in `up`

Factors are powers of two. They change only the exponent of a BF16 number, so every product and sum keeps its bits, and
in high precision the written model gives exactly the same output as before. A pair is not changed if a weight would
leave the range of BF16. A norm that multiplies by 1 + weight (Gemma's) would have to store (1 + weight) / factor - 1,
which BF16 would round, so such norms are not changed. The outputs of fused linears are not changed either, nor is the
norm before a mixture of experts, which the router reads as well.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor, nn

from fp8serve.calibration.data import Batch, first_sequences
from fp8serve.calibration.observe import scales_of
from fp8serve.calibration.passes import (
    LayerwisePass,
    Linears,
    entries_of_layer,
    forward_hooks,
    layer_indices,
    layerwise_passes,
    replaced_modules,
)
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.stage_results import LoadOrCompute, always_compute
from fp8serve.calibration.techniques.precision import input_groups
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, as_delayed
from fp8serve.model.building import Model
from fp8serve.model.config.model_config import ModelConfig, attention_linear_groups, experts_of, mlp_linear_groups
from fp8serve.ranks import ALONE, Ranks

Weights = Mapping[str, Tensor]  # by the names of parameters
ChannelAmaxes = dict[str, Tensor]  # by the name of a linear, the amax of every channel of its input, FP32 [K]
FACTORS = ".factors"  # suffix of the names of factors
TRIAL_TOKENS = 2048
MAX_ERROR_RATIO = 0.98  # error with factors / error without; a smaller reduction may be chance


@dataclass(frozen=True)
class SmoothingPair:
    """The norm or linear that produces channels, and the linears that read them, by full names.

    `heads` is (number of value heads, query heads per value head) if the channels belong to heads.
    """

    producer: str
    readers: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)

    def reduce_heads(self, amaxes: Tensor) -> Tensor:
        """Reduces amaxes [K] of the channels that the readers read to amaxes of the channels that are produced."""
        return amaxes.view(*self.heads, -1).amax(1).flatten()

    def expand_heads(self, factors: Tensor) -> Tensor:
        """Expands factors of the channels that are produced to the channels [K] that the readers read."""
        value_heads, queries = self.heads
        return factors.view(value_heads, 1, -1).expand(-1, queries, -1).flatten()


def smoothing_pairs(config: ModelConfig, index: int, linears: Collection[str]) -> list[SmoothingPair]:
    """Returns the pairs of a layer with channels that some of `linears` read."""
    pairs = [*_norm_pairs(config, index), *_linear_pairs(config, index)]
    return [pair for pair in pairs if any(name in linears for name in pair.readers)]


def _norm_pairs(config: ModelConfig, index: int) -> list[SmoothingPair]:
    """Returns the pairs of norms and their readers; a norm before both attention and MLP has readers in both."""
    block, (qkv, *after_q_a, _) = mlp_linear_groups(config, index), attention_linear_groups(config, index)
    reads = [(config.norms.before_attention, qkv), *(("self_attn.q_a_layernorm", group) for group in after_q_a)]
    if experts_of(config, index) is None:
        reads.append((config.norms.before_mlp, block[0]))
    readers = dict[str, tuple[str, ...]]()
    for norm, names in reads:
        if norm is not None and not config.offset_norms:
            readers[norm] = readers.get(norm, ()) + names
    return [SmoothingPair(f"model.layers.{index}.{norm}", names) for norm, names in readers.items()]


def _linear_pairs(config: ModelConfig, index: int) -> Iterator[SmoothingPair]:
    """Yields the pairs of projections, unless the producer is part of a fused linear."""
    block, (qkv, *_, o) = mlp_linear_groups(config, index), attention_linear_groups(config, index)
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    if not config.fused_qkv and config.latent is None:
        yield SmoothingPair(qkv[2], o, heads)
    if experts_of(config, index) is None and not config.fused_gate_up and config.activation != "xielu":
        yield SmoothingPair(block[0][1], block[1])


def smoothing_factors(inputs: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """Returns the factors of SmoothQuant (Xiao et al., arXiv 2211.10438) for channels [K], as powers of two in FP32.

    `inputs` and `columns` are the amaxes of each channel and of the weights that read it. `alpha` 1 makes all channels
    of the input equally large, `alpha` 0 all columns of the weight. The factor of the median channel is 1, and so is
    that of a channel that is always zero.
    """
    ratio = alpha * inputs.double().log2() - (1 - alpha) * columns.double().log2()
    usable = ratio.isfinite()
    if not usable.any():
        return torch.ones_like(inputs, dtype=torch.float32)
    exponents = torch.where(usable, (ratio - ratio[usable].median()).round(), 0)
    return torch.ldexp(torch.ones_like(inputs, dtype=torch.float32), exponents.int())


def column_amaxes(pair: SmoothingPair, weights: Weights) -> Tensor:
    """Returns the amaxes [K] of the weights that read each channel."""
    amaxes = [weights[f"{name}.weight"].abs().amax(0).float() for name in pair.readers]
    return torch.stack(amaxes).amax(0)


def fold(pair: SmoothingPair, weights: Weights, factors: Tensor) -> dict[str, Tensor] | None:
    """Returns the parameters of a pair with `factors` folded in, or None if BF16 cannot store one exactly."""
    changed = dict(_folded(pair, weights, factors))
    exact = all(torch.equal(new / factor, weights[name].float()) for name, (new, factor) in changed.items())
    return {name: new for name, (new, _) in changed.items()} if exact else None


def _folded(pair: SmoothingPair, weights: Weights, factors: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yields the name of each changed parameter, its new value, and its factor."""
    for leaf in ("weight", "bias"):
        if (old := weights.get(name := f"{pair.producer}.{leaf}")) is not None:
            factor = factors.reciprocal().view(-1, *[1] * (old.dim() - 1))
            yield name, ((old * factor).to(old.dtype), factor)
    for reader in pair.readers:
        old, factor = weights[name := f"{reader}.weight"], pair.expand_heads(factors)
        yield name, ((old * factor).to(old.dtype), factor)


def layer_parameters(decoder: Model, index: int) -> dict[str, Tensor]:
    """Returns the parameters of a layer by full name."""
    prefix = f"model.layers.{index}."
    return {prefix + name: p.detach() for name, p in decoder.get_submodule(prefix[:-1]).named_parameters()}


@torch.no_grad()
def smooth(
    decoder: Model,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    alpha: float,
    stages: Stages | None = None,
    load_or_compute: LoadOrCompute = always_compute,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """Folds factors into the parameters of `decoder` if this reduces the error of `linears` under `recipe`.

    Returns the changed parameters by name, and the factors of every changed pair, FP32 [channels], by the name of the
    producer and FACTORS. `alpha`, from 0 to 1, is how much of the size of channels moves into the weights.
    `load_or_compute` returns the stored parameters of a layer, if there are any.
    """
    passes = layerwise_passes(decoder, ranks.shard(batches))
    trial_passes = layerwise_passes(decoder, _trial_sequences(batches))
    results: dict[str, Tensor] = {}
    for index in layer_indices(decoder, "smooth", stages):
        layer = LayerTrial(decoder, entries_of_layer(decoder, index, linears), index, recipe)
        compute = partial(_smoothed_layer, layer, passes, trial_passes, alpha, ranks)
        smoothed = load_or_compute(f"smooth-{index:05}", compute)
        for layerwise_pass in (*passes, *trial_passes):
            layerwise_pass.advance(index)
        set_parameters(decoder, {name: tensor for name, tensor in smoothed.items() if not name.endswith(FACTORS)})
        results |= smoothed
    return results


def _trial_sequences(batches: Sequence[Batch]) -> list[Batch]:
    """Selects sequences by a hash of their content, so that their order and the batch size do not matter."""
    sequences = first_sequences(batches, sum(batch.tokens for batch in batches))
    by_content = {sha256(str(sequence.ids.tolist()).encode()).digest(): sequence for sequence in sequences}
    return first_sequences([by_content[digest] for digest in sorted(by_content)], TRIAL_TOKENS)


class LayerTrial:
    """Measures the error of one layer of `decoder` with changed parameters and `linears` in FP8."""

    def __init__(self, decoder: Model, linears: Linears, index: int, recipe: Recipe) -> None:
        self.decoder, self.linears, self.index, self.recipe = decoder, linears, index, recipe
        self.weights, self.groups = layer_parameters(decoder, index), input_groups(linears)

    def channel_amaxes(self, passes: Sequence[LayerwisePass], ranks: Ranks) -> ChannelAmaxes:
        """Returns the channel amaxes of the inputs of all linears, over the batches of all ranks."""
        first_linears = {names[0]: self.linears[names[0]] for names in self.groups}
        amaxes = {n: torch.zeros(x.in_features, device=x.weight.device) for n, x in first_linears.items()}

        def hook(name: str, linear: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            torch.maximum(amaxes[name], args[0].abs().amax(0).float(), out=amaxes[name])

        with forward_hooks(first_linears, hook):
            for layerwise_pass in passes:
                layerwise_pass.run(self.index)
        of_ranks = ranks.gather({name: x.cpu() for name, x in amaxes.items()})
        maxima = {n: torch.stack([rank[n] for rank in of_ranks]).amax(0).to(x.device) for n, x in amaxes.items()}
        return {name: maxima[names[0]] for names in self.groups for name in names}

    def error(
        self, changed: Weights, channels: ChannelAmaxes, passes: Sequence[LayerwisePass], exact: Sequence[Tensor]
    ) -> float:
        """Returns the error of the layer's outputs in FP8 against `exact`, with `changed` parameters."""
        with temporary_parameters(self.decoder, changed):
            frozen = {name: self._freeze(name, float(channels[name].max())) for name in self.linears}
            with replaced_modules(self.decoder, frozen):
                outputs = [layerwise_pass.run(self.index) for layerwise_pass in passes]
        errors = [_relative_errors(y.double(), y_exact.double()) for y, y_exact in zip(outputs, exact, strict=True)]
        return float(torch.cat(errors).mean())

    def _freeze(self, name: str, amax: float) -> FrozenLinear:
        linear, settings = self.linears[name], as_delayed(self.recipe)
        if settings is None:
            return FrozenLinear.from_linear(linear, self.recipe)
        amaxes = {f"{name}.input": amax, f"{name}.weight": float(linear.weight.abs().max())}
        input_scale, weight_scale = scales_of(amaxes, settings, torch.device("cpu")).values()
        return FrozenLinear.from_linear(linear, self.recipe, input_scale, weight_scale)


def _relative_errors(output: Tensor, exact: Tensor) -> Tensor:
    """Returns the squared error of each token [T], divided by the squared size of the token."""
    return (output - exact).square().sum(-1) / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


def _smoothed_layer(
    layer: LayerTrial,
    passes: Sequence[LayerwisePass],
    trial_passes: Sequence[LayerwisePass],
    alpha: float,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Returns the changed parameters of a layer and the factors of its changed pairs."""
    channels, changed, factors = layer.channel_amaxes(passes, ranks), dict[str, Tensor](), dict[str, Tensor]()
    if not all(0 < float(x.max()) < float("inf") for x in channels.values()):
        return changed  # observing will report why the layer cannot be calibrated
    exact = [trial.run(layer.index) for trial in trial_passes]
    lowest_error = layer.error(changed, channels, trial_passes, exact)
    for pair in smoothing_pairs(layer.decoder.config, layer.index, layer.linears):
        weights, readers = layer.weights | changed, [name for name in pair.readers if name in channels]
        amaxes = pair.reduce_heads(channels[readers[0]]), pair.reduce_heads(column_amaxes(pair, weights))
        pair_factors = smoothing_factors(*amaxes, alpha)
        if (folded := fold(pair, weights, pair_factors)) is None:
            continue
        smoothed = channels | {name: channels[name] / pair.expand_heads(pair_factors) for name in readers}
        error = layer.error(changed | folded, smoothed, trial_passes, exact)
        if error < MAX_ERROR_RATIO * lowest_error:
            lowest_error, changed, channels = error, changed | folded, smoothed
            factors[pair.producer + FACTORS] = pair_factors
    return changed | factors


def set_parameters(decoder: Model, weights: Weights) -> None:
    for name, weight in weights.items():
        parent, _, leaf = name.rpartition(".")
        module = decoder.get_submodule(parent)
        setattr(module, leaf, nn.Parameter(weight.to(module.get_parameter(leaf).device), requires_grad=False))


@contextmanager
def temporary_parameters(decoder: Model, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the context, `weights` replace the parameters of `decoder` with the same names."""
    original = {name: decoder.get_parameter(name).detach() for name in weights}
    try:
        set_parameters(decoder, weights)
        yield
    finally:
        set_parameters(decoder, original)
