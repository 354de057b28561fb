"""`FAMILIES`, the table of decoder architectures: a `Family` per `model_type`, with switches that config.json lacks.

A row and config.json together become a `ModelConfig` (model_config.py). The decoder reads only that configuration,
never the name of a family. What all families share (rotary position, a dense MLP) is code of the layer
(network/decoder.py). A family that differs there needs a new field, the branch that reads the field, and the key of
config.json that sets it.

Defaults are those of transformers' config classes. This module does not import torch.
"""

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
    latent: bool = False  # multi-head latent attention (`model_config.LatentSizes`)
    gated: bool = True  # a dense MLP multiplies up by activation(gate); otherwise it has only up, and xIELU
    mscales: bool = False  # config.json has LongRoPE's factors of cos and sin
    published_as: str | None = None  # the class name in published files, if transformers' class has another name


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "head_dim": None, "num_key_value_heads": None, "sliding_window": None, "bos_token_id": None,
    "eos_token_id": None, "max_position_embeddings": 2048, "vocab_size": 32000, "use_sliding_window": True,
    "max_window_layers": 0, "layer_types": None, "rope_theta": 10000.0,
}  # fmt: skip
_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN = {"max_position_embeddings": 32768, "vocab_size": 151936, "use_sliding_window": False, "sliding_window": 4096,
         "max_window_layers": 28, "num_key_value_heads": 32}  # fmt: skip
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "vocab_size": 256000, "head_dim": 256, "num_key_value_heads": 4,
          "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
          "sliding_window": 4096}  # fmt: skip
_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
_GEMMA_KEYS = frozenset({"hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window",
                         "final_logit_softcapping"})  # fmt: skip
_GEMMA2 = _GEMMA | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                    "sliding_window_pattern": 2}  # fmt: skip
_GEMMA3 = _GEMMA | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
                    "max_position_embeddings": 131072, "vocab_size": 262208, "rope_theta": 1e6,
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
            "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_parameters": _YARN, "sliding_window": 128,
            "sliding_window_pattern": 2, "attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4,
            "swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # fmt: skip
