"""Pairs of a layer between which a channel's size can be moved: what makes the channels, and the linears behind it.

    a norm                 and the projections behind it
    v_proj                 and o_proj: attention adds values up, so a factor of one passes through; query heads that
                           read one head of values share its factors
    up_proj                and down_proj: the product with the gate is linear in `up`

A channel is divided by its factor where it is made, and the column that reads it is multiplied by it. Factors are
powers of two: they change no digit of a BF16 number, so every product and every sum keeps its bits, and the model that
is written says in high precision exactly what it said before. Where a weight would leave the range of BF16, the pair
is left alone. A norm that multiplies by 1 + weight (Gemma's) would have to store 1 + weight divided by the factor,
less 1, which BF16 rounds: such norms are left alone, too. So is what a fused linear makes, and the norm before a
mixture of experts, whose router reads it as well.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8serve.model.building import Model
from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.network.decoder import attention_inputs, block_inputs, has_dense_mlp

Weights = Mapping[str, Tensor]  # by the names of parameters


@dataclass(frozen=True)
class Pair:
    """`before`: the norm or linear that makes the channels. `after`: the linears that read them, by full names.

    heads: (of values, query heads that read each), where channels are those of heads.
    """

    before: str
    after: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)

    def shared(self, amaxes: Tensor) -> Tensor:
        """Of the channels that `after` reads [K] -> of those that `before` makes: the largest of those that share."""
        return amaxes.view(*self.heads, -1).amax(1).flatten()

    def spread(self, factors: Tensor) -> Tensor:
        """The inverse: a factor for every channel that `after` reads."""
        groups, readers = self.heads
        return factors.view(groups, 1, -1).expand(-1, readers, -1).flatten()


def pairs(config: ModelConfig, index: int, linears: Collection[str]) -> list[Pair]:
    """Those of a layer whose channels some of `linears` read, by full names."""
    found = [*_behind_norms(config, index), *_behind_linears(config, index)]
    return [pair for pair in found if any(name in linears for name in pair.after)]


def _behind_norms(config: ModelConfig, index: int) -> list[Pair]:
    """A norm is read by the linears behind it; by all of them where attention and MLP share one."""
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
    """Where a projection has a linear of its own."""
    block, (qkv, *_, o) = block_inputs(config, index), attention_inputs(config, index)
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    if not config.fused_qkv and config.latent is None:
        yield Pair(qkv[2], o, heads)
    if has_dense_mlp(config, index) and not config.fused_gate_up:
        yield Pair(block[0][1], block[1])


def factors(inputs: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """Powers of two by which channels [K] are divided, FP32: SmoothQuant's (Xiao et al., arXiv 2211.10438), rounded.

    inputs, columns: the largest magnitude of each channel and of the weights that read it. alpha: 1 makes the channels
    of the input equally large, 0 those of the weight. The median channel keeps its size; one that is always zero, too.
    """
    ratio = alpha * inputs.double().log2() - (1 - alpha) * columns.double().log2()
    usable = ratio.isfinite()
    if not usable.any():
        return torch.ones_like(inputs, dtype=torch.float32)
    exponents = torch.where(usable, (ratio - ratio[usable].median()).round(), 0)
    return torch.ldexp(torch.ones_like(inputs, dtype=torch.float32), exponents.int())


def columns(pair: Pair, weights: Weights) -> Tensor:
    """The largest magnitude of the weights that read each channel of `after`'s inputs, [K]."""
    found = [weights[f"{name}.weight"].abs().amax(0).float() for name in pair.after]
    return torch.stack(found).amax(0)


def folded(pair: Pair, weights: Weights, by: Tensor) -> dict[str, Tensor] | None:
    """The parameters that change when the channels of `before` are divided by `by`; None: not all do so exactly."""
    changed = dict(_changed(pair, weights, by))
    exact = all(torch.equal(new / old_by, weights[name].float()) for name, (new, old_by) in changed.items())
    return {name: new for name, (new, _) in changed.items()} if exact else None


def _changed(pair: Pair, weights: Weights, by: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """By the name of a parameter: the new one, and what it was multiplied by."""
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
