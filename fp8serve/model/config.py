"""The hyper-parameters we honour, read from `config.json`.

Published architectures are one decoder with switches: what the architecture fixes is a row of `families`, the rest is
in the file. Every key of the file is sorted into one of three: honoured (becomes a field), harmless (`config_keys`), or
unknown. An unknown key that is set is an error, because a model that runs with one term of its maths missing looks
healthy and answers wrongly.

transformers 5 writes `rope_parameters` and `dtype` where 4 wrote `rope_theta` + `rope_scaling` and `torch_dtype`: both
are read. Defaults of omitted keys are those of transformers' class for the architecture. No torch here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config_keys import is_harmless
from fp8serve.model.families import FAMILIES, Family
from fp8serve.model.files import present, read_json, read_optional_json


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; which fields count depends on `kind`.

    kind: "linear" (frequencies / factor), "llama3" (low frequencies / factor, smooth between) or "yarn".
    """

    kind: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes in elements; every field that changes the maths is here."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    attention_out_bias: bool  # on o
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]  # per layer: a query sees this many newest positions; None sees all
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the weights as published: "bfloat16", "float16" or "float32"

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)


_HONOURED = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "bos_token_id", "eos_token_id",
    "dtype", "torch_dtype", "quantization_config", "layer_types",
})  # fmt: skip

# What no model exceeds, so that a hostile size is refused before a module or a list of that size is made.
_MOST = {"num_hidden_layers": 2_000, "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}
_LARGEST = 1e38  # of a number that is computed with in FP32


def read_config(model_dir: Path | str) -> ModelConfig:
    """The configuration of the Hugging Face directory `model_dir`.

    ModelError: the directory or its config.json is missing or damaged, the architecture is not one of ours, or a key
    would change the maths in a way that we do not compute.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        what = "is not a directory" if model_dir.exists() else "does not exist"
        raise ModelError(f"{model_dir} {what}; give the path of a Hugging Face-format model directory.")
    if not present(model_dir / "config.json"):
        raise ModelError(f"{model_dir} is not a model directory: it holds no config.json.")
    raw = read_json(model_dir / "config.json")
    generation = read_optional_json(model_dir / "generation_config.json")
    return parse_config(raw, generation, str(model_dir / "config.json"))


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """`raw` is the object in config.json, `generation` that in generation_config.json; `where` is named in errors."""
    family = _family(raw, where)
    _refuse_unknown(raw, family, where)
    get = _Reader(raw, family, where)
    if get("hidden_act") != "silu":
        raise ModelError(f"{where}: hidden_act is {shown(get('hidden_act'))}; this decoder computes only 'silu'.")
    heads, layers = get.positive("num_attention_heads"), get.positive("num_hidden_layers")
    kv_heads = get.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    max_len = get.positive("max_position_embeddings")
    theta, scaling = _rope(raw, max_len, where)
    bias = bool(get.boolean("attention_bias")) if family.qkv_bias is None else family.qkv_bias
    return ModelConfig(
        architecture=family.architecture,
        model_type=str(raw["model_type"]),
        vocab_size=get.positive("vocab_size"),
        hidden_size=get.positive("hidden_size"),
        intermediate_size=get.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(get, heads, where),
        rms_norm_eps=get.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_len,
        tie_word_embeddings=get.boolean("tie_word_embeddings"),
        attention_bias=bias,
        attention_out_bias=bias and family.qkv_bias is None,
        mlp_bias=get.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        layer_windows=_windows(get, layers, where),
        bos_token_id=get.token("bos_token_id"),
        eos_token_ids=_eos(get, generation or {}, where),
        dtype=_dtype(raw, where),
    )


def _family(raw: Mapping[str, Any], where: str) -> Family:
    family, names = FAMILIES.get(str(raw.get("model_type"))), raw.get("architectures")
    if family is None or (names and names != [family.architecture]):
        found = names[0] if isinstance(names, list) and names else raw.get("model_type")
        known = ", ".join(f.architecture for f in FAMILIES.values())
        raise ModelError(f"{where}: the architecture {shown(found)} is not supported; supported are {known}.")
    return family


def _refuse_unknown(raw: Mapping[str, Any], family: Family, where: str) -> None:
    for key, value in raw.items():
        if key not in _HONOURED and key not in family.optional and not is_harmless(key, value):
            raise ModelError(
                f"{where}: the key {shown(key)} is {shown(value)}, which {family.architecture} here does not compute; "
                "remove it if it does not change the model's maths."
            )


class _Reader:
    """Typed access to the file's keys with the family's defaults; every complaint names file, key and value."""

    def __init__(self, raw: Mapping[str, Any], family: Family, where: str) -> None:
        self.raw, self.family, self.where = raw, family, where

    def __call__(self, key: str) -> Any:
        readable = key in _HONOURED or key in self.family.optional
        default = self.family.defaults.get(key)
        return self.raw.get(key, default) if readable else default

    def positive(self, key: str, default: int | None = None) -> int:
        value = self(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.complain(key, value, "a positive whole number")
        if value > (most := _MOST.get(key, 2**28)):
            raise self.complain(key, value, f"at most {most}")
        return value

    def number(self, key: str) -> float:
        return _number(self(key), key, self.where)

    def boolean(self, key: str) -> bool:
        value = self(key)
        if not isinstance(value, bool):
            raise self.complain(key, value, "true or false")
        return value

    def token(self, key: str) -> int | None:
        ids = _token_ids(self(key), key, self.where)
        return ids[0] if ids else None

    def complain(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is {shown(value)} where {expected} was expected.")


def _number(value: Any, key: str, where: str, default: float | None = None) -> float:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:  # NaN fails, too
        raise ModelError(f"{where}: {key} is {shown(value)} where a positive number was expected.")
    return float(value)


def _token_ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    """`eos_token_id` is a number or a list of numbers, `bos_token_id` a number; null is none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise ModelError(f"{where}: {key} is {shown(value)} where a token id was expected.")
    return tuple(ids)


def _head_dim(get: _Reader, heads: int, where: str) -> int:
    hidden = get.positive("hidden_size")
    if get("head_dim") is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    dim = get.positive("head_dim", hidden // heads)
    if dim % 2:
        raise ModelError(f"{where}: head_dim {dim} is odd; rotary embedding needs pairs.")
    return dim


def _windows(get: _Reader, layers: int, where: str) -> tuple[int | None, ...]:
    """Per layer: `layer_types` where it is given, otherwise the layers from `max_window_layers` on."""
    enabled = get.boolean("use_sliding_window") and get("sliding_window") is not None
    window = get.positive("sliding_window") if enabled else None
    types = get("layer_types")
    if types is None:
        first = get.positive("max_window_layers") if get("max_window_layers") not in (0, None) else 0
        return tuple(window if i >= first else None for i in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise ModelError(f"{where}: layer_types is not {layers} of 'full_attention' and 'sliding_attention'.")
    windows = tuple(window if t == "sliding_attention" else None for t in types)
    uniform = get.family.uniform_window
    if windows.count(None) != types.count("full_attention") or (uniform and set(windows) != {window}):
        raise ModelError(f"{where}: layer_types contradicts sliding_window {window} of {get.family.architecture}.")
    return windows


def _eos(get: _Reader, generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """generation_config.json rules, as in transformers: chat models list their end-of-turn tokens there."""
    value = generation.get("eos_token_id")
    return _token_ids(get("eos_token_id") if value is None else value, "eos_token_id", where)


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if value not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"{where}: dtype {shown(value)} is not one of bfloat16, float16, float32.")
    return str(value)


_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "mscale", "mscale_all_dim", "truncate", "finetuned"}),  # the last is a note
}  # fmt: skip


