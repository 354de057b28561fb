"""Writes a Hugging Face directory as a GGUF file for llama.cpp: weights, hyper-parameters, tokenizer, chat template.

`_ARCHITECTURES` are supported, without sliding windows. Matrices are written as BF16, F16 or Q8_0, but as BF16 if their
rows are not a multiple of 32 elements. Vectors and routers are written as FP32, and the experts of a layer as one
stack, with one tensor in memory at a time. FP8 weights are dequantized. The file is read back before it gets its name.
Its configuration must equal that of the directory, and its tokenizer must give the same tokens for texts that are hard
to split.

The tokenizer must be byte-level BPE whose pre-tokenizer is one of `tokenizer.FAMILIES`. As in llama.cpp's converter, a
text that is hard to split shows which one it is. Other pre-tokenizers raise ModelError.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from torch import Tensor

from fp8serve.errors import MachineError, ModelError, shown
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope, Rope
from fp8serve.model.gguf.families import LAYOUTS
from fp8serve.model.gguf.model import KEYS, LAYER_MODULES, OUTER_MODULES, QK_PROJECTION, ROPE_FACTORS, hf_config
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.tokenizer import FAMILIES, Kind, tokenizer_files
from fp8serve.model.network.rotary import inverse_frequencies
from fp8serve.model.storage.files import (
    MAX_COPIED_FILE_BYTES,
    atomic_file,
    check_writable,
    read_json,
    read_optional_json,
    read_text,
)
from fp8serve.model.stored_checkpoint import Checkpoint, open_checkpoint
from fp8serve.model.text.tokenizer import Tokenizer, template_source

HARD_TEXT = (
    "Hello, World!  I'll say it's 3 o'clock; WE'VE 12345 (or 1,234.5e-6) things\n\n\n \t\ttab  and   spaces    end \n"
    "ÄÖÜ naïve café Ångström ﬁne e\u0301 κόσμε Привет 你好世界 こんにちは 안녕 مرحبا 🚀👩‍👩‍👧 ½²³ ...!!!??? $^~|<=>+ "
    "camelCase HTTPServer x=1;\r\nfor(i=0;i<10;++i){}//done /path/to\n  __init__ 'single' \"double\" 1 22 333 4444"
)
_END_ROLES = ("eos", "eot", "eom")
WeightType = Literal["BF16", "F16", "Q8_0"]
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")
_ROUTER = ".mlp.gate.weight"  # FP32 in llama.cpp
_Q8_BLOCK = 32
# The fields of `ModelConfig` that are compared after the file was read back.
_CHECKED_FIELDS = ("layer_ropes", "num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings", "attention_bias",
                   "mlp_bias", "qk_norm", "softmax_scale", "rms_norm_eps", "experts")  # fmt: skip


def vocabulary_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the keys `tokenizer.*`. Raises ModelError if there is no tokenizer, or if GGUF cannot express it."""
    path, tokenizer = checkpoint.path, Tokenizer.from_dir(checkpoint.path)
    raw = read_json(path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_str(read_text(path / "tokenizer.json", MAX_COPIED_FILE_BYTES))
    tokens, kinds = _tokens(checkpoint, tokenizer, backend)
    ends = [i for i in dict.fromkeys((tokenizer.eos_id, *tokenizer.eos_ids)) if i is not None]
    roles = {"bos": tokenizer.bos_id, **dict(zip(_END_ROLES, ends, strict=False))}
    ids = tokenizer.encode("a")
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _find_family(path, raw, backend),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        # transformers 5 writes a merge as two texts, transformers 4 as one text with a space
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in raw["model"].get("merges") or ()],
        "tokenizer.ggml.add_bos_token": bool(ids) and ids[0] == tokenizer.bos_id,
        "tokenizer.ggml.add_eos_token": bool(ids) and ids[-1] in tokenizer.eos_ids,
        "tokenizer.chat_template": template_source(path, read_optional_json(path / "tokenizer_config.json")),
    }
    keys |= {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items()}
    return {key: value for key, value in keys.items() if value is not None}


def check_same_tokens(file: GgufFile, model_dir: Path) -> None:
    """Raises ModelError unless the tokenizer in `file` gives the same tokens as that of the directory."""
    converted = tokenizers.Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"])
    original = Tokenizer.from_dir(model_dir)
    for text in (HARD_TEXT, *HARD_TEXT.split(" ")):
        if converted.encode(text).ids != original.encode(text):
            raise ModelError(
                f"{model_dir}: the tokenizer gives other tokens than llama.cpp's and cannot be written as GGUF."
            )


