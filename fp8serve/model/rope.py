"""How positions turn queries and keys, as `config.json` says it; `rotary` computes the angles.

transformers 5 writes `rope_parameters`, by type of layer where these differ, where 4 wrote `rope_theta` +
`rope_scaling`, and `rope_local_base_freq` for the layers with a window: both are read. No torch here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config_reader import Reader, positive_number


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
class Rope:
    """Rotary position: frequencies theta^(-2i/head_dim), stretched by `scaling`."""

    theta: float
    scaling: RopeScaling | None = None


def layer_ropes(get: Reader, layer_windows: tuple[int | None, ...], max_len: int) -> tuple[Rope | None, ...]:
    """Of every layer; None: its queries and keys are not turned."""
    everywhere, local = _ropes(get, max_len)
    found = [everywhere if window is None else local for window in layer_windows]
    return tuple(rope if used else None for rope, used in zip(found, _with_rope(get, len(found)), strict=True))


def _ropes(get: Reader, max_len: int) -> tuple[Rope, Rope]:
    """Of layers that see the whole context, and of layers with a window."""
    raw, where = get.raw, get.where
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or get.family.defaults.get("rope_scaling") or {}
    by_type = isinstance(given, dict) and any(isinstance(value, dict) for value in given.values())
    if not isinstance(given, dict) or (by_type and not get.family.local_theta):
        raise ModelError(f"{where}: rotary parameters per layer type are not supported for {get.family.architecture}.")
    if by_type and (set(given) - {"full_attention", "sliding_attention"} or "full_attention" not in given):
        raise ModelError(f"{where}: rope_parameters must be of full_attention and sliding_attention.")
    everywhere = _rope(given["full_attention"] if by_type else given, _theta(get, "rope_theta"), max_len, where)
    if not get.family.local_theta:
        return everywhere, everywhere
    local = given.get("sliding_attention") if by_type else None
    return everywhere, _rope(local or {}, _theta(get, "rope_local_base_freq"), max_len, where)


def _theta(get: Reader, key: str) -> Any:
    value = get(key)
    return get.family.defaults[key] if value is None else value


def _with_rope(get: Reader, layers: int) -> list[bool]:
    """Of every layer whether it has rotary position: `no_rope_layers` holds a 1 where it does."""
    used, every = get("no_rope_layers"), get("no_rope_layer_interval")
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
}  # fmt: skip


def _rope(given: Any, theta: Any, max_len: int, where: str) -> Rope:
    """`given` is the object of the file; `theta` counts where that names none."""
    if not isinstance(given, dict):
        raise ModelError(f"{where}: rotary parameters are {shown(given)} where an object was expected.")
    rope = {k: v for k, v in given.items() if v is not None}
    base = positive_number(rope.pop("rope_theta", theta), "rope_theta", where)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor other than 1 is not supported.")
    keys = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None or set(rope) - keys:
        wrong = f"type {shown(kind)}" if keys is None else f"the keys {shown(sorted(set(rope) - keys))}"
        known = ", ".join(_ROPE_KEYS)
        raise ModelError(f"{where}: rotary scaling with {wrong} is not supported; known types are {known}.")
    return Rope(base, None if kind == "default" else _scaling(kind, rope, max_len, where))


def _scaling(kind: str, rope: dict[str, Any], max_len: int, where: str) -> RopeScaling:
    def number(key: str, default: float | None = None) -> float:
        return positive_number(rope.get(key), f"rope {key}", where, default)

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
