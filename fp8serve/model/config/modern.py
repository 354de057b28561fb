"""The hyper-parameters of ModernBERT, as `EncoderConfig`. No torch here.

transformers 4 wrote a rotary base for each kind of layer and the interval of layers that see the whole text; 5 writes
`rope_parameters` and `layer_types`. Both are read.
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.reader import positive_number

KINDS = ("full_attention", "sliding_attention")
_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
HONOURED = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "norm_eps", "hidden_activation", "dtype", "torch_dtype",
    "quantization_config", "bos_token_id", "eos_token_id", "tie_word_embeddings", "layer_types", "rope_parameters",
    "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers", "local_attention",
})  # fmt: skip
# keys of training, of heads that are not computed here, and of transformers' implementation
HARMLESS = frozenset({
    "initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "decoder_bias", "classifier_pooling",
    "classifier_bias", "classifier_activation", "deterministic_flash_attn", "sparse_prediction",
    "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "layer_norm_eps",
})  # fmt: skip


def layer_windows(raw: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """For each layer, how many tokens to either side it sees; None: all."""
    half = _whole(raw, "local_attention", 128, where) // 2
    return tuple(None if kind == KINDS[0] else half for kind in _kinds(raw, layers, where))


def layer_thetas(raw: Mapping[str, Any], layers: int, where: str) -> tuple[float, ...]:
    """For each layer, its rotary base. ModelError: it is stretched, which is not computed here."""
    bases = {kind: _theta(raw, kind, where) for kind in KINDS}
    return tuple(bases[kind] for kind in _kinds(raw, layers, where))


def _kinds(raw: Mapping[str, Any], layers: int, where: str) -> list[str]:
    kinds = raw.get("layer_types")
    if kinds is None:
        every = _whole(raw, "global_attn_every_n_layers", 3, where)
        return [KINDS[bool(layer % every)] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise ModelError(f"{where}: layer_types is not {layers} of {' and '.join(map(repr, KINDS))}.")
    return kinds


def _theta(raw: Mapping[str, Any], kind: str, where: str) -> float:
    key, usual = _THETAS[kind]
    said = raw.get("rope_parameters") or {}
    rope = (said.get(kind) or {}) if isinstance(said, dict) else None
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ModelError(f"{where}: rope_parameters is {shown(said)}; ModernBERT's here has the type 'default'.")
    return positive_number(rope.get("rope_theta", raw.get(key)), key, where, usual)


def _whole(raw: Mapping[str, Any], key: str, usual: int, where: str) -> int:
    value = raw.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} is {shown(value)} where a positive whole number was expected.")
    return value
