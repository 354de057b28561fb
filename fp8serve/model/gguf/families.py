"""The table of GGUF architectures: what llama.cpp's converter does to each family's names, rows and numbers.

A row says which `model_type` a file of this architecture becomes, which keys and tensors it has in addition to the
common ones, and what llama.cpp computes without a key for it (`fixed`), such as the pattern of windows. `derived` has
everything that is more than a renaming. An architecture without a row is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.gguf import derived
from fp8serve.model.gguf.reader import GgufFile

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class Layout:
    """How a file of one architecture differs from others.

    pairs: rows of q and k are neighbouring pairs where Hugging Face has two halves. names: parts of a layer with names
    other than in `tensors.LAYER`, `PART` or `PART.KIND`; {} stands for the number of an expert of a stack. keys:
    required keys of the file, and their names in config.json. optional: likewise, but not required. fixed: keys and
    values of config.json. switches: keys of config.json that are true where layer 0 has this tensor. known: keys that
    `derive` reads, or that repeat another. eps: the norms' key, and its name in config.json. one_added: norms hold 1 +
    weight. tensors: those that `derive` reads.
    """

    model_type: str
    pairs: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    eps: tuple[str, str] = (RMS_EPS, "rms_norm_eps")
    one_added: bool = False
    tensors: tuple[str, ...] = ()
    derive: Callable[[GgufFile, dict[str, Any]], dict[str, Any]] | None = None


def _stacks(owner: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of experts that are stored in three stacks."""
    parts = {"gate": gate, "up": up, "down": down}
    return {f"ffn_{part}_exps": f"{owner}.experts.{{}}.{name}" for part, name in parts.items()}


def _shared(owner: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{owner}.{part}_proj" for part in ("gate", "up", "down")}


_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = _EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_MLP_EXPERTS = _stacks("mlp", "gate_proj", "up_proj", "down_proj") | {"ffn_gate_inp": "mlp.gate"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_ROTARY = frozenset({"rope.dimension_count"})
_COHERE = {"logit_scale": "logit_scale"}
_LAYER_NORM = (LAYER_EPS, "layer_norm_eps")

LAYOUTS: dict[str, Layout] = {  # by `general.architecture`; Mistral's models are written as llama's
    "llama": Layout("llama", pairs=True, switches=_BIASES),
    "mixtral": Layout(
        "mixtral",
        pairs=True,
        names=_stacks("block_sparse_moe", "w1", "w3", "w2") | {"ffn_gate_inp": "block_sparse_moe.gate"},
        keys=_EXPERTS | {"expert_count": "num_local_experts"},
    ),
    "qwen2": Layout("qwen2"),
    "qwen3": Layout("qwen3", switches=_ATTENTION_BIAS),
    "qwen2moe": Layout(
        "qwen2_moe",
        names=_MLP_EXPERTS | _shared("mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        keys=_QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
        switches={"qkv_bias": "attn_q.bias"},
    ),
    "qwen3moe": Layout("qwen3_moe", names=_MLP_EXPERTS, keys=_QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
    "granite": Layout(
        "granite",
        pairs=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        switches=_BIASES,
    ),
    "smollm3": Layout("smollm3", pairs=True, fixed={"no_rope_layer_interval": 4}, switches=_BIASES),
    "olmo2": Layout("olmo2", names=_AFTER, switches=_ATTENTION_BIAS),
    "olmo3": Layout(
        "olmo3",
        names=_AFTER,
        keys=_WINDOW,
        switches=_ATTENTION_BIAS,
        known=frozenset({"attention.sliding_window_pattern"}),
        derive=derived.layer_types,
    ),
    "gemma2": Layout(
        "gemma2",
        names=_AROUND,
        keys=_WINDOW,
        optional={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        one_added=True,
        derive=derived.gemma_softmax,
    ),
    "gemma3": Layout(
        "gemma3_text",
        names=_AROUND,
        keys=_WINDOW,
        optional={"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        one_added=True,
        derive=derived.gemma_softmax,
    ),
    "phi3": Layout(
        "phi3",
        names=_FUSED,
        known=_ROTARY | {"attention.sliding_window", "rope.scaling.attn_factor"},
        tensors=(derived.LONG, derived.SHORT),
        derive=derived.phi3,
    ),
    "glm4": Layout(
        "glm4",
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        switches=_ATTENTION_BIAS,
        known=_ROTARY,
        derive=derived.partial_rotary,
    ),
    "stablelm": Layout(
        "stablelm",
        keys={"use_parallel_residual": "use_parallel_residual"},
        switches={"use_qkv_bias": "attn_q.bias"},
        known=_ROTARY,
        eps=_LAYER_NORM,
        derive=derived.partial_rotary,
    ),
    "command-r": Layout(
        "cohere",
        keys=_COHERE,
        switches=_ATTENTION_BIAS | {"use_qk_norm": "attn_q_norm.weight"},
        eps=_LAYER_NORM,
    ),
    "cohere2": Layout("cohere2", keys=_COHERE | _WINDOW, switches=_ATTENTION_BIAS, eps=_LAYER_NORM),
    "gpt-oss": Layout(
        "gpt_oss",
        names=_MLP_EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys=_EXPERTS | _WINDOW | {"expert_count": "num_local_experts"},
        switches=_ATTENTION_BIAS,
        known=frozenset({"expert_feed_forward_length"}),
        derive=derived.gpt_oss,
    ),
    "deepseek2": Layout(
        "deepseek_v2",
        names=_MLP_EXPERTS
        | _shared("mlp.shared_experts")
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        keys=_EXPERTS
        | {
            "attention.kv_lora_rank": "kv_lora_rank",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        optional={"attention.q_lora_rank": "q_lora_rank", "expert_weights_scale": "routed_scaling_factor"},
        known=derived.DEEPSEEK_KEYS,
        derive=derived.deepseek,
    ),
}
_NAMED_BY_KEYS = ("mixtral", "olmo3")  # architectures here, which llama.cpp tells apart by their keys


def layout_of(file: GgufFile) -> Layout:
    """ModelError: the architecture is not read."""
    arch = file.require("general.architecture", str)
    if arch not in LAYOUTS or arch in _NAMED_BY_KEYS:
        known = ", ".join(name for name in LAYOUTS if name not in _NAMED_BY_KEYS)
        raise ModelError(f"{file.path}: the architecture {shown(arch)} is not supported; supported are {known}.")
    if arch == "llama" and file.value("llama.expert_count"):
        return LAYOUTS["mixtral"]
    if arch == "olmo2" and file.value("olmo2.attention.sliding_window"):
        return LAYOUTS["olmo3"]
    return LAYOUTS[arch]
