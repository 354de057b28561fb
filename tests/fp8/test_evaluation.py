"""Evaluation under delayed scaling warns once about layers whose scales are still 1 because nothing has set them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, DotProductAttention, Float8CurrentScaling, autocast, convert, scaling_state
from fp8serve.fp8.recipe import Recipe

SHORT = DelayedScaling(amax_history_len=4)
SMALL = 1e-4  # scale 1 rounds activations of this size to zero


def model() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False)))


def train(module: nn.Module, recipe: Recipe = SHORT) -> nn.Module:
    for _ in range(2):  # in the first step, at scale 1, the second layer gets only zeros
        with autocast(recipe=recipe):
            module(SMALL * torch.randn(4, 16)).sum().backward()
    return module


@torch.no_grad()
def evaluate(module: nn.Module, recipe: Recipe = SHORT) -> Tensor:
    with autocast(recipe=recipe):
        out: Tensor = module(SMALL * torch.ones(4, 16))
    return out


def averaged(trained: nn.Module) -> nn.Module:
    """Returns an EMA model that is made before training and gets the parameters afterwards."""
    average = AveragedModel(model())
    average.update_parameters(trained)
    return average


def with_parameters_only(trained: nn.Module) -> nn.Module:
    fresh = model()
    fresh.load_state_dict(dict(trained.named_parameters()))
    return fresh


WITHOUT_HISTORY: dict[str, Callable[[], nn.Module]] = {
    "never trained": model,
    "trained by another recipe": lambda: train(model(), Float8CurrentScaling()),
    "EMA of parameters": lambda: averaged(train(model())),
    "parameters only": lambda: with_parameters_only(train(model())),
    "copy of a fresh one": lambda: copy.deepcopy(model()),
}
WITH_HISTORY: dict[str, Callable[[], nn.Module]] = {
    "trained": lambda: train(model()),
    "deepcopy": lambda: copy.deepcopy(train(model())),
    "EMA made afterwards": lambda: AveragedModel(train(model())),
}


@pytest.mark.parametrize("name", WITHOUT_HISTORY)
def test_scales_that_nothing_has_set_are_announced_once(name: str) -> None:
    module = WITHOUT_HISTORY[name]()
    with pytest.warns(UserWarning, match="^2 FP8 layers were evaluated under delayed scaling with scale 1") as record:
        out = evaluate(module)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert not out.any(), "the warning would be unnecessary"
    evaluate(module)  # warnings are errors here


@pytest.mark.parametrize("name", WITH_HISTORY)
def test_scales_that_training_has_set_are_not_announced(name: str) -> None:
    assert evaluate(WITH_HISTORY[name]()).any()


def test_a_loaded_state_dict_sets_the_scales() -> None:
    source, target = train(model()), model()
    target.load_state_dict(source.state_dict())
    assert torch.equal(evaluate(target), evaluate(source))


def test_calibration_sets_the_scales() -> None:
    module = model()
    with torch.no_grad(), autocast(enabled=False, calibrating=True, recipe=SHORT):
        module(SMALL * torch.ones(4, 16))
    assert evaluate(module).any()


def test_a_copy_is_announced_separately() -> None:
    """The copy may be the only model that is evaluated from now on."""
    module = model()
    with pytest.warns(UserWarning, match="2 FP8 layers"):
        evaluate(module)
    twin = copy.deepcopy(module)
    with pytest.warns(UserWarning, match="2 FP8 layers"):
        evaluate(twin)


def test_recipes_without_states_have_nothing_to_announce() -> None:
    assert evaluate(model(), Float8CurrentScaling()).any()


def test_a_forward_pass_in_high_precision_reads_no_scale() -> None:
    assert evaluate(model(), DelayedScaling(override_linear_precision=(True, False, False))).any()


def test_a_training_step_is_not_an_evaluation() -> None:
    """The scales of the first training step are 1, which is right and causes no warning."""
    train(model())


def test_attention_is_announced_too() -> None:
    q, k, v = (torch.randn(4, 2, 8) for _ in range(3))
    with (
        pytest.warns(UserWarning, match="^1 FP8 layer was evaluated"),
        torch.no_grad(),
        autocast(recipe=DelayedScaling(fp8_dpa=True)),
    ):
        DotProductAttention()(q, k, v, [4], 0.3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_announced_and_evaluated_as_the_eager_one() -> None:
    module = model()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="2 FP8 layers"):
        actual = evaluate(compiled)  # type: ignore[arg-type]
    assert torch.equal(actual, evaluate(module))


def test_a_warning_raised_as_an_error_does_not_interrupt_the_update() -> None:
    """Example: a teacher without scales is evaluated while a student trains."""
    student, teacher = model(), model()

    @autocast(recipe=SHORT)
    def step(x: Tensor) -> None:
        student(x)
        with torch.no_grad():
            teacher(x)

    with pytest.raises(UserWarning, match="2 FP8 layers"):
        step(torch.randn(4, 16))
    state = scaling_state(student[0])["input"]  # type: ignore[index]
    assert state.steps == 1
    assert state.amax_history[0] == 0


def test_a_failed_evaluation_is_announced_when_it_is_repeated() -> None:
    """The warning, raised as an error, does not replace the caller's exception."""
    module = model()

    @autocast(recipe=SHORT)
    @torch.no_grad()
    def fail() -> None:
        module(torch.ones(4, 16))
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(UserWarning, match="2 FP8 layers"):
        evaluate(module)


def test_the_first_pass_of_a_reentrant_checkpoint_is_not_an_evaluation() -> None:
    """It runs without gradients; the backward pass repeats it with gradients and records amaxes."""
    module = model()
    for _ in range(2):
        with autocast(recipe=SHORT):
            out = checkpoint(module, torch.randn(4, 16, requires_grad=True), use_reentrant=True)
            out.sum().backward()
    assert scaling_state(module[0])["input"].steps > 0  # type: ignore[index]
    fresh = model()
    with torch.no_grad(), pytest.warns(UserWarning, match="2 FP8 layers"), autocast(recipe=SHORT):
        fresh(torch.ones(4, 16))


def test_an_announcement_names_the_line_that_calls_a_decorated_function() -> None:
    module = model()

    @torch.no_grad()
    @autocast(recipe=SHORT)
    def decorated() -> Tensor:
        out: Tensor = module(torch.ones(4, 16))
        return out

    with pytest.warns(UserWarning, match="2 FP8 layers") as record:
        decorated()
    assert "contextlib" not in record[0].filename
    other = model()
    with pytest.warns(UserWarning, match="2 FP8 layers") as record:
        autocast(recipe=SHORT)(lambda: torch.no_grad()(other)(torch.ones(4, 16)))()
    assert record[0].filename == __file__