def _tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> tuple[list[str], list[int]]:
    """Returns the tokens and their kinds by id, padded to the size of the model's vocabulary."""
    size, by_id = checkpoint.config.vocab_size, {i: t for t, i in backend.get_vocab(with_added_tokens=True).items()}
    if max(by_id, default=0) >= size:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has more tokens than the model, {max(by_id) + 1} and {size}."
        )
    added = backend.get_added_tokens_decoder()
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    return tokens, [int(_kind(i in by_id, i in added, i in tokenizer.special_ids)) for i in range(size)]


def _kind(is_used: bool, is_added: bool, is_special: bool) -> Kind:
    if not is_used:
        return Kind.UNUSED
    return Kind.CONTROL if is_special else Kind.USER_DEFINED if is_added else Kind.NORMAL


def _find_family(path: Path, raw: dict[str, Any], backend: tokenizers.Tokenizer) -> str:
    model = raw.get("model") or {}
    is_byte_level = '"ByteLevel"' in json.dumps(raw.get("pre_tokenizer"))
    is_nfc = '"NFC"' in json.dumps(raw.get("normalizer"))
    if model.get("type") == "BPE" and is_byte_level and backend.pre_tokenizer is not None:
        words = backend.pre_tokenizer.pre_tokenize_str(HARD_TEXT)
        for name, family in FAMILIES.items():
            options_match = family.nfc == is_nfc and family.ignores_merges == bool(model.get("ignore_merges"))
            if options_match and family.pre_tokenizer().pre_tokenize_str(HARD_TEXT) == words:
                return name
    raise ModelError(f"{path}: the pre-tokenizer is none of those that can be written as GGUF ({', '.join(FAMILIES)}).")


def write_gguf(source: Path | str, out: Path | str, weight_type: WeightType = "BF16") -> None:
    """Writes the model in the directory `source` to the GGUF file `out`.

    Raises ModelError if `out` exists, or if GGUF cannot express the architecture, its rotary position or its tokenizer.
    Raises MachineError if the disk is full or not writable.
    """
    out, checkpoint = Path(out), open_checkpoint(source)
    if out.exists():
        raise ModelError(f"{out} exists; choose another output file or remove it first.")
    if not out.absolute().parent.is_dir():
        raise MachineError(f"{out} cannot be written: there is no directory {out.parent}.")
    check_writable(out, checkpoint.num_weights)
    arch = _arch(checkpoint)
    keys = _sizes(checkpoint.config, arch) | _rope_scaling(checkpoint, arch) | vocabulary_keys(checkpoint)
    try:
        with atomic_file(out) as temporary:
            _write(temporary, arch, keys, checkpoint, weight_type)
            _check(temporary, checkpoint)
    except OSError as e:
        raise MachineError(f"{out} could not be written: {e.strerror or e}; nothing was left there.") from e


