"""torch's fast paths around the layers of nn.Transformer, which must not be taken around a converted layer.

In evaluation nn.TransformerEncoderLayer hands its weights to one fused operation in high precision and calls none of
its layers: a converted one would silently run no FP8 product. A flag of the layer says whether the operation knows its
activation; a flag of nn.TransformerEncoder says whether to pack the input for it.
"""

from collections.abc import Iterable

from torch import nn


def leave(module: nn.Module, converted: Iterable[nn.Module]) -> None:
    """Let every layer of nn.Transformer inside `module` that holds one of the `converted` call its layers."""
    chosen = set(converted)
    for child in module.modules():
        if isinstance(child, nn.TransformerEncoderLayer) and chosen & set(child.modules()):
            child.activation_relu_or_gelu = 0
        elif isinstance(child, nn.TransformerEncoder) and chosen & set(child.modules()):
            child.use_nested_tensor = False
