"""GGUF files written by the `gguf` package's own writer, from directories that transformers wrote."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.torch import load_file
from tokenizers import Tokenizer

KINDS = {"normal": 1, "control": 3, "user": 4, "unused": 5}


def write_gguf(out: Path, model: Path, weight_type: Type = Type.BF16, **metadata: Any) -> Path:
    """Writes the model of the directory `model` to `out`, with matrices of `weight_type`. `metadata` adds or replaces
    keys."""
    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(out, config["model_type"] if config["model_type"] != "mistral" else "llama")
    keys = sizes(writer.arch, config) | bpe_vocabulary(model) | metadata
    for key, value in keys.items():
        add(writer, key, value)
    for name, data in tensors(model, config, writer.arch).items():
        matrix = data.ndim > 1
        raw = gguf.quantize(data, weight_type if matrix else Type.F32)
        writer.add_tensor(name, raw, raw_dtype=weight_type if matrix else Type.F32)
    return finish(writer, out)


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a value with the type that llama.cpp's converter gives it. None is not written."""
    if value is None:
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def finish(writer: GGUFWriter, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def sizes(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }


def bpe_vocabulary(model: Path) -> dict[str, Any]:
    """Returns the byte-level BPE vocabulary of tokenizer.json, padded to 320 tokens."""
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    unused = [f"[PAD{i}]" for i in range(len(tokens), 320)]
    special = [KINDS["control" if t in ("<s>", "</s>") else "normal"] for t in tokens]
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": special + [KINDS["unused"]] * len(unused),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
    }


def tensors(model: Path, config: dict[str, Any], arch: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns FP32 tensors by llama.cpp's names, with the rows of q and k of a llama model in its order."""
    key = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    arrays = {}
    for name, weight in load_file(model / "model.safetensors").items():
        data, heads = weight.float().numpy(), config["num_attention_heads"]
        for part, count in (("q_proj", heads), ("k_proj", config["num_key_value_heads"])):
            if part in name and arch == "llama":
                data = pairs(data, count)
        arrays[names.get_name(name, (".weight", ".bias"))] = np.ascontiguousarray(data)
    return arrays


def pairs(data: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Permutes the rows of q or k as llama.cpp's converter does."""
    split = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return split.swapaxes(1, 2).reshape(data.shape)
