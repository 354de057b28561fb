"""How positions rotate queries and keys, according to `config.json`; `rotary` computes the angles.

transformers 5 writes `rope_parameters`, by type of layer where these differ, where 4 wrote `rope_theta` +
`rope_scaling`, and `rope_local_base_freq` for the layers with a window: both are read. No torch here.
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
    """How rotary frequencies are stretched beyond the trained context; `kind` decides which fields are used.

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
class LongRope:
    """Frequencies divided one by one, by different factors for sequences beyond the trained context (arXiv
    2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cos and sin
    long_attention_factor: float  # the same, beyond the trained context
    kind: str = "longrope"


@dataclass(frozen=True)
class Rope:
    """Rotary position: frequencies theta^(-2i/rotary_dim), stretched by `scaling`."""

    theta: float
    scaling: RopeScaling | LongRope | None = None


@dataclass(frozen=True)
class QueryScaling:
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / original_max_position_embeddings)): Llama 4's."""

    beta: float
    original_max_position_embeddings: int


def layer_ropes(
    get: Reader, layer_windows: tuple[int | None, ...], max_len: int, rotary_dim: int
) -> tuple[Rope | None, ...]:
    """The rotary position of every layer; None: its queries and keys are not rotated."""
    everywhere, local = _ropes(get, max_len, rotary_dim)
    ropes = [everywhere if window is None else local for window in layer_windows]
    return tuple(rope if used else None for rope, used in zip(ropes, _with_rope(get, layer_windows), strict=True))


def yarn_parameters(get: Reader) -> tuple[float, float]:
    """(factor, mscale_all_dim) of stretched rotary frequencies; (1, 1) where no such factor is given."""
    parameters = _rope_parameters(get)[0]
    is_plain = parameters.get("rope_type", parameters.get("type", "default")) == "default"
    if is_plain or not parameters.get("mscale_all_dim"):
        return 1.0, 1.0
    return _number(parameters, "factor", get.where), _number(parameters, "mscale_all_dim", get.where)


def rotary_dim(get: Reader, head_dim: int) -> int:
    """How many elements of a head are rotated, from the first on."""
    key, (whole, windowed) = "partial_rotary_factor", _rope_parameters(get)
    own = 1.0 if get(key) is None else get(key)
    parts = sorted({positive_number(rope.get(key), key, get.where, own) for rope in (whole, windowed or whole)})
    num_rotated = int(head_dim * parts[0])
    if parts == [1.0]:
        return head_dim
    if key not in get.family.optional or len(parts) > 1 or parts[0] > 1 or num_rotated % 2 or num_rotated == 0:
        raise ModelError(
            f"{get.where}: {key} {parts[0]} of heads of {head_dim} elements is not supported for "
            f"{get.family.architecture}."
        )
    return num_rotated


def query_scaling(get: Reader, max_len: int) -> QueryScaling | None:
    """`llama_4_scaling_beta` of the rotary parameters, where the family has it."""
    parameters = _rope_parameters(get)[0]
    beta = parameters.get("llama_4_scaling_beta") if get.family.scales_queries else None
    if beta is None:
        return None
    original = positive_number(
        parameters.get("original_max_position_embeddings"), "rope original_max_position_embeddings", get.where, max_len
    )
    return QueryScaling(positive_number(beta, "llama_4_scaling_beta", get.where), int(original))


