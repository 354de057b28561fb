"""Layers with the same input share one cast, with the bits of a cast in every layer; states that differ stay separate.

To compare, a forward hook that does nothing makes every layer cast its own input.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fp8serve.fp8 import casting
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, Float8CurrentScaling, Recipe, from_name
from fp8serve.fp8.shared_input import SharedInput
from fp8serve.fp8.stateful import scaling_state

RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed most recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
    "current": Float8CurrentScaling(),
    "rowwise": from_name("rowwise"),
    "block": from_name("block"),
}


class Projections(nn.Module):
    """Layers q, k and v with the same input, and a layer o after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(128, 128), nn.Linear(128, 256, bias=False), nn.Linear(128, 128)
        self.o = nn.Linear(128, 128)
        self.shared = SharedInput()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.shared([self.q, self.k, self.v], x)
        return self.o(q * k.unflatten(-1, (2, 128)).sum(-2) + v)  # type: ignore[no-any-return]


def make(separately: bool) -> Projections:
    torch.manual_seed(0)
    model = Projections()
    convert(model)
    if separately:
        for layer in (model.q, model.k, model.v):
            layer.register_forward_hook(lambda *_: None)
    return model


def batches(count: int, shape: tuple[int, ...] = (3, 40, 128)) -> Iterator[Tensor]:
    noise = torch.Generator().manual_seed(1)
    for i in range(count):
        yield (torch.randn(shape, generator=noise) * (i + 1)).to(torch.bfloat16).requires_grad_()


def results(model: nn.Module, steps: int, recipe: Recipe, **options: Any) -> dict[str, Tensor]:
    """Returns the outputs, gradients and states of a few steps of SGD with two microbatches each."""
    tensors: dict[str, Tensor] = {}
    for step, parts in enumerate(zip(*[batches(2 * steps)] * 2, strict=True)):
        for i, x in enumerate(parts):
            y = run(model, x, recipe, i == 0, **options)
            y.float().square().mean().backward()  # type: ignore[no-untyped-call]
            tensors |= {f"y {step} {i}": y.detach(), f"dx {step} {i}": x.grad}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            tensors[f"{name} {step}"] = parameter.grad
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        tensors |= {f"{name} {step}": t.clone() for name, t in model.state_dict().items()} if step % 2 else {}
    return tensors


def run(
    model: nn.Module,
    x: Tensor,
    recipe: Recipe,
    is_first: bool,
    recompute: bool = False,
    accumulate: bool = False,
    torch_autocast: bool = False,
    enabled: bool = True,
) -> Tensor:
    context = torch.autocast("cpu", torch.bfloat16) if torch_autocast else nullcontext()
    x = x.float() if torch_autocast else x
    with context, autocast(enabled, recipe=recipe, is_first_microbatch=is_first if accumulate else None):
        return checkpoint(model, x, use_reentrant=False) if recompute else model(x)  # type: ignore[no-any-return]


def count_casts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of every cast that runs from now on."""
    calls: list[str] = []

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (calls.append(name), op(*arguments))[1]

    for name in ("_quantize_delayed", "_quantize", "_quantize_transpose"):
        monkeypatch.setattr(casting, name, counted(name, getattr(casting, name)))
    current = {key: (counted(str(key), op), rest) for key, (op, rest) in casting._CURRENT_OPS.items()}
    monkeypatch.setattr(casting, "_CURRENT_OPS", current)
    return calls


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


OPTIONS: list[dict[str, bool]] = [
    {},
    {"recompute": True},
    {"accumulate": True},
    {"torch_autocast": True},
    {"recompute": True, "accumulate": True},
    {"enabled": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("name", RECIPES)
def test_a_shared_cast_has_the_bits_of_separate_casts(name: str, options: dict[str, bool]) -> None:
    shared, separate = make(separately=False), make(separately=True)
    assert_equal(results(shared, 3, RECIPES[name], **options), results(separate, 3, RECIPES[name], **options))


@pytest.mark.parametrize("layout", ["tn", "any"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_input_is_cast_once(name: str, layout: casting.Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for separately in (False, True):
        model, (x,) = make(separately), batches(1)
        calls = count_casts(monkeypatch)
        with patch.object(casting, "layout_of", lambda device: layout), autocast(recipe=RECIPES[name]):
            model(x)
        counts.append(len(calls))
        monkeypatch.undo()
    directions = 2 if name in ("rowwise", "block") else 1  # the scales of x and of its transpose differ
    assert counts[1] - counts[0] == 2 * directions


@pytest.mark.parametrize("name", RECIPES)
def test_one_copy_of_the_transposed_input_is_saved(name: str) -> None:
    sizes: list[dict[int, int]] = []
    for separately in (False, True):
        model, (x,) = make(separately), batches(1)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            if tensor.itemsize == 1 and tensor.shape == (128, 120):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(recipe=RECIPES[name]):
            y = model(x)
        sizes.append(storages)
        del y
    assert len(sizes[1]) - len(sizes[0]) == 2


DELAYED = RECIPES["delayed"]


def trained(model: nn.Module, steps: int = 2) -> nn.Module:
    results(model, steps, DELAYED)
    return model


def inputs(model: Any) -> list[Any]:
    return [layer.scaling["input"] for layer in (model.q, model.k, model.v)]


def test_layers_share_a_state_until_it_is_accessed() -> None:
    model = make(separately=False)
    with autocast(recipe=DELAYED):
        model(next(batches(1)))
    q, k, v = inputs(model)
    assert q is k is v
    assert scaling_state(model.k)["input"] is not q
    assert torch.equal(scaling_state(model.k)["input"].amax_history, q.amax_history)
    assert inputs(model)[2] is q, "v still shares q's state"
    before = model.state_dict()
    assert len({before[f"{name}.input.scale"].data_ptr() for name in "qkv"}) == 3
    with autocast(recipe=DELAYED):
        model(next(batches(1)))
    assert len({id(state) for state in inputs(model)}) == 1, "equal states are shared again"


def test_a_layer_that_is_also_called_separately_has_its_own_state() -> None:
    """A separate call changes only its own layer's history, in steps with and without a shared call."""
    models = [make(separately=False), make(separately=True)]
    for model in models:
        for i, x in enumerate(batches(6)):
            with autocast(recipe=DELAYED):
                y = model(x) if i != 3 else model.o(x)
                if i in (1, 3, 4):
                    y = y + model.v(x * 5)
            y.float().sum().backward()  # type: ignore[no-untyped-call]
    assert_equal(models[0].state_dict(), models[1].state_dict())
    assert scaling_state(models[0].v)["input"].scale != scaling_state(models[0].q)["input"].scale


