"""`LAYOUTS`, the table of GGUF architectures: how llama.cpp's converter changes each family's names and tensors.

A row has the `model_type` of the Hugging Face model, the keys and tensors in addition to the common ones, and values
that llama.cpp fixes in code (`fixed`). A function `derive` computes the keys of config.json that are not only renamed,
from the file and the keys that were read before. An architecture without a row raises ModelError. `to_decimal` and
`dequantize` read the numbers of any file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.gguf.reader import GgufFile

_ELEMENTS_PER_STEP = 2**20  # elements of a tensor that are in memory as FP32 at the same time
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
Config = dict[str, Any]
# The numbers of layers of Gemma's 27B models, which scale the softmax by hidden_size / num_heads, not by head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`
DEEPSEEK_KEYS = frozenset({
    "attention.key_length_mla", "attention.value_length_mla", "expert_weights_norm", "expert_gating_func",
    "expert_group_count", "expert_group_used_count", "rope.scaling.yarn_log_multiplier",
})  # fmt: skip


def to_decimal(value: Any) -> Any:
    """Returns the decimal number that was rounded to this FP32 number: 1e-5 instead of 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def dequantize(tensor: Any, dtype: torch.dtype = torch.bfloat16, expert: int | None = None) -> Tensor:
    """Returns a `gguf.ReaderTensor` as a PyTorch tensor of type `dtype`, or only one expert of a stack."""
    import gguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    data = tensor.data if expert is None else tensor.data[expert]
    shape = shape if expert is None else shape[1:]
    rows = data.reshape(-1, data.shape[-1])
    out = torch.empty(len(rows), shape[-1], dtype=dtype)
    step = max(1, _ELEMENTS_PER_STEP // shape[-1])
    for start in range(0, len(rows), step):
        with np.errstate(all="ignore"):  # the writer refuses NaN and infinities
            part = gguf.dequantize(rows[start : start + step], tensor.tensor_type)
        out[start : start + step] = torch.from_numpy(np.array(part, dtype=np.float32))
    return out.reshape(shape)


def olmo3_keys(file: GgufFile, config: Config) -> Config:
    """Returns the layer types. Every fourth layer has full attention, unless the file has a pattern."""
    layers = config["num_hidden_layers"]
    pattern = file.value("olmo2.attention.sliding_window_pattern")
    if pattern is None and isinstance(layers, int):
        pattern = [(i + 1) % 4 != 0 for i in range(layers)]
    if not isinstance(pattern, list):
        raise ModelError(f"{file.path}: attention.sliding_window_pattern is {shown(pattern)}, which is not a list.")
    return {"layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in pattern]}


def gemma_keys(file: GgufFile, config: Config) -> Config:
    arch = file.require("general.architecture", str)
    if config["num_hidden_layers"] != _GEMMA_27B_LAYERS[arch]:
        return {"query_pre_attn_scalar": config["head_dim"]}
    return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}


def rotary_keys(file: GgufFile, config: Config) -> Config:
    """Returns the fraction of a head that is rotated."""
    arch = file.require("general.architecture", str)
    num_rotated, head = file.get(f"{arch}.rope.dimension_count", int), config["head_dim"]
    if num_rotated is None or not isinstance(head, int) or not 0 < num_rotated <= head:
        return {}
    return {"partial_rotary_factor": num_rotated / head}


def phi3_keys(file: GgufFile, config: Config) -> Config:
    """Returns the window (0 means none), the rotated fraction, and LongRoPE's factors if the file has them."""
    window = file.require("phi3.attention.sliding_window", int)
    keys = rotary_keys(file, config) | {"sliding_window": window or None}
    if LONG not in file.tensors and SHORT not in file.tensors:
        return keys
    original = file.require("phi3.rope.scaling.original_context_length", int)
    return keys | {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "rope_type": "longrope",
            "long_factor": _factors(file, LONG),
            "short_factor": _factors(file, SHORT),
            **_attention_factor(file, config, original),
        },
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise ModelError(f"{file.path} has no {name}; convert the model to GGUF again.")
    return [to_decimal(factor) for factor in dequantize(file.tensors[name], torch.float32).flatten().tolist()]


def _attention_factor(file: GgufFile, config: Config, original: int) -> Config:
    """Returns the factor of cos and sin if it differs from the one that follows from the context lengths."""
    factor, length = file.get("phi3.rope.scaling.attn_factor", float), config["max_position_embeddings"]
    if factor is None or not isinstance(length, int) or original < 2:
        return {}
    default = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
    return {} if math.isclose(factor, default, rel_tol=1e-6) else {"attention_factor": to_decimal(factor)}


def gpt_oss_keys(file: GgufFile, config: Config) -> Config:
    """Returns the experts' size, and YaRN's parameters with its ramp not rounded to whole pairs of elements."""
    scaling = config.get("rope_scaling")
    size = file.require("gpt-oss.expert_feed_forward_length", int)
    return {"intermediate_size": size} | ({"rope_scaling": scaling | {"truncate": False}} if scaling else {})


def deepseek_keys(file: GgufFile, config: Config) -> Config:
    """Returns the sizes of a head and the routing. V3's routers use a sigmoid, V2's a softmax."""
    key, value = (file.get(f"deepseek2.attention.{part}_length_mla", int) for part in ("key", "value"))
    if key is None or value is None:  # an old file, in which keys and values are one tensor
        key, value = (file.require(f"deepseek2.attention.{part}_length", int) for part in ("key", "value"))
    normalizes = bool(file.get("deepseek2.expert_weights_norm", bool))
    keys = {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - int(config["qk_rope_head_dim"] or 0),
        "v_head_dim": value,
        "q_lora_rank": config.get("q_lora_rank"),
        "head_dim": None,
        "norm_topk_prob": normalizes,
    }
    gating = file.get("deepseek2.expert_gating_func", int) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"{file.path}: deepseek2.expert_gating_func is {gating}, which is not supported.")
    routing = _sigmoid_routing(file, config) if gating == _SIGMOID else _softmax_routing(file, config)
    return keys | _yarn_keys(file, config) | routing


