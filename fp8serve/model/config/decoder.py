"""Parses `config.json` of a decoder into a `ModelConfig`. encoder.py does the same for encoders.

All supported architectures are one decoder with switches. `families` has the switches that the architecture fixes;
`config.json` has the others. Every key of the file is honoured (it becomes a field), harmless (reader.py) or unknown.
An unknown key with a value raises ModelError, because a model that runs without one term of its maths looks healthy
and gives wrong answers.

Omitted keys have the defaults of transformers' config class for the architecture. This module does not import torch.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.encoder import ENCODERS, HEAD_KEYS, is_encoder, parse_encoder_config, read_head
from fp8serve.model.config.families import FAMILIES, SHARED, Family
from fp8serve.model.config.mixture import read_experts
from fp8serve.model.config.model_config import Activation, AnyConfig, LatentSizes, ModelConfig, TransformersClass
from fp8serve.model.config.reader import HONOURED, Reader, is_harmless, read_dtype, token_ids, unknown_key_error
from fp8serve.model.config.rope import layer_ropes, query_scaling, rotary_dim, yarn_parameters
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.storage.files import present, read_optional_json
from fp8serve.processes import module_command

_CLASSIFIER_SUFFIX = "ForSequenceClassification"
_GATED: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNGATED: dict[str, Activation] = {"xielu": "xielu"}
_TRIAL_COMMAND = module_command("fp8serve.model.transformers_backend.class_trace")
_TRIAL_TIMEOUT_SECONDS = 300.0
_MISTRAL_ADVICE = (
    "; params.json and consolidated.safetensors are Mistral's own layout, so download the model's config.json and "
    "model*.safetensors, or convert it with transformers"
)


def read_config(model_dir: Path | str) -> ModelConfig:
    """Returns the configuration of the decoder in the Hugging Face directory `model_dir`.

    Raises ModelError if the directory or its config.json is missing or damaged, if the architecture is not supported,
    or if a key changes the maths in a way that is not implemented.
    """
    raw, generation, where = _read_json_files(Path(model_dir))
    return parse_config(raw, generation, where)


def is_encoder_directory(model_dir: Path | str) -> bool:
    """Returns whether the directory contains an encoder. Raises ModelError if config.json is damaged."""
    return is_encoder(read_optional_json(Path(model_dir) / "config.json"))


def read_any_config(model_dir: Path | str) -> AnyConfig:
    """Returns the configuration of the decoder or encoder in `model_dir`. Same errors as `read_config`."""
    path = Path(model_dir) / "config.json"
    raw = read_optional_json(path)
    return parse_encoder_config(raw, str(path)) if is_encoder(raw) else read_config(model_dir)


def check_any_config(model_dir: Path | str) -> None:
    """Checks the configuration as `read_any_config` does, and returns nothing. Models without a family are not checked.

    Checking these would need torch, transformers and several seconds; the process that runs the model checks them.
    """
    if is_encoder_directory(model_dir):
        read_any_config(model_dir)
        return
    raw, generation, where = _read_json_files(Path(model_dir))
    if not is_without_family(raw):
        parse_config(raw, generation, where)


def parse_any_config(raw: Mapping[str, Any]) -> AnyConfig:
    """Returns the configuration of a decoder or an encoder. Same errors as `parse_config`."""
    return parse_encoder_config(raw) if is_encoder(raw) else parse_config(raw)


def _read_json_files(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Returns config.json, generation_config.json and the path of config.json as text for error messages."""
    if not model_dir.is_dir():
        problem = "is not a directory" if model_dir.exists() else "does not exist"
        raise ModelError(f"{model_dir} {problem}; give the path of a Hugging Face-format model directory.")
    if not present(model_dir / "config.json"):
        advice = _MISTRAL_ADVICE if present(model_dir / "params.json") else ""
        raise ModelError(f"{model_dir} is not a model directory: it holds no config.json{advice}.")
    raw = read_text_config(model_dir)
    generation = read_optional_json(model_dir / "generation_config.json")
    return raw, generation, str(model_dir / "config.json")


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """Returns the configuration in `raw` (config.json) and `generation` (generation_config.json).

    `where` is the path of config.json for error messages. Same errors as `read_config`.
    """
    if is_encoder(raw):
        name = ENCODERS[raw["model_type"]].architecture
        raise ModelError(f"{where} is of an encoder ({name}), which embeds or classifies texts and generates none.")
    if is_without_family(raw):
        return _describe_transformers_class(raw, generation or {}, where)
    family = _family(raw, where)
    _refuse_unknown(raw, family, where)
    get = Reader(raw, family, where)
    layers, max_len = get.positive("num_hidden_layers"), get.positive("max_position_embeddings")
    windows, latent = _windows(get, layers, where), _latent_sizes(get)
    attention = (
        _latent_attention_fields(get, latent) if latent else _attention_fields(get, _head_dim(get, where), where)
    )
    head_dim = attention["head_dim"]
    num_rotated = latent.rope if latent else rotary_dim(get, head_dim)
    parallel = get.boolean("use_parallel_residual") if family.parallel is None else family.parallel
    # generation_config.json takes precedence, as in transformers: chat models list their end-of-turn tokens there.
    eos = (generation or {}).get("eos_token_id")
    return ModelConfig(
        architecture=family.architecture,
        model_type=str(raw["model_type"]),
        vocab_size=get.positive("vocab_size"),
        hidden_size=get.positive("hidden_size"),
        intermediate_size=get.positive("intermediate_size"),
        num_layers=layers,
        rms_norm_eps=get.number(family.eps_key),
        max_position_embeddings=max_len,
        tie_word_embeddings=not is_classifier(raw) and get.boolean("tie_word_embeddings"),
        head=read_head(raw, where) if is_classifier(raw) else None,
        mlp_bias=get.boolean("mlp_bias"),
        layer_windows=windows,
        layer_ropes=layer_ropes(get, windows, max_len, num_rotated),
        rotary_dim=None if num_rotated == head_dim else num_rotated,
        rope_interleaved=family.rope_interleaved and (not latent or get.boolean("rope_interleave")),
        query_scaling=query_scaling(get, max_len),
        bos_token_id=get.token("bos_token_id"),
        eos_token_ids=token_ids(get("eos_token_id") if eos is None else eos, "eos_token_id", where),
        dtype=read_dtype(raw, where, "bfloat16"),
        activation=_activation(get, where),
        parallel=parallel,
        norms=SHARED if parallel else family.norms,
        norm=family.norm,
        norm_bias=family.norm_bias,
        offset_norms=family.offset_norms,
        fused_gate_up=family.fused_gate_up,
        head_bias=not is_classifier(raw) and get("lm_head_bias") is not None and get.boolean("lm_head_bias"),
        experts=read_experts(get, layers),
        attention_sinks=family.sinks,
        num_predictors=get.positive("num_nextn_predict_layers") if get("num_nextn_predict_layers") else 0,
        **attention,
        **_scale_fields(get),
    )


