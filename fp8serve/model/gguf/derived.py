"""Hyper-parameters that a GGUF file does not name as config.json does: each function gives keys of config.json.

They get the file and the keys read so far, and know what llama.cpp computes where the file has no key.
"""

import math
from typing import Any

import torch

from fp8serve.errors import ModelError, shown
from fp8serve.model.gguf.numbers import decimal, dequantized
from fp8serve.model.gguf.reader import GgufFile

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
Config = dict[str, Any]
# The models of Gemma 2 and 3 whose softmax is scaled by the width and not by the head, by their layers: 27B.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_SOFTMAX, _SIGMOID = 1, 2  # `expert_gating_func`
DEEPSEEK_KEYS = frozenset({
    "attention.key_length_mla", "attention.value_length_mla", "expert_weights_norm", "expert_gating_func",
    "expert_group_count", "expert_group_used_count", "rope.scaling.yarn_log_multiplier",
})  # fmt: skip


def layer_types(file: GgufFile, config: Config) -> Config:
    """The windows of OLMo 3: every fourth layer sees the whole context unless the file has a pattern."""
    layers = config["num_hidden_layers"]
    pattern = file.value("olmo2.attention.sliding_window_pattern")
    if pattern is None and isinstance(layers, int):
        pattern = [(i + 1) % 4 != 0 for i in range(layers)]
    if not isinstance(pattern, list):
        raise ModelError(f"{file.path}: attention.sliding_window_pattern is {shown(pattern)}, which is no list.")
    return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}


def gemma_softmax(file: GgufFile, config: Config) -> Config:
    arch = file.require("general.architecture", str)
    if config["num_hidden_layers"] != _SCALED_BY_WIDTH[arch]:
        return {"query_pre_attn_scalar": config["head_dim"]}
    return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}


def partial_rotary(file: GgufFile, config: Config) -> Config:
    """The fraction of a head that is rotated."""
    arch = file.require("general.architecture", str)
    turned, head = file.get(f"{arch}.rope.dimension_count", int), config["head_dim"]
    if turned is None or not isinstance(head, int) or not 0 < turned <= head:
        return {}
    return {"partial_rotary_factor": turned / head}


def phi3(file: GgufFile, config: Config) -> Config:
    """A window of 0 means no window; factors for short and long sequences are LongRoPE's."""
    window = file.require("phi3.attention.sliding_window", int)
    found = partial_rotary(file, config) | {"sliding_window": window or None}
    if LONG not in file.tensors and SHORT not in file.tensors:
        return found
    original = file.require("phi3.rope.scaling.original_context_length", int)
    return found | {
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
    return [decimal(factor) for factor in dequantized(file.tensors[name], torch.float32).flatten().tolist()]


def _attention_factor(file: GgufFile, config: Config, original: int) -> Config:
    """The factor, where it differs from the one that follows from the lengths."""
    given, longest = file.get("phi3.rope.scaling.attn_factor", float), config["max_position_embeddings"]
    if given is None or not isinstance(longest, int) or original < 2:
        return {}
    usual = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original else 1.0
    return {} if math.isclose(given, usual, rel_tol=1e-6) else {"attention_factor": decimal(given)}


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
    found = {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - int(config["qk_rope_head_dim"] or 0),
        "v_head_dim": value,
        "q_lora_rank": config.get("q_lora_rank"),
        "head_dim": None,
        "norm_topk_prob": normed,
    }
    gating = file.get("deepseek2.expert_gating_func", int) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"{file.path}: deepseek2.expert_gating_func is {gating}, which is not computed here.")
    return found | _stretched(file, config) | (_sigmoid(file, config) if gating == _SIGMOID else _softmax(file, config))


def _softmax(file: GgufFile, config: Config) -> Config:
    groups, kept = _groups(file)
    limited = groups is not None and groups > 1
    return {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "n_group": groups if limited else None,
        "topk_group": kept if limited else None,
    }


def _sigmoid(file: GgufFile, config: Config) -> Config:
    """Files of DeepSeek V3 from before the keys of groups have 256 experts in 8 groups, of which 4 are kept."""
    groups, kept = _groups(file)
    usual = (8, 4) if config["n_routed_experts"] == 256 else (1, 1)
    return {"model_type": "deepseek_v3", "n_group": groups or usual[0], "topk_group": kept or usual[1]}


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
