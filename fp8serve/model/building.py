"""The module of a configuration: our decoder, transformers' own class where there is no family, or our encoder.

`hidden_states` runs an encoder, or a decoder that embeds, over whole texts, without a cache.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_attention
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.network.decoder import Decoder, rotated
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.modern_encoder import encoder_class

if TYPE_CHECKING:
    from fp8serve.model.transformers_backend.network import TransformersModel

Model = Union[Decoder, "TransformersModel"]  # a language model
AnyModel = Model | Encoder


def build_on_meta(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Without weights: every parameter is on "meta"."""
    if config.computed_by is None:
        return Decoder(config, device="meta", dtype=dtype)
    from fp8serve.model.transformers_backend.network import TransformersModel

    return TransformersModel(config, dtype)


def skeleton(config: AnyConfig) -> AnyModel:
    """As `build_on_meta`, for encoders, too."""
    return encoder_class(config)(config, device="meta") if isinstance(config, EncoderConfig) else build_on_meta(config)


def transposed_linears(model: AnyModel) -> frozenset[str]:
    """The linears whose weights are transposed in files."""
    return frozenset() if isinstance(model, Decoder | Encoder) else model.transposed


def hidden_states(model: AnyModel, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
    """ids and segments integer [T] of texts of these lengths -> [T, hidden]; for a decoder after its final norm.

    Every text attends only to itself: its vectors do not depend on other texts, if the linears' rows do not.
    """
    if isinstance(model, Encoder):
        return model(ids, lengths, segments)  # type: ignore[no-any-return]
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])

    def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = model.attention_options(layer)
        parts = zip(*(torch.split(t, list(lengths)) for t in (q, k, v)), strict=True)
        return torch.cat([causal_attention(a, b, c, [len(a)], *options) for a, b, c in parts])

    return model(ids, positions, rotated(mix))  # type: ignore[no-any-return]
