"""Smoothing: evens out channels that are large in an input and small in the weights that read them, or the reverse.

One scale serves all channels of an input. Where a few are thousands of times larger than the others, the others become
zero in FP8. So a channel is divided by a factor where it is produced, and the weights that read it are multiplied by
that factor, once, in the stored weights: serving needs no further op.

    observe   the largest magnitude of every channel of every input, over all samples
    try       pair after pair of a layer: the layer in FP8 with the pair's factors and without, over some samples
    keep      the factors where they make the error of the layer's output smaller

That error is the mean over tokens of |FP8 output - output|^2 / |output|^2: the next norm divides by a token's size, and
the first token of a text, which is enormous in many models, counts as one of many. Maxima do not depend on the order of
the samples or on how they are batched; the samples that are tried are chosen by their content, and run one by one.

A pair is a producer of channels and the linears that read them:

    a norm                 and the projections behind it
    v_proj                 and o_proj: attention adds values up, so a factor of one passes through; query heads that
                           read one head of values share its factors
    up_proj                and down_proj: the product with the gate is linear in `up`

Factors are powers of two: they change no digit of a BF16 number, so every product and every sum keeps its bits, and in
high precision the written model gives exactly the same output as before. A pair in which a weight would leave the range
of BF16 is left alone. A norm that multiplies by 1 + weight (Gemma's) would have to store (1 + weight) / factor - 1,
which BF16 rounds: such norms are left alone, too. So are the outputs of fused linears, and the norm before a mixture of
experts, which the router reads as well.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor, nn

from fp8serve.calibration.data import Batch, first_sequences
from fp8serve.calibration.observe import scale_of
from fp8serve.calibration.passes import Linears, Stream, hooks, in_place, layers, streams, within
from fp8serve.calibration.progress import Stages
from fp8serve.calibration.techniques.precision import groups
from fp8serve.calibration.unfinished import Once, every_time
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, delayed
from fp8serve.model.building import Model
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.decoder import attention_inputs, block_inputs, has_dense_mlp
from fp8serve.ranks import ALONE, Ranks

Weights = Mapping[str, Tensor]  # by the names of parameters
FACTORS = ".factors"  # suffix of the name of the channels' producer
TRIED_TOKENS = 2048
HELPS = 0.98  # fraction of the error without factors; a smaller gain may be chance
Channels = dict[str, Tensor]  # by the name of a linear, the largest magnitude of every channel of its input, FP32 [K]


@dataclass(frozen=True)
class Pair:
    """`before`: the norm or linear that makes the channels. `after`: the linears that read them, by full names.

    heads: (number of value heads, query heads that read each), if channels belong to heads.
    """

    before: str
    after: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)

    def shared(self, amaxes: Tensor) -> Tensor:
        """Values of the channels that `after` reads [K] -> of those that `before` produces: the largest of those that
        share one."""
        return amaxes.view(*self.heads, -1).amax(1).flatten()

    def spread(self, factors: Tensor) -> Tensor:
        """The inverse: a factor for every channel that `after` reads."""
        groups, readers = self.heads
        return factors.view(groups, 1, -1).expand(-1, readers, -1).flatten()


def pairs(config: ModelConfig, index: int, linears: Collection[str]) -> list[Pair]:
    """The pairs of a layer whose channels some of `linears` read, by full names."""
    results = [*_behind_norms(config, index), *_behind_linears(config, index)]
    return [pair for pair in results if any(name in linears for name in pair.after)]


def _behind_norms(config: ModelConfig, index: int) -> list[Pair]:
    """A norm is read by the linears after it; by those of both where attention and MLP share one."""
    block, (qkv, *behind_q, _) = block_inputs(config, index), attention_inputs(config, index)
    behind = [(config.norms.before_attention, qkv), *(("self_attn.q_a_layernorm", group) for group in behind_q)]
    if has_dense_mlp(config, index):
        behind.append((config.norms.before_mlp, block[0]))
    readers = dict[str, tuple[str, ...]]()
    for norm, names in behind:
        if norm is not None and not config.offset_norms:
            readers[norm] = readers.get(norm, ()) + names
    return [Pair(f"model.layers.{index}.{norm}", after) for norm, after in readers.items()]


def _behind_linears(config: ModelConfig, index: int) -> Iterator[Pair]:
    """Pairs of projections that are separate linears."""
    block, (qkv, *_, o) = block_inputs(config, index), attention_inputs(config, index)
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    if not config.fused_qkv and config.latent is None:
        yield Pair(qkv[2], o, heads)
    if has_dense_mlp(config, index) and not config.fused_gate_up and config.activation != "xielu":
        yield Pair(block[0][1], block[1])


def factors(inputs: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """Powers of two by which channels [K] are divided, FP32: SmoothQuant's (Xiao et al., arXiv 2211.10438), rounded.

    inputs, columns: the largest magnitude of each channel and of the weights that read it. alpha: 1 makes the channels
    of the input equally large, 0 those of the weight. The median channel keeps its size, and so does one that is always
    zero.
    """
    ratio = alpha * inputs.double().log2() - (1 - alpha) * columns.double().log2()
    usable = ratio.isfinite()
    if not usable.any():
        return torch.ones_like(inputs, dtype=torch.float32)
    exponents = torch.where(usable, (ratio - ratio[usable].median()).round(), 0)
    return torch.ldexp(torch.ones_like(inputs, dtype=torch.float32), exponents.int())


def columns(pair: Pair, weights: Weights) -> Tensor:
    """The largest magnitude of the weights that read each channel of `after`'s inputs, [K]."""
    results = [weights[f"{name}.weight"].abs().amax(0).float() for name in pair.after]
    return torch.stack(results).amax(0)


