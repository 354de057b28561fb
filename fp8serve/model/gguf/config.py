"""The hyper-parameters of a GGUF file, written as config.json writes them.

As with config.json, a key that we do not know is an error: a model that runs with one term of its maths missing looks
healthy and answers wrongly. Llama 3's stretched frequencies come as a tensor of factors (`rope_freqs.weight`) whose
parameters the file does not keep: they are found again, and held to every factor.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.rope import Rope
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.tensors import dequantized
from fp8serve.model.network.rotary import inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"
# By `general.architecture`; Mistral's models are written as llama's.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_OTHERS = {"attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
           "rope.scaling.original_context_length", "rope.scaling.finetuned", "vocab_size"}  # fmt: skip
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0,
            "attention.sliding_window": 0}  # fmt: skip


def hf_config(file: GgufFile) -> dict[str, Any]:
    """What config.json of the same model holds, checked to be a model that is served.

    ModelError: an architecture that is not served, an unknown key, or a value that we do not compute with.
    """
    arch = file.require("general.architecture", str)
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path}: the architecture {shown(arch)} is not supported; supported are {known}.")
    _refuse_unknown(file, arch)
    config: dict[str, Any] = {"architectures": [FAMILIES[arch].architecture], "model_type": arch, "dtype": "bfloat16"}
    config |= _sizes(file, arch) | _tokens(file) | _switches(file)
    if scaling := _scaling(file, arch):
        config["rope_scaling"] = scaling
    parsed = parse_config(config, where=str(file.path))
    _check_heads(file, arch, parsed.head_dim)
    # A key that is left out means one thing in GGUF and another in config.json: these are always written.
    config |= {"head_dim": parsed.head_dim, "num_key_value_heads": parsed.num_kv_heads}
    config["rope_theta"] = _rope(config).theta
    if ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3(file, config)
    return config


def _refuse_unknown(file: GgufFile, arch: str) -> None:
    for key in file.keys:
        name = key.removeprefix(f"{arch}.")
        if name == key or name in KEYS or name in _OTHERS:
            continue
        value = file.value(key)
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise ModelError(f"{file.path}: the key {key} is {shown(value)}, which {arch} here does not compute.")


def _sizes(file: GgufFile, arch: str) -> dict[str, Any]:
    return {ours: _decimal(file.value(f"{arch}.{theirs}")) for theirs, ours in KEYS.items()}


def _decimal(value: Any) -> Any:
    """An FP32 as the number that was written: 1e-5 and not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _tokens(file: GgufFile) -> dict[str, Any]:
    special = {f"{role}_token_id": file.get(f"tokenizer.ggml.{role}_token_id", int) for role in ("bos", "eos")}
    return special | {"vocab_size": len(file.list_of("tokenizer.ggml.tokens", str))}


def _switches(file: GgufFile) -> dict[str, Any]:
    """What the file says by which tensors it has."""
    switches: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.tensors}
    for name, tensor in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_gate.bias")):
        if file.value("general.architecture") == "llama" and f"blk.0.{tensor}" in file.tensors:
            switches[name] = True
    return switches


def _scaling(file: GgufFile, arch: str) -> dict[str, Any] | None:
    kind = file.get(f"{arch}.rope.scaling.type", str) or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rotary scaling with type {shown(kind)} is not supported; linear and yarn are.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _decimal(file.value(f"{arch}.rope.scaling.factor"))}
    if kind == "yarn":
        original = file.value(f"{arch}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _check_heads(file: GgufFile, arch: str, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        found = file.get(f"{arch}.{key}", int)
        if found not in (None, head_dim):
            raise ModelError(f"{file.path}: {arch}.{key} is {found}, but a head has {head_dim} elements.")


def _rope(config: dict[str, Any]) -> Rope:
    """That of every layer: no architecture here has two kinds, or layers without."""
    rope = parse_config(config).layer_ropes[0]
    assert rope is not None
    return rope


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters that make the factors in the file, by which frequencies are divided."""
    factors = dequantized(file.tensors[ROPE_FACTORS], torch.float32)
    plain = inverse_frequencies(config["head_dim"], _rope(config))
    for candidate in _llama3_candidates(float(factors.max())):
        stretched = inverse_frequencies(config["head_dim"], _rope(config | {"rope_scaling": candidate}))
        if factors.shape == plain.shape and torch.allclose(plain / factors, stretched, rtol=1e-5, atol=0):
            return candidate
    raise ModelError(f"{file.path}: {ROPE_FACTORS} holds factors that are not those of Llama 3.")


def _llama3_candidates(factor: float) -> Iterator[dict[str, Any]]:
    """Llama 3 itself was trained with 8,192 tokens; whoever trained anew took another power of two."""
    for exponent in (13, *range(5, 18)):
        yield {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**exponent,
        }
