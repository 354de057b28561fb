"""`grouped_linear` has the bits of calling every expert's Linear: outputs, gradients and states."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert
from fp8serve.fp8 import grouped_linear as module
from fp8serve.fp8.grouped_linear import grouped_linear
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import FIELDS

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed by row": DelayedScaling(amax_history_len=4, weight_granularity="row"),
    "current": Float8CurrentScaling(),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "block": Float8BlockScaling(),
    "high-precision backward": DelayedScaling(override_linear_precision=(False, True, True)),
    "high-precision wgrad": Float8CurrentScaling(override_linear_precision=(False, False, True)),
    "high-precision forward": DelayedScaling(override_linear_precision=(True, False, False)),
}
COUNTS = [[5, 0, 17, 1], [0, 0, 3, 0], [40, 9, 0, 2]]  # rows of each expert, step by step
Run = Callable[[list[Linear], Tensor, list[tuple[int, int]]], Tensor]


def experts(bias: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    linears = nn.ModuleList(nn.Linear(136, 40, bias=bias) for _ in range(4))
    return convert(linears)  # type: ignore[return-value]


def one_by_one(linears: list[Linear], x: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    return torch.cat([linear(x[a:b]) for linear, (a, b) in zip(linears, spans, strict=True) if a < b])


def steps(linears: nn.ModuleList, recipe: Recipe, run: Run, dtype: torch.dtype) -> list[Tensor | None]:
    """Runs three steps; returns outputs and gradients of every step, and the final states."""
    tensors: list[Tensor | None] = []
    noise = torch.Generator().manual_seed(1)
    for counts in COUNTS:
        spans = list(pairwise([0, *torch.tensor(counts).cumsum(0).tolist()]))
        x = (torch.randn(sum(counts), 136, generator=noise) * 3).to(dtype).requires_grad_()
        with autocast(recipe=recipe):
            y = run(list(linears), x, spans)  # type: ignore[arg-type]
        y.backward(torch.randn(y.shape, generator=noise).to(dtype))
        tensors += [y, x.grad, *(p.grad for p in linears.parameters())]
        for p in linears.parameters():
            p.grad = None
    for linear in linears:
        for state in linear.scaling.values():  # type: ignore[union-attr, operator]
            tensors += [getattr(state, field).clone() for field in FIELDS]
    return tensors


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_together_equals_one_by_one(recipe: str, bias: bool, dtype: torch.dtype) -> None:
    linears = experts(bias)
    actual = steps(deepcopy(linears), RECIPES[recipe], grouped_linear, dtype)  # type: ignore[arg-type]
    assert_same(actual, steps(linears, RECIPES[recipe], one_by_one, dtype))


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_weight_gradients_have_the_same_bits(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups them as on a GPU; on a CPU, the grouped op is a loop."""
    linears, calls = experts(True), list[int]()
    expected = steps(deepcopy(linears), RECIPES[recipe], grouped_linear, torch.bfloat16)  # type: ignore[arg-type]
    on_a_gpu, together = module._can_group_wgrad, module._grouped_wgrad

    def counted(parts: Any) -> Any:
        calls.append(len(parts))
        return together(parts)

    monkeypatch.setattr(module, "_can_group_wgrad", lambda parts, device: on_a_gpu(parts, torch.device("cuda")))
    monkeypatch.setattr(module, "_grouped_wgrad", counted)
    assert_same(steps(linears, RECIPES[recipe], grouped_linear, torch.bfloat16), expected)  # type: ignore[arg-type]
    assert calls == ([] if "high-precision" in recipe else [3, 1, 3])


def test_products_of_all_experts_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and input gradients take one call each; weight gradients, on a CPU, one call for each expert."""
    calls: list[int] = []
    multiply = module._grouped_mm

    def counted(a: Any, *rest: Any) -> Tensor:
        calls.append(len(a))
        return multiply(a, *rest)

    monkeypatch.setattr(module, "_grouped_mm", counted)
    steps(experts(False), RECIPES["delayed"], grouped_linear, torch.bfloat16)  # type: ignore[arg-type]
    assert calls == [3, 3, 1, 1, 3, 3]


def test_an_expert_without_rows_keeps_its_state() -> None:
    linears = experts(False)
    steps(linears, RECIPES["delayed"], grouped_linear, torch.bfloat16)  # type: ignore[arg-type]
    ran = [[counts[i] > 0 for counts in COUNTS].count(True) for i in range(4)]
    assert [int(linear.scaling["weight"].steps) for linear in linears] == ran  # type: ignore[union-attr, index]
    assert [int(linear.scaling["grad_output"].steps) for linear in linears] == ran  # type: ignore[union-attr, index]


def test_frozen_experts_have_no_gradient_and_pass_one_on() -> None:
    linears = experts(False)
    linears[2].requires_grad_(False)
    x = torch.randn(6, 136, requires_grad=True)
    with autocast(recipe=RECIPES["current"]):
        y = grouped_linear(list(linears), x, [(0, 2), (2, 2), (2, 5), (5, 6)])  # type: ignore[arg-type]
    y.sum().backward()
    assert linears[2].weight.grad is None
    assert linears[0].weight.grad is not None
    assert x.grad is not None
    assert bool((x.grad != 0).any(1).all())


def test_a_hook_is_called_and_recomputation_repeats() -> None:
    linears, calls = experts(False), list[int]()
    handle = linears[0].register_forward_hook(lambda m, args, out: calls.append(len(args[0])))
    x, spans = torch.randn(6, 136, requires_grad=True), [(0, 2), (2, 2), (2, 5), (5, 6)]
    with autocast(recipe=RECIPES["current"]):
        grouped_linear(list(linears), x, spans)  # type: ignore[arg-type]
    assert calls == [2]
    handle.remove()
    gradients = []
    for run in (grouped_linear, lambda *a: checkpoint(grouped_linear, *a, use_reentrant=False)):
        x.grad = None
        with autocast(recipe=RECIPES["delayed"]):
            y = run(list(deepcopy(linears)), x, spans)  # type: ignore[arg-type, no-untyped-call]
        y.sum().backward()
        gradients.append((y, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]