def _rope_parameters(get: Reader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of layers that see the whole context, and of those with a window where the file distinguishes
    them."""
    where, new, old = get.where, get.raw.get("rope_parameters"), get.raw.get("rope_scaling")
    if new and old and _scaling_of(new) != _scaling_of(old):
        raise ModelError(f"{where}: rope_parameters and rope_scaling contradict each other; take one of them out.")
    _check_theta(get, new)
    parameters = new or old or get.family.defaults.get("rope_parameters")
    parameters = parameters or {}
    by_type = isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values())
    if not isinstance(parameters, dict) or (by_type and get.family.local_theta is None):
        raise ModelError(f"{where}: rotary parameters per layer type are not supported for {get.family.architecture}.")
    if not by_type:
        return parameters, {}
    if set(parameters) - {"full_attention", "sliding_attention"} or "full_attention" not in parameters:
        raise ModelError(f"{where}: rope_parameters must be of full_attention and sliding_attention.")
    return _object(parameters["full_attention"], where), _object(parameters.get("sliding_attention") or {}, where)


def _check_theta(get: Reader, new: Any) -> None:
    """ModelError: transformers 4's key and 5's give different bases; it is unknown with which the weights were
    trained."""
    old, new = get.raw.get("rope_theta"), new if isinstance(new, dict) else {}
    whole = new.get("full_attention", new)
    inner = whole.get("rope_theta") if isinstance(whole, dict) else None
    if old is not None and inner is not None and old != inner:
        raise ModelError(
            f"{get.where}: rope_theta is {shown(old)}, and {shown(inner)} in rope_parameters; take one of them out."
        )


def _scaling_of(parameters: Any) -> Any:
    """What transformers 4 wrote as `rope_scaling`, with the name that 5 has for its type."""
    if not isinstance(parameters, dict):
        return parameters
    return {"rope_type" if key == "type" else key: value for key, value in parameters.items() if key != "rope_theta"}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ModelError(f"{where}: rotary parameters are {shown(value)} where an object was expected.")
    return value


def _ropes(get: Reader, max_len: int, rotary_dim: int) -> tuple[Rope, Rope]:
    """The rotary position of layers that see the whole context, and of layers with a window."""
    whole, windowed = _rope_parameters(get)
    everywhere = _rope(get, whole, _theta(get, "rope_theta"), max_len, rotary_dim)
    if get.family.local_theta is None:
        return everywhere, everywhere
    return everywhere, _rope(get, windowed, _theta(get, get.family.local_theta), max_len, rotary_dim)


def _theta(get: Reader, key: str) -> Any:
    value = get(key)
    return get.family.defaults[key] if value is None else value


def _with_rope(get: Reader, layer_windows: tuple[int | None, ...]) -> list[bool]:
    """For every layer, whether it has rotary position: `no_rope_layers` holds a 1 where it does."""
    used, every, layers = get("no_rope_layers"), get("no_rope_layer_interval"), len(layer_windows)
    if get.family.rope_in_windows_only:
        return [window is not None for window in layer_windows]
    if used is None:
        return [every is None or (i + 1) % get.positive("no_rope_layer_interval") != 0 for i in range(layers)]
    if not isinstance(used, list) or len(used) != layers or any(value not in (0, 1) for value in used):
        raise get.complain("no_rope_layers", used, f"a list of {layers} zeros and ones")
    return [bool(value) for value in used]


_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "mscale", "mscale_all_dim", "truncate", "finetuned"}),  # the last is a note
    "longrope": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor",
                           "long_factor"}),
}  # fmt: skip
_ELSEWHERE = ("partial_rotary_factor",)  # read by `rotary_dim`
_MSCALES = ("short_mscale", "long_mscale")
_QUERIES = ("llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings")


def _rope(get: Reader, parameters: Mapping[str, Any], theta: Any, max_len: int, rotary_dim: int) -> Rope:
    """`given` is the object of the file; `theta` is the base if that names none."""
    where = get.where
    rope = {k: v for k, v in parameters.items() if v is not None and k not in _ELSEWHERE}
    base = positive_number(rope.pop("rope_theta", theta), "rope_theta", where)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = get.family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    keys = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    own = set(_QUERIES if get.family.scales_queries else ()) | set(_MSCALES if get.family.mscales else ())
    unknown = set(rope) - (keys or set()) - own
    if keys is None or unknown:
        wrong = f"type {shown(kind)}" if keys is None else f"the keys {shown(sorted(unknown))}"
        known = ", ".join(_ROPE_KEYS)
        raise ModelError(f"{where}: rotary scaling with {wrong} is not supported; known types are {known}.")
    if kind == "longrope":
        return Rope(base, _long_rope(get, rope, max_len, rotary_dim))
    return Rope(base, None if kind == "default" else _scaling(kind, rope, max_len, where))


def _long_rope(get: Reader, rope: Mapping[str, Any], max_len: int, rotary_dim: int) -> LongRope:
    own = get("original_max_position_embeddings")
    original = int(_number(rope if own is None else {}, "original_max_position_embeddings", get.where, own or max_len))
    factor = _number(rope, "factor", get.where, max_len / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    attention = _number(rope, "attention_factor", get.where, attention)
    short, long = (_number(rope, key, get.where) if get.family.mscales else attention for key in _MSCALES)
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
    """YaRN (arXiv 2309.00071), section 3.4: 0.1 ln(factor) + 1, or DeepSeek's quotient of two such."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    return mscale(1.0)
