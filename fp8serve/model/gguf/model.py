"""The model in a GGUF file as a directory has it: the hyper-parameters of config.json, and the weights by name.

As with config.json, a key that we do not know is an error: a model that runs with one term of its maths missing looks
healthy and answers wrongly. Llama 3's stretched frequencies come as a tensor of factors (`rope_freqs.weight`), and the
file does not have their parameters: these are recovered and checked against every factor.

Weights are dequantized one by one when they are read. llama.cpp rotates neighbouring pairs of a head's elements where
the Hugging Face layout rotates the two halves, and so stores the rows of q and k of the architecture llama in another
order; Qwen's are stored as they are.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.model.config.rope import Rope
from fp8serve.model.gguf.families import RMS_EPS, Layout, decimal, dequantize, layout_of
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.network.rotary import inverse_frequencies

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
_THETA = 10000.0  # where the file names none
_OTHERS = {"attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
           "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast",
           "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor", "vocab_size"}  # fmt: skip
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0,
            "attention.sliding_window": 0, "expert_group_count": 1, "expert_group_used_count": 1,
            "nextn_predict_layers": 0}  # fmt: skip
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
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
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)")
_ROW = ".shared_expert_gate.weight"
PERMUTED = re.compile(r".*\.([qk])_proj\.(?:weight|bias)")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the same model, checked to be that of a served architecture.

    ModelError: an architecture that is not served, an unknown key, or a value that we do not compute with.
    """
    layout, arch = layout_of(file), file.require("general.architecture", str)
    _refuse_unknown(file, arch, layout)
    config: dict[str, Any] = {"model_type": layout.model_type, "dtype": "bfloat16", **layout.fixed}
    config |= _sizes(file, arch) | _named(file, arch, layout)
    config |= {f"{role}_token_id": file.get(f"tokenizer.ggml.{role}_token_id", int) for role in ("bos", "eos")}
    config |= {"vocab_size": len(file.list_of("tokenizer.ggml.tokens", str))}
    config |= {"tie_word_embeddings": "output.weight" not in file.tensors}
    config |= {name: f"blk.0.{tensor}" in file.tensors for name, tensor in layout.switches.items()}
    if scaling := _scaling(file, arch, layout):
        config["rope_scaling"] = scaling
    if layout.derive is not None:
        config |= layout.derive(file, config)
    config["architectures"] = [FAMILIES[config["model_type"]].architecture]
    parsed = parse_config(config, where=str(file.path))
    if parsed.latent is None:
        _check_heads(file, arch, parsed.head_dim, parsed.rotary_dim or parsed.head_dim)
        config["head_dim"] = parsed.head_dim
    if ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3(file, config)
    return config


def _refuse_unknown(file: GgufFile, arch: str, layout: Layout) -> None:
    own = layout.keys.keys() | layout.optional.keys() | layout.known | {layout.eps[0]}
    for key in file.keys:
        name = key.removeprefix(f"{arch}.")
        if name == key or name in SIZES or name in own or name in _OTHERS:
            continue
        value = file.value(key)
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise ModelError(f"{file.path}: the key {key} is {shown(value)}, which {arch} here does not compute.")


