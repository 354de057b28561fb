"""nn.Transformer's layers run in FP8 in evaluation, too; a warning names modules that stay in high precision."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fp8serve import Float8CurrentScaling, autocast, convert

LEFT = "left . nn.MultiheadAttention"


def products(module: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Runs the module once; returns the FP8 operands of its layers, and its output last."""
    casts: list[torch.Tensor] = []
    for child in module.modules():
        if hasattr(child, "observer"):
            child.observer = lambda name, values, q, scale_inv: casts.append(q)
    with autocast(recipe=Float8CurrentScaling()):
        y = module(*args, **kwargs)
    return [*casts, y]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_encoder_layer_evaluates_as_it_trains(mode: Any, activation: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation=activation)
    with pytest.warns(UserWarning, match=LEFT):
        convert(layer)
    layer = copy.deepcopy(layer)
    x = torch.randn(2, 3, 16)
    trained = products(layer.train(), x)
    with mode():
        evaluated = products(layer.eval(), x)
    assert len(evaluated) == len(trained) == 5
    torch.testing.assert_close(evaluated[-1], trained[-1].detach(), rtol=1e-5, atol=1e-5)


def test_an_encoder_with_padding() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    with pytest.warns(UserWarning, match=LEFT):
        convert(encoder)
    x, padding = torch.randn(2, 3, 16), torch.tensor([[False, False, True], [False, False, False]])
    trained = products(encoder.train(), x, src_key_padding_mask=padding)
    with torch.no_grad():
        evaluated = products(encoder.eval(), x, src_key_padding_mask=padding)
    assert len(evaluated) == len(trained) == 9
    torch.testing.assert_close(evaluated[-1], trained[-1].detach(), rtol=1e-5, atol=1e-5)


def test_an_encoder_that_was_not_converted_keeps_its_fast_path() -> None:
    model = nn.ModuleDict(
        {"encoder": nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), "head": nn.Linear(16, 4)}
    )
    convert(model, skip=("encoder.*",))
    assert model["encoder"].activation_relu_or_gelu == 1  # type: ignore[union-attr]


def test_an_attention_that_is_skipped_on_purpose_is_not_mentioned() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(layer, skip=("self_attn",))
