"""The hyper-parameters we honour, read from `config.json`: here a decoder's, in encoder.py an encoder's.

Published architectures are one decoder with switches: a row of `families` has what the architecture fixes, the file has
the rest. Every key of the file is one of three: honoured (it becomes a field), harmless (reader.py), or unknown. An
unknown key that is set is an error, because a model that runs with one term of its maths missing looks healthy and
answers wrongly.

transformers 5 writes `dtype` where 4 wrote `torch_dtype`: both are read. Defaults of omitted keys are those of
transformers' class for the architecture. No torch here.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.encoder import ENCODERS, OF_HEADS, head_of, is_encoder, parse_encoder_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.config.family import SHARED, Family
from fp8serve.model.config.latent import latent_attention, latent_of
from fp8serve.model.config.mixture import experts_of
from fp8serve.model.config.model_config import Activation, AnyConfig, ModelConfig, TransformersClass
from fp8serve.model.config.reader import HONOURED, Reader, is_harmless, token_ids
from fp8serve.model.config.rope import layer_ropes, query_scaling, rotary_dim
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.storage.files import present, read_optional_json
from fp8serve.processes import module_command

_CLASSIFIES = "ForSequenceClassification"
_GATED: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNGATED: dict[str, Activation] = {"xielu": "xielu"}
_COMMAND = module_command("fp8serve.model.transformers_backend.trial")
_SECONDS = 300.0


def read_config(model_dir: Path | str) -> ModelConfig:
    """The configuration of the Hugging Face directory `model_dir`.

    ModelError: the directory or its config.json is missing or damaged, the architecture is not supported, or a key
    would change the maths in a way that we do not compute.
    """
    raw, generation, where = _read(Path(model_dir))
    return parse_config(raw, generation, where)


def holds_encoder(model_dir: Path | str) -> bool:
    """Whether the directory is that of an encoder. ModelError: a damaged config.json."""
    return is_encoder(read_optional_json(Path(model_dir) / "config.json"))


def read_any_config(model_dir: Path | str) -> AnyConfig:
    """As `read_config`, for encoders, too."""
    path = Path(model_dir) / "config.json"
    raw = read_optional_json(path)
    return parse_encoder_config(raw, str(path)) if is_encoder(raw) else read_config(model_dir)


def check_any_config(model_dir: Path | str) -> None:
    """ModelError as `read_any_config`, but a model without a family is left to the process that computes it: a full
    check would take torch, transformers and seconds."""
    if holds_encoder(model_dir):
        read_any_config(model_dir)
        return
    raw, generation, where = _read(Path(model_dir))
    if not is_without_family(raw):
        parse_config(raw, generation, where)


def parse_any_config(raw: Mapping[str, Any]) -> AnyConfig:
    """As `parse_config`, for encoders, too."""
    return parse_encoder_config(raw) if is_encoder(raw) else parse_config(raw)


def _read(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    if not model_dir.is_dir():
        what = "is not a directory" if model_dir.exists() else "does not exist"
        raise ModelError(f"{model_dir} {what}; give the path of a Hugging Face-format model directory.")
    if not present(model_dir / "config.json"):
        raise ModelError(f"{model_dir} is not a model directory: it holds no config.json{_mistrals(model_dir)}.")
    raw = read_text_config(model_dir)
    generation = read_optional_json(model_dir / "generation_config.json")
    return raw, generation, str(model_dir / "config.json")


def _mistrals(model_dir: Path) -> str:
    """Advice if the directory has Mistral's own layout."""
    if not present(model_dir / "params.json"):
        return ""
    return (
        "; params.json and consolidated.safetensors are Mistral's own layout, so download the model's config.json and "
        "model*.safetensors, or convert it by transformers"
    )


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """`raw` is the object in config.json, `generation` that in generation_config.json; `where` is named in errors."""
    if is_encoder(raw):
        name = ENCODERS[raw["model_type"]].architecture
        raise ModelError(f"{where} is of an encoder of {name}'s family: it embeds or classifies, and writes no text.")
    if is_without_family(raw):
        return _describe_class(raw, generation or {}, where)
    family = _family(raw, where)
    _refuse_unknown(raw, family, where)
    get = Reader(raw, family, where)
    layers, max_len = get.positive("num_hidden_layers"), get.positive("max_position_embeddings")
    windows, latent = _windows(get, layers, where), latent_of(get)
    attention = latent_attention(get, latent) if latent else _attention(get, _head_dim(get, where), where)
    head_dim = attention["head_dim"]
    num_rotated = latent.rope if latent else rotary_dim(get, head_dim)
    # generation_config.json takes precedence, as in transformers: chat models list their end-of-turn tokens there
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
        tie_word_embeddings=not classifies(raw) and get.boolean("tie_word_embeddings"),
        head=head_of(raw, where) if classifies(raw) else None,
        mlp_bias=get.boolean("mlp_bias"),
        layer_windows=windows,
        layer_ropes=layer_ropes(get, windows, max_len, num_rotated),
        rotary_dim=None if num_rotated == head_dim else num_rotated,
        neighbours_pair=family.neighbours_pair and (not latent or get.boolean("rope_interleave")),
        query_scaling=query_scaling(get, max_len),
        bos_token_id=get.token("bos_token_id"),
        eos_token_ids=token_ids(get("eos_token_id") if eos is None else eos, "eos_token_id", where),
        dtype=_dtype(raw, where),
        activation=_activation(get, where),
        norm=family.norm,
        norm_bias=family.norm_bias,
        offset_norms=family.offset_norms,
        fused_gate_up=family.fused_gate_up,
        head_bias=not classifies(raw) and get("lm_head_bias") is not None and get.boolean("lm_head_bias"),
        experts=experts_of(get, layers),
        attention_sinks=family.sinks,
        num_predictors=get.positive("num_nextn_predict_layers") if get("num_nextn_predict_layers") else 0,
        **_blocks(get),
        **attention,
        **_multipliers(get),
    )