def _arch(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    arch = _ARCHITECTURES.get(config.model_type)
    if arch is None or any(window is not None for window in config.layer_windows):
        model = f"{config.architecture}{' with a window' if arch else ''}"
        architectures = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{model} cannot be written as GGUF; supported are {architectures}, without sliding windows.")
    return arch


def _sizes(config: ModelConfig, arch: str) -> dict[str, Any]:
    rope = _rope(config)
    sizes = {
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": float(config.rms_norm_eps),
        "rope_theta": float(rope.theta),
    }
    if config.experts is not None:
        sizes |= {"num_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token}
        sizes["moe_intermediate_size"] = config.experts.size
    values = {key: sizes[hf_key] for key, hf_key in {**KEYS, **LAYOUTS[arch].keys}.items()}
    values |= {"attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim}
    values |= {"vocab_size": config.vocab_size}
    return {f"{arch}.{key}": value for key, value in values.items()}


def _rope(config: ModelConfig) -> Rope:
    rope = config.layer_ropes[0]
    if rope is None or len(set(config.layer_ropes)) > 1:
        raise ModelError(f"{config.architecture} with different rotary positions cannot be written as GGUF.")
    return rope


def _rope_scaling(checkpoint: Checkpoint, arch: str) -> dict[str, Any]:
    """Returns the keys `rope.scaling.*`. Llama 3's scaling is a tensor instead (`_frequency_divisors`)."""
    scaling = _rope(checkpoint.config).scaling
    if scaling is None or scaling.kind == "llama3":
        return {}
    if isinstance(scaling, LongRope):
        raise ModelError(f"{checkpoint.config.architecture} with LongRoPE cannot be written as GGUF.")
    keys: dict[str, Any] = {"type": scaling.kind, "factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        keys["original_context_length"] = scaling.original_max_position_embeddings
    return {f"{arch}.rope.scaling.{key}": value for key, value in keys.items()}


def _write(path: Path, arch: str, keys: dict[str, Any], checkpoint: Checkpoint, weight_type: WeightType) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in keys.items():
        adders.get(type(value), writer.add_array)(key, value)
    items = [*_frequency_divisors(checkpoint.config), *_tensors(checkpoint, weight_type)]
    for name, shape, kind, _ in items:
        byte_shape, dtype = _array_layout(shape, kind)
        num_bytes = int(np.prod(byte_shape)) * dtype.itemsize
        writer.add_tensor_info(name, byte_shape, dtype, num_bytes, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with closing(writer):
        for name, _, kind, load in items:
            writer.write_tensor_data(_quantize(name, kind, load().float().numpy()))


def _quantize(name: str, kind: str, values: Any) -> Any:
    """Returns FP32 `values` as the GGML type `kind`. Raises ModelError if they are not finite before or after that."""
    import gguf

    if not np.isfinite(values).all():
        raise ModelError(f"The tensor {name} holds NaN or an infinity; a model that diverged is not written.")
    with np.errstate(over="ignore", invalid="ignore"):  # infinite values are refused below
        quantized = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
        if not np.isfinite(gguf.dequantize(quantized, gguf.GGMLQuantizationType[kind])).all():
            amax = float(np.abs(values).max())
            raise ModelError(f"The tensor {name} holds {amax:.6g}, which is too large for {kind}; choose --type BF16.")
    return quantized


def _array_layout(shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and the dtype of the NumPy array for a tensor of the GGML type `kind`."""
    import gguf

    numpy_types = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
    if kind in numpy_types:
        return shape, numpy_types[kind]
    return tuple(gguf.quant_shape_to_byte_shape(shape, gguf.GGMLQuantizationType[kind])), np.dtype(np.uint8)


def _tensors(checkpoint: Checkpoint, weight_type: WeightType) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """Yields (name in GGUF, shape, GGML type, function that loads it) for every tensor."""
    heads = {"q": checkpoint.config.num_heads, "k": checkpoint.config.num_kv_heads}
    layout = LAYOUTS[_ARCHITECTURES[checkpoint.config.model_type]]
    # The experts of a layer share a name, in which {} is the index of the expert.
    counts = Counter(_EXPERT.sub(r"\1{}\2", name) for name in checkpoint.shapes)
    for name, count in counts.items():
        parts = [name.format(expert) for expert in range(count)]
        match = QK_PROJECTION.fullmatch(name) if layout.interleaved else None
        shape = checkpoint.shapes[parts[0]]
        is_small = len(shape) == 1 or name.endswith(_ROUTER)
        kind = "F32" if is_small else "BF16" if shape[-1] % _Q8_BLOCK else weight_type
        if "{}" in name:
            yield gguf_name(name, layout.names), (len(parts), *shape), kind, partial(_load_stack, checkpoint, parts)
        else:
            load = partial(_load, checkpoint, name, heads[match[1]] if match else None)
            yield gguf_name(name, layout.names), shape, kind, load


def _load_stack(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    return torch.stack([checkpoint[name] for name in names])


def _load(checkpoint: Checkpoint, name: str, heads: int | None) -> Tensor:
    return checkpoint[name] if heads is None else interleave(checkpoint[name], heads)


def _frequency_divisors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """Yields the tensor by which Llama 3 divides rotary frequencies, as `_tensors` does."""
    rope = _rope(config)
    if rope.scaling is not None and rope.scaling.kind == "llama3":
        divisors = inverse_frequencies(config.head_dim, Rope(rope.theta)) / inverse_frequencies(config.head_dim, rope)
        yield ROPE_FACTORS, tuple(divisors.shape), "F32", lambda: divisors


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    """Returns the GGUF name of a Hugging Face tensor, the inverse of `hf_name` with the same `names`."""
    owner, _, kind = name.rpartition(".")
    outer = {hf_part: part for part, hf_part in OUTER_MODULES.items()}
    if owner in outer:
        return f"{outer[owner]}.{kind}"
    layer, _, hf_part = owner.removeprefix("model.layers.").partition(".")
    parts = {hf_name: part for part, hf_name in (LAYER_MODULES | dict(names)).items()}
    return f"blk.{layer}.{parts[hf_part]}.{kind}"


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rows of `weight` [heads * head_dim, ...] from the two halves of each head to neighbouring pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def _check(path: Path, checkpoint: Checkpoint) -> None:
    """Raises ModelError unless the written file has the directory's configuration and tokens."""
    file = GgufFile(path)
    config = parse_config(hf_config(file), where=str(path))
    for field in _CHECKED_FIELDS:
        expected = getattr(checkpoint.config, field)
        if getattr(config, field) != expected:
            raise ModelError(f"{checkpoint.path}: GGUF cannot express that {field} is {shown(expected)}.")
    check_same_tokens(file, checkpoint.path)
