"""Writes a Hugging Face directory as a GGUF file for llama.cpp: weights, sizes, tokenizer and chat template.

The architectures below are supported, without windows. Matrices are written as BF16, F16 or Q8_0, vectors and routers
in FP32, the experts of a layer as one stack, with one tensor in memory at a time. FP8 weights are dequantized. The file
is read back before it gets its name: its configuration must equal that of the directory, and its tokenizer must give
the same tokens for texts that are hard to split.

A tokenizer must be byte-level BPE that splits like one of `tokenizer.FAMILIES`. The family is found by trying all of
them on a text that is hard to split, as llama.cpp's own converter does. A tokenizer that splits like none of them is
refused.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import tokenizers
import torch
from torch import Tensor

from fp8serve.errors import MachineError, ModelError, shown
from fp8serve.model.config.decoder import parse_config
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope, Rope
from fp8serve.model.gguf.families import LAYOUTS
from fp8serve.model.gguf.model import ENDS, KEYS, LAYER, PERMUTED, ROPE_FACTORS, hf_config
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.tokenizer import FAMILIES, Family, Kind, tokenizer_files
from fp8serve.model.network.rotary import inverse_frequencies
from fp8serve.model.storage.files import (
    MAX_CARRIED_BYTES,
    check_writable,
    fsync,
    read_json,
    read_optional_json,
    read_text,
)
from fp8serve.model.stored import Checkpoint, open_checkpoint
from fp8serve.model.text.tokenizer import Tokenizer, template_source

HARD = (
    "Hello, World!  I'll say it's 3 o'clock; WE'VE 12345 (or 1,234.5e-6) things\n\n\n \t\ttab  and   spaces    end \n"
    "ÄÖÜ naïve café Ångström ﬁne e\u0301 κόσμε Привет 你好世界 こんにちは 안녕 مرحبا 🚀👩‍👩‍👧 ½²³ ...!!!??? $^~|<=>+ "
    "camelCase HTTPServer x=1;\r\nfor(i=0;i<10;++i){}//done /path/to\n  __init__ 'single' \"double\" 1 22 333 4444"
)
_ENDS = ("eos", "eot", "eom")
WeightType = Literal["BF16", "F16", "Q8_0"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")
_ROUTER = ".mlp.gate.weight"  # which llama.cpp keeps in FP32
_Q8_BLOCK = 32
_SAME = ("layer_ropes", "num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias",
         "qk_norm", "softmax_scale", "rms_norm_eps", "experts")  # fmt: skip


def vocabulary_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys `tokenizer.*`. ModelError: there is no tokenizer, or GGUF cannot express it."""
    path, tokenizer = checkpoint.path, Tokenizer.from_dir(checkpoint.path)
    raw = read_json(path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_str(read_text(path / "tokenizer.json", MAX_CARRIED_BYTES))
    tokens, kinds = _tokens(checkpoint, tokenizer, backend)
    ends = [i for i in dict.fromkeys((tokenizer.eos_id, *tokenizer.eos_ids)) if i is not None]
    roles = {"bos": tokenizer.bos_id, **dict(zip(_ENDS, ends, strict=False))}
    around = tokenizer.encode("a")
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _family(path, raw, backend),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(_merges(raw)),
        "tokenizer.ggml.add_bos_token": bool(around) and around[0] == tokenizer.bos_id,
        "tokenizer.ggml.add_eos_token": bool(around) and around[-1] in tokenizer.eos_ids,
        "tokenizer.chat_template": template_source(path, read_optional_json(path / "tokenizer_config.json")),
    }
    keys |= {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items()}
    return {key: value for key, value in keys.items() if value is not None}


def check_same_tokens(file: GgufFile, model_dir: Path) -> None:
    """ModelError unless the tokenizer in `file` gives the same tokens as the directory's."""
    written, own = tokenizers.Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"]), Tokenizer.from_dir(model_dir)
    for text in (HARD, *HARD.split(" ")):
        if written.encode(text).ids != own.encode(text):
            raise ModelError(
                f"{model_dir}: the tokenizer makes other tokens than llama.cpp's and cannot be written as GGUF."
            )


