"""The hyper-parameters of a decoder, and who computes a model. decoder.py reads them from `config.json`; no torch."""

from dataclasses import dataclass
from typing import Literal

from fp8serve.model.config.encoder import EncoderConfig, Head
from fp8serve.model.config.family import BEFORE, HeadNorm, Norm, Norms
from fp8serve.model.config.latent import Latent
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.rope import QueryScaling, Rope

Activation = Literal["silu", "gelu_tanh", "xielu"]


@dataclass(frozen=True)
class TransformersClass:
    """A model without a family, which transformers' own class computes (transformers_backend/)."""

    config_json: str
    softmax_scales: tuple[float, ...]  # of each layer


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes in elements; every field that changes the maths is here.

    The fields with a default are those in which other families differ from Llama.
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
    layer_windows: tuple[int | None, ...]  # per layer: a query sees this many newest positions; None sees all
    layer_ropes: tuple[Rope | None, ...]  # per layer: rotary position; None has none
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the weights as published: "bfloat16", "float16" or "float32"
    softmax_scale: float  # multiplies the products of queries and keys
    attention_softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap)
    activation: Activation = "silu"  # xielu: of an MLP that multiplies by no gate
    norms: Norms = BEFORE
    offset_norms: bool = False  # norms multiply by 1 + weight
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the weights' type, before the product
    residual_scale: float = 1.0  # multiplies what a block adds to the residual
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    fused_qkv: bool = False  # one linear, q's rows first
    fused_gate_up: bool = False
    qk_norm_weight: HeadNorm = "shared"  # where there is a qk_norm
    rotary_dim: int | None = None  # elements of a head, from the first on, that are rotated; None: all
    neighbours_pair: bool = False  # rotary position rotates element 2i with 2i + 1
    query_scaling: QueryScaling | None = None
    parallel: bool = False  # the MLP reads what attention reads, and both are added to it
    norm: Norm = "rms"
    norm_bias: bool = False
    experts: Experts | None = None  # in place of the MLP in some layers
    latent: Latent | None = None  # all heads read one key, whose latent part is the value, too
    num_predictors: int = 0  # layers after the last that may be in the file, and are left out
    attention_sinks: bool = False  # a logit of each head joins the denominator of its softmax
    head: Head | None = None  # a head of labels in place of the one that makes logits of tokens
    computed_by: TransformersClass | None = None  # the fields of rotary position, norms and biases then have no meaning

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_position_embeddings


AnyConfig = ModelConfig | EncoderConfig
ComputedBy = Literal["fp8serve", "transformers"]
COMPUTED_BY: dict[ComputedBy, str] = {
    "fp8serve": "computed by fp8serve's own layers",
    "transformers": "computed by transformers' own class, because it has no family here: the same numerics, and slower",
}


def computed_by(config: AnyConfig) -> ComputedBy:
    """Who computes the model; `COMPUTED_BY` has the words for it."""
    return "transformers" if isinstance(config, ModelConfig) and config.computed_by is not None else "fp8serve"


def computed_by_note(config: ModelConfig) -> tuple[str, ...]:
    """A sentence for the owner of a model that transformers computes; empty for other models."""
    if config.computed_by is None:
        return ()
    return (f"{config.architecture} has no family here: transformers' own class computes it, with the same numerics in "
            "its linear layers and its cache, and slower.",)  # fmt: skip
