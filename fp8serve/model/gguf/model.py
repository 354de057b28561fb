"""Reads the model in a GGUF file: the hyper-parameters as config.json, and the weights by Hugging Face name.

As in config.json, an unknown key raises ModelError, because a model that runs without one term of its maths looks
healthy and gives wrong answers. Llama 3's frequencies come as a tensor of divisors (`rope_freqs.weight`) without their
parameters. This module tries candidates for the parameters and compares them with every divisor.

Weights are dequantized one by one when they are read. In the architecture llama, llama.cpp rotates neighbouring pairs
of a head's elements, and Hugging Face rotates its two halves. The rows of q and k therefore have another order in the
file than in Hugging Face. Qwen's rows have Hugging Face's order.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.model.config.rope import Rope
from fp8serve.model.gguf.families import RMS_EPS, Layout, dequantize, layout_of, to_decimal
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.network.rotary import inverse_frequencies
from fp8serve.model.storage.shards import LazyTensors

ROPE_FACTORS = "rope_freqs.weight"
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
KEYS = SIZES | {RMS_EPS: "rms_norm_eps"}
_DEFAULT_THETA = 10000.0
# Keys that this module reads in addition to SIZES, or that repeat other keys.
_OTHER_KEYS = {"attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
           "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast",
           "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor", "vocab_size"}  # fmt: skip
_NEUTRAL_VALUES = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0,
            "attention.sliding_window": 0, "expert_group_count": 1, "expert_group_used_count": 1,
            "nextn_predict_layers": 0}  # fmt: skip
OUTER_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)")
_SHARED_GATE = ".shared_expert_gate.weight"
QK_PROJECTION = re.compile(r".*\.([qk])_proj\.(?:weight|bias)")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the model's config.json. Raises ModelError for unsupported architectures, unknown keys and values."""
    layout, arch = layout_of(file), file.require("general.architecture", str)
    _refuse_unknown(file, arch, layout)
    config: dict[str, Any] = {"model_type": layout.model_type, "dtype": "bfloat16", **layout.fixed}
    config |= _sizes(file, arch) | _renamed_keys(file, arch, layout)
    config |= {f"{role}_token_id": file.get(f"tokenizer.ggml.{role}_token_id", int) for role in ("bos", "eos")}
    config |= {"vocab_size": len(file.get_list("tokenizer.ggml.tokens", str))}
    config |= {"tie_word_embeddings": "output.weight" not in file.tensors}
    config |= {name: f"blk.0.{tensor}" in file.tensors for name, tensor in layout.switches.items()}
    if scaling := _rope_scaling(file, arch, layout):
        config["rope_scaling"] = scaling
    if layout.derive is not None:
        config |= layout.derive(file, config)
    config["architectures"] = [FAMILIES[config["model_type"]].architecture]
    parsed = parse_config(config, where=str(file.path))
    if parsed.latent is None:
        head_dim, num_rotated = parsed.head_dim, parsed.rotary_dim or parsed.head_dim
        for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", num_rotated)):
            size = file.get(f"{arch}.{key}", int)
            if size not in (None, expected):
                raise ModelError(f"{file.path}: {arch}.{key} is {size}, but a head has {head_dim} elements.")
        config["head_dim"] = head_dim
    if ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3(file, config)
    return config


def _refuse_unknown(file: GgufFile, arch: str, layout: Layout) -> None:
    layout_keys = layout.keys.keys() | layout.optional.keys() | layout.handled | {layout.eps[0]}
    for key in file.keys:
        name = key.removeprefix(f"{arch}.")
        if name == key or name in SIZES or name in layout_keys or name in _OTHER_KEYS:
            continue
        value = file.value(key)
        if name not in _NEUTRAL_VALUES or value != _NEUTRAL_VALUES[name]:
            raise ModelError(
                f"{file.path}: the key {key} is {shown(value)}, which fp8serve does not implement for {arch}."
            )


