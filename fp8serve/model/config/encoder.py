"""Parses `config.json` of an encoder: BERT (MiniLM, BGE), RoBERTa (XLM-RoBERTa: E5, BGE-M3) or ModernBERT.

As for decoders (decoder.py), a key of config.json is honoured, harmless or refused. For ModernBERT, transformers 4
writes a rotary base for each type of layer and the interval of the layers with full attention. transformers 5 writes
`rope_parameters` and `layer_types` instead. This module reads both and does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.reader import is_harmless, positive_integer, positive_number, read_dtype, unknown_key_error

_LAYER_TYPES = ("full_attention", "sliding_attention")
_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
_COMMON_KEYS = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "layer_norm_eps", "dtype", "torch_dtype", "quantization_config",
    "bos_token_id", "eos_token_id", "tie_word_embeddings",
})  # fmt: skip
_BERT_KEYS = _COMMON_KEYS | {"type_vocab_size", "hidden_act"}
_MODERNBERT_KEYS = _COMMON_KEYS | frozenset({
    "norm_eps", "hidden_activation", "layer_types", "rope_parameters", "global_rope_theta", "local_rope_theta",
    "global_attn_every_n_layers", "local_attention",
    # Keys for training, for heads that fp8serve does not run, and for transformers' own implementation.
    "initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "decoder_bias", "classifier_pooling",
    "classifier_bias", "classifier_activation", "deterministic_flash_attn", "sparse_prediction",
    "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad",
})  # fmt: skip
EncoderActivation = Literal["gelu", "gelu_tanh"]
ScoreActivation = Literal["none", "sigmoid", "softmax"]
_ACTIVATIONS: dict[Any, EncoderActivation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
HEAD_KEYS = frozenset({"sentence_transformers", "sbert_ce_default_activation_function"})
_SCORES: dict[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True)
class EncoderFamily:
    """The class names of one encoder family in transformers, and how its models differ from the others."""

    architecture: str  # class without a head
    classifier: str  # class with a classification head; "" if that is not supported
    prefix: str  # of tensor names in files that were saved with a head
    has_pooler: bool = False  # the classification head reads the pooler, which is part of the base model
    counts_from_pad: bool = False  # positions start at pad_token_id + 1, as in fairseq
    pretrained: str = ""  # class with the pre-training head, which some published embedding models name
    is_modern: bool = False  # ModernBERT


ENCODERS: dict[str, EncoderFamily] = {
    "modernbert": EncoderFamily("ModernBertModel", "", "model.", pretrained="ModernBertForMaskedLM", is_modern=True),
    "bert": EncoderFamily("BertModel", "BertForSequenceClassification", "bert.", has_pooler=True),
    "roberta": EncoderFamily("RobertaModel", "RobertaForSequenceClassification", "roberta.", counts_from_pad=True),
    "xlm-roberta": EncoderFamily(
        "XLMRobertaModel", "XLMRobertaForSequenceClassification", "roberta.", counts_from_pad=True
    ),
}


@dataclass(frozen=True)
class Head:
    """The labels of a classifier or cross-encoder, and the function that turns its logits into scores."""

    labels: tuple[str, ...]
    activation: ScoreActivation


@dataclass(frozen=True)
class EncoderConfig:
    """The hyper-parameters of one encoder. Every field except `dtype` changes the maths."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int  # rows of the position embedding
    first_position: int  # the row of a sequence's first token in the position embedding
    type_vocab_size: int
    layer_norm_eps: float
    activation: EncoderActivation
    dtype: str  # of the published weights: "bfloat16", "float16" or "float32"
    head: Head | None = None
    layer_windows: tuple[int | None, ...] = ()  # ModernBERT: tokens to either side per layer; None is full attention
    layer_thetas: tuple[float, ...] = ()  # ModernBERT: rotary base per layer

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_length(self) -> int:
        """The number of tokens in the longest sequence."""
        return self.max_position_embeddings - self.first_position

    @property
    def prefix(self) -> str:
        """The prefix of tensor names in files that were saved with a head."""
        return ENCODERS[self.model_type].prefix

    @property
    def has_pooler(self) -> bool:
        """Whether the classification head reads the output of the base model's pooler."""
        return ENCODERS[self.model_type].has_pooler


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes a supported encoder."""
    return str(raw.get("model_type")) in ENCODERS


def parse_encoder_config(raw: Mapping[str, Any], where: str = "config.json") -> EncoderConfig:
    """Returns the configuration in `raw`, the object in config.json.

    Raises ModelError if a key is missing or damaged, or changes the maths in a way that is not implemented.
    """
    family = ENCODERS[str(raw["model_type"])]
    _refuse_unknown(raw, family, where)

    def size(key: str, default: int | None = None) -> int:
        return positive_integer(raw.get(key, default), key, where)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    layers, is_modern = size("num_hidden_layers"), family.is_modern
    kinds = _layer_types(raw, layers, where) if is_modern else []
    half_window = size("local_attention", 128) // 2 if is_modern else 0
    thetas = {kind: _theta(raw, kind, where) for kind in _LAYER_TYPES} if is_modern else {}
    eps = "norm_eps" if is_modern else "layer_norm_eps"
    head = read_head(raw, where) if raw.get("architectures") == [family.classifier] else None
    rows, first = size("max_position_embeddings"), _first_position(raw, family, where)
    if rows <= first:
        raise ModelError(
            f"{where}: max_position_embeddings {rows} leaves no position after the {first} reserved for padding."
        )
    return EncoderConfig(
        architecture=family.architecture if head is None else family.classifier,
        model_type=str(raw["model_type"]),
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        max_position_embeddings=rows,
        first_position=first,
        layer_windows=tuple(None if kind == "full_attention" else half_window for kind in kinds),
        layer_thetas=tuple(thetas[kind] for kind in kinds),
        type_vocab_size=1 if is_modern else size("type_vocab_size", 2),
        layer_norm_eps=positive_number(raw.get(eps), eps, where, 1e-5 if is_modern else 1e-12),
        activation=_activation(raw, where),
        dtype=read_dtype(raw, where, "float32"),
        head=head,
    )


def _refuse_unknown(raw: Mapping[str, Any], family: EncoderFamily, where: str) -> None:
    names = raw.get("architectures")
    architectures = [name for name in (family.architecture, family.classifier, family.pretrained) if name]
    if names and names not in [[name] for name in architectures]:
        class_name = names[0] if isinstance(names, list) else names
        raise ModelError(
            f"{where}: the architecture {shown(class_name)} is not supported; supported for this model_type: "
            f"{', '.join(architectures)}."
        )
    honoured = _MODERNBERT_KEYS if family.is_modern else _BERT_KEYS
    for key, value in raw.items():
        is_neutral = value in ("absolute", None) if key == "position_embedding_type" else is_harmless(key, value)
        is_causal = key in ("is_decoder", "is_encoder_decoder") and bool(value)
        is_honoured = key in honoured or (names == [family.classifier] and key in HEAD_KEYS)
        if is_causal or not (is_honoured or is_neutral):
            raise unknown_key_error(key, value, family.architecture, where)


def read_head(raw: Mapping[str, Any], where: str) -> Head:
    """Returns the classification head. Its labels have transformers' names.

    The default activation is that of sentence-transformers for one label, and of transformers' pipeline for several.
    """
    count = positive_integer(raw.get("num_labels", 2), "num_labels", where)
    names = raw.get("id2label", {str(i): f"LABEL_{i}" for i in range(count)})
    if not isinstance(names, dict) or not names or sorted(names) != sorted(map(str, range(len(names)))):
        raise ModelError(f"{where}: id2label is {shown(names)} where a name for each of 0, 1, 2, ... was expected.")
    labels = tuple(str(names[str(i)]) for i in range(len(names)))
    settings = raw.get("sentence_transformers") or {}
    name = settings.get("activation_fn") if isinstance(settings, dict) else settings
    name = name or raw.get("sbert_ce_default_activation_function")
    if name is None:
        return Head(labels, _default_activation(raw.get("problem_type"), len(labels)))
    if (activation := _SCORES.get(str(name).rpartition(".")[2])) is None:
        activations = ", ".join(_SCORES)
        raise ModelError(f"{where}: the activation of scores is {shown(name)}; supported are {activations}.")
    return Head(labels, activation)


def _default_activation(problem_type: Any, labels: int) -> ScoreActivation:
    if problem_type == "regression":
        return "none"
    return "sigmoid" if labels == 1 or problem_type == "multi_label_classification" else "softmax"


def _first_position(raw: Mapping[str, Any], family: EncoderFamily, where: str) -> int:
    if not family.counts_from_pad:
        return 0
    pad = raw.get("pad_token_id", 1)
    if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
        raise ModelError(f"{where}: pad_token_id is {shown(pad)} where a token id was expected.")
    return pad + 1


def _activation(raw: Mapping[str, Any], where: str) -> EncoderActivation:
    key = "hidden_activation" if ENCODERS[raw["model_type"]].is_modern else "hidden_act"
    name = raw.get(key, "gelu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"{where}: {key} is {shown(name)}; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _layer_types(raw: Mapping[str, Any], layers: int, where: str) -> list[str]:
    kinds = raw.get("layer_types")
    if kinds is None:
        key = "global_attn_every_n_layers"
        interval = positive_integer(raw.get(key, 3), key, where)
        return [_LAYER_TYPES[bool(layer % interval)] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise ModelError(f"{where}: layer_types is not {layers} of {' and '.join(map(repr, _LAYER_TYPES))}.")
    return kinds


def _theta(raw: Mapping[str, Any], kind: str, where: str) -> float:
    key, default = _THETAS[kind]
    parameters = raw.get("rope_parameters") or {}
    rope = (parameters.get(kind) or {}) if isinstance(parameters, dict) else None
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ModelError(f"{where}: rope_parameters is {shown(parameters)}; ModernBERT supports only type 'default'.")
    return positive_number(rope.get("rope_theta", raw.get(key)), key, where, default)
