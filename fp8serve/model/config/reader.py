"""Typed access to the keys of `config.json`. Every error names the file, the key and the value.

`HONOURED` lists the keys that every family honours. Two other tables list the harmless keys: those that never change
the result, and those that do not change it at some values. The harmless keys come from the config.json of the most used
repositories of these architectures, and of the programs that write them (transformers 4 and 5, trainers, converters). A
key is harmless only if the architecture's own code never reads it in a forward pass of inference. A key in none of the
tables must be null, false, empty or zero, because an unknown term of the maths must not be ignored.

`Fields` reads any untrusted JSON. A value of the wrong type raises an error that names its key. Every getter, such as
`fields.text("fmt")`, returns None if the key is missing or null. Callers therefore need no type checks of their own.
This module does not import torch.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from fp8serve.errors import Fp8ServeError, ModelError, shown
from fp8serve.model.config.families import Family

T = TypeVar("T")

HONOURED = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "bos_token_id", "eos_token_id",
    "dtype", "torch_dtype", "quantization_config", "layer_types",
})  # fmt: skip

# `pretraining_tp` only changed the order of a sum. `auto_map` names code that fp8serve never runs. A window needs
# `sliding_window`, so `max_window_layers` and `sliding_window_size` alone have no effect. `intermediate_size` was
# computed from `ffn_dim_multiplier` and `multiple_of`.
_HARMLESS = frozenset({
    # initialisation and training
    "initializer_range", "initializer_factor", "init_method", "init_std", "attention_dropout", "attn_pdrop",
    "embd_pdrop", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "neftune_noise_alpha", "gradient_checkpointing", "use_bfloat16", "router_aux_loss_coef",
    "output_router_logits", "router_jitter_noise", "input_jitter_noise", "router_z_loss_coef", "ffn_dim_multiplier",
    "multiple_of", "mlp_ratio",
    # caching, kernels and parallelism
    "use_cache", "cache_implementation", "attn_implementation", "flash_attention", "use_flash_attn",
    "use_flash_attention", "use_flash_attention_2", "use_return_dict", "return_dict", "torchscript",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "output_past", "pretraining_tp",
    "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "tensor_parallel_degree",
    "transformers.js_config", "use_parallel_embedding",
    # the kind of model, as other tools describe it
    "is_llama_config", "is_qwen2_config", "is_mistral_config", "is_decoder", "is_encoder_decoder", "auto_map",
    "trust_remote_code", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    "finetuning_task", "max_window_layers",
    # limits and special tokens of tokenizers and tools
    "max_sequence_length", "model_max_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "n_positions",
    "n_ctx", "context_length", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "initial_context_length", "decoder_start_token_id", "tokenizer_class", "prefix", "sliding_window_size",
    # generation defaults, which fp8serve reads from generation_config.json
    "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_beams",
    "num_beam_groups", "num_return_sequences", "early_stopping", "diversity_penalty", "max_new_tokens",
    "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "return_dict_in_generate", "output_scores",
    # notes
    "transformers_version", "name_or_path", "license", "model_name", "model_id", "base_model",
    "base_model_name_or_path", "library_name", "pipeline_tag", "tags", "unsloth_version", "unsloth_fixed",
})  # fmt: skip

# Keys that change the maths, with their neutral values. Every other value is refused: `"is_causal": false` is as much a
# change as `"logit_scale": 0.5`. Granite's `attention_multiplier` replaces 1 / sqrt(head_dim), so 1 is not neutral.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, None),
    "rotary_pct": (1, None),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "is_causal": (True, None),
    "use_rope": (True, None),
    "scale_attn_weights": (True, None),
    "activation": ("silu", "swiglu", None),
    "activation_function": ("silu", "swiglu", None),
    "hidden_activation": ("silu", "swiglu", None),
    "norm_type": ("rmsnorm", "rms_norm", None),
    "position_embedding_type": ("rope", "rotary", None),
}
# Larger than in any model: a hostile size is refused before a module or list of that size is allocated.
MAX_SIZES = {"num_hidden_layers": 2_000, "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}
_MAX_NUMBER = 1e38  # FP32 arithmetic with larger numbers may overflow


def is_harmless(key: str, value: Any) -> bool:
    """Returns whether a key with this value changes nothing in the model's forward pass."""
    if key in _HARMLESS or key.startswith("_"):
        return True
    return value in _NEUTRAL_VALUES.get(key, (None, False, [], {}, ""))


