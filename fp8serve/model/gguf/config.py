"""The hyper-parameters of a GGUF file, written as config.json writes them.

As with config.json, a key that we do not know is an error: a model that runs with one term of its maths missing looks
healthy and answers wrongly. Llama 3's stretched frequencies come as a tensor of factors (`rope_freqs.weight`), and the
file does not have their parameters: these are recovered and checked against every factor.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.rope import Rope
from fp8serve.model.gguf.families import RMS_EPS, Layout, decimal, dequantized, layout_of
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


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the same model, checked to be that of a served architecture.

    ModelError: an architecture that is not served, an unknown key, or a value that we do not compute with.
    """
    layout, arch = layout_of(file), file.require("general.architecture", str)
    _refuse_unknown(file, arch, layout)
    config: dict[str, Any] = {"model_type": layout.model_type, "dtype": "bfloat16", **layout.fixed}
    config |= _sizes(file, arch) | _named(file, arch, layout) | _tokens(file) | _switches(file, layout)
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


def _tokens(file: GgufFile) -> dict[str, Any]:
    special = {f"{role}_token_id": file.get(f"tokenizer.ggml.{role}_token_id", int) for role in ("bos", "eos")}
    return special | {"vocab_size": len(file.list_of("tokenizer.ggml.tokens", str))}


def _switches(file: GgufFile, layout: Layout) -> dict[str, Any]:
    """Facts that follow from which tensors the file has."""
    switches: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.tensors}
    for name, tensor in layout.switches.items():
        switches[name] = f"blk.0.{tensor}" in file.tensors
    return switches


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


def _check_heads(file: GgufFile, arch: str, head_dim: int, turned: int) -> None:
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", turned)):
        size = file.get(f"{arch}.{key}", int)
        if size not in (None, expected):
            raise ModelError(f"{file.path}: {arch}.{key} is {size}, but a head has {head_dim} elements.")


def _rope(config: dict[str, Any]) -> Rope:
    """The rotary position of the layers that have one; where the factors are in a tensor, it is the same for all."""
    return next(rope for rope in parse_config(config).layer_ropes if rope is not None)


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters that give the factors in the file, by which frequencies are divided."""
    factors = dequantized(file.tensors[ROPE_FACTORS], torch.float32)
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
