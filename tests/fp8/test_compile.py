"""torch.compile(fullgraph=True) of a converted module gives the eager bits and states, and compiles once."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Session, autocast, convert
from fp8serve.fp8.recipe import Recipe

# torch's own tracer instantiates the Function class that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

SHORT = DelayedScaling(amax_history_len=4)
RECIPES: dict[str, Recipe] = {
    "delayed": SHORT,
    "delayed, backward in high precision": DelayedScaling(
        amax_history_len=4, override_linear_precision=(False, True, True)
    ),
    "current": Float8CurrentScaling(),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "block": Float8BlockScaling(),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return convert(nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 30)))


def train(
    module: nn.Module, original: nn.Module, recipe: Recipe, steps: int = 4, session: Session | None = None
) -> list[Tensor]:
    """Returns the outputs, input gradients, weight gradients and final states of a training run."""
    tensors: list[Tensor] = []
    for step in range(steps):
        original.zero_grad()
        x = torch.linspace(-1 - step, 2, 280).view(7, 40).requires_grad_()
        with autocast(recipe=recipe, session=session):
            y = module(x)
        y.square().mean().backward()
        assert x.grad is not None
        tensors += [y.detach(), x.grad, *(p.grad for p in original.parameters() if p.grad is not None)]
    return tensors + [t.clone() for t in original.state_dict().values()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_module_gives_the_bits_of_the_eager_one(name: str) -> None:
    eager = model()
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for a, b in zip(train(eager, eager, RECIPES[name]), train(compiled, twin, RECIPES[name]), strict=True):
        assert torch.equal(a, b)


def test_new_scales_do_not_recompile() -> None:
    original, counter = model(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(original, fullgraph=True, backend=counter)
    train(compiled, original, SHORT, steps=2)
    frames = counter.frame_count
    train(compiled, original, SHORT, steps=4)
    assert counter.frame_count == frames


def test_many_rules_and_a_session_of_the_model_compile_too() -> None:
    eager = model()
    twin = copy.deepcopy(eager)
    compiled, session = torch.compile(twin, fullgraph=True, backend="aot_eager"), Session(twin)
    for margin in (0, 1, 2, 3, 0):
        recipe = DelayedScaling(amax_history_len=4, margin=margin)
        expected, actual = train(eager, eager, recipe), train(compiled, twin, recipe, session=session)
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_no_grad_and_high_precision_compile_too() -> None:
    original = model()
    compiled: Any = torch.compile(original, fullgraph=True, backend="aot_eager")
    train(compiled, original, SHORT)
    before = [t.clone() for t in original.state_dict().values()]
    x = torch.randn(3, 40)
    with torch.no_grad(), autocast(recipe=SHORT):
        assert torch.equal(compiled(x), original(x))
    assert all(torch.equal(a, b) for a, b in zip(before, original.state_dict().values(), strict=True))
    assert torch.equal(compiled(x), original(x))


def test_the_history_length_may_change_under_compile() -> None:
    original = model()
    compiled = torch.compile(original, fullgraph=True, backend="aot_eager")
    train(compiled, original, SHORT)
    train(compiled, original, DelayedScaling(amax_history_len=2))
    assert original.state_dict()["0.input.amax_history"].shape == (2,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor_trains_like_eager() -> None:
    eager = model()
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True)
    for a, b in zip(train(eager, eager, SHORT), train(compiled, twin, SHORT), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