def _describe_class(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """A process without torch does not load it but asks another process."""
    if "torch" in sys.modules:
        from fp8serve.model.transformers_backend.trial import describe  # here: it brings torch

        return describe(raw, generation, where)
    fields = ask(raw, generation, where)
    return ModelConfig(**fields | {"computed_by": TransformersClass(**fields["computed_by"])})


def ask(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the model's `ModelConfig` that have no default or another value, from a process of
    transformers_backend/trial.py, which is started once for each model, takes seconds, and ends. ModelError: as
    `describe`."""
    text = _ask(json.dumps([raw, generation, where], sort_keys=True))
    try:
        answer = json.loads(text, object_hook=_with_tuples)
    except ValueError:
        raise ModelError(f"The process that builds transformers' class gave no answer: {shown(text[:80])}.") from None
    if "refused" in answer:
        raise ModelError(answer["refused"])
    return dict(answer["fields"])


@cache
def _ask(question: str) -> bytes:
    try:
        done = subprocess.run(_COMMAND, input=question.encode(), capture_output=True, timeout=_SECONDS, check=True)
    except subprocess.TimeoutExpired as problem:  # its output ends with a warning that explains nothing
        raise ModelError(f"transformers' class was not built within {_SECONDS:g} seconds.") from problem
    except (OSError, subprocess.SubprocessError) as problem:
        why = (getattr(problem, "stderr", None) or b"").decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"The process that builds transformers' class failed: {why[:300] or problem}.") from problem
    return done.stdout


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def _blocks(get: Reader) -> dict[str, Any]:
    """How attention and MLP follow each other."""
    family = get.family
    parallel = get.boolean("use_parallel_residual") if family.parallel is None else family.parallel
    return {"parallel": parallel, "norms": SHARED if parallel else family.norms}


def _attention(get: Reader, head_dim: int, where: str) -> dict[str, Any]:
    heads = get.positive("num_attention_heads")
    kv_heads = get.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    family = get.family
    bias = get.boolean(family.bias_key) if family.qkv_bias is None else family.qkv_bias
    normed = family.qk_norm is not None and (get("use_qk_norm") is None or get.boolean("use_qk_norm"))
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": bias,
        "attention_out_bias": bias and family.qkv_bias is None and family.out_bias,
        "fused_qkv": family.fused_qkv,
        "qk_norm": normed,
        "qk_norm_weight": family.qk_norm or "shared",
        "softmax_scale": _softmax_scale(get, head_dim),
        "attention_softcap": get.optional_number("attn_logit_softcapping"),
    }


def _softmax_scale(get: Reader, head_dim: int) -> float:
    """Granite's file has the factor; Gemma's has the number that replaces `head_dim` in 1 / sqrt(head_dim)."""
    multiplier = get.optional_number("attention_multiplier")
    if multiplier is not None:
        return multiplier
    return float((get.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5)


def _multipliers(get: Reader) -> dict[str, Any]:
    """The factors of embeddings, the residual and the logits."""
    by_width = get.family.sqrt_embedding
    multiplier = get.optional_number("embedding_multiplier") or 1.0
    return {
        "embedding_scale": get.positive("hidden_size") ** 0.5 if by_width else multiplier,
        "rounds_embedding_scale": by_width,
        "residual_scale": get.optional_number("residual_multiplier") or 1.0,
        "logits_divisor": get.optional_number("logits_scaling") or 1 / (get.optional_number("logit_scale") or 1.0),
        "logits_softcap": get.optional_number("final_logit_softcapping"),
    }


def _activation(get: Reader, where: str) -> Activation:
    """Where a family has `hidden_activation` it takes precedence: old files of Gemma name another in `hidden_act`."""
    key = "hidden_act" if get("hidden_activation") is None else "hidden_activation"
    table = _GATED if get.family.gated else _UNGATED
    activation = table.get(get(key)) if isinstance(get(key), str) else None
    if activation is None:
        known, whose = " and ".join(repr(name) for name in table), get.family.architecture
        raise ModelError(f"{where}: {key} is {shown(get(key))}; of {whose} this decoder computes {known}.")
    return activation


def is_without_family(raw: Mapping[str, Any]) -> bool:
    """Whether transformers' own class is asked to compute the model."""
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind not in FAMILIES and find_spec("transformers") is not None


def _family(raw: Mapping[str, Any], where: str) -> Family:
    family, names = FAMILIES.get(str(raw.get("model_type"))), raw.get("architectures")
    if family is None or (names and names not in _class_names(family)):
        name = names[0] if isinstance(names, list) and names else raw.get("model_type")
        known = ", ".join(f.architecture for f in FAMILIES.values())
        more = "" if family else "; pip install 'fp8serve[transformers]' lets transformers' own classes compute others"
        raise ModelError(f"{where}: the architecture {shown(name)} is not supported; supported are {known}{more}.")
    return family


def _class_names(family: Family) -> list[list[str]]:
    """The classes of a family: the one that writes text, and those that embed and classify."""
    ends, names = ("ForCausalLM", "Model", _CLASSIFIES), (family.architecture, family.published_as)
    return [[name.replace("ForCausalLM", end)] for name in names if name is not None for end in ends]


def classifies(raw: Mapping[str, Any]) -> bool:
    """Whether config.json describes a model with a head of labels."""
    names = raw.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(_CLASSIFIES)


def _refuse_unknown(raw: Mapping[str, Any], family: Family, where: str) -> None:
    for key, value in raw.items():
        known = key in HONOURED or key in family.optional or (classifies(raw) and key in OF_HEADS)
        fits = value in (family.fixed[key], None) if key in family.fixed else is_harmless(key, value)
        if not known and not fits:
            raise ModelError(
                f"{where}: the key {shown(key)} is {shown(value)}, which {family.architecture} here does not compute; "
                "remove it if it does not change the model's maths."
            )


def _head_dim(get: Reader, where: str) -> int:
    hidden, heads = get.positive("hidden_size"), get.positive("num_attention_heads")
    if get("head_dim") is None and hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    dim = get.positive("head_dim", hidden // heads)
    if dim % 2:
        raise ModelError(f"{where}: head_dim {dim} is odd; rotary embedding needs pairs.")
    return dim


def _windows(get: Reader, layers: int, where: str) -> tuple[int | None, ...]:
    """Per layer: `layer_types` where it is given, otherwise by the family's pattern or from `max_window_layers` on."""
    enabled = get.boolean("use_sliding_window") and get("sliding_window") is not None
    window = get.positive("sliding_window") if enabled else None
    types = get("layer_types")
    if types is None and get("sliding_window_pattern") is not None:
        every = get.positive("sliding_window_pattern")
        return tuple(window if (i + 1) % every else None for i in range(layers))
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


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if value not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"{where}: dtype {shown(value)} is not one of bfloat16, float16, float32.")
    return str(value)
