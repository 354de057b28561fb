"""`ModelConfig`, the hyper-parameters of a decoder (decoder.py reads them from config.json), and `computed_by`, which
says whether fp8serve's layers or transformers' class compute a model.

Does not import torch.
"""

from dataclasses import dataclass
from typing import Literal

from fp8serve.model.config.encoder import EncoderConfig, Head
from fp8serve.model.config.family import BEFORE, HeadNorm, Norm, Norms
from fp8serve.model.config.latent_attention import LatentSizes
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.rope import QueryScaling, Rope

Activation = Literal["silu", "gelu_tanh", "xielu"]


@dataclass(frozen=True)
class TransformersClass:
    """An architecture that config/families.py does not list, so transformers' class computes it
    (transformers_backend/)."""

    config_json: str
    softmax_scales: tuple[float, ...]  # one per layer
    adaptable_linears: tuple[str, ...]  # see config/linear_names.py


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