def _describe_transformers_class(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the configuration of a model without a family. Imports torch only if this process already has."""
    if "torch" in sys.modules:
        from fp8serve.model.transformers_backend.class_trace import describe  # imported here because it imports torch

        return describe(raw, generation, where)
    fields = describe_in_child_process(raw, generation, where)
    return ModelConfig(**fields | {"computed_by": TransformersClass(**fields["computed_by"])})


def describe_in_child_process(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the `ModelConfig` fields that have no default or differ from it. Same errors as `describe`.

    Runs transformers_backend/class_trace.py in a child process, once for each model, which takes seconds.
    """
    output = _run_trial(json.dumps([raw, generation, where], sort_keys=True))
    try:
        result = json.loads(output, object_hook=_lists_to_tuples)
    except ValueError:
        raise ModelError(f"The process that builds transformers' class wrote no JSON: {shown(output[:80])}.") from None
    if "refused" in result:
        raise ModelError(result["refused"])
    return dict(result["fields"])


@cache
def _run_trial(model_json: str) -> bytes:
    command, timeout = _TRIAL_COMMAND, _TRIAL_TIMEOUT_SECONDS
    try:
        return subprocess.run(
            command, input=model_json.encode(), capture_output=True, timeout=timeout, check=True
        ).stdout
    except subprocess.TimeoutExpired as error:  # the last line of its output is an unrelated warning
        raise ModelError(f"transformers' class was not built within {timeout:g} seconds.") from error
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"The process that builds transformers' class failed: {reason[:300] or error}.") from error


def _lists_to_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def _attention_fields(get: Reader, head_dim: int, where: str) -> dict[str, Any]:
    heads = get.positive("num_attention_heads")
    kv_heads = get.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    family = get.family
    bias = get.boolean(family.bias_key) if family.qkv_bias is None else family.qkv_bias
    has_qk_norm = family.qk_norm is not None and (get("use_qk_norm") is None or get.boolean("use_qk_norm"))
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": bias,
        "attention_out_bias": bias and family.qkv_bias is None and family.out_bias,
        "fused_qkv": family.fused_qkv,
        "qk_norm": has_qk_norm,
        "qk_norm_weight": family.qk_norm or "shared",
        "softmax_scale": _softmax_scale(get, head_dim),
        "attention_softcap": get.optional_number("attn_logit_softcapping"),
    }


def _latent_sizes(get: Reader) -> LatentSizes | None:
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


def _latent_attention_fields(get: Reader, latent: LatentSizes) -> dict[str, Any]:
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


