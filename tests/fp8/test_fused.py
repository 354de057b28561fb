"""Fused layers have the bits of their two parts run separately: outputs, gradients and states."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.fp8 import elementwise
from fp8serve.fp8.fused import NormLinear, SiluMulLinear
from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.recipe import Recipe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHORT = DelayedScaling(amax_history_len=4)
RECIPES: list[Recipe | None] = [
    SHORT,
    DelayedScaling(amax_history_len=4, override_linear_precision=(False, False, True)),
    DelayedScaling(amax_history_len=4, override_linear_precision=(False, True, False)),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    None,
]


def norms() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    layers: dict[str, nn.Module] = {
        "rms": nn.RMSNorm(40, eps=1e-6),
        "layer": nn.LayerNorm(40, eps=1e-5),
        "layer without bias": nn.LayerNorm(40, eps=1e-5, bias=False),
    }
    for norm in layers.values():
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    return layers


def unfused_norm(norm: nn.Module, x: Tensor) -> Tensor:
    weight: Any = norm.weight
    if isinstance(norm, nn.LayerNorm):
        return norm(x)  # type: ignore[no-any-return]
    return elementwise.rms_norm(x, weight, 1e-6)


def train(module: nn.Module, run: Callable[..., Tensor], count: int, dtype: torch.dtype, recipe: Recipe | None) -> Any:
    tensors: list[Tensor] = []
    for step in range(3):
        module.zero_grad()
        noise = torch.Generator().manual_seed(step)
        xs = [torch.randn(2, 5, 40, generator=noise).to(dtype).requires_grad_() for _ in range(count)]
        with autocast(enabled=recipe is not None, recipe=recipe):
            y = run(*xs)
        y.float().square().sum().backward()
        tensors += [y.detach(), *(x.grad for x in xs if x.grad is not None)]
        tensors += [p.grad for p in module.parameters() if p.grad is not None]
    return tensors + list(module.state_dict().values())


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", norms())
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_norm_linear(recipe: Recipe | None, kind: str, dtype: torch.dtype) -> None:
    fused = NormLinear(norms()[kind], Linear(40, 24)).to(dtype)
    separate = copy.deepcopy(fused)
    actual = train(fused, fused, 1, dtype, recipe)
    expected = train(separate, lambda x: separate.linear(unfused_norm(separate.norm, x)), 1, dtype, recipe)
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_without_eps_uses_the_default_of_torch(dtype: torch.dtype) -> None:
    norm, x = nn.RMSNorm(40).to(dtype), (torch.randn(3, 40) * 1e-4).to(dtype)  # so small that eps decides
    layer = NormLinear(norm, Linear(40, 24).to(dtype))
    torch.testing.assert_close(layer(x), layer.linear(norm(x)))


def test_a_norm_without_weight_is_refused() -> None:
    with pytest.raises(TypeError, match="this RMSNorm has none"):
        NormLinear(nn.RMSNorm(40, elementwise_affine=False), Linear(40, 24))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_silu_mul_linear(recipe: Recipe | None, dtype: torch.dtype) -> None:
    fused = SiluMulLinear(Linear(40, 24)).to(dtype)
    separate = copy.deepcopy(fused)
    actual = train(fused, fused, 2, dtype, recipe)
    expected = train(separate, lambda gate, up: separate.linear(elementwise.silu_mul(gate, up)), 2, dtype, recipe)
    assert_same(actual, expected)


def test_the_activation_in_between_is_never_stored() -> None:
    tensors: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    layer, gate, up = SiluMulLinear(Linear(40, 24)), torch.randn(64, 40), torch.randn(64, 40)
    gate.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast(recipe=SHORT):
        layer(gate, up)
    wide = [t for t in tensors if t.dtype == torch.float32 and t.numel() == 64 * 40]
    assert {t.data_ptr() for t in wide} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("name", ["rms_norm_quantize", "layer_norm_quantize", "silu_mul_quantize"])
def test_fused_ops_give_the_bits_of_the_reference(name: str) -> None:
    for case in cases(name):
        q, amax = getattr(torch.ops.fp8serve, name)(*case.make())
        expected_q, expected_amax = getattr(reference, name)(*case.make())
        assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
        assert torch.equal(amax, expected_amax)


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_torch_autocast_rounds_in_between() -> None:
    """FP32 in, BF16 autocast: the norm stays FP32 and the Linear rounds its input, fused or not."""
    fused = NormLinear(norms()["rms"], Linear(40, 24))
    x = torch.randn(5, 40)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), autocast(recipe=SHORT):
        assert torch.equal(fused(x), fused.linear(elementwise.rms_norm(x, fused.norm.weight, 1e-6)))  # type: ignore[arg-type]


def test_a_frozen_norm_and_recomputation_work_in_fused_layers() -> None:
    fused = NormLinear(norms()["rms"], Linear(40, 24))
    fused.norm.requires_grad_(False)
    again = copy.deepcopy(fused)
    actual = train(again, lambda x: checkpoint(again, x, use_reentrant=False), 1, torch.float32, SHORT)
    assert_same(train(fused, fused, 1, torch.float32, SHORT), actual)
