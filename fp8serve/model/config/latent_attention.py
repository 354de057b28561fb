"""The hyper-parameters of DeepSeek's multi-head latent attention (arXiv 2405.04434). Does not import torch."""

import math
from dataclasses import dataclass
from typing import Any

from fp8serve.model.config.reader import Reader
from fp8serve.model.config.rope import yarn_parameters


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of multi-head latent attention, in elements."""

    q_rank: int | None  # `q_lora_rank`; None: queries are projected from the layer's input
    rank: int  # `kv_lora_rank`, the size of the latent vector for keys and values
    nope: int  # `qk_nope_head_dim`, a head's elements without rotary position
    rope: int  # `qk_rope_head_dim`, a head's elements with rotary position
    value: int  # `v_head_dim`


def read_latent_sizes(get: Reader) -> LatentSizes | None:
    """Returns the sizes in config.json, or None if the family has no latent attention."""
    if not get.family.latent:
        return None
    latent = LatentSizes(
        None if get("q_lora_rank") is None else get.positive("q_lora_rank"),
        get.positive("kv_lora_rank"),
        get.positive("qk_nope_head_dim"),
        get.positive("qk_rope_head_dim"),
        get.positive("v_head_dim"),
    )
    for key, size in {"kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope}.items():
        if size % 2:
            raise get.unexpected(key, size, "an even number")
    for key, size in {"qk_head_dim": latent.nope + latent.rope, "head_dim": latent.rope}.items():
        if get.raw.get(key) not in (None, size):
            raise get.unexpected(key, get.raw[key], str(size))
    return latent


def latent_attention_fields(get: Reader, latent: LatentSizes) -> dict[str, Any]:
    """Returns the `ModelConfig` fields. All heads share one key: a token's latent vector and its rotated elements."""
    heads, bias = get.positive("num_attention_heads"), get.boolean("attention_bias")
    factor, mscale = yarn_parameters(get)
    yarn_scale = 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    return {
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": False,
        "softmax_scale": float((latent.nope + latent.rope) ** -0.5 * yarn_scale * yarn_scale),
        "latent": latent,
    }