class Reader:
    """Reads the keys that a family honours, with its defaults. Getters raise ModelError for values of a wrong type."""

    def __init__(self, raw: Mapping[str, Any], family: Family, where: str) -> None:
        self.raw, self.family, self.where = raw, family, where

    def __call__(self, key: str) -> Any:
        is_honoured = key in HONOURED or key in self.family.optional
        default = self.family.defaults.get(key)
        return self.raw.get(key, default) if is_honoured else default

    def positive(self, key: str, default: int | None = None) -> int:
        value = self(key)
        return positive_integer(default if value is None else value, key, self.where)

    def number(self, key: str) -> float:
        return positive_number(self(key), key, self.where)

    def optional_number(self, key: str) -> float | None:
        return None if self(key) is None else self.number(key)

    def boolean(self, key: str) -> bool:
        value = self(key)
        if not isinstance(value, bool):
            raise self.unexpected(key, value, "true or false")
        return value

    def token(self, key: str) -> int | None:
        ids = token_ids(self(key), key, self.where)
        return ids[0] if ids else None

    def unexpected(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is {shown(value)} where {expected} was expected.")


def positive_integer(value: Any, key: str, where: str) -> int:
    """Returns `value`. Raises ModelError unless it is an integer from 1 to the limit of the key."""
    limit = MAX_SIZES.get(key, 2**28)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        is_too_large = isinstance(value, int) and value > limit
        expected = f"at most {limit}" if is_too_large else "a positive whole number"
        raise ModelError(f"{where}: {key} is {shown(value)} where {expected} was expected.")
    return value


def positive_number(value: Any, key: str, where: str, default: float | None = None) -> float:
    """Returns `value`, or `default` if it is null, as a float. Raises ModelError unless it is finite and above 0."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_NUMBER:  # also refuses NaN
        raise ModelError(f"{where}: {key} is {shown(value)} where a positive number was expected.")
    return float(value)


def token_ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    """Returns the token ids in `value`, which is one id, a list of ids, or null. Raises ModelError otherwise."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        raise ModelError(f"{where}: {key} is {shown(value)} where a token id was expected.")
    return tuple(ids)


def read_dtype(raw: Mapping[str, Any], where: str, default: str) -> str:
    """Returns the dtype of the published weights. transformers 4 writes `torch_dtype`, transformers 5 `dtype`."""
    value = raw.get("dtype") or raw.get("torch_dtype") or default
    if value not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"{where}: dtype {shown(value)} is not one of bfloat16, float16, float32.")
    return str(value)


def unknown_key_error(key: str, value: Any, architecture: str, where: str) -> ModelError:
    return ModelError(
        f"{where}: the key {shown(key)} is {shown(value)}, which fp8serve does not implement for {architecture}; "
        "remove the key if it does not change the model's maths."
    )


class Fields:
    """Typed access to the JSON object `value`. Raises `error` if it is not an object.

    `where` is the location of `value` for error messages, such as "config.json: quantization_config".
    """

    def __init__(self, value: Any, where: str, error: type[Fp8ServeError] = ModelError) -> None:
        self.where, self._error = where, error
        if not isinstance(value, Mapping):
            raise error(f"{where} is {shown(value)} where an object was expected.")
        self._values: Mapping[str, Any] = value

    def text(self, key: str) -> str | None:
        return self._of_type(key, str, "text")

    def integer(self, key: str) -> int | None:
        return self._of_type(key, int, "a whole number")

    def boolean(self, key: str) -> bool | None:
        return self._of_type(key, bool, "true or false")

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of text as a tuple, or an empty tuple if the key is missing."""
        value = self._of_type(key, list, "a list of text") or []
        if not all(isinstance(item, str) for item in value):
            raise self.unexpected(key, "a list of text")
        return tuple(value)

    def object(self, key: str) -> "Fields | None":
        value = self._values.get(key)
        return None if value is None else Fields(value, f"{self.where}.{key}", self._error)

    def objects(self, key: str) -> "list[Fields]":
        """Returns all objects inside the object `key`, or an empty list if the key is missing."""
        return list(self.named_objects(key).values())

    def named_objects(self, key: str) -> "dict[str, Fields]":
        """Returns all objects inside the object `key` by their names, or nothing if the key is missing."""
        if (fields := self.object(key)) is None:
            return {}
        return {k: Fields(v, f"{fields.where}.{shown(k)}", self._error) for k, v in fields._values.items()}

    def raw(self, key: str) -> Any:
        """Returns the unchecked value, which callers may only compare, or quote with `shown`."""
        return self._values.get(key)

    @property
    def has_values(self) -> bool:
        """Whether the object has a value that is not null, false, zero or empty."""
        return any(self._values.values())

    def unexpected(self, key: str, expected: str) -> Fp8ServeError:
        return self._error(f"{self.where}.{key} is {shown(self._values.get(key))} where {expected} was expected.")

    def _of_type(self, key: str, kind: type[T], expected: str) -> T | None:
        value = self._values.get(key)
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise self.unexpected(key, expected)
