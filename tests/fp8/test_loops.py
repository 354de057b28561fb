"""A training loop inside one autocast causes a warning; similar code does not (warnings are errors here)."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from fp8serve import DelayedScaling, Float8CurrentScaling, Linear, autocast, scaling_state
from fp8serve.fp8 import steps
from fp8serve.fp8.recipe import Recipe

SHORT = DelayedScaling(amax_history_len=4)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """A loop that should enter a context in every step, and enters one around all steps."""
    with autocast(recipe=recipe):
        for _ in range(2):
            one_step(model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_inside_one_context_is_announced(name: str) -> None:
    model = Linear(8, 8)
    optimizer = OPTIMIZERS[name](model)
    with pytest.warns(UserWarning, match="stepped twice inside one autocast") as record:
        loop(model, optimizer, SHORT)
    assert record[0].filename == __file__
    assert scaling_state(model)["input"].steps == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its tracer
def test_a_compiled_model_in_a_loop_inside_one_context_is_announced() -> None:
    model = Linear(8, 8)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(UserWarning, match="stepped twice inside one autocast"):
        loop(run, optimizer, SHORT)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its tracer
@pytest.mark.parametrize("recipe", [SHORT, Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_a_compiled_model_that_enters_the_context_itself_is_not_announced(recipe: Recipe) -> None:
    """The setup for a Trainer in docs/training.md. Compiled and eager steps have the same bits."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Linear(8, 8)
        model.forward = autocast(recipe=recipe)(model.forward)  # type: ignore[method-assign]
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            one_step(run, optimizer)  # type: ignore[arg-type]
        results.append(list(model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its tracer
def test_a_compiled_step_with_its_own_context_updates_the_scales() -> None:
    """The compiled function enters and exits the context and runs the backward pass."""
    model = Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def step() -> None:
        with autocast(recipe=SHORT):
            loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()

    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
    assert scaling_state(model)["input"].steps == scaling_state(model)["grad_output"].steps == 3


def test_a_context_for_every_step_is_not_announced() -> None:
    model = Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with autocast(recipe=SHORT):
            one_step(model, optimizer)
    assert scaling_state(model)["input"].steps == 3


def test_accumulation_and_two_optimizers_in_one_context_are_not_announced() -> None:
    first, second = Linear(8, 8), Linear(8, 8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    with autocast(recipe=SHORT):
        for _ in range(4):
            first(second(torch.ones(2, 8))).sum().backward()
        for optimizer in optimizers:
            first(second(torch.ones(2, 8))).sum().backward()
            optimizer.step()


def test_a_loop_with_a_stateless_recipe_is_not_announced() -> None:
    model = Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop(model, optimizer, Float8CurrentScaling())


def test_steps_of_another_thread_and_after_an_exception_are_not_counted() -> None:
    plain = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    model, hooks = Linear(8, 8), len(_global_optimizer_post_hooks)
    with autocast(recipe=SHORT):
        for _ in range(3):
            model(torch.ones(2, 8))
            thread = threading.Thread(target=one_step, args=(plain, optimizer))
            thread.start()
            thread.join()
            assert (
                len(_global_optimizer_post_hooks) == hooks
            )  # no hook is added, since another thread may iterate over them

    @autocast(recipe=SHORT)
    def failing() -> None:
        model(torch.ones(2, 8))
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        failing()
    assert steps._LOCAL.detector is None  # the detection ends with the context, also after an exception
