"""Contexts entered again, left in the wrong order, and entered by several threads; training in several threads."""

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
def hasty() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*bodies: Callable[[], None]) -> None:
    """Run each in a thread of its own, from the same moment on; the first error of any is raised here."""
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


def train(seed: int, found: dict[int, dict[str, Tensor]]) -> None:
    """A training run from its own seed, model and optimizer to the final state."""
    generator = torch.Generator().manual_seed(seed)
    model = convert(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        recipe = DelayedScaling(amax_history_len=4, margin=step % 3)  # rules that the runs share, found and made anew
        with autocast(recipe=recipe):
            loss = model(torch.randn(8, 16, generator=generator) * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found[seed] = model.state_dict()


def test_runs_in_threads_are_bit_equal_to_runs_in_a_row(hasty: None) -> None:
    alone: dict[int, dict[str, Tensor]] = {}
    beside: dict[int, dict[str, Tensor]] = {}
    for seed in range(4):
        train(seed, alone)
    together(*(lambda seed=seed: train(seed, beside) for seed in range(4)))
    for seed, wanted in alone.items():
        assert beside[seed].keys() == wanted.keys()
        assert all(torch.equal(beside[seed][name], value) for name, value in wanted.items())


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_threads_may_run_one_model_without_gradients(hasty: None) -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)))
    xs = [torch.randn(4, 16) for _ in range(4)]
    found: dict[int, list[Tensor]] = {}

    def run(i: int) -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                with autocast(recipe=SHORT):
                    found.setdefault(i, []).append(model(xs[i]))

    together(*(lambda i=i: run(i) for i in range(4)))  # the first run of all, which creates the states
    with torch.no_grad(), autocast(recipe=SHORT):
        wanted = [model(x) for x in xs]
    assert all(torch.equal(y, wanted[i]) for i in range(4) for y in found[i])
    assert all(state.steps == 0 for state in scaling_state(model[0]).values())  # type: ignore[index]


def test_modules_made_in_threads_have_places_of_their_own(hasty: None) -> None:
    made: list[Linear] = []
    together(*(lambda: made.extend(Linear(2, 2) for _ in range(200)) for _ in range(4)))
    assert len({m.position for m in made}) == len({m.key for m in made}) == 800


def test_rules_made_in_threads_do_not_meet(hasty: None) -> None:
    def enter() -> None:
        for _ in range(250):
            with autocast(recipe=DelayedScaling(amax_compute_algo=lambda history: history.amax())):
                pass

    together(*[enter] * 4)


def test_one_context_may_be_entered_by_several_threads() -> None:
    """A decorator is one object; each call of its function, in whatever thread, has its own rule and step."""
    inside = threading.Barrier(2)
    layers = [Linear(8, 8), Linear(8, 8)]
    decorator = autocast(recipe=SHORT)

    @decorator
    def call(i: int) -> None:
        inside.wait(PATIENCE)
        layers[i](torch.full((2, 8), i + 1.0))
        inside.wait(PATIENCE)

    together(lambda: call(0), lambda: call(1))
    assert [scaling_state(m)["input"].amax_history[-1].item() for m in layers] == [1.0, 2.0]
    assert not {"group", "rule", "held", "step"} & set(vars(decorator))  # nothing of an entry is on the object


def test_one_context_may_be_entered_again_inside_itself() -> None:
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


def test_a_context_is_left_in_the_thread_that_entered_it() -> None:
    context = autocast(recipe=SHORT)
    with context:
        with pytest.raises(RecipeError, match="was not entered in this thread"):
            together(lambda: context.__exit__(None, None, None))
        assert current_frame() is not None
    assert current_frame() is None
