"""`ModelConfig`, the hyper-parameters of a decoder (decoder.py reads them from config.json), and what follows from it:
whether fp8serve's layers or transformers' class compute the model, and the names of its linear layers.

Does not import torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Literal

from fp8serve.errors import ModelError
from fp8serve.model.config.encoder import EncoderConfig, Head
from fp8serve.model.config.families import BEFORE, HeadNorm, Norm, Norms
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.rope import QueryScaling, Rope

Activation = Literal["silu", "gelu_tanh", "xielu"]


@dataclass(frozen=True)
class TransformersClass:
    """An architecture that config/families.py does not list, so transformers' class computes it
    (transformers_backend/)."""

    config_json: str
    softmax_scales: tuple[float, ...]  # one per layer
    adaptable_linears: tuple[str, ...]  # see `adaptable_linear_names`


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of DeepSeek's multi-head latent attention (arXiv 2405.04434), in elements."""

    q_rank: int | None  # `q_lora_rank`; None: queries are projected from the layer's input
    rank: int  # `kv_lora_rank`, the size of the latent vector for keys and values
    nope: int  # `qk_nope_head_dim`, a head's elements without rotary position
    rope: int  # `qk_rope_head_dim`, a head's elements with rotary position
    value: int  # `v_head_dim`


@dataclass(frozen=True)
class ModelConfig:
    """The hyper-parameters of one decoder-only transformer: every number and switch that changes its maths.

    Llama has the default of every field that has one.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    attention_out_bias: bool  # on o
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]  # per layer: the window in tokens, or None for full attention
    layer_ropes: tuple[Rope | None, ...]  # per layer; None: no rotary position
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the published weights: "bfloat16", "float16" or "float32"
    softmax_scale: float  # multiplies the products of queries and keys
    attention_softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap)
    activation: Activation = "silu"  # with "xielu" the MLP has no gate
    norms: Norms = BEFORE
    offset_norms: bool = False  # norms multiply by 1 + weight
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # the scale is rounded to the weights' dtype first
    residual_scale: float = 1.0  # multiplies the output of attention and MLP
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    fused_qkv: bool = False  # one linear with the rows of q, k and v
    fused_gate_up: bool = False  # one linear with the rows of gate and up
    qk_norm_weight: HeadNorm = "shared"  # used if qk_norm is set
    rotary_dim: int | None = None  # the first elements of a head that are rotated; None: all
    rope_interleaved: bool = False  # element 2i is rotated with 2i + 1
    query_scaling: QueryScaling | None = None
    parallel: bool = False  # attention and MLP read the same input, and the residual adds both outputs
    norm: Norm = "rms"
    norm_bias: bool = False
    experts: Experts | None = None  # replace the MLP in some layers
    latent: LatentSizes | None = None  # multi-head latent attention
    num_predictors: int = 0  # multi-token prediction layers in the checkpoint, which are not loaded
    attention_sinks: bool = False  # each head has a learned logit in the denominator of its softmax
    head: Head | None = None  # a classification head, which replaces the language model's head
    computed_by: TransformersClass | None = None  # if set, the fields for rotary position, norms and biases are unused

    @property
    def max_length(self) -> int:
        """The number of tokens in the longest sequence."""
        return self.max_position_embeddings


AnyConfig = ModelConfig | EncoderConfig
ComputedBy = Literal["fp8serve", "transformers"]
COMPUTED_BY: dict[ComputedBy, str] = {
    "fp8serve": "computed by fp8serve's own layers",
    "transformers": "computed by transformers' own class, because fp8serve has no layers for it: same numerics, slower",
}


def computed_by(config: AnyConfig) -> ComputedBy:
    """Returns whether fp8serve's layers or transformers' class compute the model. `COMPUTED_BY` describes both."""
    return "transformers" if isinstance(config, ModelConfig) and config.computed_by is not None else "fp8serve"


def computed_by_notes(config: ModelConfig) -> tuple[str, ...]:
    """Returns a note for the user if transformers computes the model, otherwise an empty tuple."""
    if config.computed_by is None:
        return ()
    return (f"fp8serve has no layers for {config.architecture}: transformers' own class computes it, with the same "
            "numerics in its linear layers and its cache, and slower.",)  # fmt: skip


Groups = tuple[tuple[str, ...], ...]  # names of linears; the linears of a group read the same input


def linear_names(config: ModelConfig) -> list[str]:
    """Returns the names of the linears that may run in FP8: those of every layer, without routers and head."""
    return [name for layer in range(config.num_layers) for group in linear_groups(config, layer) for name in group]


def experts_of(config: ModelConfig, layer: int) -> Experts | None:
    """Returns the mixture of experts of the layer, or None if the layer has a dense MLP."""
    return config.experts if config.experts is not None and layer in config.experts.layers else None


def linear_groups(config: ModelConfig, layer: int) -> Groups:
    """Returns the full names of a layer's linears, in the order in which they run. Each expert has its own groups."""
    return attention_linear_groups(config, layer) + mlp_linear_groups(config, layer)


def attention_linear_groups(config: ModelConfig, layer: int) -> Groups:
    """Returns the `linear_groups` of attention. The first group reads the layer's input; the last one is o_proj."""
    qkv: Groups = (("qkv_proj",),) if config.fused_qkv else (("q_proj", "k_proj", "v_proj"),)
    if config.latent is not None:
        has_q_b = config.latent.q_rank is not None
        qkv = (("q_a_proj" if has_q_b else "q_proj", "kv_a_proj_with_mqa"), *([("q_b_proj",)] if has_q_b else []))
    return _with_prefix(f"model.layers.{layer}.self_attn", (*qkv, ("o_proj",)))


def mlp_linear_groups(config: ModelConfig, layer: int) -> Groups:
    """Returns the `linear_groups` of the MLP or the mixture of experts."""
    experts = experts_of(config, layer)
    if experts is None:
        gate_up = ("mlp.gate_up_proj",) if config.fused_gate_up else ("mlp.gate_proj", "mlp.up_proj")
        groups: Groups = (gate_up if config.activation != "xielu" else ("mlp.up_proj",), ("mlp.down_proj",))
    else:
        groups = tuple(_expert_groups(experts))
    return _with_prefix(f"model.layers.{layer}", groups)


def _with_prefix(owner: str, groups: Groups) -> Groups:
    return tuple(tuple(f"{owner}.{name}" for name in group) for group in groups)


def _expert_groups(experts: Experts) -> Iterator[tuple[str, ...]]:
    names = experts.names
    owners = [f"{names.block}.experts.{expert}" for expert in range(experts.count)]
    for owner in [*owners, f"{names.block}.{names.shared}"] if names.shared else owners:
        yield f"{owner}.{names.gate}", f"{owner}.{names.up}"
        yield (f"{owner}.{names.down}",)


def adaptable_linear_names(config: ModelConfig) -> list[str]:
    """Returns the names of the linear layers that can have an adapter, in the model's order: all that may run in FP8,
    except the experts of a mixture, whose weights are stacked, and layers whose weights are stored transposed."""
    if config.computed_by is not None:
        return list(config.computed_by.adaptable_linears)
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, count=0))
    return linear_names(config)


def is_expert(linear: str) -> bool:
    """Returns whether the linear layer of this name belongs to one of the experts that a router chooses from."""
    return ".experts." in linear


def select_linears(linears: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Returns the `linears` whose full name, or its last component, matches a pattern; all of them without patterns.
    Raises ModelError if a pattern matches no layer."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in linears):
            suffixes = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise ModelError(f"No linear layer is called {pattern!r}; those that can have an adapter are {suffixes}.")
    return [name for name in linears if not patterns or any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)
