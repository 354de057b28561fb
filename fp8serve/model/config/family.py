"""`Family`, the row of the table in families.py: the switches that an architecture fixes. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms in the checkpoint, or None where the layer has no norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


Norm = Literal["rms", "fp32_rms", "layer"]
"""RMSNorm that rounds before it multiplies by its weight ("rms") or only after that ("fp32_rms"), or LayerNorm."""
HeadNorm = Literal["shared", "all_heads", "by_head"]
"""How queries and keys are normalized: per head with one weight for all heads ("shared"), all heads as one vector
("all_heads"), or per head with a weight for each head ("by_head")."""

BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SHARED = Norms("input_layernorm", None, "input_layernorm", None)
AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class MixtureNames:
    """The names of a mixture's modules in the checkpoint. Experts are `block`.experts.0, `block`.experts.1, ..."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None  # the expert that computes every token, if there is one
    shared_gate: str | None = None  # a linear layer whose sigmoid multiplies the shared expert's output


@dataclass(frozen=True)
class Mixture:
    """The switches of a family's mixtures of experts; mixture.Experts describes those that are not explained here."""

    names: MixtureNames = MixtureNames()
    size: str = "moe_intermediate_size"  # the key of config.json for the intermediate size of each expert
    normalizes: bool | None = None  # None: `norm_topk_prob` in config.json decides
    fp32_routing_weights: bool = False
    softmax_over_chosen: bool = False  # the softmax is over the logits of the chosen experts only
    bias: bool = False  # the router and every projection have a bias
    interleaved: bool = False  # one tensor [E, in, out] has all experts; gate and up rows alternate (gpt-oss)
    sigmoid: bool | None = None  # DeepSeek's routing with sigmoid or softmax scores; None: other routing
    sparsemixer: bool = False  # the routing of Phi-3.5-MoE, which chooses two experts


@dataclass(frozen=True)
class Family:
    """One architecture: the keys of config.json that it honours, and the switches that no config.json has."""

    architecture: str
    defaults: Mapping[str, Any]  # values of keys that config.json omits
    optional: frozenset[str] = frozenset()  # honoured keys, in addition to those that all families honour
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with the one value that this family supports
    qkv_bias: bool | None = None  # None: the key `bias_key` decides
    bias_key: str = "attention_bias"
    out_bias: bool = True  # `bias_key` also applies to o_proj
    fused_qkv: bool = False  # the checkpoint has one linear for q, k and v
    fused_gate_up: bool = False  # the checkpoint has one linear for gate and up
    qk_norm: HeadNorm | None = None  # if config.json has `use_qk_norm`, that key can disable the norm
    # Whether all layers have the window. Otherwise the layers from `max_window_layers` on have it or, if `defaults` has
    # `sliding_window_pattern`, all layers except every n-th.
    uniform_window: bool = True
    local_theta: str | None = None  # the key of a separate rotary base, without scaling, for layers with a window
    rope_in_windows_only: bool = False  # layers without a window have no rotary position embedding
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of types of rotary scaling
    rope_interleaved: bool = False  # element 2i is rotated with 2i + 1
    scales_queries: bool = False  # config.json may scale queries by their position
    # Whether attention and MLP read the same normalized input. None: `use_parallel_residual` in config.json decides.
    parallel: bool | None = False
    norms: Norms = BEFORE
    norm: Norm = "rms"
    norm_bias: bool = False  # LayerNorms have a bias
    eps_key: str = "rms_norm_eps"  # the key of the norms' epsilon
    offset_norms: bool = False  # norms multiply by 1 + weight
    sqrt_embedding: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    mixture: Mixture | None = None  # some layers have experts instead of an MLP
    sinks: bool = False  # each head has a learned logit in the denominator of its softmax
    latent: bool = False  # multi-head latent attention (latent_attention.py)
    gated: bool = True  # a dense MLP multiplies up by activation(gate); otherwise it has only up, and xIELU
    mscales: bool = False  # config.json has LongRoPE's factors of cos and sin
    published_as: str | None = None  # the class name in published files, if transformers' class has another name
