"""What a model's configuration says about its division among the ranks of tensor parallelism. Does not import torch."""

from dataclasses import replace

from fp8serve.errors import RequestError
from fp8serve.model.config.model_config import ModelConfig


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