def _sizes(file: GgufFile, arch: str) -> dict[str, Any]:
    """Keys whose absence means one thing in GGUF and another in config.json, so they are always written."""
    sizes = {ours: decimal(file.value(f"{arch}.{theirs}")) for theirs, ours in SIZES.items()}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if sizes["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        sizes["head_dim"] = hidden // heads
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = heads
    return sizes | {"rope_theta": _THETA if sizes["rope_theta"] is None else sizes["rope_theta"]}


def _named(file: GgufFile, arch: str, layout: Layout) -> dict[str, Any]:
    """The values of this architecture's keys. ModelError: a required key is missing."""
    theirs, ours = layout.eps
    keys = {**layout.keys, theirs: ours}
    for key in keys:
        if file.value(f"{arch}.{key}") is None:
            raise ModelError(f"{file.path} has no {arch}.{key}; convert the model to GGUF again.")
    values = {ours: decimal(file.value(f"{arch}.{theirs}")) for theirs, ours in {**keys, **layout.optional}.items()}
    return {key: value for key, value in values.items() if value is not None or key in keys.values()}


def _scaling(file: GgufFile, arch: str, layout: Layout) -> dict[str, Any] | None:
    kind = file.get(f"{arch}.rope.scaling.type", str) or "none"
    if kind == "none" or (kind == "longrope" and layout.tensors):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rotary scaling with type {shown(kind)} is not supported; linear and yarn are.")
    factor = decimal(file.value(f"{arch}.rope.scaling.factor"))
    return {"rope_type": kind, "factor": factor} | (_yarn(file, arch, factor) if kind == "yarn" else {})


def _yarn(file: GgufFile, arch: str, factor: Any) -> dict[str, Any]:
    """The attention factor has had two meanings in GGUF; it is accepted where it equals what YaRN computes anyway."""
    factors = {name: file.get(f"{arch}.rope.scaling.{name}", float) for name in
             ("yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor")}  # fmt: skip
    attention = factors.pop("yarn_attn_factor")
    usual = 0.1 * math.log(factor) + 1 if isinstance(factor, float) and factor > 1 else 1.0
    if attention is not None and not any(math.isclose(attention, known, rel_tol=1e-5) for known in (1.0, usual)):
        raise ModelError(
            f"{file.path}: the key {arch}.rope.scaling.yarn_attn_factor is {shown(attention)}, which is not supported."
        )
    original = file.value(f"{arch}.rope.scaling.original_context_length")
    betas = {name.removeprefix("yarn_"): decimal(value) for name, value in factors.items() if value is not None}
    return {"original_max_position_embeddings": original, **betas}


def _check_heads(file: GgufFile, arch: str, head_dim: int, num_rotated: int) -> None:
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", num_rotated)):
        size = file.get(f"{arch}.{key}", int)
        if size not in (None, expected):
            raise ModelError(f"{file.path}: {arch}.{key} is {size}, but a head has {head_dim} elements.")


def _rope(config: dict[str, Any]) -> Rope:
    """The rotary position of the layers that have one; where the factors are in a tensor, it is the same for all."""
    return next(rope for rope in parse_config(config).layer_ropes if rope is not None)


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters that give the factors in the file, by which frequencies are divided."""
    factors = dequantize(file.tensors[ROPE_FACTORS], torch.float32)
    plain = inverse_frequencies(config["head_dim"], _rope(config))
    for candidate in _llama3_candidates(float(factors.max())):
        stretched = inverse_frequencies(config["head_dim"], _rope(config | {"rope_scaling": candidate}))
        if factors.shape == plain.shape and torch.allclose(plain / factors, stretched, rtol=1e-5, atol=0):
            return candidate
    raise ModelError(f"{file.path}: {ROPE_FACTORS} holds factors that are not those of Llama 3.")


def _llama3_candidates(factor: float) -> Iterator[dict[str, Any]]:
    """Llama 3 itself was trained with 8,192 tokens; models trained from scratch use another power of two."""
    for exponent in (13, *range(5, 18)):
        yield {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**exponent,
        }


def hf_name(name: str, names: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight; None for a tensor that no decoder here has.

    names: of parts of a layer with other names in this architecture (families.Layout).
    """
    match = _NAME.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    if f"{part}.{kind}" in names:
        ours = names[f"{part}.{kind}"]
    elif (owner := ENDS.get(part) if layer is None else names.get(part, LAYER.get(part))) is not None:
        ours = f"{owner}.{kind}"
    else:
        return None
    return ours if layer is None else f"model.layers.{int(layer)}.{ours}"


class Weights(Mapping[str, Tensor]):
    """Tensors by Hugging Face name: BF16, or FP32 where a parameter stays so. config: what config.json holds.

    ModelError: the file holds a tensor that no decoder here computes with.
    """

    def __init__(self, file: GgufFile, layout: Layout, config: Mapping[str, Any], ignored: Collection[str]) -> None:
        self._makers: dict[str, Callable[[], Tensor]] = {}
        self._layout = layout
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for name, tensor in file.tensors.items():
            if name in ignored:
                continue
            ours = hf_name(name, layout.names)
            if ours is None:
                raise ModelError(f"{file.path} holds the tensor {shown(name)}, which no decoder here computes with.")
            self._makers |= self._parts(ours, tensor)
        self._makers = with_kv_b(self._makers)

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def _parts(self, ours: str, tensor: Any) -> dict[str, Callable[[], Tensor]]:
        """`tensor` itself, or every expert's part of a stack."""
        if "{}" not in ours:
            return {ours: partial(self._dequantize, ours, tensor)}
        experts = int(tensor.shape[-1])
        return {ours.format(e): partial(dequantize, tensor, expert=e) for e in range(experts)}

    def _dequantize(self, name: str, tensor: Any) -> Tensor:
        if self._layout.one_added and name.endswith("norm.weight"):
            return (dequantize(tensor, torch.float32) - 1).to(torch.bfloat16)
        weight = dequantize(tensor, torch.float32 if keeps_fp32(name) else torch.bfloat16)
        match = PERMUTED.fullmatch(name) if self._layout.pairs else None
        if name.endswith(_ROW):  # the converter drops dimensions of size 1
            return weight.reshape(1, -1)
        return weight if match is None else halves(weight, self._heads[match[1]])


def with_kv_b(makers: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """DeepSeek's `kv_b_proj` [heads * (nope + value), rank], which newer files have in two parts: `k_b` [heads, rank,
    still] and `v_b` [heads, value, rank]."""

    def join(keys: Callable[[], Tensor], values: Callable[[], Tensor]) -> Tensor:
        return torch.cat((keys().transpose(1, 2), values()), 1).flatten(0, 1)

    result = dict(makers)
    for name in makers:
        owner, is_keys, _ = name.partition(".k_b_proj.weight")
        if is_keys and f"{owner}.v_b_proj.weight" in result:
            parts = result.pop(name), result.pop(f"{owner}.v_b_proj.weight")
            result[f"{owner}.kv_b_proj.weight"] = partial(join, *parts)
    return result


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, ...] of neighbouring pairs, reordered into two halves."""
    if weight.shape[0] % (2 * heads):
        raise ModelError(f"A projection of {weight.shape[0]} rows does not divide into {heads} heads of pairs.")
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
