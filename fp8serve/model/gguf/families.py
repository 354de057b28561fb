"""The table of GGUF architectures: what llama.cpp's converter does to each family's names, rows and numbers.

A row says which `model_type` a file of this architecture becomes, which keys and tensors it has in addition to the
common ones, and what llama.cpp computes without a key for it (`fixed`), such as the pattern of windows. A function
`derive` gives keys of config.json that are more than a renaming, from the file and the keys read so far. An
architecture without a row is refused. `decimal` and `dequantize` read numbers of any file.
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

_ELEMENTS_AT_ONCE = 2**20  # only so much of a tensor exists in FP32 at a time
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
Config = dict[str, Any]
# The models of Gemma 2 and 3 whose softmax is scaled by the width and not by the head, by their layers: 27B.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_SOFTMAX, _SIGMOID = 1, 2  # `expert_gating_func`
DEEPSEEK_KEYS = frozenset({
    "attention.key_length_mla", "attention.value_length_mla", "expert_weights_norm", "expert_gating_func",
    "expert_group_count", "expert_group_used_count", "rope.scaling.yarn_log_multiplier",
})  # fmt: skip


def decimal(value: Any) -> Any:
    """An FP32 as the decimal number that it was rounded from: 1e-5 and not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def dequantize(tensor: Any, dtype: torch.dtype = torch.bfloat16, expert: int | None = None) -> Tensor:
    """A `gguf.ReaderTensor` as `dtype`, in the shape that PyTorch gives it; FP32 of a few rows at a time.

    expert: the number of an expert in a stack, to get it alone.
    """
    import gguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    data = tensor.data if expert is None else tensor.data[expert]
    shape = shape if expert is None else shape[1:]
    rows = data.reshape(-1, data.shape[-1])
    out = torch.empty(len(rows), shape[-1], dtype=dtype)
    step = max(1, _ELEMENTS_AT_ONCE // shape[-1])
    for at in range(0, len(rows), step):
        with np.errstate(all="ignore"):  # NaN and infinities are found, and refused, when the tensor is written
            part = gguf.dequantize(rows[at : at + step], tensor.tensor_type)
        out[at : at + step] = torch.from_numpy(np.array(part, dtype=np.float32))
    return out.reshape(shape)


def layer_types(file: GgufFile, config: Config) -> Config:
    """The windows of OLMo 3: every fourth layer sees the whole context unless the file has a pattern."""
    layers = config["num_hidden_layers"]
    pattern = file.value("olmo2.attention.sliding_window_pattern")
    if pattern is None and isinstance(layers, int):
        pattern = [(i + 1) % 4 != 0 for i in range(layers)]
    if not isinstance(pattern, list):
        raise ModelError(f"{file.path}: attention.sliding_window_pattern is {shown(pattern)}, which is not a list.")
    return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}


def gemma_softmax(file: GgufFile, config: Config) -> Config:
    arch = file.require("general.architecture", str)
    if config["num_hidden_layers"] != _SCALED_BY_WIDTH[arch]:
        return {"query_pre_attn_scalar": config["head_dim"]}
    return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}


def partial_rotary(file: GgufFile, config: Config) -> Config:
    """The fraction of a head that is rotated."""
    arch = file.require("general.architecture", str)
    num_rotated, head = file.get(f"{arch}.rope.dimension_count", int), config["head_dim"]
    if num_rotated is None or not isinstance(head, int) or not 0 < num_rotated <= head:
        return {}
    return {"partial_rotary_factor": num_rotated / head}


