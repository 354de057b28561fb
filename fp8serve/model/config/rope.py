"""Reads the parameters of rotary position embeddings from `config.json`. network/rotary.py computes the angles.

transformers 5 writes `rope_parameters`, with one object for each layer type if these differ. transformers 4 writes
`rope_theta`, `rope_scaling` and, for layers with a window, `rope_local_base_freq`. This module reads both and does not
import torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.reader import Reader, positive_number


@dataclass(frozen=True)
class RopeScaling:
    """The parameters that scale rotary frequencies for contexts longer than the trained one.

    "linear" divides all frequencies by `factor`. "llama3" divides low frequencies, with a smooth transition to the high
    ones. "yarn" is YaRN. Each kind uses only some of the fields.
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
class LongRope:
    """LongRoPE (arXiv 2402.13753): each frequency has a divisor, and another one beyond the trained context."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cos and sin
    long_attention_factor: float  # multiplies cos and sin beyond the trained context
    kind: str = "longrope"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding with the frequencies theta^(-2i/rotary_dim), changed by `scaling`."""

    theta: float
    scaling: RopeScaling | LongRope | None = None


@dataclass(frozen=True)
class QueryScaling:
    """Llama 4's factor of queries: 1 + beta * ln(1 + floor(position / original_max_position_embeddings))."""

    beta: float
    original_max_position_embeddings: int


def layer_ropes(
    get: Reader, layer_windows: tuple[int | None, ...], max_len: int, rotary_dim: int
) -> tuple[Rope | None, ...]:
    """Returns the rotary position embedding of each layer, or None for a layer that has none."""
    full_parameters, windowed_parameters = _rope_parameters(get)
    full = windowed = _rope(get, full_parameters, _theta(get, "rope_theta"), max_len, rotary_dim)
    if get.family.local_theta is not None:
        windowed = _rope(get, windowed_parameters, _theta(get, get.family.local_theta), max_len, rotary_dim)
    ropes = [full if window is None else windowed for window in layer_windows]
    flags = _layers_with_rope(get, layer_windows)
    return tuple(rope if has_rope else None for rope, has_rope in zip(ropes, flags, strict=True))


def yarn_parameters(get: Reader) -> tuple[float, float]:
    """Returns YaRN's (factor, mscale_all_dim), or (1, 1) if config.json has no `mscale_all_dim`."""
    parameters = _rope_parameters(get)[0]
    is_unscaled = parameters.get("rope_type", parameters.get("type", "default")) == "default"
    if is_unscaled or not parameters.get("mscale_all_dim"):
        return 1.0, 1.0
    return _number(parameters, "factor", get.where), _number(parameters, "mscale_all_dim", get.where)


def rotary_dim(get: Reader, head_dim: int) -> int:
    """Returns the number of a head's elements that are rotated; they are the first ones."""
    key, (full, windowed) = "partial_rotary_factor", _rope_parameters(get)
    default = 1.0 if get(key) is None else get(key)
    factors = sorted({positive_number(rope.get(key), key, get.where, default) for rope in (full, windowed or full)})
    num_rotated = int(head_dim * factors[0])
    if factors == [1.0]:
        return head_dim
    if key not in get.family.optional or len(factors) > 1 or factors[0] > 1 or num_rotated % 2 or num_rotated == 0:
        raise ModelError(
            f"{get.where}: {key} {factors[0]} of heads of {head_dim} elements is not supported for "
            f"{get.family.architecture}."
        )
    return num_rotated


def query_scaling(get: Reader, max_len: int) -> QueryScaling | None:
    """Returns the scaling of queries by position, or None if config.json has no `llama_4_scaling_beta`."""
    parameters = _rope_parameters(get)[0]
    beta = parameters.get("llama_4_scaling_beta") if get.family.scales_queries else None
    if beta is None:
        return None
    original = positive_number(
        parameters.get("original_max_position_embeddings"), "rope original_max_position_embeddings", get.where, max_len
    )
    return QueryScaling(positive_number(beta, "llama_4_scaling_beta", get.where), int(original))