def fold(pair: Pair, weights: Weights, by: Tensor) -> dict[str, Tensor] | None:
    """The parameters that change when the channels of `before` are divided by `by`; None: some cannot change
    exactly."""
    changed = dict(_changed(pair, weights, by))
    exact = all(torch.equal(new / old_by, weights[name].float()) for name, (new, old_by) in changed.items())
    return {name: new for name, (new, _) in changed.items()} if exact else None


def _changed(pair: Pair, weights: Weights, by: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """By the name of a parameter: the new value and its factor."""
    for leaf in ("weight", "bias"):
        if (old := weights.get(name := f"{pair.before}.{leaf}")) is not None:
            rows = by.reciprocal().view(-1, *[1] * (old.dim() - 1))
            yield name, ((old * rows).to(old.dtype), rows)
    for after in pair.after:
        old = weights[name := f"{after}.weight"]
        yield name, ((old * pair.spread(by)).to(old.dtype), pair.spread(by))


def parameters(decoder: Model, index: int) -> dict[str, Tensor]:
    """Those of a layer, by name."""
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
    once: Once = every_time,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """Fold factors into the parameters of `decoder` where that helps `linears` under `recipe`.

    Returns the changed parameters by name, and the factors of every pair that was kept, FP32 [channels], by the name of
    the channels' producer and FACTORS. alpha: how much of an input's unevenness goes into the weights, 0..1. once:
    stores the changed parameters of a layer, or returns those of an earlier run.
    """
    running, tried = streams(decoder, ranks.own(batches)), streams(decoder, _chosen(batches))
    results: dict[str, Tensor] = {}
    for index in layers(decoder, "smooth", stages):
        layer = Layer(decoder, within(decoder, index, linears), index, recipe)
        retained = once(f"smooth-{index:05}", partial(_smoothed_layer, layer, running, tried, alpha, ranks))
        for stream in (*running, *tried):
            stream.advance(index)
        put(decoder, {name: tensor for name, tensor in retained.items() if not name.endswith(FACTORS)})
        results |= retained
    return results


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
        linear, settings = self.linears[name], delayed(self.recipe)
        if settings is None:
            return FrozenLinear.from_linear(linear, self.recipe)
        of_input = scale_of(amax, f"{name}.input", settings)
        of_weight = scale_of(float(linear.weight.abs().max()), f"{name}.weight", settings)
        return FrozenLinear.from_linear(linear, self.recipe, of_input, of_weight)


def _relative(got: Tensor, exact: Tensor) -> Tensor:
    """Squared errors of tokens [T] relative to their own size."""
    return (got - exact).square().sum(-1) / exact.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


def _smoothed_layer(
    layer: Layer, running: Sequence[Stream], tried: Sequence[Stream], alpha: float, ranks: Ranks
) -> dict[str, Tensor]:
    """The parameters of a layer that change, and the factors."""
    channels, changed, retained = layer.channels(running, ranks), dict[str, Tensor](), dict[str, Tensor]()
    if not all(0 < float(x.max()) < float("inf") for x in channels.values()):
        return changed  # it cannot be calibrated, and observing will report why
    exact = [stream.run(layer.index) for stream in tried]
    least = layer.error(changed, channels, tried, exact)
    for pair in pairs(layer.decoder.config, layer.index, layer.linears):
        weights, read = layer.weights | changed, [name for name in pair.after if name in channels]
        by = factors(pair.shared(channels[read[0]]), pair.shared(columns(pair, weights)), alpha)
        if (trial := fold(pair, weights, by)) is None:
            continue
        smaller = channels | {name: channels[name] / pair.spread(by) for name in read}
        error = layer.error(changed | trial, smaller, tried, exact)
        if error < HELPS * least:
            least, changed, channels, retained = error, changed | trial, smaller, retained | {pair.before + FACTORS: by}
    return changed | retained


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
