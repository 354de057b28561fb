"""The promises of autocast, one behaviour for each test."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert, scaling_state
from fp8serve.errors import RecipeError
from fp8serve.fp8 import scaling
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.session import MAX_RECENT_CONFIGS, UPDATE_CONFIGS

SHORT = DelayedScaling(amax_history_len=4)


def layer(seed: int = 0, size: int = 16) -> Linear:
    torch.manual_seed(seed)
    return Linear(size, size, bias=False)


def batch(seed: int = 1, size: int = 16, magnitude: float = 1.0) -> Tensor:
    return torch.randn(8, size, generator=torch.Generator().manual_seed(seed)) * magnitude


def snapshot(*modules: Linear) -> list[Any]:
    return [
        (name, s.scale.item(), s.amax_history.tolist(), s.nonfinite.item(), s.steps.item())
        for module in modules
        for name, s in scaling_state(module).items()
    ]


def steps_of(module: Linear, name: str) -> int:
    return int(scaling_state(module)[name].steps)


def test_outside_of_any_context_a_linear_is_a_plain_linear() -> None:
    module, x = layer(), batch()
    assert torch.equal(module(x), nn.functional.linear(x, module.weight))
    assert scaling_state(module) == {}


def test_the_default_recipe_is_delayed_scaling() -> None:
    module = layer()
    with autocast():
        module(batch())
    assert scaling_state(module)["input"].amax_history.shape == (1024,)


def test_forward_states_are_updated_when_the_context_ends() -> None:
    module, x = layer(), batch()
    with autocast(recipe=SHORT):
        module(x)
        assert scaling_state(module)["input"].scale.item() == 1.0
    amax = x.abs().max()
    assert scaling_state(module)["input"].scale.item() == (torch.tensor(448.0) / amax).item()
    assert scaling_state(module)["input"].amax_history.tolist() == [0.0, 0.0, 0.0, amax.item()]
    assert steps_of(module, "grad_output") == 0


def test_several_calls_in_one_context_are_one_step() -> None:
    module = layer()
    with autocast(recipe=SHORT):
        module(batch(magnitude=1.0))
        module(batch(magnitude=5.0))
    assert steps_of(module, "input") == 1
    assert scaling_state(module)["input"].amax_history[-1] == batch(magnitude=5.0).abs().max()


def test_all_states_are_updated_by_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [layer(seed) for seed in range(3)]
    sizes: list[int] = []
    kernel = scaling._delayed_update

    def counting(*args: Any) -> None:
        sizes.append(len(args[0]))
        kernel(*args)

    monkeypatch.setattr(scaling, "_delayed_update", counting)
    with autocast(recipe=SHORT):
        x = batch()
        for module in modules:
            x = module(x)
    x.sum().backward()
    assert sizes == [6, 3]


def test_backward_after_exit_inherits_the_recipe_of_the_forward() -> None:
    module, x = layer(), batch().requires_grad_()
    with autocast(recipe=SHORT):
        y = module(x)
    with autocast(recipe=Float8CurrentScaling()):
        y.square().sum().backward()
    assert steps_of(module, "grad_output") == 1
    assert scaling_state(module)["grad_output"].amax_history.shape == (4,)


def test_sequential_contexts_may_use_different_recipes() -> None:
    module, x = layer(), batch()
    outputs = []
    for recipe in (Float8CurrentScaling(), Float8BlockScaling(), Float8CurrentScaling(granularity="row")):
        with autocast(recipe=recipe):
            outputs.append(module(x))
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    assert scaling_state(module) == {}


def test_the_inner_context_wins_and_the_outermost_updates() -> None:
    first, second = layer(0), layer(1)
    inner = DelayedScaling(amax_history_len=2, margin=1)
    with autocast(recipe=SHORT):
        with autocast(recipe=inner):
            second(batch())
        assert steps_of(second, "input") == 0
        first(batch())
    amax = batch().abs().max()
    assert scaling_state(first)["input"].scale.item() == (torch.tensor(448.0) / amax).item()
    assert scaling_state(second)["input"].scale.item() == (torch.tensor(224.0) / amax).item()


def test_a_disabled_island_runs_in_high_precision() -> None:
    first, second, x = layer(0), layer(1), batch()
    with autocast(recipe=SHORT):
        first(x)
        with autocast(enabled=False):
            y = second(x)
        with autocast(recipe=Float8CurrentScaling()):
            z = second(x)
    assert torch.equal(y, nn.functional.linear(x, second.weight))
    assert not torch.equal(z, y)
    assert scaling_state(second) == {}
    assert steps_of(first, "input") == 1


def test_no_grad_leaves_the_state_untouched() -> None:
    """Row D7 of docs/numerics.md."""
    module = layer()
    with autocast(recipe=SHORT):
        module(batch())
    before = snapshot(module)
    with torch.no_grad(), autocast(recipe=SHORT):
        first = module(batch(2, magnitude=9.0))
    with autocast(recipe=SHORT), torch.no_grad():
        second = module(batch(2, magnitude=9.0))
    assert torch.equal(first, second)
    assert snapshot(module) == before


def test_an_exception_leaves_the_states_unchanged() -> None:
    """Row D8 of docs/numerics.md."""
    module, other = layer(0), layer(1)
    with autocast(recipe=SHORT):
        module(batch())
    before = snapshot(module)

    @autocast(recipe=SHORT)
    def failing() -> None:
        module(batch(3, magnitude=100.0))
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        failing()
    assert snapshot(module) == before
    with autocast(recipe=SHORT):  # the failed context has left the stack
        other(batch())
    assert steps_of(other, "input") == 1
    assert snapshot(module) == before


def test_calibrating_records_in_high_precision_without_gradients() -> None:
    module, x = layer(), batch()
    with torch.no_grad(), autocast(enabled=False, calibrating=True, recipe=SHORT):
        y = module(x)
    assert torch.equal(y, nn.functional.linear(x, module.weight))
    assert scaling_state(module)["input"].amax_history[-1] == x.abs().max()
    assert scaling_state(module)["weight"].amax_history[-1] == module.weight.detach().abs().max()


def test_calibrating_records_gradients_in_high_precision() -> None:
    module, x = layer(), batch().requires_grad_()
    with autocast(enabled=False, calibrating=True, recipe=SHORT):
        y = module(x)
    y.backward(torch.full_like(y, 0.25))
    assert scaling_state(module)["grad_output"].amax_history[-1] == 0.25
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(y, 0.25) @ module.weight)


def test_calibrating_needs_a_recipe_with_a_history() -> None:
    with pytest.raises(RecipeError, match="Float8CurrentScaling has none; use DelayedScaling"):
        autocast(calibrating=True, recipe=Float8CurrentScaling())
    with pytest.raises(RecipeError, match=r"recipe must be DelayedScaling, .* found 'delayed'"):
        autocast(recipe="delayed")  # type: ignore[arg-type]


def test_a_frozen_first_layer_does_not_stop_the_gradient_state() -> None:
    first, second = layer(0), layer(1)
    first.weight.requires_grad_(False)
    for _ in range(2):
        with autocast(recipe=SHORT):
            y = second(first(batch()))
        y.sum().backward()
    assert steps_of(second, "grad_output") == 2
    assert steps_of(first, "grad_output") == 0


def test_gradient_states_are_updated_once_when_the_backward_pass_ends() -> None:
    module, x = layer(), batch().requires_grad_()
    with autocast(recipe=SHORT):
        y = module(module(x))
    steps: list[int] = []
    x.register_hook(lambda grad: steps.append(steps_of(module, "grad_output")))
    y.sum().backward()
    assert steps == [0]
    assert steps_of(module, "grad_output") == 1


def test_two_forwards_before_one_backward_are_counted() -> None:
    module = layer()
    with autocast(recipe=SHORT):
        first = module(batch(1))
    with autocast(recipe=SHORT):
        second = module(batch(2, magnitude=3.0))
    (first.sum() + second.sum() * 2).backward()
    assert (steps_of(module, "input"), steps_of(module, "grad_output")) == (2, 1)
    assert scaling_state(module)["grad_output"].amax_history[-1] == 2.0


def test_two_forwards_then_two_backwards() -> None:
    module = layer()
    with autocast(recipe=SHORT):
        first, second = module(batch(1)), module(batch(2))
    first.sum().backward()
    second.sum().backward()
    assert (steps_of(module, "input"), steps_of(module, "grad_output")) == (1, 2)


def test_a_failed_backward_does_not_stop_the_next() -> None:
    module = layer()

    def boom(grad: Tensor) -> None:
        raise RuntimeError("boom")

    x = batch().requires_grad_()
    x.register_hook(boom)
    with autocast(recipe=SHORT):
        y, z = module(x), module(batch())
    with pytest.raises(RuntimeError, match="boom"):
        y.sum().backward()
    z.sum().backward()
    assert steps_of(module, "grad_output") == 1


class Failing(torch.autograd.Function):
    """The identity; its backward pass fails while `on` is set."""

    on = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        if Failing.on:
            raise ValueError("as planned")
        return dy


def test_a_failed_backward_stages_no_amax() -> None:
    """The next update ignores amaxes of the failed pass, also while its exception is still referenced."""
    first, second = layer(0), layer(1)
    twins = layer(0), layer(1)
    for size, fails in ((1.0, False), (100.0, True), (1.0, False), (3.0, False)):
        with autocast(recipe=SHORT):
            y = second(Failing.apply(first(batch())))  # type: ignore[no-untyped-call]
        with autocast(recipe=SHORT):
            z = twins[1](twins[0](batch()))
        Failing.on = fails
        if fails:
            with pytest.raises(ValueError, match="as planned") as error:
                (size * y.sum()).backward()
            assert error.value.__traceback__ is not None
            assert scaling_state(second)["grad_output"].amax_history[0] == 0.0
        else:
            (size * y.sum()).backward()
            (size * z.sum()).backward()
    for module, twin in zip((first, second), twins, strict=True):
        assert snapshot(module)[2] == snapshot(twin)[2]
        assert snapshot(module)[2][0] == "grad_output"


def test_a_backward_pass_finds_its_rule_after_1100_newer_ones() -> None:
    module = layer()
    with autocast(recipe=DelayedScaling(amax_history_len=5)):
        y = module(batch())
    for i in range(1100):
        with autocast(recipe=DelayedScaling(amax_compute_algo=lambda history, i=i: history.amax())):
            pass
    y.sum().backward()
    assert steps_of(module, "grad_output") == 1


def test_rules_are_freed_when_no_graph_needs_them() -> None:
    """A recipe with a new function in every step does not leak memory."""
    before = len(UPDATE_CONFIGS)
    for _ in range(1100):
        with autocast(recipe=DelayedScaling(amax_compute_algo=lambda history: history.amax())):
            pass
    gc.collect()
    assert len(UPDATE_CONFIGS) <= before + MAX_RECENT_CONFIGS


def test_several_models_are_independent() -> None:
    """A context updates the modules that ran in it, and no others."""
    teacher, student = layer(0), layer(1)
    with (
        pytest.warns(UserWarning, match="1 FP8 layer was evaluated under delayed scaling with scale 1"),
        autocast(recipe=DelayedScaling(amax_history_len=8)),
        torch.no_grad(),
    ):
        teacher(batch())
    with autocast(recipe=SHORT):
        student(batch())
    with autocast(recipe=DelayedScaling(amax_history_len=8)):
        teacher(batch())
    assert steps_of(student, "input") == steps_of(teacher, "input") == 1
    assert scaling_state(student)["input"].amax_history.shape == (4,)
    assert scaling_state(teacher)["input"].amax_history.shape == (8,)


def test_threads_do_not_share_contexts() -> None:
    module, x = layer(), batch()
    outputs: list[Tensor] = []
    with autocast(recipe=SHORT):
        thread = threading.Thread(target=lambda: outputs.append(module(x)))
        thread.start()
        thread.join()
    assert torch.equal(outputs[0], nn.functional.linear(x, module.weight))


def test_a_context_can_decorate_a_function() -> None:
    module = layer()

    @autocast(recipe=SHORT)
    def step(x: Tensor) -> Tensor:
        out: Tensor = module(x)
        return out

    step(batch())
    step(batch())
    assert steps_of(module, "input") == 2


@pytest.mark.parametrize("margin", [0, 2])
def test_nonfinite_input_is_dropped_and_counted(margin: int) -> None:
    """Row D2 through a module: the output is finite, the step does not change the scale, and `nonfinite` counts it."""
    module = layer()
    recipe = DelayedScaling(amax_history_len=4, margin=margin)
    with autocast(recipe=recipe):
        module(batch())
    before = scaling_state(module)["input"].scale.item()
    x = batch()
    x[0, 0] = torch.inf
    with autocast(recipe=recipe):
        y = module(x)
    assert y.isfinite().all()
    state = scaling_state(module)["input"]
    assert (state.scale.item(), state.nonfinite.item(), state.steps.item()) == (before, 1, 1)


RECIPES: list[Recipe] = [SHORT, Float8CurrentScaling(), Float8CurrentScaling(granularity="row"), Float8BlockScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_every_recipe_runs_through_convert(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)))
    with autocast(recipe=recipe):
        model(batch()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_staged_amax_is_that_of_the_reference() -> None:
    module, x = layer(), batch()
    x[2, 3] = torch.nan
    with autocast(recipe=SHORT):
        module(x)
    assert scaling_state(module)["input"].amax_history[-1] == arithmetic.amax(x)
