"""The table of architectures: one row for each family of models, with what its class fixes and no file says.

A row and the file together become a `ModelConfig` (config.py), and that is all the decoder knows of a family: it asks
where norms are, which projections have a bias, what multiplies the residual, never for a name. What all families here
have in common (RMSNorm, rotary position, a gated dense MLP) is not in the table but in the layer (decoder.py). A family
that differs there adds a field, the branch of the layer that reads it, and the key of the file that sets it.

Defaults are those of transformers' config classes. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms in the file; None: there is none in this place."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None


BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
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
    shared_gate: str | None = None  # a linear whose sigmoid multiplies what that one says


@dataclass(frozen=True)
class Mixture:
    """How a family's mixtures of experts differ from others'; see mixture.Experts.

    size: the key for the size of each expert. normalizes: None: the file says so. weighs_chosen: the softmax is of the
    chosen experts' logits alone. bias: of the router and of every projection. interleaved: files have all experts in
    one tensor [E, in, out], with rows of gate and up in turn (gpt-oss).
    """

    names: MixtureNames = MixtureNames()
    size: str = "moe_intermediate_size"
    normalizes: bool | None = None
    wide_weights: bool = False
    weighs_chosen: bool = False
    bias: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture.

    defaults: of keys that the file leaves out. optional: keys that this family honours besides those that all do.
    qkv_bias: whether q, k and v have a bias; None: the file's `attention_bias` says so, of o too. qk_norm: whether
    queries and keys are normed. uniform_window: all layers have the window; else those from `max_window_layers` on, or
    all but every `sliding_window_pattern`-th where there is such a default. local_theta: layers with a window have a
    rotary base of their own. offset_norms: norms multiply by 1 + weight. sqrt_embedding: embeddings are multiplied by
    the square root of their width. mixture: some layers have experts for an MLP. sinks: each head has a logit that
    joins the sum of its weights.
    """

    architecture: str
    defaults: Mapping[str, Any]
    optional: frozenset[str] = frozenset()
    qkv_bias: bool | None = None
    qk_norm: bool = False
    uniform_window: bool = True
    local_theta: bool = False
    norms: Norms = BEFORE
    offset_norms: bool = False
    sqrt_embedding: bool = False
    mixture: Mixture | None = None
    sinks: bool = False


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "head_dim": None, "num_key_value_heads": None, "sliding_window": None, "bos_token_id": None,
    "eos_token_id": None, "max_position_embeddings": 2048, "vocab_size": 32000, "use_sliding_window": True,
    "max_window_layers": 0, "layer_types": None, "rope_theta": 10000.0,
}  # fmt: skip
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN = {"max_position_embeddings": 32768, "vocab_size": 151936, "use_sliding_window": False, "sliding_window": 4096,
         "max_window_layers": 28, "num_key_value_heads": 32}  # fmt: skip
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "vocab_size": 256000, "head_dim": 256, "num_key_value_heads": 4,
          "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
          "sliding_window": 4096}  # fmt: skip
_WINDOWED = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
_GEMMA_KEYS = frozenset({"hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window",
                         "final_logit_softcapping"})  # fmt: skip
_GEMMA2 = _GEMMA | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                    "sliding_window_pattern": 2}  # fmt: skip
_GEMMA3 = _GEMMA | {"max_position_embeddings": 131072, "vocab_size": 262208, "rope_theta": 1e6,
                    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}  # fmt: skip
_GRANITE = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}
_SMOLLM3 = {"max_position_embeddings": 32768, "vocab_size": 128256, "num_key_value_heads": 4, "bos_token_id": 128000,
            "eos_token_id": 128001, "tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4,
            "use_sliding_window": False}  # fmt: skip
_MIXTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_QWEN2_MOE = _QWEN | _EXPERTS | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
                                 "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                                 "qkv_bias": True}  # fmt: skip
_QWEN3_MOE = _QWEN | _EXPERTS | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                                 "moe_intermediate_size": 768, "max_window_layers": 0}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}  # fmt: skip
_GPT_OSS = {"max_position_embeddings": 131072, "vocab_size": 201088, "head_dim": 64, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_scaling": _YARN, "sliding_window": 128,
            "sliding_window_pattern": 2, "attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4,
            "swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # fmt: skip
_MOE_KEYS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
                       "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"})  # fmt: skip
_BIASES = frozenset({"attention_bias", "mlp_bias"})

FAMILIES: dict[str, Family] = {  # by the file's model_type
    "llama": Family("LlamaForCausalLM", _COMMON | _SPECIAL, _BIASES),
    "mistral": Family(
        "MistralForCausalLM",
        _COMMON | _SPECIAL | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        frozenset({"sliding_window"}),
        qkv_bias=False,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _COMMON | _QWEN, _WINDOWED, qkv_bias=True, uniform_window=False),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _COMMON | _QWEN | {"head_dim": 128},
        _WINDOWED | {"attention_bias"},
        qk_norm=True,
        uniform_window=False,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _COMMON | _GEMMA2,
        _GEMMA_KEYS | {"attn_logit_softcapping"},
        uniform_window=False,
        norms=AROUND,
        offset_norms=True,
        sqrt_embedding=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _COMMON | _GEMMA3,
        _GEMMA_KEYS | {"sliding_window_pattern", "rope_local_base_freq"},
        qk_norm=True,
        uniform_window=False,
        local_theta=True,
        norms=AROUND,
        offset_norms=True,
        sqrt_embedding=True,
    ),
    "granite": Family("GraniteForCausalLM", _COMMON | _SPECIAL | _GRANITE, _BIASES.union(_GRANITE)),
    "smollm3": Family("SmolLM3ForCausalLM", _COMMON | _SMOLLM3, _BIASES | {"no_rope_layers", "no_rope_layer_interval"}),
    "mixtral": Family(
        "MixtralForCausalLM",
        _COMMON | _SPECIAL | _MIXTRAL,
        frozenset({"sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok"}),
        qkv_bias=False,
        mixture=Mixture(
            MixtureNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
            size="intermediate_size",
            normalizes=True,
            wide_weights=True,
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _COMMON | _QWEN2_MOE,
        _MOE_KEYS | {"sliding_window", "shared_expert_intermediate_size", "qkv_bias"},
        qkv_bias=True,
        mixture=Mixture(MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate")),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _COMMON | _QWEN3_MOE,
        frozenset({"sliding_window", "use_sliding_window", "attention_bias"}) | _MOE_KEYS,
        qk_norm=True,
        mixture=Mixture(),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _COMMON | _GPT_OSS,
        frozenset(
            {
                "sliding_window",
                "attention_bias",
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "experts_per_token",
                "swiglu_limit",
                "swiglu_alpha",
            }
        ),
        uniform_window=False,
        mixture=Mixture(
            MixtureNames(router="router"),
            size="intermediate_size",
            normalizes=False,
            weighs_chosen=True,
            bias=True,
            interleaved=True,
        ),
        sinks=True,
    ),
}
