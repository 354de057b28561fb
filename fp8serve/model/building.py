"""Builds the network of a configuration: a `Decoder`, an `Encoder`, or transformers' class of the architecture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_attention
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.network.decoder import Decoder, make_attend
from fp8serve.model.network.encoder import Encoder, encoder_class

if TYPE_CHECKING:
    from fp8serve.model.transformers_backend.network import TransformersModel

Model = Union[Decoder, "TransformersModel"]  # a language model
AnyModel = Model | Encoder


def build_on_meta(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Builds a language model without weights: every parameter is on the "meta" device."""
    if config.computed_by is None:
        return Decoder(config, device="meta", dtype=dtype)
    from fp8serve.model.transformers_backend.network import TransformersModel

    return TransformersModel(config, dtype)


def build_any_on_meta(config: AnyConfig, dtype: torch.dtype = torch.bfloat16) -> AnyModel:
    """Builds a language model or an encoder without weights: every parameter is on the "meta" device."""
    if isinstance(config, EncoderConfig):
        return encoder_class(config)(config, device="meta", dtype=dtype)
    return build_on_meta(config, dtype)


def transposed_linears(model: AnyModel) -> frozenset[str]:
    """Returns the names of the linear layers whose weights are stored transposed, as GPT-2's are."""
    return frozenset() if isinstance(model, Decoder | Encoder) else model.transposed


def hidden_states(model: AnyModel, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
    """Runs an encoder or a decoder over packed texts without a KV cache and returns the hidden states [T, hidden].

    `ids` and `segments` are integer tensors [T], and `lengths` are the texts' numbers of tokens. A decoder's hidden
    states are those after its final norm. A text attends only to itself.
    """
    if isinstance(model, Encoder):
        return model(ids, lengths, segments)  # type: ignore[no-any-return]
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])

    def attend_within_texts(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = model.attention_options(layer)
        parts = zip(*(torch.split(t, list(lengths)) for t in (q, k, v)), strict=True)
        return torch.cat([causal_attention(a, b, c, [len(a)], *options) for a, b, c in parts])

    return model(ids, positions, make_attend(attend_within_texts))  # type: ignore[no-any-return]