def test_states_that_differ_are_not_shared() -> None:
    models = [trained(make(separately)) for separately in (False, True)]
    for model in models:
        states = {n: t * 2 if n == "k.input.scale" else t for n, t in model.state_dict().items()}
        model.load_state_dict(states)
    assert_equal(results(models[0], 2, DELAYED), results(models[1], 2, DELAYED))
    assert_equal(models[0].state_dict(), models[1].state_dict())


def test_values_are_compared_once_for_states_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison synchronizes with the GPU, so it must not be repeated in every step."""
    from fp8serve.fp8 import shared_input

    model = trained(make(separately=False))
    scaling_state(model.k)["input"].scale.mul_(2)
    compared: list[int] = []
    equal = shared_input._are_equal
    monkeypatch.setattr(shared_input, "_are_equal", lambda states: (compared.append(1), equal(states))[1])
    for x in batches(3):
        with autocast(recipe=DELAYED):
            model(x)
    assert compared == [1]


def test_a_hook_that_changes_the_input_is_applied() -> None:
    models = [make(separately=False), make(separately=True)]
    for model in models:
        trained(model)
        model.k.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 3,))
    assert_equal(results(models[0], 2, DELAYED), results(models[1], 2, DELAYED))


def test_a_global_module_hook_is_called_for_every_layer() -> None:
    model, modules = make(separately=False), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: modules.append(module))
    try:
        with autocast(recipe=DELAYED):
            model(next(batches(1)))
    finally:
        handle.remove()
    assert all(any(layer is module for module in modules) for layer in (model.q, model.k, model.v))


def test_a_copy_shares_nothing_with_its_original() -> None:
    model = trained(make(separately=False))
    with autocast(recipe=DELAYED):
        model(next(batches(1)))
    copy = deepcopy(model)
    assert inputs(copy)[0] is inputs(copy)[1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained(copy)
    assert_equal(before, model.state_dict())


def test_frozen_weights_need_no_transposed_input() -> None:
    """Only k is trained; it needs a transposed input, which q, the first layer, does not cast."""
    models = [make(separately=False), make(separately=True)]
    for model in models:
        for layer in (model.q, model.v):
            layer.requires_grad_(False)
    runs = []
    for model in models:
        for x in batches(2):
            with autocast(recipe=DELAYED):
                y = model(x)
            y.float().square().sum().backward()  # type: ignore[no-untyped-call]
        runs.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None} | model.state_dict())
    assert "k.weight" in runs[0]
    assert_equal(*runs)


def test_observers_of_all_layers_see_the_input() -> None:
    model, casts = make(separately=False), []
    for name in "qkv":
        layer = getattr(model, name)
        layer.observer = lambda role, x, q, scale_inv, name=name: casts.append((name, role, float(x.detach().sum())))
    with autocast(recipe=DELAYED):
        model(next(batches(1)))
    sums = {total for _, role, total in casts if role == "input"}
    assert len(sums) == 1
    assert {name for name, role, _ in casts if role == "input"} == set("qkv")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in its tracer
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_compiled_model_has_the_bits_of_the_eager_one(name: str) -> None:
    """Reading the states, as for a checkpoint, does not cause a recompilation."""
    eager, compiled = make(separately=False), make(separately=False)
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(compiled, backend=counter, fullgraph=True)
    for x in batches(3):
        runs = []
        for runner in (eager, model):
            x.grad = None
            with autocast(recipe=RECIPES[name]):
                y = runner(x)
            y.float().square().sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            runs.append({"y": y.detach(), "dx": x.grad.clone()})
        assert_equal(*runs)
        assert_equal(eager.state_dict(), compiled.state_dict())
    assert counter.frame_count == 1
    assert type(compiled.q) is Linear


def test_calibrating_in_high_precision_does_not_share_states() -> None:
    """The calibrator reads and writes the states of every layer."""
    model = make(separately=False)
    with autocast(enabled=False, calibrating=True, recipe=DELAYED):
        model(next(batches(1)))
    q, k, v = inputs(model)
    assert q is not k
    assert torch.equal(q.amax_history, k.amax_history)
    assert k is not v