def _tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> tuple[list[str], list[int]]:
    """Tokens and kinds by id, padded to the size of the model's vocabulary."""
    size, by_id = checkpoint.config.vocab_size, {i: t for t, i in backend.get_vocab(with_added_tokens=True).items()}
    if max(by_id, default=0) >= size:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has more tokens than the model, {max(by_id) + 1} and {size}."
        )
    added = backend.get_added_tokens_decoder()
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    return tokens, [int(_kind(i, i in by_id, i in added, i in tokenizer.special_ids)) for i in range(size)]


def _kind(i: int, known: bool, added: bool, special: bool) -> Kind:
    if not known:
        return Kind.UNUSED
    return Kind.CONTROL if special else Kind.USER_DEFINED if added else Kind.NORMAL


def _merges(raw: dict[str, Any]) -> Iterator[str]:
    """transformers 5 writes a merge as two texts, 4 as one with a space between."""
    for merge in raw["model"].get("merges") or ():
        yield merge if isinstance(merge, str) else " ".join(merge)


def _family(path: Path, raw: dict[str, Any], backend: tokenizers.Tokenizer) -> str:
    model = raw.get("model") or {}
    is_byte_level = '"ByteLevel"' in json.dumps(raw.get("pre_tokenizer"))
    if model.get("type") == "BPE" and is_byte_level and backend.pre_tokenizer is not None:
        cut = backend.pre_tokenizer.pre_tokenize_str(HARD)
        for name, family in FAMILIES.items():
            if family.pre_tokenizer().pre_tokenize_str(HARD) == cut and _is_alike(family, raw):
                return name
    raise ModelError(f"{path}: the pre-tokenizer is none of those that can be written as GGUF ({', '.join(FAMILIES)}).")


def _is_alike(family: Family, raw: dict[str, Any]) -> bool:
    nfc = '"NFC"' in json.dumps(raw.get("normalizer"))
    return family.nfc == nfc and family.whole_words == bool(raw["model"].get("ignore_merges"))


def write_gguf(source: Path | str, out: Path | str, weight_type: WeightType = "BF16") -> None:
    """Write the model in the directory `source` to the GGUF file `out`.

    ModelError: `out` exists; GGUF cannot express the architecture, its rotary position or its tokenizer. MachineError:
    the disk is full or not writable.
    """
    out, checkpoint = Path(out), open_checkpoint(source)
    if out.exists():
        raise ModelError(f"{out} exists; choose another output file or remove it first.")
    if not out.absolute().parent.is_dir():
        raise MachineError(f"{out} cannot be written: there is no directory {out.parent}.")
    check_writable(out, checkpoint.num_weights)
    arch = _arch(checkpoint)
    keys = _sizes(checkpoint.config, arch) | _scaling(checkpoint, arch) | vocabulary_keys(checkpoint)
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        _write(temporary, arch, keys, checkpoint, weight_type)
        _check(temporary, checkpoint)
        fsync(temporary)
        os.rename(temporary, out)
    except OSError as e:
        raise MachineError(f"{out} could not be written: {e.strerror or e}; nothing was left there.") from e
    finally:
        temporary.unlink(missing_ok=True)


def _arch(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    arch = _ARCHITECTURES.get(config.model_type)
    if arch is None or any(window is not None for window in config.layer_windows):
        what = f"{config.architecture}{' with a window' if arch else ''}"
        raise ModelError(f"{what} is not written as GGUF; written are {', '.join(_ARCHITECTURES)}, without windows.")
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
    others = dict.fromkeys(("attention.value_length", "rope.dimension_count"), config.head_dim)
    names = {**KEYS, **LAYOUTS[arch].keys}
    named = {theirs: sizes[ours] for theirs, ours in names.items()} | others | {"vocab_size": config.vocab_size}
    return {f"{arch}.{key}": value for key, value in named.items()}


def _rope(config: ModelConfig) -> Rope:
    rope = config.layer_ropes[0]
    if rope is None or len(set(config.layer_ropes)) > 1:
        raise ModelError(f"{config.architecture} with layers of different rotary position is not written as GGUF.")
    return rope


def _scaling(checkpoint: Checkpoint, arch: str) -> dict[str, Any]:
    """Llama 3's is a tensor of factors."""
    scaling = _rope(checkpoint.config).scaling
    if scaling is None or scaling.kind == "llama3":
        return {}
    if isinstance(scaling, LongRope):
        raise ModelError(f"{checkpoint.config.architecture} with LongRoPE is not written as GGUF.")
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
    items = [*_factors(checkpoint.config), *_items(checkpoint, weight_type)]
    for name, shape, kind, _ in items:
        byte_shape, dtype = _layout(shape, kind)
        num_bytes = int(np.prod(byte_shape)) * dtype.itemsize
        writer.add_tensor_info(name, byte_shape, dtype, num_bytes, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with closing(writer):
        for name, _, kind, make in items:
            writer.write_tensor_data(_quantized(name, kind, make().float().numpy()))


def _quantized(name: str, kind: str, values: Any) -> Any:
    """`values` FP32 as they are stored in the file. ModelError: they are not all finite, before or in this type."""
    import gguf

    if not np.isfinite(values).all():
        raise ModelError(f"The tensor {name} holds NaN or an infinity; a model that diverged is not written.")
    with np.errstate(over="ignore", invalid="ignore"):  # what becomes infinite is refused below
        stored = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
        if not np.isfinite(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])).all():
            most = float(np.abs(values).max())
            raise ModelError(f"The tensor {name} holds {most:.6g}, which is too large for {kind}; choose --type BF16.")
    return stored


