"""Multi-head latent attention as data: DeepSeek's sizes (arXiv 2405.04434), and the sizes of a head. No torch."""

import math
from dataclasses import dataclass
from typing import Any

from fp8serve.model.config.reader import Reader
from fp8serve.model.config.rope import yarn_parameters


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention, in elements.

    q_rank: size of the vector from which queries are projected; None: they are projected from the layer's input. rank:
    size of the vector from which keys and values are projected. nope, rope: elements of a head without and with
    rotary position. value: elements of a head's value.
    """

    q_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int


def latent_of(get: Reader) -> Latent | None:
    """The latent attention of the family that `get` reads; None if it has none."""
    if not get.family.latent:
        return None
    latent = Latent(
        None if get("q_lora_rank") is None else get.positive("q_lora_rank"),
        get.positive("kv_lora_rank"),
        get.positive("qk_nope_head_dim"),
        get.positive("qk_rope_head_dim"),
        get.positive("v_head_dim"),
    )
    for key, size in {"kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope}.items():
        if size % 2:
            raise get.complain(key, size, "an even number")
    for key, size in {"qk_head_dim": latent.nope + latent.rope, "head_dim": latent.rope}.items():
        if get.raw.get(key) not in (None, size):
            raise get.complain(key, get.raw[key], str(size))
    return latent


def latent_attention(get: Reader, latent: Latent) -> dict[str, Any]:
    """The fields of ModelConfig: all heads read one key, a token's latent vector and its rotated elements."""
    heads, bias = get.positive("num_attention_heads"), get.boolean("attention_bias")
    return {
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": False,
        "softmax_scale": _softmax_scale(get, latent),
        "latent": latent,
    }


def _softmax_scale(get: Reader, latent: Latent) -> float:
    """1 / sqrt of a head's size; where the context is stretched, times the square of YaRN's factor for
    `mscale_all_dim`."""
    factor, mscale = yarn_parameters(get)
    stretched = 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    return float((latent.nope + latent.rope) ** -0.5 * stretched * stretched)
