"""The names of a decoder's linear layers, computed from its configuration. This module does not import torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch

from fp8serve.errors import ModelError
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.model_config import ModelConfig

Groups = tuple[tuple[str, ...], ...]  # names of linears; the linears of a group read the same input


def linear_names(config: ModelConfig) -> list[str]:
    """Returns the names of the linears that may run in FP8: those of every layer, without routers and head."""
    return [name for layer in range(config.num_layers) for group in linear_groups(config, layer) for name in group]


def experts_of(config: ModelConfig, layer: int) -> Experts | None:
    """Returns the mixture of experts of the layer, or None if the layer has a dense MLP."""
    return config.experts if config.experts is not None and layer in config.experts.layers else None


def linear_groups(config: ModelConfig, layer: int) -> Groups:
    """Returns the full names of a layer's linears, in the order in which they run. Each expert has its own groups."""
    return attention_linear_groups(config, layer) + mlp_linear_groups(config, layer)


def attention_linear_groups(config: ModelConfig, layer: int) -> Groups:
    """Returns the `linear_groups` of attention. The first group reads the layer's input; the last one is o_proj."""
    qkv: Groups = (("qkv_proj",),) if config.fused_qkv else (("q_proj", "k_proj", "v_proj"),)
    if config.latent is not None:
        has_q_b = config.latent.q_rank is not None
        qkv = (("q_a_proj" if has_q_b else "q_proj", "kv_a_proj_with_mqa"), *([("q_b_proj",)] if has_q_b else []))
    return _with_prefix(f"model.layers.{layer}.self_attn", (*qkv, ("o_proj",)))


def mlp_linear_groups(config: ModelConfig, layer: int) -> Groups:
    """Returns the `linear_groups` of the MLP or the mixture of experts."""
    experts = experts_of(config, layer)
    if experts is None:
        gate_up = ("mlp.gate_up_proj",) if config.fused_gate_up else ("mlp.gate_proj", "mlp.up_proj")
        groups: Groups = (gate_up if config.activation != "xielu" else ("mlp.up_proj",), ("mlp.down_proj",))
    else:
        groups = tuple(_expert_groups(experts))
    return _with_prefix(f"model.layers.{layer}", groups)


def _with_prefix(owner: str, groups: Groups) -> Groups:
    return tuple(tuple(f"{owner}.{name}" for name in group) for group in groups)


def _expert_groups(experts: Experts) -> Iterator[tuple[str, ...]]:
    names = experts.names
    owners = [f"{names.block}.experts.{expert}" for expert in range(experts.count)]
    for owner in [*owners, f"{names.block}.{names.shared}"] if names.shared else owners:
        yield f"{owner}.{names.gate}", f"{owner}.{names.up}"
        yield (f"{owner}.{names.down}",)


def adaptable_linear_names(config: ModelConfig) -> list[str]:
    """Returns the names of the linear layers that can have an adapter, in the model's order: all that may run in FP8,
    except the experts of a mixture, whose weights are stacked, and layers whose weights are stored transposed."""
    if config.computed_by is not None:
        return list(config.computed_by.adaptable_linears)
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, count=0))
    return linear_names(config)


def is_expert(linear: str) -> bool:
    """Returns whether the linear layer of this name belongs to one of the experts that a router chooses from."""
    return ".experts." in linear


def select_linears(linears: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Returns the `linears` whose full name, or its last component, matches a pattern; all of them without patterns.
    Raises ModelError if a pattern matches no layer."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in linears):
            suffixes = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise ModelError(f"No linear layer is called {pattern!r}; those that can have an adapter are {suffixes}.")
    return [name for name in linears if not patterns or any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)
