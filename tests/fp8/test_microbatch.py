"""A forward pass uses the current weight, however it was written. It uses a cached FP8 weight only if the caller passes
`is_first_microbatch=False`."""

import copy
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fp8serve import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    NormLinear,
    SiluMulLinear,
    autocast,
    convert,
    scaling_state,
)
from fp8serve.errors import RecipeError
from fp8serve.fp8.ops import reference
from fp8serve.fp8.recipe import Recipe

SHORT = DelayedScaling(amax_history_len=4)
RECIPES: dict[str, Recipe] = {
    "delayed": SHORT,
    "current": Float8CurrentScaling(),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "block": Float8BlockScaling(),
}
X = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(24, 16, bias=False), nn.Linear(16, 8, bias=False)))


def loss_of(model: nn.Module, recipe: Recipe, first: bool | None = None) -> Tensor:
    with autocast(recipe=recipe, is_first_microbatch=first):
        y = model(X)
    return y.square().sum()  # type: ignore[no-any-return]


@torch.no_grad()
def output(model: nn.Module, recipe: Recipe) -> Tensor:
    with autocast(recipe=recipe):
        return model(X)  # type: ignore[no-any-return]


def check_fresh(model: nn.Module, recipe: Recipe) -> None:
    """Checks that the model has the outputs of a new model with its weights and scales, with and without gradients."""
    fresh = network().to(next(model.parameters()).dtype)
    fresh.load_state_dict(model.state_dict())
    twin = copy.deepcopy(fresh)
    assert torch.equal(output(model, recipe), output(fresh, recipe))
    assert torch.equal(loss_of(model, recipe), loss_of(twin, recipe))


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Returns every optimizer of torch in each of its forms, except SparseAdam, which takes only sparse gradients."""
    classes = {
        n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    del classes["Optimizer"], classes["SparseAdam"]
    factories: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}
    for (name, cls), form in product(classes.items(), ("plain", "foreach", "fused")):
        flags = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}[form]
        try:
            cls([nn.Parameter(torch.zeros(2, 2))], lr=0.05, **flags)
        except (TypeError, RuntimeError):  # the optimizer has no such form
            continue
        flags |= {"max_iter": 3} if cls is torch.optim.LBFGS else {}
        factories[f"{name} {form}"] = lambda parameters, cls=cls, flags=flags: cls(parameters, lr=0.05, **flags)
    return factories


OPTIMIZERS = optimizers()


def test_optimizers_are_found_in_all_their_forms() -> None:
    """The parameters of the next test would be empty if torch renamed a flag."""
    assert {"SGD fused", "Adam fused", "AdamW fused", "Adagrad fused", "Muon plain", "Adafactor foreach"} <= set(
        OPTIMIZERS
    )
    assert {"LBFGS plain", "RMSprop foreach", "NAdam plain", "ASGD foreach"} <= set(OPTIMIZERS)


def before_backward(optimizer: Any, backward: Callable[[], None], set_to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    backward()
    optimizer.step()


def after_step(optimizer: Any, backward: Callable[[], None], set_to_none: bool) -> None:
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def never(optimizer: Any, backward: Callable[[], None], set_to_none: bool) -> None:
    backward()
    optimizer.step()


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")  # expected here
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("order", [before_backward, after_step, never])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_current_after_every_optimizer_in_every_order(
    name: str, order: Callable[..., None], set_to_none: bool
) -> None:
    for recipe in RECIPES.values():
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(2):
            before = parameters_to_vector(model.parameters()).clone()
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(
                    lambda model=model, optimizer=optimizer, recipe=recipe: closure(model, optimizer, recipe)
                )
            else:
                loss = loss_of(model, recipe)
                order(optimizer, loss.backward, set_to_none)
            assert not torch.equal(before, parameters_to_vector(model.parameters()))
            check_fresh(model, recipe)


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> Tensor:
    """Returns the closure that LBFGS calls several times a step, each time with other weights."""
    optimizer.zero_grad()
    check_fresh(model, recipe)
    optimizer.zero_grad()
    loss = loss_of(model, recipe)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def by_data(weight: Tensor) -> None:
    weight.data.mul_(2)


def by_new_data(weight: Tensor) -> None:
    weight.data = weight.data * 2


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= 2


@torch.no_grad()
def in_place(weight: Tensor) -> None:
    weight.mul_(2)


@torch.inference_mode()
def in_inference_mode(weight: Tensor) -> None:
    weight.mul_(2)


def by_average(weight: Tensor) -> None:
    """Overwrites the weight by an exponential moving average."""
    weight.data.copy_(0.5 * weight.data + 0.1)


def by_vector(weight: Tensor) -> None:
    vector_to_parameters(parameters_to_vector([weight]) * 2, [weight])


WRITES = [by_data, by_new_data, by_numpy, in_place, in_inference_mode, by_average, by_vector]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_way_to_write_a_weight(name: str, write: Callable[[Tensor], None]) -> None:
    """Writes while gradients exist, after an evaluation, and between two microbatches without is_first_microbatch."""
    model, recipe = network(), RECIPES[name]
    for _ in range(2):
        loss_of(model, recipe).backward()  # type: ignore[no-untyped-call]
        output(model, recipe)
        for weight in model.parameters():
            write(weight)
        check_fresh(model, recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_averaged_weights_may_be_swapped_in_to_evaluate_and_out_again(name: str) -> None:
    model, recipe = network(), RECIPES[name]
    average = [torch.full_like(p, 0.01) for p in model.parameters()]
    for _ in range(2):
        loss_of(model, recipe).backward()  # type: ignore[no-untyped-call]
        for _ in range(2):
            for i, weight in enumerate(model.parameters()):
                weight.data, average[i] = average[i], weight.data
            check_fresh(model, recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_loading_and_casting_a_module(name: str) -> None:
    model, recipe = network(), RECIPES[name]
    for assign in (False, True):
        loss_of(model, recipe).backward()  # type: ignore[no-untyped-call]
        model.load_state_dict({n: v.clone() * 2 for n, v in model.state_dict().items()}, assign=assign)
        check_fresh(model, recipe)
    loss_of(model, recipe).backward()  # type: ignore[no-untyped-call]
    check_fresh(model.to(torch.bfloat16).to(torch.float32), recipe)


def record_weight_casts(layer: Linear) -> list[Tensor]:
    """Returns a list that gets the quantized weight at every cast."""
    casts: list[Tensor] = []
    layer.observer = lambda name, values, q, scale_inv: casts.append(q) if name == "weight" else None
    return casts


def microbatch(layer: nn.Module, recipe: Recipe, first: bool | None) -> None:
    loss_of(layer, recipe, first).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_is_quantized_once_a_step_with_is_first_microbatch(name: str) -> None:
    layer = Linear(24, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    casts = record_weight_casts(layer)
    for step in range(3):
        for i in range(4):
            microbatch(layer, RECIPES[name], i == 0)
        assert len(casts) == step + 1
        if name == "delayed":
            assert scaling_state(layer)["weight"].steps.item() == step + 1
        optimizer.step()
        optimizer.zero_grad()


def test_a_layers_own_argument_overrides_the_context() -> None:
    layer = Linear(24, 16)
    casts = record_weight_casts(layer)
    with autocast(recipe=SHORT, is_first_microbatch=False):
        for first, count in ((True, 1), (False, 1), (None, 1), (True, 2)):
            layer(X, is_first_microbatch=first)
            assert len(casts) == count


@pytest.mark.parametrize("fused", [NormLinear(nn.LayerNorm(24), Linear(24, 16)), SiluMulLinear(Linear(24, 16))])
def test_fused_layers_take_is_first_microbatch(fused: Any) -> None:
    casts = record_weight_casts(fused.linear)
    sources = (X,) if isinstance(fused, NormLinear) else (X, X)
    with autocast(recipe=SHORT):
        for first, count in ((True, 1), (False, 1), (None, 2)):
            fused(*sources, is_first_microbatch=first)
            assert len(casts) == count


def test_without_is_first_microbatch_every_forward_pass_quantizes_the_weight() -> None:
    """As in Transformer Engine, the weight's history gets one row for each context that quantizes it."""
    layer = Linear(24, 16)
    casts = record_weight_casts(layer)
    for i in range(3):
        microbatch(layer, SHORT, None)
        assert len(casts) == scaling_state(layer)["weight"].steps.item() == i + 1
    with autocast(recipe=SHORT):
        layer(X)
        layer(X)
    assert len(casts) == 5
    assert scaling_state(layer)["weight"].steps.item() == 4
    assert scaling_state(layer)["weight"].amax_history[1:].unique().numel() == 1


