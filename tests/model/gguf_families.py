"""GGUF files of every family, from directories that transformers wrote, as llama.cpp's converter makes them.

Names come from the `gguf` package's own table; what the converter does to rows and numbers is restated here.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from torch import Tensor

from fp8serve.model.storage.files import read_json
from fp8serve.model.stored_checkpoint import open_checkpoint
from tests.model.gguf_files import add, bpe_vocabulary, finish, pairs

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmo3": "olmo2",
                 "gemma3_text": "gemma3", "cohere": "command-r", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2",
                 "deepseek_v3": "deepseek2"}  # fmt: skip
_PERMUTED = ("mixtral", "granite", "smollm3")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_KEYS = {  # key of config.json -> key of GGUF
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "num_local_experts": "expert_count",
    "num_experts": "expert_count", "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "logit_scale": "logit_scale", "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual", "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank", "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "norm_topk_prob": "expert_weights_norm",
}  # fmt: skip


def write_family(out: Path, model: Path, weight_type: Type = Type.BF16, **metadata: Any) -> Path:
    """Writes the model of the directory `model` to `out`, with matrices of `weight_type`. `metadata` adds or replaces
    keys."""
    config = read_json(model / "config.json")
    kind = config["model_type"]
    writer = GGUFWriter(out, ARCHITECTURES.get(kind, kind))
    for key, value in (keys(config, writer.arch) | bpe_vocabulary(model) | metadata).items():
        add(writer, key, value)
    for name, data in tensors(model, config, writer.arch).items():
        tensor_type = weight_type if data.ndim > 1 and data.shape[-1] % 32 == 0 else Type.F32
        writer.add_tensor(name, gguf.quantize(data, tensor_type), raw_dtype=tensor_type)
    return finish(writer, out)


def keys(config: dict[str, Any], arch: str) -> dict[str, Any]:
    kind, heads = config["model_type"], config["num_attention_heads"]
    metadata = {_KEYS[key]: value for key, value in config.items() if key in _KEYS and value is not None}
    if kind in ("qwen2_moe", "qwen3_moe"):
        for key in ("attention.sliding_window", "expert_weights_norm"):
            metadata.pop(key, None)
    head = config.get("head_dim") or config["hidden_size"] // heads
    if kind not in ("stablelm", "cohere", "phi3", "granite") and "deepseek" not in kind:
        metadata |= {"attention.key_length": head, "attention.value_length": head}
    rope = config["rope_parameters"]
    whole = rope.get("full_attention", rope)
    if kind != "gemma2":
        metadata["rope.freq_base"] = float(whole["rope_theta"])
    if kind in ("mixtral", "granite", "smollm3", "glm4", "stablelm", "phi3", "cohere2"):
        metadata["rope.dimension_count"] = int(head * whole.get("partial_rotary_factor", 1.0))
    special = {"olmo3": _olmo3, "phi3": _phi3, "gpt_oss": _gpt_oss}.get(kind)
    metadata |= special(config) if special else _deepseek(config) if "deepseek" in kind else {}
    if whole["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": float(whole["factor"])}
    elif kind in ("cohere", "cohere2"):
        metadata["rope.scaling.type"] = "none"
    if whole["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
    return {f"{arch}.{key}": value for key, value in metadata.items()}


def _olmo3(config: dict[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]]}


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    metadata = {
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.scaling.original_context_length": original,
    }
    if config["rope_parameters"]["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        metadata["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
    return metadata


def _gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"]}


def _deepseek(config: dict[str, Any]) -> dict[str, Any]:
    rank, rotary_dim, plain_dim = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    metadata = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotary_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": plain_dim + rotary_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary_dim,
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
    }
    if "mscale_all_dim" in config["rope_parameters"]:
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * config["rope_parameters"]["mscale_all_dim"]
    return metadata


def tensors(model: Path, config: dict[str, Any], arch: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns FP32 tensors by llama.cpp's names."""
    key = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, weight in _stacked(open_checkpoint(model), config["model_type"]).items():
        for part, data in _converted(name, weight.float(), config).items():
            theirs = names.get_name(part, (".weight", ".bias"))
            assert theirs is not None, part
            arrays[theirs] = np.ascontiguousarray(data.squeeze().numpy())
    if config["rope_parameters"].get("rope_type") == "longrope":
        for which in ("long", "short"):
            factors = np.array(config["rope_parameters"][f"{which}_factor"], np.float32)
            arrays[f"rope_factors_{which}.weight"] = factors
    return arrays


def _stacked(weights: Any, kind: str) -> dict[str, Tensor]:
    """Returns the experts of each layer stacked into one tensor, as the converter does."""
    plain: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name in weights:
        if (match := _EXPERT.fullmatch(name)) is None:
            plain[name] = weights[name]
        else:
            stacks[f"{match[1]}.{match[3]}"][int(match[2])] = weights[name]
    for name, parts in stacks.items():
        owner = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        plain[owner if kind == "mixtral" else name] = torch.stack([parts[i] for i in range(len(parts))])
    return plain


def _converted(name: str, data: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    kind = config["model_type"]
    if kind in _PERMUTED and (match := re.fullmatch(r".*\.([qk])_proj\.(weight|bias)", name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return {name: torch.from_numpy(pairs(data.numpy(), heads))}
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return {name: data + 1}
    if name.endswith(".sinks"):
        return {f"{name}.weight": data}
    if name.endswith(".e_score_correction_bias"):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): data}
    if name.endswith("kv_b_proj.weight"):
        heads, still = config["num_attention_heads"], config["qk_nope_head_dim"]
        keys_, values = data.view(heads, -1, data.shape[-1]).split([still, config["v_head_dim"]], 1)
        parts = {"k_b_proj": keys_.transpose(1, 2), "v_b_proj": values}
        return {name.replace("kv_b_proj", part): part_data for part, part_data in parts.items()}
    return {name: data}
