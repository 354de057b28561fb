"""Adapters on frozen layers: the formula, its gradients through FP8 weights, and batch-invariant rows."""

import pytest
import torch
from torch import Tensor, nn

from fp8serve.fp8 import recipe
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.lora import LoraLinear, low_rank, squared_norms
from fp8serve.fp8.ops import dequantize

CLOSE = 0.006  # relative error of a tensor: a few roundings to BF16
BASES = ("bf16", "current", "rowwise", "block", "mxfp8")


def base_and_weight(kind: str) -> tuple[nn.Module, Tensor]:
    """Returns a frozen layer of 192 inputs and 320 outputs with a bias, and its weight in FP32."""
    torch.manual_seed(0)
    linear = nn.Linear(192, 320).bfloat16().requires_grad_(False)
    chosen = recipe.from_name(kind)
    if chosen is None:
        return linear, linear.weight.float()
    frozen = FrozenLinear.from_linear(linear, chosen)
    return frozen, dequantize(frozen.weight_q, frozen.weight_scale_inv)


def distance(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None
    assert expected is not None
    return float((actual.detach().float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", BASES)
def test_outputs_and_gradients_are_those_of_the_formula(kind: str, dora: bool) -> None:
    base, weight = base_and_weight(kind)
    layer = LoraLinear(base, 8, 2.0, dora=dora)
    layer.lora_B.data.normal_(0, 0.02)
    x = torch.randn(2, 35, 192).bfloat16().requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)

    a, b = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    wide, magnitude = x.detach().float().requires_grad_(), layer.lora_magnitude_vector
    adapted = weight + 2 * b @ a
    z = wide @ adapted.t()
    if magnitude is not None:
        copy = magnitude.detach().clone().requires_grad_()
        z = z * copy / adapted.norm(dim=1).detach()
    z = z + base.bias.float()  # type: ignore[operator, union-attr]
    z.backward(dy.float())
    tolerance = 0.03 if isinstance(base, FrozenLinear) else CLOSE  # FrozenLinear quantizes its input
    assert distance(y, z.detach()) < tolerance
    assert distance(x.grad, wide.grad) < CLOSE
    assert distance(layer.lora_A.grad, a.grad) < CLOSE
    assert distance(layer.lora_B.grad, b.grad) < CLOSE
    assert layer.lora_A.grad is not None
    assert layer.lora_A.grad.dtype == torch.float32
    if magnitude is not None:
        assert distance(magnitude.grad, copy.grad) < tolerance


@pytest.mark.parametrize("kind", BASES)
def test_a_new_adapter_changes_nothing(kind: str) -> None:
    base, weight = base_and_weight(kind)
    x = torch.randn(9, 192).bfloat16()
    assert torch.equal(LoraLinear(base, 4, 1.0)(x), base(x))
    torch.testing.assert_close(squared_norms(base).sqrt(), weight.norm(dim=1))
    torch.testing.assert_close(LoraLinear(base, 4, 1.0, dora=True)(x), base(x), atol=0.02, rtol=0.02)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    x, a, b = (torch.randn(*shape).bfloat16() for shape in ((67, 200), (5, 200), (130, 5)))
    every = low_rank(x, a, b, 1.7)
    for rows in ([3], [66, 1], list(range(0, 67, 2))):
        assert torch.equal(low_rank(x[rows], a, b, 1.7), every[rows])


def test_dropout_is_for_training_only() -> None:
    base, _ = base_and_weight("rowwise")
    layer = LoraLinear(base, 4, 1.0, dropout=0.5)
    layer.lora_B.data.normal_()
    x = torch.randn(8, 192).bfloat16().requires_grad_()
    assert not torch.equal(layer(x), layer(x))
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))


def test_a_packed_weight_is_refused() -> None:
    base, _ = base_and_weight("rowwise")
    assert isinstance(base, FrozenLinear)
    base.pack(torch.empty(320 * 192, dtype=base.weight_q.dtype))
    y = base(torch.randn(4, 192).bfloat16().requires_grad_())
    with pytest.raises(ValueError, match="packed weight has no transpose"):
        y.sum().backward()