def _softmax_routing(file: GgufFile, config: Config) -> Config:
    groups, chosen_groups = _groups(file)
    has_groups = groups is not None and groups > 1
    return {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if has_groups else "greedy",
        "n_group": groups if has_groups else None,
        "topk_group": chosen_groups if has_groups else None,
    }


def _sigmoid_routing(file: GgufFile, config: Config) -> Config:
    """Returns V3's routing. Old files of DeepSeek V3 do not say that a token chooses 4 of the 8 groups of experts."""
    groups, chosen_groups = _groups(file)
    default = (8, 4) if config["n_routed_experts"] == 256 else (1, 1)
    return {"model_type": "deepseek_v3", "n_group": groups or default[0], "topk_group": chosen_groups or default[1]}


def _groups(file: GgufFile) -> tuple[int | None, int | None]:
    count = file.get("deepseek2.expert_group_count", int)
    return count, file.get("deepseek2.expert_group_used_count", int)


def _yarn_keys(file: GgufFile, config: Config) -> Config:
    """Returns YaRN's parameters with `mscale`; the file has 0.1 * mscale."""
    scaling, multiplier = config.get("rope_scaling"), file.get("deepseek2.rope.scaling.yarn_log_multiplier", float)
    if not scaling or multiplier is None:
        return {}
    mscale = to_decimal(multiplier / 0.1)
    return {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale}}


RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class Layout:
    """One GGUF architecture: its keys and tensors, and their names in a Hugging Face directory."""

    model_type: str
    interleaved: bool = False  # the rows of q and k are neighbouring pairs; Hugging Face has two halves
    # Tensor names, with or without ".weight", that are not in model.LAYER_MODULES. {} is the index of an expert.
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # required keys, and their names in config.json
    optional: Mapping[str, str] = field(default_factory=dict)  # optional keys, and their names in config.json
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json with their values
    switches: Mapping[str, str] = field(default_factory=dict)  # config.json keys that are true if layer 0 has a tensor
    handled: frozenset[str] = frozenset()  # keys that `derive` reads, or that repeat another key
    eps: tuple[str, str] = (RMS_EPS, "rms_norm_eps")  # the key of the norms' epsilon, and its name in config.json
    norms_include_one: bool = False  # the file has 1 + weight for norms
    tensors: tuple[str, ...] = ()  # tensors that `derive` reads
    derive: Callable[[GgufFile, dict[str, Any]], dict[str, Any]] | None = None


