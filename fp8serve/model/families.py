"""The table of architectures: one row for each family of models, with what its class fixes and no file says.

A row and the file together become a `ModelConfig` (config.py), and that is all the decoder knows of a family: it asks
which projections have a bias and whether queries and keys are normed, never for a name. What all families here have in
common (a norm before attention and before the MLP, SiLU, rotary position of one base, a dense MLP) is not in the table
but in the layer (decoder.py). A family that differs there adds a field, the branch of the layer that reads it, and the
key of the file that sets it.

Defaults are those of transformers' config classes. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """One architecture.

    defaults: of keys that the file leaves out. optional: keys that this family honours besides those that all do.
    qkv_bias: whether q, k and v have a bias; None: the file's `attention_bias` says so, of o too. qk_norm: whether
    queries and keys are normed. uniform_window: all layers have the window; else those from `max_window_layers` on.
    """

    architecture: str
    defaults: Mapping[str, Any]
    optional: frozenset[str] = frozenset()
    qkv_bias: bool | None = None
    qk_norm: bool = False
    uniform_window: bool = True


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "head_dim": None, "num_key_value_heads": None, "sliding_window": None, "bos_token_id": None,
    "eos_token_id": None, "max_position_embeddings": 2048, "vocab_size": 32000, "use_sliding_window": True,
    "max_window_layers": 0, "layer_types": None,
}  # fmt: skip
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN = {"max_position_embeddings": 32768, "vocab_size": 151936, "use_sliding_window": False, "sliding_window": 4096,
         "max_window_layers": 28, "num_key_value_heads": 32}  # fmt: skip
_WINDOWED = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})

FAMILIES: dict[str, Family] = {  # by the file's model_type
    "llama": Family("LlamaForCausalLM", _COMMON | _SPECIAL, frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family(
        "MistralForCausalLM",
        _COMMON | _SPECIAL | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        frozenset({"sliding_window"}),
        qkv_bias=False,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _COMMON | _QWEN, _WINDOWED, qkv_bias=True, uniform_window=False),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _COMMON | _QWEN | {"head_dim": 128},
        _WINDOWED | {"attention_bias"},
        qk_norm=True,
        uniform_window=False,
    ),
}
