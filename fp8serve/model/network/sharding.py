"""Divides a decoder among the ranks of a group, for serving (fp8/sharded.py).

Each rank has some heads of attention with their keys and values, some rows of every other matrix, of the embedding and
of the head, and the same rows of every expert. Norms and routers are whole on every rank. So every rank computes the
same hidden states, and chooses the same experts.

Experts are divided like MLPs and not among the ranks. So all ranks have the same work whatever the router chooses, and
shapes do not depend on its choice. Each rank adds up its columns of the experts' outputs.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8serve.errors import RequestError
from fp8serve.fp8.sharded import Shard, gather, keep_rows, shard_embedding, take_rows
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.decoder import MLP, ApertusMLP, Attention, Decoder, Layer
from fp8serve.model.network.experts import Expert, Experts, Mixture
from fp8serve.model.network.latent_attention import LatentAttention
from fp8serve.model.network.norms import LayerNorm


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Returns the configuration with the heads of one rank. Raises RequestError if the model cannot be divided."""
    if config.computed_by is not None:
        raise RequestError(
            f"transformers' class computes {config.architecture}, which cannot be divided; leave tensor_parallel out."
        )
    if config.qk_norm and config.qk_norm_weight == "all_heads":
        raise RequestError(
            f"{config.architecture} normalizes all heads together, which cannot be divided; leave tensor_parallel out."
        )
    latent, experts = config.latent, config.experts
    sizes = {"attention heads": config.num_heads, "elements of a hidden state": config.hidden_size}
    sizes |= {} if latent else {"key/value heads": config.num_kv_heads}
    if experts is None or len(experts.layers) < config.num_layers:
        sizes["elements of an MLP"] = config.intermediate_size
    if experts is not None:
        sizes["elements of an expert"] = experts.size
        sizes |= {} if experts.shared_size is None else {"elements of a shared expert": experts.shared_size}
    for name, count in sizes.items():
        if count % size:
            raise RequestError(f"tensor_parallel {size} does not divide the {count} {name} of this model.")
    kv_heads = config.num_kv_heads // (1 if latent else size)
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=kv_heads)


def shard_decoder(model: Decoder, shard: Shard) -> None:
    """Keeps this rank's part of the weights of a loaded model, in place. Must be called before `join`."""
    shard_embedding(model.embedding, shard)
    for layer in model.model.layers:
        _shard_layer(cast(Layer, layer), shard)
    head = cast(nn.Linear, model.head)
    gather(head, shard, input_is_whole=True)
    if type(head.weight) is nn.Parameter and model.config.tie_word_embeddings:
        head.weight = cast(nn.Parameter, model.embedding.weight)


def _shard_layer(layer: Layer, shard: Shard) -> None:
    attention, mlp = layer.self_attn, layer.get_submodule(layer.mlp_name)
    if isinstance(attention, LatentAttention):
        _shard_latent_attention(attention, shard)
    else:
        _shard_attention(attention, shard)
    gather(attention.o_proj, shard)
    if isinstance(mlp, Mixture):
        _shard_mixture(mlp, shard)
    else:
        dense = cast(MLP | ApertusMLP, mlp)
        (dense.up if isinstance(dense, ApertusMLP) else dense.gate_up).shard(shard)
        gather(dense.down_proj, shard)


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


def _shard_mixture(mixture: Mixture, shard: Shard) -> None:
    for expert in mixture.experts:
        for linear in cast(Expert, expert).linears():
            keep_rows(linear, shard)
        expert.__class__ = ShardedExpert
        cast(ShardedExpert, expert).shard = shard
    mixture.experts.__class__ = ShardedExperts
    experts = cast(ShardedExperts, mixture.experts)
    experts.shard, experts._is_silu = shard, False  # the op for a whole MLP does not gather
    names = mixture.settings.names
    if names.shared is not None and names.shared in mixture._modules:
        gate, up, down = cast(Expert, mixture._modules[names.shared]).linears()
        for linear in (gate, up):
            keep_rows(linear, shard)
        gather(down, shard)


class ShardedExpert(Expert):
    """An expert that gathers the input of `down` and returns this rank's columns of the output."""

    shard: Shard

    def apply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.shard.gather_columns(super().apply_gate(gate, up), gate.shape[1] * self.shard.size)


class ShardedExperts(Experts):
    """The experts of a mixture, of which each rank has some rows."""

    shard: Shard

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of the `chosen` experts' outputs times `weights` [T, k] for x [T, hidden]."""
        return self.shard.gather_columns(super().forward(x, chosen, weights), x.shape[1])

    def _fits_in_memory(self, nbytes: int) -> bool:
        """Returns whether the stacks fit on every rank, because all ranks must run the same collectives."""
        fits = torch.tensor(int(super()._fits_in_memory(nbytes)))
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        return bool(fits)