def _stacks(owner: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Returns the names of experts that a file stores in three stacks."""
    parts = {"gate": gate, "up": up, "down": down}
    return {f"ffn_{part}_exps": f"{owner}.experts.{{}}.{name}" for part, name in parts.items()}


def _shared(owner: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{owner}.{part}_proj" for part in ("gate", "up", "down")}


_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = _EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_MLP_EXPERTS = _stacks("mlp", "gate_proj", "up_proj", "down_proj") | {"ffn_gate_inp": "mlp.gate"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH_NORMS = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_ROTARY_KEYS = frozenset({"rope.dimension_count"})
_COHERE = {"logit_scale": "logit_scale"}
_LAYER_NORM = (LAYER_EPS, "layer_norm_eps")

LAYOUTS: dict[str, Layout] = {  # by `general.architecture`; Mistral's models are written as llama's
    "llama": Layout("llama", interleaved=True, switches=_BIASES),
    "mixtral": Layout(
        "mixtral",
        interleaved=True,
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
        interleaved=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        switches=_BIASES,
    ),
    "smollm3": Layout("smollm3", interleaved=True, fixed={"no_rope_layer_interval": 4}, switches=_BIASES),
    "olmo2": Layout("olmo2", names=_POST_NORMS, switches=_ATTENTION_BIAS),
    "olmo3": Layout(
        "olmo3",
        names=_POST_NORMS,
        keys=_WINDOW,
        switches=_ATTENTION_BIAS,
        handled=frozenset({"attention.sliding_window_pattern"}),
        derive=olmo3_keys,
    ),
    "gemma2": Layout(
        "gemma2",
        names=_SANDWICH_NORMS,
        keys=_WINDOW,
        optional={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norms_include_one=True,
        derive=gemma_keys,
    ),
    "gemma3": Layout(
        "gemma3_text",
        names=_SANDWICH_NORMS,
        keys=_WINDOW,
        optional={"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        norms_include_one=True,
        derive=gemma_keys,
    ),
    "phi3": Layout(
        "phi3",
        names=_FUSED,
        handled=_ROTARY_KEYS | {"attention.sliding_window", "rope.scaling.attn_factor"},
        tensors=(LONG, SHORT),
        derive=phi3_keys,
    ),
    "glm4": Layout(
        "glm4",
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        switches=_ATTENTION_BIAS,
        handled=_ROTARY_KEYS,
        derive=rotary_keys,
    ),
    "stablelm": Layout(
        "stablelm",
        keys={"use_parallel_residual": "use_parallel_residual"},
        switches={"use_qkv_bias": "attn_q.bias"},
        handled=_ROTARY_KEYS,
        eps=_LAYER_NORM,
        derive=rotary_keys,
    ),
    "command-r": Layout(
        "cohere", keys=_COHERE, switches=_ATTENTION_BIAS | {"use_qk_norm": "attn_q_norm.weight"}, eps=_LAYER_NORM
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
        handled=frozenset({"expert_feed_forward_length"}),
        derive=gpt_oss_keys,
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
        handled=DEEPSEEK_KEYS,
        derive=deepseek_keys,
    ),
}
_UNNAMED = ("mixtral", "olmo3")  # llama.cpp has no names for these; `layout_of` recognizes them by their keys


def layout_of(file: GgufFile) -> Layout:
    """Returns the layout of a file's architecture. Raises ModelError if the architecture is not supported."""
    arch = file.require("general.architecture", str)
    if arch not in LAYOUTS or arch in _UNNAMED:
        names = ", ".join(name for name in LAYOUTS if name not in _UNNAMED)
        raise ModelError(f"{file.path}: the architecture {shown(arch)} is not supported; supported are {names}.")
    if arch == "llama" and file.value("llama.expert_count"):
        return LAYOUTS["mixtral"]
    if arch == "olmo2" and file.value("olmo2.attention.sliding_window"):
        return LAYOUTS["olmo3"]
    return LAYOUTS[arch]