def test_the_second_microbatch_uses_the_weight_and_the_scale_of_the_first() -> None:
    layer = Linear(24, 16, bias=False)
    microbatch(layer, SHORT, True)
    with autocast(recipe=SHORT, is_first_microbatch=False):
        y = layer(X)
    exact = reference.quantize(layer.weight.detach(), torch.tensor(1.0), torch.float8_e4m3fn)[0].double()
    scale = torch.tensor(448.0) / X.abs().max()
    values = reference.quantize(X, scale, torch.float8_e4m3fn)[0].double() / scale.double()
    torch.testing.assert_close(y.detach().double(), values @ exact.t(), rtol=1e-5, atol=1e-6)


def swapped(layer: Linear) -> None:
    layer.weight.data = layer.weight.data * 2


def replaced(layer: Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def counted(layer: Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def stepped_elsewhere(layer: Linear) -> None:
    """Steps an optimizer of other parameters, such as master weights, which may be copied here unnoticed."""
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=1.0, fused=True).step()


def loaded(layer: Linear) -> None:
    layer.load_state_dict({n: v.clone() for n, v in layer.state_dict().items()})


@pytest.mark.parametrize("change", [swapped, replaced, counted, stepped_elsewhere, loaded])
@pytest.mark.parametrize("name", RECIPES)
def test_a_changed_weight_is_quantized_again_despite_is_first_microbatch(
    name: str, change: Callable[[Linear], None]
) -> None:
    layer, recipe = Linear(24, 16), RECIPES[name]
    casts = record_weight_casts(layer)
    microbatch(layer, recipe, True)
    change(layer)
    for _ in range(2):  # and the new data are cached again
        microbatch(layer, recipe, False)
        assert len(casts) == 2


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_cached_weights_serve_only_their_recipe_and_directions() -> None:
    layer = Linear(24, 16)
    casts = record_weight_casts(layer)
    with torch.no_grad():
        loss_of(layer, SHORT, True)  # without gradients, no transposed weight is cached
    x = X.clone().requires_grad_()
    for recipe, count in ((SHORT, 2), (SHORT, 2), (DelayedScaling(amax_history_len=8), 3), (SHORT, 4)):
        with autocast(recipe=recipe, is_first_microbatch=False):
            layer(x)
        assert len(casts) == count


def test_an_evaluation_between_two_microbatches_keeps_the_cached_weight() -> None:
    layer = Linear(24, 16)
    casts = record_weight_casts(layer)
    microbatch(layer, SHORT, True)
    output(layer, SHORT)
    microbatch(layer, SHORT, False)
    assert len(casts) == 2  # the first microbatch and the evaluation


def test_a_copy_starts_without_a_cached_weight() -> None:
    layer = Linear(24, 16)
    microbatch(layer, SHORT, True)
    twin = copy.deepcopy(layer)
    twin.weight.data.mul_(2)
    casts = record_weight_casts(twin)
    microbatch(twin, SHORT, False)
    assert len(casts) == 1


def test_a_cached_fp8_weight_does_not_keep_the_weight_alive() -> None:
    layer = Linear(24, 16)
    microbatch(layer, SHORT, True)
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.zeros(16, 24))
    layer.zero_grad()
    assert old() is None


@pytest.mark.parametrize("invalid", [1, "yes", torch.tensor(True)])
def test_is_first_microbatch_must_be_none_true_or_false(invalid: Any) -> None:
    with pytest.raises(RecipeError, match="is_first_microbatch must be None, True or False"):
        autocast(is_first_microbatch=invalid)
    with autocast(), pytest.raises(RecipeError, match="is_first_microbatch must be None, True or False"):
        Linear(24, 16)(X, is_first_microbatch=invalid)


def test_weights_that_were_created_in_inference_mode() -> None:
    """Such weights have no version counter."""
    with torch.inference_mode():
        layer = Linear(24, 16)
        for first in (None, True, False):
            with autocast(recipe=Float8CurrentScaling(), is_first_microbatch=first):
                y = layer(X)
    assert y.isfinite().all()