_EXPERT_KEYS = frozenset({"sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok"})
_MOE_KEYS = _EXPERT_KEYS | {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
_BIASES = frozenset({"attention_bias", "mlp_bias"})
_PHI3 = {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1,
         "eos_token_id": 32000, "partial_rotary_factor": 1.0}  # fmt: skip
_OLMO = {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_GLM = {"vocab_size": 151552, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
        "rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5,
        "eos_token_id": [151329, 151336, 151338]}  # fmt: skip
_MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                   "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                   "llama_4_scaling_beta": 0.1}  # fmt: skip
_MINISTRAL = {"vocab_size": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 262144, "rope_parameters": _MINISTRAL_ROPE}  # fmt: skip
_COHERE = {"vocab_size": 256000, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
           "bos_token_id": 5, "eos_token_id": 255001, "logit_scale": 0.0625}  # fmt: skip
_COHERE_KEYS = frozenset({"layer_norm_eps", "logit_scale", "attention_bias"})
# Keys of Cohere's published files that transformers does not read either.
_COHERE_FIXED = {"use_parallel_block": True, "use_gated_activation": True, "use_embedding_sharing": True,
                "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "layer_switch": 4,
                "order_of_interleaved_layers": "local_attn_first"}  # fmt: skip
_STABLELM = {"vocab_size": 50304, "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
             "bos_token_id": 0, "eos_token_id": 0, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
             "use_parallel_residual": False}  # fmt: skip
_DEEPSEEK = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "v_head_dim": 128, "rope_interleave": True}  # fmt: skip
_DEEPSEEK_V2 = {"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                "num_attention_heads": 32, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
                "routed_scaling_factor": 1.0, "topk_method": "greedy", "moe_intermediate_size": 1407,
                "norm_topk_prob": False, "n_group": None, "topk_group": None}  # fmt: skip
_DEEPSEEK_V3 = {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
                "num_attention_heads": 128, "num_key_value_heads": 128, "first_k_dense_replace": 3,
                "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8,
                "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 2048,
                "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
_DEEPSEEK_FIXED = {"moe_layer_freq": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001}
_DEEPSEEK_NAMES = MixtureNames(shared="shared_experts")
_SIGMOID_ROUTING = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_SIGMOID_KEYS = frozenset(_SIGMOID_ROUTING) | {"attention_bias", "first_k_dense_replace", "moe_intermediate_size",
                                       "n_routed_experts", "n_shared_experts", "norm_topk_prob",
                                       "num_experts_per_tok"}  # fmt: skip
_DOTS1 = _SIGMOID_ROUTING | {"vocab_size": 152064, "num_key_value_heads": 32, "moe_intermediate_size": 1408,
                     "first_k_dense_replace": 0, "norm_topk_prob": False, "sliding_window": 4096,
                     "max_window_layers": 62}  # fmt: skip
_GLM4_MOE = _SIGMOID_ROUTING | {"vocab_size": 151552, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                        "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
                        "num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1,
                        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False}  # fmt: skip
_PHIMOE = {"vocab_size": 32064, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
           "rope_theta": 1e6, "num_experts_per_tok": 2, "num_experts": 16, "router_jitter_noise": 0.01,
           "lm_head_bias": False}  # fmt: skip
_APERTUS_ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
_APERTUS = {"hidden_act": "xielu", "vocab_size": 131072, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
            "rope_theta": 12e6, "rope_parameters": _APERTUS_ROPE}  # fmt: skip
_DEEPSEEK_KEYS = frozenset(_DEEPSEEK) | {"attention_bias", "qk_head_dim", "num_experts_per_tok", "norm_topk_prob"}

FAMILIES: dict[str, Family] = {  # by the file's model_type
    "llama": Family("LlamaForCausalLM", _COMMON | _LLAMA_TOKENS, _BIASES),
    "mistral": Family(
        "MistralForCausalLM",
        _COMMON | _LLAMA_TOKENS | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        frozenset({"sliding_window"}),
        qkv_bias=False,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _COMMON | _QWEN, _WINDOW_KEYS, qkv_bias=True, uniform_window=False),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _COMMON | _QWEN | {"head_dim": 128},
        _WINDOW_KEYS | {"attention_bias"},
        qk_norm="shared",
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
        qk_norm="shared",
        uniform_window=False,
        local_theta="rope_local_base_freq",
        norms=AROUND,
        offset_norms=True,
        sqrt_embedding=True,
    ),
    "granite": Family("GraniteForCausalLM", _COMMON | _LLAMA_TOKENS | _GRANITE, _BIASES.union(_GRANITE)),
    "smollm3": Family("SmolLM3ForCausalLM", _COMMON | _SMOLLM3, _BIASES | {"no_rope_layers", "no_rope_layer_interval"}),
    "phi3": Family(
        "Phi3ForCausalLM",
        _COMMON | _PHI3,
        frozenset({"sliding_window", "partial_rotary_factor", "original_max_position_embeddings"}),
        qkv_bias=False,
        fused_qkv=True,
        fused_gate_up=True,
        fixed={"interpolate_factor": 1, "full_attn_mod": 1},
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _COMMON | _OLMO,
        frozenset({"attention_bias"}),
        qk_norm="all_heads",
        norms=AFTER,
        norm="fp32_rms",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _COMMON | _OLMO | {"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        frozenset({"attention_bias", "sliding_window"}),
        qk_norm="all_heads",
        uniform_window=False,
        local_theta="rope_theta",
        norms=AFTER,
        norm="fp32_rms",
    ),
    "glm": Family(
        "GlmForCausalLM",
        _COMMON | _GLM,
        frozenset({"attention_bias", "partial_rotary_factor"}),
        out_bias=False,
        fused_gate_up=True,
        rope_interleaved=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _COMMON | _GLM,
        frozenset({"attention_bias", "partial_rotary_factor"}),
        out_bias=False,
        fused_gate_up=True,
        rope_interleaved=True,
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        _COMMON | _LLAMA_TOKENS | _MINISTRAL,
        frozenset({"sliding_window"}),
        qkv_bias=False,
        scales_queries=True,
    ),
    "cohere": Family(
        "CohereForCausalLM",
        _COMMON | _COHERE | {"rope_theta": 5e5, "use_qk_norm": False},
        _COHERE_KEYS | {"use_qk_norm"},
        fixed=_COHERE_FIXED,
        qk_norm="by_head",
        rope_interleaved=True,
        parallel=True,
        norm="layer",
        eps_key="layer_norm_eps",
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _COMMON | _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        _COHERE_KEYS | {"sliding_window", "sliding_window_pattern"},
        fixed=_COHERE_FIXED,
        uniform_window=False,
        rope_in_windows_only=True,
        rope_interleaved=True,
        parallel=True,
        norm="layer",
        eps_key="layer_norm_eps",
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        _COMMON | _STABLELM,
        frozenset({"layer_norm_eps", "partial_rotary_factor", "use_qkv_bias", "use_parallel_residual"}),
        bias_key="use_qkv_bias",
        out_bias=False,
        parallel=None,
        norm="layer",
        norm_bias=True,
        eps_key="layer_norm_eps",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _COMMON | _LLAMA_TOKENS | _MIXTRAL,
        _EXPERT_KEYS,
        qkv_bias=False,
        mixture=Mixture(
            MixtureNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
            size="intermediate_size",
            normalizes=True,
            fp32_routing_weights=True,
        ),
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        _COMMON | _LLAMA_TOKENS | _PHIMOE,
        _EXPERT_KEYS | {"attention_bias", "router_jitter_noise", "lm_head_bias", "original_max_position_embeddings"},
        norm="layer",
        norm_bias=True,
        mixture=Mixture(
            MixtureNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
            size="intermediate_size",
            normalizes=False,
            sparsemixer=True,
        ),
        mscales=True,
        published_as="PhiMoEForCausalLM",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _COMMON | _QWEN2_MOE,
        _MOE_KEYS | {"shared_expert_intermediate_size", "qkv_bias"},
        bias_key="qkv_bias",
        out_bias=False,
        mixture=Mixture(MixtureNames(shared="shared_expert", shared_gate="shared_expert_gate")),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _COMMON | _QWEN3_MOE,
        _MOE_KEYS | {"use_sliding_window", "attention_bias"},
        qk_norm="shared",
        mixture=Mixture(),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _COMMON | _GPT_OSS,
        _EXPERT_KEYS | {"attention_bias", "experts_per_token", "swiglu_limit", "swiglu_alpha"},
        uniform_window=False,
        mixture=Mixture(
            MixtureNames(router="router"),
            size="intermediate_size",
            normalizes=False,
            softmax_over_chosen=True,
            bias=True,
            interleaved=True,
        ),
        sinks=True,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _COMMON | _LLAMA_TOKENS | _DEEPSEEK | _DEEPSEEK_V2,
        _DEEPSEEK_KEYS.union(_DEEPSEEK_V2) - {"norm_topk_prob"},
        fixed=_DEEPSEEK_FIXED | {"scoring_func": "softmax", "norm_topk_prob": False},
        rope_interleaved=True,
        mixture=Mixture(_DEEPSEEK_NAMES, fp32_routing_weights=True, normalizes=False, sigmoid=False),
        latent=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _COMMON | _DEEPSEEK | _DEEPSEEK_V3,
        _DEEPSEEK_KEYS.union(_DEEPSEEK_V3, {"num_nextn_predict_layers"}),
        fixed=_DEEPSEEK_FIXED | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        rope_interleaved=True,
        mixture=Mixture(_DEEPSEEK_NAMES, fp32_routing_weights=True, sigmoid=True),
        latent=True,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        _COMMON | _DOTS1,
        _SIGMOID_KEYS | {"sliding_window", "max_window_layers"},
        fixed=_DEEPSEEK_FIXED | {"scoring_func": "noaux_tc"},
        qk_norm="shared",
        uniform_window=False,
        mixture=Mixture(_DEEPSEEK_NAMES, fp32_routing_weights=True, sigmoid=True),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _COMMON | _GLM4_MOE,
        _SIGMOID_KEYS | {"partial_rotary_factor", "use_qk_norm", "num_nextn_predict_layers"},
        out_bias=False,
        qk_norm="shared",
        mixture=Mixture(_DEEPSEEK_NAMES, fp32_routing_weights=True, sigmoid=True),
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        _COMMON | _LLAMA_TOKENS | _APERTUS,
        frozenset({"attention_bias"}),
        fixed={"qk_norm": True, "post_norm": False},
        qk_norm="shared",
        norms=Norms("attention_layernorm", None, "feedforward_layernorm", None),
        gated=False,
    ),
}