def _layout(shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], Any]:
    """(the shape, the type) of the array that holds a tensor of this kind."""
    import gguf

    plain = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
    if kind in plain:
        return shape, plain[kind]
    return tuple(gguf.quant_shape_to_byte_shape(shape, gguf.GGMLQuantizationType[kind])), np.dtype(np.uint8)


def _items(checkpoint: Checkpoint, weight_type: WeightType) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """(name in GGUF, shape, type, function that computes it) of every tensor."""
    heads = {"q": checkpoint.config.num_heads, "k": checkpoint.config.num_kv_heads}
    layout = LAYOUTS[_ARCHITECTURES[checkpoint.config.model_type]]
    for name, parts in _stacks(checkpoint.shapes).items():
        match = PERMUTED.fullmatch(name) if layout.pairs else None
        shape = checkpoint.shapes[parts[0]]
        is_small = len(shape) == 1 or name.endswith(_ROUTER)
        kind = "F32" if is_small else "BF16" if shape[-1] % _Q8_BLOCK else weight_type
        if "{}" in name:
            yield gguf_name(name, layout.names), (len(parts), *shape), kind, partial(_stacked, checkpoint, parts)
        else:
            make = _maker(checkpoint, name, heads[match[1]] if match else None)
            yield gguf_name(name, layout.names), shape, kind, make


def _stacks(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors of the file: each is one tensor, or those of all experts under one name, in which {} is the
    expert."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        stacks.setdefault(_EXPERT.sub(r"\1{}\2", name), []).append(name)
    return {name: [name.format(e) for e in range(len(parts))] for name, parts in stacks.items()}


def _stacked(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    return torch.stack([checkpoint[name] for name in names])


def _maker(checkpoint: Checkpoint, name: str, heads: int | None) -> Any:
    return lambda: checkpoint[name] if heads is None else pairs(checkpoint[name], heads)


def _factors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """The factors by which Llama 3 divides rotary frequencies."""
    rope = _rope(config)
    if rope.scaling is not None and rope.scaling.kind == "llama3":
        factors = inverse_frequencies(config.head_dim, Rope(rope.theta)) / inverse_frequencies(config.head_dim, rope)
        yield ROPE_FACTORS, tuple(factors.shape), "F32", lambda: factors


def gguf_name(name: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight. `names`: see `hf_name`."""
    owner, _, kind = name.rpartition(".")
    ends = {ours: theirs for theirs, ours in ENDS.items()}
    if owner in ends:
        return f"{ends[owner]}.{kind}"
    layer, _, part = owner.removeprefix("model.layers.").partition(".")
    theirs = {ours: theirs for theirs, ours in (LAYER | dict(names)).items()}[part]
    return f"blk.{layer}.{theirs}.{kind}"


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, ...] of two halves, reordered into llama.cpp's neighbouring pairs."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape).contiguous()


def _check(path: Path, checkpoint: Checkpoint) -> None:
    """ModelError unless the written file agrees with the directory."""
    file = GgufFile(path)
    config = parse_config(hf_config(file), where=str(path))
    for field in _SAME:
        expected = getattr(checkpoint.config, field)
        if getattr(config, field) != expected:
            raise ModelError(f"{checkpoint.path}: GGUF cannot say that {field} is {shown(expected)}.")
    check_same_tokens(file, checkpoint.path)
