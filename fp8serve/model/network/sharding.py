"""Divides a decoder among the ranks of a group, for serving (fp8/sharded.py).

Each rank has some heads of attention with their keys and values, the same rows of gate and up, and rows of the
embedding and of the head. Of o and down it has the columns that read these heads and rows. Then the ranks add up
their outputs once after attention and once after the MLP. If the bits must not depend on the number of ranks
(`invariant`), or if the columns would divide a block of scales, a rank has rows of o and down instead, and all inputs
and outputs are gathered. Norms and routers are whole on every rank. So every rank computes the same hidden states, and
chooses the same experts.

Experts are divided like MLPs and not among the ranks. So all ranks have the same work whatever the router chooses, and
shapes do not depend on its choice. Each rank adds up its part of the experts' outputs before the ranks add up theirs.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8serve.fp8.sharded import Shard, can_reduce, gather, keep_columns, keep_rows, reduce, shard_embedding, take_rows
from fp8serve.model.network.decoder import MLP, ApertusMLP, Attention, Decoder, Layer
from fp8serve.model.network.experts import Expert, Experts, Mixture
from fp8serve.model.network.latent_attention import LatentAttention
from fp8serve.model.network.norms import LayerNorm


def shard_decoder(model: Decoder, shard: Shard, *, invariant: bool) -> None:
    """Keeps this rank's part of the weights of a loaded model, in place. Must be called before `join`. If `invariant`,
    nothing is summed over the ranks."""
    shard_embedding(model.embedding, shard)
    for layer in model.model.layers:
        _shard_layer(cast(Layer, layer), shard, invariant)
    head = cast(nn.Linear, model.head)
    gather(head, shard, input_is_whole=True)
    if type(head.weight) is nn.Parameter and model.config.tie_word_embeddings:
        head.weight = cast(nn.Parameter, model.embedding.weight)


def _shard_layer(layer: Layer, shard: Shard, invariant: bool) -> None:
    attention, mlp = layer.self_attn, layer.get_submodule(layer.mlp_name)
    if isinstance(attention, LatentAttention):
        _shard_latent_attention(attention, shard)
    else:
        _shard_attention(attention, shard)
    _shard_output(attention.o_proj, shard, invariant)
    if isinstance(mlp, Mixture):
        _shard_mixture(mlp, shard, invariant)
    else:
        dense = cast(MLP | ApertusMLP, mlp)
        (dense.up if isinstance(dense, ApertusMLP) else dense.gate_up).shard(shard)
        _shard_output(dense.down_proj, shard, invariant)


def _shard_output(layer: nn.Module, shard: Shard, invariant: bool) -> None:
    """Divides o or down, whose input is divided already."""
    if invariant or not can_reduce(layer, shard):
        gather(layer, shard)
    else:
        reduce(layer, shard)


def _shard_attention(attention: Attention, shard: Shard) -> None:
    attention.qkv.shard(shard)
    for norm in (attention.q_norm, attention.k_norm):
        if isinstance(norm, LayerNorm) and norm.weight.dim() == 2:  # one row for each head
            keep_rows(norm, shard)
    sinks = attention._parameters["sinks"]
    if sinks is not None:
        own_sinks = take_rows(sinks.detach(), [shard.rows(len(sinks))])
        attention.sinks = nn.Parameter(own_sinks, requires_grad=False)


def _shard_latent_attention(attention: LatentAttention, shard: Shard) -> None:
    """Divides the heads. The latent vector and its cache, which all heads share, are whole on every rank."""
    queries: Any = attention.q_proj if attention.latent.q_rank is None else attention.q_b_proj
    keep_rows(queries, shard)
    absorbed = attention.kv_b_proj
    keep_rows(absorbed, shard)
    attention.num_heads = absorbed.heads = attention.num_heads // shard.size


def _shard_mixture(mixture: Mixture, shard: Shard, invariant: bool) -> None:
    name, experts = mixture.settings.names.shared, [cast(Expert, expert) for expert in mixture.experts]
    shared = None if name is None else cast(Expert | None, mixture._modules.get(name))
    everyone = experts if shared is None else [*experts, shared]
    reduces = not invariant and all(can_reduce(expert.linears()[2], shard) for expert in everyone)
    for expert in everyone:
        gate, up, down = expert.linears()
        keep_rows(gate, shard)
        keep_rows(up, shard)
        if reduces:
            keep_columns(down, shard)
        elif expert is shared:
            gather(down, shard)
        else:
            keep_rows(down, shard)
            expert.__class__ = GatheredExpert
            cast(GatheredExpert, expert).shard = shard
    mixture.experts._is_silu = False  # the op for a whole MLP computes without the other ranks
    mixture.experts.__class__ = ShardedExperts if reduces else GatheredExperts
    if reduces:
        mixture.__class__ = ReducedMixture
        cast(ReducedMixture, mixture).shard = shard
    else:
        cast(GatheredExperts, mixture.experts).shard = shard


class ShardedExperts(Experts):
    """The experts of a mixture, of which each rank has a part."""

    def _fits_in_memory(self, nbytes: int) -> bool:
        """Returns whether the stacks fit on every rank, because all ranks must run the same collectives."""
        fits = torch.tensor(int(super()._fits_in_memory(nbytes)))
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        return bool(fits)


class ReducedMixture(Mixture):
    """A mixture whose experts are divided like dense MLPs: the ranks add up the sums of their experts' outputs."""

    shard: Shard

    def mix(self, hidden: Tensor) -> Tensor:
        """Returns the sum of the outputs of the chosen experts and the shared expert, [T, hidden]."""
        return self.shard.sum_over_ranks(super().mix(hidden))


class GatheredExpert(Expert):
    """An expert that gathers the input of `down` and returns this rank's columns of the output."""

    shard: Shard

    def apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.shard.gather_columns(super().apply_gate(gate, up), gate.shape[1] * self.shard.size)


class GatheredExperts(ShardedExperts):
    """Experts that gather the columns of their output."""

    shard: Shard

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of the `chosen` experts' outputs times `weights` [T, k] for x [T, hidden]."""
        return self.shard.gather_columns(super().forward(x, chosen, weights), x.shape[1])