def phi3(file: GgufFile, config: Config) -> Config:
    """A window of 0 means no window; factors for short and long sequences are LongRoPE's."""
    window = file.require("phi3.attention.sliding_window", int)
    config_keys = partial_rotary(file, config) | {"sliding_window": window or None}
    if LONG not in file.tensors and SHORT not in file.tensors:
        return config_keys
    original = file.require("phi3.rope.scaling.original_context_length", int)
    return config_keys | {
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
    return [decimal(factor) for factor in dequantize(file.tensors[name], torch.float32).flatten().tolist()]


def _attention_factor(file: GgufFile, config: Config, original: int) -> Config:
    """The factor, where it differs from the one that follows from the lengths."""
    factor, longest = file.get("phi3.rope.scaling.attn_factor", float), config["max_position_embeddings"]
    if factor is None or not isinstance(longest, int) or original < 2:
        return {}
    usual = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original else 1.0
    return {} if math.isclose(factor, usual, rel_tol=1e-6) else {"attention_factor": decimal(factor)}


def gpt_oss(file: GgufFile, config: Config) -> Config:
    """All experts have one size; the ramp of frequencies is not rounded to whole pairs."""
    scaling = config.get("rope_scaling")
    size = file.require("gpt-oss.expert_feed_forward_length", int)
    return {"intermediate_size": size} | ({"rope_scaling": scaling | {"truncate": False}} if scaling else {})


def deepseek(file: GgufFile, config: Config) -> Config:
    """V3's routers use a sigmoid; the sizes of a head come from the tensors where the file lacks one of the two."""
    key, value = (file.get(f"deepseek2.attention.{what}_length_mla", int) for what in ("key", "value"))
    if key is None or value is None:  # written before keys and values were stored apart
        key, value = (file.require(f"deepseek2.attention.{what}_length", int) for what in ("key", "value"))
    normed = bool(file.get("deepseek2.expert_weights_norm", bool))
    keys = {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - int(config["qk_rope_head_dim"] or 0),
        "v_head_dim": value,
        "q_lora_rank": config.get("q_lora_rank"),
        "head_dim": None,
        "norm_topk_prob": normed,
    }
    gating = file.get("deepseek2.expert_gating_func", int) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"{file.path}: deepseek2.expert_gating_func is {gating}, which is not supported.")
    return keys | _stretched(file, config) | (_sigmoid(file, config) if gating == _SIGMOID else _softmax(file, config))


def _softmax(file: GgufFile, config: Config) -> Config:
    groups, chosen_groups = _groups(file)
    limited = groups is not None and groups > 1
    return {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "n_group": groups if limited else None,
        "topk_group": chosen_groups if limited else None,
    }


def _sigmoid(file: GgufFile, config: Config) -> Config:
    """Files of DeepSeek V3 from before the keys of groups have 256 experts in 8 groups, of which 4 are kept."""
    groups, chosen_groups = _groups(file)
    usual = (8, 4) if config["n_routed_experts"] == 256 else (1, 1)
    return {"model_type": "deepseek_v3", "n_group": groups or usual[0], "topk_group": chosen_groups or usual[1]}


def _groups(file: GgufFile) -> tuple[int | None, int | None]:
    count = file.get("deepseek2.expert_group_count", int)
    return count, file.get("deepseek2.expert_group_used_count", int)


def _stretched(file: GgufFile, config: Config) -> Config:
    """YaRN multiplies the output of a head; the file has a tenth of that factor's weight."""
    scaling, tenth = config.get("rope_scaling"), file.get("deepseek2.rope.scaling.yarn_log_multiplier", float)
    if not scaling or tenth is None:
        return {}
    weight = decimal(tenth / 0.1)
    return {"rope_scaling": scaling | {"mscale": weight, "mscale_all_dim": weight}}


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
        derive=layer_types,
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
        derive=gemma_softmax,
    ),
    "gemma3": Layout(
        "gemma3_text",
        names=_AROUND,
        keys=_WINDOW,
        optional={"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
        one_added=True,
        derive=gemma_softmax,
    ),
    "phi3": Layout(
        "phi3",
        names=_FUSED,
        known=_ROTARY | {"attention.sliding_window", "rope.scaling.attn_factor"},
        tensors=(LONG, SHORT),
        derive=phi3,
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
        derive=partial_rotary,
    ),
    "stablelm": Layout(
        "stablelm",
        keys={"use_parallel_residual": "use_parallel_residual"},
        switches={"use_qkv_bias": "attn_q.bias"},
        known=_ROTARY,
        eps=_LAYER_NORM,
        derive=partial_rotary,
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
        derive=gpt_oss,
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
        known=DEEPSEEK_KEYS,
        derive=deepseek,
    ),
}
_NAMED_BY_KEYS = ("mixtral", "olmo3")  # architectures here, which llama.cpp distinguishes by their keys


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