def _sizes(file: GgufFile, arch: str) -> dict[str, Any]:
    """Returns the keys of `SIZES`, with GGUF's defaults, which differ from those of config.json."""
    sizes = {hf_key: to_decimal(file.value(f"{arch}.{key}")) for key, hf_key in SIZES.items()}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if sizes["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        sizes["head_dim"] = hidden // heads
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = heads
    return sizes | {"rope_theta": _DEFAULT_THETA if sizes["rope_theta"] is None else sizes["rope_theta"]}


def _renamed_keys(file: GgufFile, arch: str, layout: Layout) -> dict[str, Any]:
    """Returns the values of the layout's keys. Raises ModelError if a required key is missing."""
    eps, hf_eps = layout.eps
    keys = {**layout.keys, eps: hf_eps}
    for key in keys:
        if file.value(f"{arch}.{key}") is None:
            raise ModelError(f"{file.path} has no {arch}.{key}; convert the model to GGUF again.")
    values = {hf_key: to_decimal(file.value(f"{arch}.{key}")) for key, hf_key in {**keys, **layout.optional}.items()}
    return {key: value for key, value in values.items() if value is not None or key in keys.values()}


def _rope_scaling(file: GgufFile, arch: str, layout: Layout) -> dict[str, Any] | None:
    kind = file.get(f"{arch}.rope.scaling.type", str) or "none"
    if kind == "none" or (kind == "longrope" and layout.tensors):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rotary scaling with type {shown(kind)} is not supported; linear and yarn are.")
    factor = to_decimal(file.value(f"{arch}.rope.scaling.factor"))
    return {"rope_type": kind, "factor": factor} | (_yarn(file, arch, factor) if kind == "yarn" else {})


def _yarn(file: GgufFile, arch: str, factor: Any) -> dict[str, Any]:
    """Returns YaRN's parameters. Raises ModelError unless the attention factor is 1 or YaRN's own.

    The key of the attention factor has had two meanings in GGUF, which agree only for these values.
    """
    factors = {name: file.get(f"{arch}.rope.scaling.{name}", float) for name in
             ("yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor")}  # fmt: skip
    attention = factors.pop("yarn_attn_factor")
    default = 0.1 * math.log(factor) + 1 if isinstance(factor, float) and factor > 1 else 1.0
    if attention is not None and not any(
        math.isclose(attention, supported, rel_tol=1e-5) for supported in (1.0, default)
    ):
        raise ModelError(
            f"{file.path}: the key {arch}.rope.scaling.yarn_attn_factor is {shown(attention)}, which is not supported."
        )
    original = file.value(f"{arch}.rope.scaling.original_context_length")
    betas = {name.removeprefix("yarn_"): to_decimal(value) for name, value in factors.items() if value is not None}
    return {"original_max_position_embeddings": original, **betas}


def _rope(config: dict[str, Any]) -> Rope:
    """Returns the rotary position embedding of the first layer that has one."""
    return next(rope for rope in parse_config(config).layer_ropes if rope is not None)


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns Llama 3's parameters for the divisors of frequencies in the file."""
    divisors = dequantize(file.tensors[ROPE_FACTORS], torch.float32)
    unscaled = inverse_frequencies(config["head_dim"], _rope(config))
    for exponent in (13, *range(5, 18)):  # likely trained contexts: Llama's own 8,192 tokens, then powers of two
        candidate = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**exponent,
        }
        scaled = inverse_frequencies(config["head_dim"], _rope(config | {"rope_scaling": candidate}))
        if divisors.shape == unscaled.shape and torch.allclose(unscaled / divisors, scaled, rtol=1e-5, atol=0):
            return candidate
    raise ModelError(f"{file.path}: {ROPE_FACTORS} holds factors that are not those of Llama 3.")


def hf_name(name: str, names: Mapping[str, str]) -> str | None:
    """Returns the Hugging Face name of a tensor, or None if it is unknown.

    For example, blk.0.attn_q.weight becomes model.layers.0.self_attn.q_proj.weight. `names` are `Layout.names`.
    """
    match = _TENSOR_NAME.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    if f"{part}.{kind}" in names:
        hf_part = names[f"{part}.{kind}"]
    elif (owner := OUTER_MODULES.get(part) if layer is None else names.get(part, LAYER_MODULES.get(part))) is not None:
        hf_part = f"{owner}.{kind}"
    else:
        return None
    return hf_part if layer is None else f"model.layers.{int(layer)}.{hf_part}"


def read_weights(
    file: GgufFile, layout: Layout, config: Mapping[str, Any], ignored: Collection[str]
) -> Mapping[str, Tensor]:
    """Returns the model's tensors by Hugging Face name: BF16, or FP32 for parameters with `needs_fp32`.

    `config` is config.json. The tensors `ignored` are not read. Raises ModelError if the file has an unknown tensor.
    """
    loaders: dict[str, Callable[[], Tensor]] = {}
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in file.tensors.items():
        if name in ignored:
            continue
        target = hf_name(name, layout.names)
        if target is None:
            raise ModelError(f"{file.path} holds the tensor {shown(name)}, which no supported model has.")
        if "{}" in target:  # a stack of experts
            experts = range(int(tensor.shape[-1]))
            loaders |= {target.format(e): partial(dequantize, tensor, expert=e) for e in experts}
        else:
            loaders[target] = partial(_read_weight, target, tensor, layout, heads)
    loaders = join_kv_b(loaders)
    return LazyTensors(loaders, lambda name: loaders[name]())


def _read_weight(name: str, tensor: Any, layout: Layout, heads: Mapping[str, int]) -> Tensor:
    if layout.norms_include_one and name.endswith("norm.weight"):
        return (dequantize(tensor, torch.float32) - 1).to(torch.bfloat16)
    weight = dequantize(tensor, torch.float32 if needs_fp32(name) else torch.bfloat16)
    match = QK_PROJECTION.fullmatch(name) if layout.interleaved else None
    if name.endswith(_SHARED_GATE):  # llama.cpp's converter drops dimensions of size 1
        return weight.reshape(1, -1)
    return weight if match is None else deinterleave(weight, heads[match[1]])


def join_kv_b(loaders: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Joins DeepSeek's `k_b` [heads, rank, nope] and `v_b` [heads, value, rank], which newer files have separately.

    The result is `kv_b_proj` [heads * (nope + value), rank].
    """

    def join(keys: Callable[[], Tensor], values: Callable[[], Tensor]) -> Tensor:
        return torch.cat((keys().transpose(1, 2), values()), 1).flatten(0, 1)

    result = dict(loaders)
    for name in loaders:
        owner, suffix, _ = name.partition(".k_b_proj.weight")
        if suffix and f"{owner}.v_b_proj.weight" in result:
            parts = result.pop(name), result.pop(f"{owner}.v_b_proj.weight")
            result[f"{owner}.kv_b_proj.weight"] = partial(join, *parts)
    return result


def deinterleave(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rows of `weight` [heads * head_dim, ...] from neighbouring pairs to the two halves of each head."""
    if weight.shape[0] % (2 * heads):
        raise ModelError(f"A projection of {weight.shape[0]} rows does not divide into {heads} heads of pairs.")
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