def _rope(raw: Mapping[str, Any], max_len: int, where: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise ModelError(f"{where}: rotary parameters per layer type are not supported.")
    rope = {k: v for k, v in given.items() if v is not None}
    theta = _number(rope.pop("rope_theta", raw.get("rope_theta")), "rope_theta", where, 10000.0)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor other than 1 is not supported.")
    keys = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None or set(rope) - keys:
        wrong = f"type {shown(kind)}" if keys is None else f"the keys {shown(sorted(set(rope) - keys))}"
        known = ", ".join(_ROPE_KEYS)
        raise ModelError(f"{where}: rotary scaling with {wrong} is not supported; known types are {known}.")
    return theta, None if kind == "default" else _scaling(kind, rope, max_len, where)


def _scaling(kind: str, rope: dict[str, Any], max_len: int, where: str) -> RopeScaling:
    def number(key: str, default: float | None = None) -> float:
        return _number(rope.get(key), f"rope {key}", where, default)

    original = int(number("original_max_position_embeddings", max_len))
    factor = number("factor", max_len / original if kind == "yarn" else None)
    if kind == "linear":
        return RopeScaling(kind, factor, original)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ModelError(f"{where}: rope high_freq_factor {high} is not above low_freq_factor {low}.")
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=number("attention_factor", _yarn_attention(factor, rope, number)),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention(factor: float, rope: Mapping[str, Any], number: Callable[[str], float]) -> float:
    """YaRN (arXiv 2309.00071), section 3.4: 0.1 ln(factor) + 1, or DeepSeek's quotient of two such."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    return mscale(1.0)
