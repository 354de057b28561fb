"""Pairs in a layer between which a channel's size can be moved: the producer of the channels, and the linears after it.

    a norm                 and the projections behind it
    v_proj                 and o_proj: attention adds values up, so a factor of one passes through; query heads that
                           read one head of values share its factors
    up_proj                and down_proj: the product with the gate is linear in `up`

A channel is divided by its factor where it is produced, and the column that reads it is multiplied by it. Factors are
powers of two: they change no digit of a BF16 number, so every product and every sum keeps its bits, and in high
precision the written model gives exactly the same output as before. A pair in which a weight would leave the range of
BF16 is left alone. A norm that multiplies by 1 + weight (Gemma's) would have to store (1 + weight) / factor - 1, which
BF16 rounds: such norms are left alone, too. So are the outputs of fused linears, and the norm before a mixture of
experts, which the router reads as well.
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
    found = [*_behind_norms(config, index), *_behind_linears(config, index)]
    return [pair for pair in found if any(name in linears for name in pair.after)]


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
    found = [weights[f"{name}.weight"].abs().amax(0).float() for name in pair.after]
    return torch.stack(found).amax(0)


def folded(pair: Pair, weights: Weights, by: Tensor) -> dict[str, Tensor] | None:
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
