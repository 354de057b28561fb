"""Contexts nested in themselves, left in the wrong order or entered by several threads; training in threads."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, Float8CurrentScaling, Linear, autocast, convert, scaling_state
from fp8serve.errors import RecipeError
from fp8serve.fp8.autocast import current_frame
from tests.patience import PATIENCE

SHORT = DelayedScaling(amax_history_len=4)
STEPS = 12


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Makes Python switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_in_threads(*bodies: Callable[[], None]) -> None:
    """Runs each function in its own thread, all starting together; raises the first error of any thread."""
    barrier, errors = threading.Barrier(len(bodies)), []

    def run(body: Callable[[], None]) -> None:
        try:
            barrier.wait(PATIENCE)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def train(seed: int, results: dict[int, dict[str, Tensor]]) -> None:
    """Trains a model with its own seed and optimizer; stores its final state in `results[seed]`."""
    generator = torch.Generator().manual_seed(seed)
    model = convert(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        recipe = DelayedScaling(amax_history_len=4, margin=step % 3)  # the threads create and reuse the same rules
        with autocast(recipe=recipe):
            loss = model(torch.randn(8, 16, generator=generator) * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    results[seed] = model.state_dict()


def test_runs_in_threads_are_bit_equal_to_runs_in_a_row(frequent_switches: None) -> None:
    sequential: dict[int, dict[str, Tensor]] = {}
    concurrent: dict[int, dict[str, Tensor]] = {}
    for seed in range(4):
        train(seed, sequential)
    run_in_threads(*(lambda seed=seed: train(seed, concurrent) for seed in range(4)))
    for seed, expected in sequential.items():
        assert concurrent[seed].keys() == expected.keys()
        assert all(torch.equal(concurrent[seed][name], value) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_threads_may_run_one_model_without_gradients(frequent_switches: None) -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)))
    xs = [torch.randn(4, 16) for _ in range(4)]
    outputs: dict[int, list[Tensor]] = {}

    def run(i: int) -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                with autocast(recipe=SHORT):
                    outputs.setdefault(i, []).append(model(xs[i]))

    run_in_threads(*(lambda i=i: run(i) for i in range(4)))  # the first run, which creates the states
    with torch.no_grad(), autocast(recipe=SHORT):
        expected = [model(x) for x in xs]
    assert all(torch.equal(y, expected[i]) for i in range(4) for y in outputs[i])
    assert all(state.steps == 0 for state in scaling_state(model[0]).values())  # type: ignore[index]


def test_modules_created_in_threads_have_unique_positions(frequent_switches: None) -> None:
    modules: list[Linear] = []
    run_in_threads(*(lambda: modules.extend(Linear(2, 2) for _ in range(200)) for _ in range(4)))
    assert len({m.position for m in modules}) == len({m.key for m in modules}) == 800


def test_threads_may_create_rules_concurrently(frequent_switches: None) -> None:
    def enter() -> None:
        for _ in range(250):
            with autocast(recipe=DelayedScaling(amax_compute_algo=lambda history: history.amax())):
                pass

    run_in_threads(*[enter] * 4)


def test_one_context_may_be_entered_by_several_threads() -> None:
    """A decorator is one object, but each call of its function has its own rule and step, in every thread."""
    inside = threading.Barrier(2)
    layers = [Linear(8, 8), Linear(8, 8)]
    decorator = autocast(recipe=SHORT)

    @decorator
    def call(i: int) -> None:
        inside.wait(PATIENCE)
        layers[i](torch.full((2, 8), i + 1.0))
        inside.wait(PATIENCE)

    run_in_threads(lambda: call(0), lambda: call(1))
    assert [scaling_state(m)["input"].amax_history[-1].item() for m in layers] == [1.0, 2.0]
    assert not {"group", "rule", "held", "step"} & set(vars(decorator))  # the object stores no state of a call


def test_one_context_may_be_nested_in_itself() -> None:
    layer, context = Linear(8, 8), autocast(recipe=SHORT)
    with context:
        with autocast(recipe=Float8CurrentScaling()), context:
            layer(torch.ones(2, 8))
        assert scaling_state(layer)["input"].steps == 0
        layer(torch.ones(2, 8))
    assert scaling_state(layer)["input"].steps == 1


def test_contexts_left_in_the_wrong_order_are_refused() -> None:
    layer, outer, inner = Linear(8, 8), autocast(recipe=SHORT), autocast(recipe=Float8CurrentScaling())
    outer.__enter__()
    layer(torch.ones(2, 8))
    inner.__enter__()
    with pytest.raises(RecipeError, match="left before one that was entered after it"):
        outer.__exit__(None, None, None)
    frame = current_frame()
    assert frame is not None
    assert frame.context is inner  # which is still open
    inner.__exit__(None, None, None)
    assert current_frame() is None
    state = scaling_state(layer)["input"]
    assert (state.steps.item(), state.amax_history[0].item()) == (0, 0.0)
    with outer:
        layer(torch.ones(2, 8))
    assert state.steps == 1


def test_leaving_a_context_in_another_thread_is_refused() -> None:
    context = autocast(recipe=SHORT)
    with context:
        with pytest.raises(RecipeError, match="was not entered in this thread"):
            run_in_threads(lambda: context.__exit__(None, None, None))
        assert current_frame() is not None
    assert current_frame() is None
