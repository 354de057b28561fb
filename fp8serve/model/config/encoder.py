"""The hyper-parameters of an encoder: BERT (MiniLM, BGE), RoBERTa (XLM-RoBERTa: E5, BGE-M3) and ModernBERT.

As for decoders (decoder.py), a key of config.json is honoured, harmless or refused. For ModernBERT transformers 4 wrote
a rotary base for each kind of layer and the interval of layers that see the whole text; 5 writes `rope_parameters` and
`layer_types`. Both are read. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8serve.errors import ModelError, shown
from fp8serve.model.config.reader import is_harmless, positive_number

_KINDS = ("full_attention", "sliding_attention")
_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
_MODERN = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "norm_eps", "hidden_activation", "dtype", "torch_dtype",
    "quantization_config", "bos_token_id", "eos_token_id", "tie_word_embeddings", "layer_types", "rope_parameters",
    "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers", "local_attention",
    # keys of training, of heads that are not computed here, and of transformers\' implementation
    "initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "decoder_bias", "classifier_pooling",
    "classifier_bias", "classifier_activation", "deterministic_flash_attn", "sparse_prediction",
    "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "layer_norm_eps",
})  # fmt: skip
EncoderActivation = Literal["gelu", "gelu_tanh"]
ScoreActivation = Literal["none", "sigmoid", "softmax"]
_ACTIVATIONS: dict[Any, EncoderActivation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST = {"num_hidden_layers": 2_000, "num_attention_heads": 2**16}
_HONOURED = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "hidden_act", "dtype",
    "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "tie_word_embeddings",
})  # fmt: skip
OF_HEADS = frozenset({"sentence_transformers", "sbert_ce_default_activation_function"})
_SCORES: dict[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid"}


def _layer_windows(raw: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """For each layer, how many tokens to either side it sees; None: all."""
    half = _whole({"local_attention": 128} | dict(raw), "local_attention", where) // 2
    return tuple(None if kind == _KINDS[0] else half for kind in _kinds(raw, layers, where))


def _layer_thetas(raw: Mapping[str, Any], layers: int, where: str) -> tuple[float, ...]:
    """For each layer, its rotary base. ModelError: it is stretched, which is not supported."""
    bases = {kind: _theta(raw, kind, where) for kind in _KINDS}
    return tuple(bases[kind] for kind in _kinds(raw, layers, where))


def _kinds(raw: Mapping[str, Any], layers: int, where: str) -> list[str]:
    kinds = raw.get("layer_types")
    if kinds is None:
        every = _whole({"global_attn_every_n_layers": 3} | dict(raw), "global_attn_every_n_layers", where)
        return [_KINDS[bool(layer % every)] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise ModelError(f"{where}: layer_types is not {layers} of {' and '.join(map(repr, _KINDS))}.")
    return kinds


def _theta(raw: Mapping[str, Any], kind: str, where: str) -> float:
    key, usual = _THETAS[kind]
    parameters = raw.get("rope_parameters") or {}
    rope = (parameters.get(kind) or {}) if isinstance(parameters, dict) else None
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ModelError(f"{where}: rope_parameters is {shown(parameters)}; ModernBERT's here has the type 'default'.")
    return positive_number(rope.get("rope_theta", raw.get(key)), key, where, usual)


@dataclass(frozen=True)
class EncoderFamily:
    """architecture: of the model without a head. prefix: of its tensors in files that were saved with a head.

    classifier: of the model with a head of labels. has_pooler: the layer that such a head reads is in the model itself.
    counts_from_pad: positions start after the id of padding, as in fairseq. pretrained: of the model with its
    pre-training head, which some published embedders name as their class. is_modern: a ModernBERT.
    """

    architecture: str
    classifier: str
    prefix: str
    has_pooler: bool = False
    counts_from_pad: bool = False
    pretrained: str = ""
    is_modern: bool = False


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
    """The labels of a classifier or cross-encoder. activation: the function that turns its logits into scores."""

    labels: tuple[str, ...]
    activation: ScoreActivation


@dataclass(frozen=True)
class EncoderConfig:
    """One encoder. Sizes in elements; every field but `dtype` changes the maths."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int  # rows of the table of positions
    first_position: int  # the row of a sequence's first token in that table
    type_vocab_size: int
    layer_norm_eps: float
    activation: EncoderActivation
    dtype: str  # of the weights as published: "bfloat16", "float16" or "float32"
    head: Head | None = None
    layer_windows: tuple[int | None, ...] = ()  # of ModernBERT's layers; None sees the whole text
    layer_thetas: tuple[float, ...] = ()  # and the bases of their rotary position

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_position_embeddings - self.first_position

    @property
    def prefix(self) -> str:
        """The prefix of tensor names in files that were saved with a head."""
        return ENCODERS[self.model_type].prefix

    @property
    def has_pooler(self) -> bool:
        """Whether a head reads the output of the model's own pooler."""
        return ENCODERS[self.model_type].has_pooler


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Whether config.json holds an encoder that is computed here."""
    return str(raw.get("model_type")) in ENCODERS


def parse_encoder_config(raw: Mapping[str, Any], where: str = "config.json") -> EncoderConfig:
    """`raw` is the object in config.json. ModelError: a key is missing or damaged, or changes the maths in a way that
    we do not compute."""
    family = ENCODERS[str(raw["model_type"])]
    _refuse(raw, family, where)
    hidden, heads = _whole(raw, "hidden_size", where), _whole(raw, "num_attention_heads", where)
    if hidden % heads:
        raise ModelError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    layers, is_modern = _whole(raw, "num_hidden_layers", where), family.is_modern
    eps = "norm_eps" if is_modern else "layer_norm_eps"
    head = head_of(raw, where) if raw.get("architectures") == [family.classifier] else None
    rows, first = _whole(raw, "max_position_embeddings", where), _first_position(raw, family, where)
    if rows <= first:
        raise ModelError(
            f"{where}: max_position_embeddings {rows} leaves no position behind the {first} that are kept."
        )
    return EncoderConfig(
        architecture=family.architecture if head is None else family.classifier,
        model_type=str(raw["model_type"]),
        vocab_size=_whole(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_whole(raw, "intermediate_size", where),
        num_layers=layers,
        num_heads=heads,
        max_position_embeddings=rows,
        first_position=first,
        layer_windows=_layer_windows(raw, layers, where) if is_modern else (),
        layer_thetas=_layer_thetas(raw, layers, where) if is_modern else (),
        type_vocab_size=1 if is_modern else _whole({"type_vocab_size": 2} | dict(raw), "type_vocab_size", where),
        layer_norm_eps=positive_number(raw.get(eps), eps, where, 1e-5 if is_modern else 1e-12),
        activation=_activation(raw, where),
        dtype=_dtype(raw, where),
        head=head,
    )


def _refuse(raw: Mapping[str, Any], family: EncoderFamily, where: str) -> None:
    names = raw.get("architectures")
    known = [name for name in (family.architecture, family.classifier, family.pretrained) if name]
    if names and names not in [[name] for name in known]:
        class_name = names[0] if isinstance(names, list) else names
        raise ModelError(
            f"{where}: the architecture {shown(class_name)} is not supported; of this family {' and '.join(known)} "
            f"{'are' if len(known) > 1 else 'is'}."
        )
    honoured = _MODERN if family.is_modern else _HONOURED
    for key, value in raw.items():
        plain = value in ("absolute", None) if key == "position_embedding_type" else is_harmless(key, value)
        causal = key in ("is_decoder", "is_encoder_decoder") and bool(value)
        if causal or not (key in honoured or plain or (names == [family.classifier] and key in OF_HEADS)):
            raise ModelError(
                f"{where}: the key {shown(key)} is {shown(value)}, which {family.architecture} here does not compute; "
                "remove it if it does not change the model's maths."
            )


def head_of(raw: Mapping[str, Any], where: str) -> Head:
    """Labels as transformers names them; the activation as sentence-transformers chooses it for one label and as
    transformers' pipeline chooses it for several."""
    named = raw.get(
        "id2label", {str(i): f"LABEL_{i}" for i in range(_whole({"num_labels": 2} | dict(raw), "num_labels", where))}
    )
    if not isinstance(named, dict) or not named or sorted(named) != sorted(map(str, range(len(named)))):
        raise ModelError(f"{where}: id2label is {shown(named)} where a name for each of 0, 1, 2, ... was expected.")
    labels = tuple(str(named[str(i)]) for i in range(len(named)))
    settings = raw.get("sentence_transformers") or {}
    name = settings.get("activation_fn") if isinstance(settings, dict) else settings
    name = name or raw.get("sbert_ce_default_activation_function")
    if name is None:
        return Head(labels, _usual_activation(raw.get("problem_type"), len(labels)))
    if (activation := _SCORES.get(str(name).rpartition(".")[2])) is None:
        raise ModelError(f"{where}: scores are made by {shown(name)}; supported are {', '.join(_SCORES)}.")
    return Head(labels, activation)


def _usual_activation(problem: Any, labels: int) -> ScoreActivation:
    if problem == "regression":
        return "none"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def _whole(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST.get(key, 2**28):
        raise ModelError(f"{where}: {key} is {shown(value)} where a positive whole number was expected.")
    return value


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
        raise ModelError(f"{where}: {key} is {shown(name)}; encoders here compute {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if value not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"{where}: dtype {shown(value)} is not one of bfloat16, float16, float32.")
    return str(value)