def _softmax_scale(get: Reader, head_dim: int) -> float:
    """Returns the factor of attention scores: Granite's own, or 1 / sqrt(d), where d is head_dim or Gemma's
    replacement."""
    multiplier = get.optional_number("attention_multiplier")
    if multiplier is not None:
        return multiplier
    return float((get.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5)


def _scale_fields(get: Reader) -> dict[str, Any]:
    """Returns the fields that scale embeddings, the residual and the logits."""
    scales_by_width = get.family.sqrt_embedding
    multiplier = get.optional_number("embedding_multiplier") or 1.0
    return {
        "embedding_scale": get.positive("hidden_size") ** 0.5 if scales_by_width else multiplier,
        "rounds_embedding_scale": scales_by_width,
        "residual_scale": get.optional_number("residual_multiplier") or 1.0,
        "logits_divisor": get.optional_number("logits_scaling") or 1 / (get.optional_number("logit_scale") or 1.0),
        "logits_softcap": get.optional_number("final_logit_softcapping"),
    }


def _activation(get: Reader, where: str) -> Activation:
    """Returns the activation: `hidden_activation` if it is set, because `hidden_act` is wrong in Gemma's old files."""
    key = "hidden_act" if get("hidden_activation") is None else "hidden_activation"
    table = _GATED if get.family.gated else _UNGATED
    activation = table.get(get(key)) if isinstance(get(key), str) else None
    if activation is None:
        supported = " and ".join(repr(name) for name in table)
        raise ModelError(
            f"{where}: {key} is {shown(get(key))}; for {get.family.architecture} fp8serve supports {supported}."
        )
    return activation


def is_without_family(raw: Mapping[str, Any]) -> bool:
    """Returns whether transformers' own class computes the model, because `FAMILIES` does not have its type."""
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and model_type not in FAMILIES and find_spec("transformers") is not None


def _family(raw: Mapping[str, Any], where: str) -> Family:
    family, names = FAMILIES.get(str(raw.get("model_type"))), raw.get("architectures")
    if family is None or (names and names not in _class_names(family)):
        name = names[0] if isinstance(names, list) and names else raw.get("model_type")
        families = ", ".join(f.architecture for f in FAMILIES.values())
        hint = "" if family else "; pip install 'fp8serve[transformers]' lets transformers' own classes compute others"
        raise ModelError(f"{where}: the architecture {shown(name)} is not supported; supported are {families}{hint}.")
    return family


def _class_names(family: Family) -> list[list[str]]:
    """Returns the accepted values of `architectures`: a family's classes for text, embeddings and classification."""
    suffixes, names = ("ForCausalLM", "Model", _CLASSIFIER_SUFFIX), (family.architecture, family.published_as)
    return [[name.replace("ForCausalLM", suffix)] for name in names if name is not None for suffix in suffixes]


def is_classifier(raw: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes a model with a classification head."""
    names = raw.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(_CLASSIFIER_SUFFIX)


def _refuse_unknown(raw: Mapping[str, Any], family: Family, where: str) -> None:
    for key, value in raw.items():
        is_honoured = key in HONOURED or key in family.optional or (is_classifier(raw) and key in HEAD_KEYS)
        is_neutral = value in (family.fixed[key], None) if key in family.fixed else is_harmless(key, value)
        if not is_honoured and not is_neutral:
            raise unknown_key_error(key, value, family.architecture, where)


def _head_dim(get: Reader, where: str) -> int:
    hidden, heads = get.positive("hidden_size"), get.positive("num_attention_heads")
    if get("head_dim") is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    dim = get.positive("head_dim", hidden // heads)
    if dim % 2:
        raise ModelError(f"{where}: head_dim {dim} is odd; rotary embedding needs pairs.")
    return dim


def _windows(get: Reader, layers: int, where: str) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, or None for a layer with full attention.

    The layers with a window come from `layer_types`. If the file lacks that key, they follow the family's pattern, or
    start at `max_window_layers`.
    """
    enabled = get.boolean("use_sliding_window") and get("sliding_window") is not None
    window = get.positive("sliding_window") if enabled else None
    types = get("layer_types")
    if types is None and get("sliding_window_pattern") is not None:
        interval = get.positive("sliding_window_pattern")
        return tuple(window if (i + 1) % interval else None for i in range(layers))
    if types is None:
        first = get.positive("max_window_layers") if get("max_window_layers") not in (0, None) else 0
        return tuple(window if i >= first else None for i in range(layers))
    layer_types = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in layer_types for t in types):
        raise ModelError(f"{where}: layer_types is not {layers} of 'full_attention' and 'sliding_attention'.")
    windows = tuple(window if t == "sliding_attention" else None for t in types)
    is_uniform = get.family.uniform_window
    if windows.count(None) != types.count("full_attention") or (is_uniform and set(windows) != {window}):
        raise ModelError(f"{where}: layer_types contradicts sliding_window {window} of {get.family.architecture}.")
    return windows