def _rope_parameters(get: Reader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rotary parameters of layers with full attention, and those of layers with a window.

    The second object is empty if config.json does not distinguish the layer types.
    """
    where, new, old = get.where, get.raw.get("rope_parameters"), get.raw.get("rope_scaling")
    if new and old and _without_theta(new) != _without_theta(old):
        raise ModelError(f"{where}: rope_parameters and rope_scaling differ; remove one of them.")
    full = new.get("full_attention", new) if isinstance(new, dict) else {}
    theta, inner_theta = get.raw.get("rope_theta"), full.get("rope_theta") if isinstance(full, dict) else None
    if theta is not None and inner_theta is not None and theta != inner_theta:
        raise ModelError(
            f"{where}: rope_theta is {shown(theta)}, and {shown(inner_theta)} in rope_parameters; remove one of them."
        )
    parameters = new or old or get.family.defaults.get("rope_parameters") or {}
    parameters = _object(parameters, where)
    is_by_layer_type = any(isinstance(value, dict) for value in parameters.values())
    if is_by_layer_type and get.family.local_theta is None:
        raise ModelError(f"{where}: rotary parameters per layer type are not supported for {get.family.architecture}.")
    if not is_by_layer_type:
        return parameters, {}
    if set(parameters) - {"full_attention", "sliding_attention"} or "full_attention" not in parameters:
        raise ModelError(f"{where}: rope_parameters must have the keys full_attention and sliding_attention.")
    return _object(parameters["full_attention"], where), _object(parameters.get("sliding_attention") or {}, where)


def _without_theta(parameters: Any) -> Any:
    """Returns `rope_scaling` or `rope_parameters` without the base, with transformers 5's key for the type."""
    if not isinstance(parameters, dict):
        return parameters
    return {"rope_type" if key == "type" else key: value for key, value in parameters.items() if key != "rope_theta"}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ModelError(f"{where}: rotary parameters are {shown(value)} where an object was expected.")
    return value


def _theta(get: Reader, key: str) -> Any:
    value = get(key)
    return get.family.defaults[key] if value is None else value


def _layers_with_rope(get: Reader, layer_windows: tuple[int | None, ...]) -> list[bool]:
    """Returns whether each layer has rotary position. `no_rope_layers` has a 1 for each layer that has it."""
    flags, interval, layers = get("no_rope_layers"), get("no_rope_layer_interval"), len(layer_windows)
    if get.family.rope_in_windows_only:
        return [window is not None for window in layer_windows]
    if flags is None:
        return [interval is None or (i + 1) % get.positive("no_rope_layer_interval") != 0 for i in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        raise get.unexpected("no_rope_layers", flags, f"a list of {layers} zeros and ones")
    return [bool(flag) for flag in flags]


_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "mscale", "mscale_all_dim", "truncate", "finetuned"}),  # "finetuned" has no effect
    "longrope": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor",
                           "long_factor"}),
}  # fmt: skip
_MSCALE_KEYS = ("short_mscale", "long_mscale")
_QUERY_SCALING_KEYS = ("llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings")


def _rope(get: Reader, parameters: Mapping[str, Any], theta: Any, max_len: int, rotary_dim: int) -> Rope:
    """Returns the rotary position embedding in `parameters`. `theta` is the base if `parameters` has none."""
    where = get.where
    rope = {key: value for key, value in parameters.items() if value is not None}
    rope.pop("partial_rotary_factor", None)  # `rotary_dim` reads it
    base = positive_number(rope.pop("rope_theta", theta), "rope_theta", where)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = get.family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    keys = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    family_keys = set(_QUERY_SCALING_KEYS if get.family.scales_queries else ())
    family_keys |= set(_MSCALE_KEYS if get.family.mscales else ())
    unknown = set(rope) - (keys or set()) - family_keys
    if keys is None or unknown:
        problem = f"type {shown(kind)}" if keys is None else f"the keys {shown(sorted(unknown))}"
        rope_types = ", ".join(_ROPE_KEYS)
        raise ModelError(f"{where}: rotary scaling with {problem} is not supported; known types are {rope_types}.")
    if kind == "longrope":
        return Rope(base, _long_rope(get, rope, max_len, rotary_dim))
    return Rope(base, None if kind == "default" else _scaling(kind, rope, max_len, where))


def _long_rope(get: Reader, rope: Mapping[str, Any], max_len: int, rotary_dim: int) -> LongRope:
    top_level = get("original_max_position_embeddings")
    source, default = (rope, max_len) if top_level is None else ({}, top_level or max_len)
    original = int(_number(source, "original_max_position_embeddings", get.where, default))
    factor = _number(rope, "factor", get.where, max_len / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    attention = _number(rope, "attention_factor", get.where, attention)
    short, long = (_number(rope, key, get.where) if get.family.mscales else attention for key in _MSCALE_KEYS)
    return LongRope(
        _factors(rope, "short_factor", rotary_dim // 2, get.where),
        _factors(rope, "long_factor", rotary_dim // 2, get.where),
        original,
        short,
        long,
    )


def _factors(rope: Mapping[str, Any], key: str, count: int, where: str) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list) or len(factors) != count:
        raise ModelError(f"{where}: rope {key} is {shown(factors)} where a list of {count} numbers was expected.")
    return tuple(positive_number(value, f"rope {key}", where) for value in factors)


def _number(rope: Mapping[str, Any], key: str, where: str, default: Any = None) -> float:
    return positive_number(rope.get(key), f"rope {key}", where, default)


def _scaling(kind: str, rope: dict[str, Any], max_len: int, where: str) -> RopeScaling:
    number = partial(_number, rope, where=where)
    original = int(number("original_max_position_embeddings", default=max_len))
    factor = number("factor", default=max_len / original if kind == "yarn" else None)
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
        beta_fast=number("beta_fast", default=32.0),
        beta_slow=number("beta_slow", default=1.0),
        attention_factor=number("attention_factor", default=_yarn_attention(factor, rope, number)),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention(factor: float, rope: Mapping[str, Any], number: Callable[[str], float]) -> float:
    """Returns YaRN's factor of cos and sin, 0.1 ln(factor) + 1 (arXiv 2309.00071).

    DeepSeek's factor is f(mscale) / f(mscale_all_dim), where f(weight) = 0.1 weight ln(factor) + 1.
    """

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    return mscale(1.0)
