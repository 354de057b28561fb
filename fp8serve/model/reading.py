"""A model over whole texts: the vectors of all their tokens, without a cache. An encoder, or a decoder that embeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.attention import causal_attention
from fp8serve.model.building import AnyModel
from fp8serve.model.checkpoint import load_encoder, load_servable
from fp8serve.model.config.either import holds_encoder
from fp8serve.model.network.decoder import rotated
from fp8serve.model.network.encoder import Encoder


def load_reader(model_dir: Path | str, *how: Any, **options: Any) -> AnyModel:
    """`load_encoder`, or `load_servable`, by what the directory holds."""
    return (load_encoder if holds_encoder(model_dir) else load_servable)(model_dir, *how, **options)


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
