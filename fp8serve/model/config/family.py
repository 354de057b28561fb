"""What a row of the table of architectures holds (families.py): how a family differs from others. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms in the file; None: there is none in this place."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


Norm = Literal["rms", "wide_rms", "layer"]
"""RMSNorm with or without a rounding before the product with its weight, or LayerNorm."""
HeadNorm = Literal["shared", "whole", "by_head"]
"""Queries and keys are normed head by head with one weight, as one vector, or head by head with a weight per head."""

BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SHARED = Norms("input_layernorm", None, "input_layernorm", None)
AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class MixtureNames:
    """The names of a mixture of experts in the file; the experts are `block`.experts.0, .1, ... None: there is none."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None  # the expert that every token goes through
    shared_gate: str | None = None  # a linear whose sigmoid multiplies the output of that expert


@dataclass(frozen=True)
class Mixture:
    """How a family's mixtures of experts differ from those of others; see mixture.Experts.

    size: the key for the size of each expert. normalizes: None: the file says so. weighs_chosen: the softmax is over
    the chosen experts' logits only. bias: the router and every projection have one. interleaved: files have all experts
    in one tensor [E, in, out], with alternating rows of gate and up (gpt-oss). sigmoid: for DeepSeek's choice of
    experts, whether scores are a sigmoid or a softmax. sparsemixer: two experts are chosen as in Phi-3.5-MoE.
    """

    names: MixtureNames = MixtureNames()
    size: str = "moe_intermediate_size"
    normalizes: bool | None = None
    wide_weights: bool = False
    weighs_chosen: bool = False
    bias: bool = False
    interleaved: bool = False
    sigmoid: bool | None = None
    sparsemixer: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture.

    defaults: values of keys that the file leaves out. optional: keys that this family honours in addition to those that
    all families honour. fixed: keys for which only one value, what this family does anyway, is accepted. qkv_bias:
    whether q, k and v have a bias; None: the file's `bias_key` decides. out_bias: that key applies to o, too.
    fused_qkv, fused_gate_up: the file joins these projections into one linear. qk_norm: whether and how queries and
    keys are normed; where the file has `use_qk_norm`, that decides whether. uniform_window: all layers have the window;
    else those from `max_window_layers` on, or all but every `sliding_window_pattern`-th where there is such a default.
    local_theta: the key of the rotary base of layers with a window, if it differs from that of the others or only the
    others are stretched. rope_in_windows_only: other layers have no rotary position. rope_aliases: other names of types
    of rotary scaling. neighbours_pair: element 2i is rotated with 2i + 1. scales_queries: by their position, as the
    file says. parallel: attention and MLP read the same input, through one norm; None: the file's
    `use_parallel_residual` decides. norm_bias: LayerNorms have a bias. eps_key: the key of the norms' epsilon.
    offset_norms: norms multiply by 1 + weight. sqrt_embedding: embeddings are multiplied by the square root of their
    width. mixture: some layers have experts in place of an MLP. sinks: each head has a logit that joins the denominator
    of its softmax. latent: heads read one latent vector (latent.py). gated: a dense MLP multiplies two projections;
    else it has one, followed by xIELU. mscales: LongRoPE's factors of cos and sin are in the file. published_as: the
    class that published files name, where transformers' class has another name.
    """

    architecture: str
    defaults: Mapping[str, Any]
    optional: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    bias_key: str = "attention_bias"
    out_bias: bool = True
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qk_norm: HeadNorm | None = None
    uniform_window: bool = True
    local_theta: str | None = None
    rope_in_windows_only: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    neighbours_pair: bool = False
    scales_queries: bool = False
    parallel: bool | None = False
    norms: Norms = BEFORE
    norm: Norm = "rms"
    norm_bias: bool = False
    eps_key: str = "rms_norm_eps"
    offset_norms: bool = False
    sqrt_embedding: bool = False
    mixture: Mixture | None = None
    sinks: bool = False
    latent: bool = False
    gated: bool = True
    mscales: bool = False
    published_as: str | None = None
