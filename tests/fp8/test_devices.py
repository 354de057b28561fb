"""Both operand layouts give the same bits, and transposed copies are made only on devices that need them."""

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.fp8 import casting, linear
from fp8serve.fp8.casting import Layout, layout_of
from fp8serve.fp8.ops import Case, cases, reference
from fp8serve.fp8.recipe import Recipe

RECIPES: list[Recipe] = [
    DelayedScaling(amax_history_len=4),
    Float8CurrentScaling(),
    Float8CurrentScaling(granularity="row"),
    Float8BlockScaling(),
]


def step(recipe: Recipe, layout: Layout) -> list[Tensor]:
    torch.manual_seed(0)
    layer, x = Linear(40, 136), torch.randn(150, 40).requires_grad_()
    with patch.object(casting, "layout_of", lambda device: layout):
        for _ in range(2):
            layer.zero_grad()
            with autocast(recipe=recipe):
                y = layer(x)
            y.square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_layouts_give_the_same_bits(recipe: Recipe) -> None:
    for a, b in zip(step(recipe, "tn"), step(recipe, "any"), strict=True):
        assert torch.equal(a, b)


def record_calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple[Any, ...]]:
    """Returns a list that gets the arguments of every call of the op `name` of `module`."""
    calls: list[tuple[Any, ...]] = []
    kernel: Callable[..., Any] = getattr(module, name)

    def spy(*args: Any) -> Any:
        calls.append(args)
        return kernel(*args)

    monkeypatch.setattr(module, name, spy)
    return calls


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_tn_devices_get_both_operands_contiguous(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch, linear, "_scaled_mm")
    step(recipe, "tn")
    assert len(calls) == 6
    assert all(t.is_contiguous() for a, b, *_ in calls for t in (a, b))


def test_any_layout_devices_get_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """dgrad and wgrad read views of the forward pass's operands."""
    multiplied, cast = (
        record_calls(monkeypatch, linear, "_scaled_mm"),
        record_calls(monkeypatch, casting, "_quantize_delayed"),
    )
    step(RECIPES[0], "any")
    forward, dgrad, wgrad = multiplied[:3]
    assert dgrad[1].data_ptr() == forward[1].data_ptr()
    assert wgrad[1].data_ptr() == forward[0].data_ptr()
    assert dgrad[1].stride() == (1, 40)
    assert not any(is_transposed for *_, is_transposed, _ in cast)


def test_cast_and_transpose_is_one_op_on_tn_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cast, transposed = (
        record_calls(monkeypatch, casting, "_quantize_delayed"),
        record_calls(monkeypatch, casting, "_transpose_fp8"),
    )
    step(RECIPES[0], "tn")
    assert [is_transposed for *_, is_transposed, _ in cast] == [True] * 6  # input, weight and gradient, two steps
    assert not transposed


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_nothing_is_transposed_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = record_calls(monkeypatch, casting, "_quantize_delayed")
    layer = Linear(8, 8)
    with torch.no_grad(), autocast():
        layer(torch.ones(2, 8))
    assert [is_transposed for *_, is_transposed, _ in cast] == [False] * 2


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_transpose"), ids=lambda c: c.name)
def test_cast_and_transpose_are_those_of_the_reference(case: Case) -> None:
    for actual, expected in zip(
        torch.ops.fp8serve.quantize_transpose(*case.make()), reference.quantize_transpose(*case.make()), strict=True
    ):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_the_layout_is_a_property_of_the_device() -> None:
    assert layout_of(torch.device("cpu")) == "tn"


@pytest.mark.parametrize(
    ("capability", "layout"), [((8, 9), "tn"), ((9, 0), "tn"), ((10, 0), "any"), ((10, 3), "any"), ((12, 0), "any")]
)
def test_the_layout_of_every_gpu_generation(
    capability: tuple[int, int], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    casting._is_blackwell.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    try:
        assert layout_of(torch.device("cuda")) == layout
    finally:
        casting._is_blackwell.cache_clear()
