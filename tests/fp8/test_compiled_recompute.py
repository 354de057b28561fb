"""Every combination of torch.compile, recomputation, accumulation and recipe gives the eager bits or an error."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.stateful import prepare_states

pytestmark = [
    # torch's own tracer instantiates the Function class that it deprecates
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # a reentrant checkpoint first runs without gradients, like an evaluation
    pytest.mark.filterwarnings("ignore:.*FP8 layers were evaluated under delayed scaling with scale 1:UserWarning"),
]

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "weights by row": DelayedScaling(amax_history_len=4, weight_granularity="row"),
    "high precision wgrad": DelayedScaling(amax_history_len=4, override_linear_precision=(False, False, True)),
    "current": Float8CurrentScaling(),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "block": Float8BlockScaling(),
}
COMPILED = ("nothing", "inside", "outside")
RECOMPUTED: tuple[bool | None, ...] = (None, False, True)  # the argument use_reentrant; None: nothing is recomputed
SMOKE = {("outside", False, 1, "delayed"), ("inside", True, 1, "delayed"), ("outside", False, 2, "current")}
REFUSED: dict[tuple[str, bool | None], tuple[type[Exception], str]] = {
    ("nothing", True): (RuntimeError, "call torch.utils.checkpoint.checkpoint with use_reentrant=False"),
    ("inside", True): (RuntimeError, "call torch.utils.checkpoint.checkpoint with use_reentrant=False"),
    ("inside", False): (CheckpointError, "during the (original )?forward"),
}


def combinations() -> Iterator[Any]:
    for each in product(COMPILED, RECOMPUTED, (1, 2), RECIPES):
        marks = [pytest.mark.slow, pytest.mark.smoke] if each in SMOKE else [pytest.mark.slow]
        yield pytest.param(*each, marks=marks, id="-".join(map(str, each)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)))


def wrap(module: nn.Module, compiled: str, reentrant: bool | None) -> Callable[[Tensor], Tensor]:
    """Returns a call of the module, compiled outside or inside of a checkpointed region."""
    torch._dynamo.reset()
    inner: Any = torch.compile(module, backend="aot_eager") if compiled == "inside" else module
    outer: Any = inner if reentrant is None else (lambda x: checkpoint(inner, x, use_reentrant=reentrant))
    return torch.compile(outer, backend="aot_eager") if compiled == "outside" else outer  # type: ignore[no-any-return]


def train(module: nn.Module, call: Callable[[Tensor], Tensor], recipe: Recipe, microbatches: int) -> list[Tensor]:
    """Gradients of the weights and of the inputs after every step, and the states at the end."""
    tensors: list[Tensor] = []
    for step in range(3):
        module.zero_grad()
        for number in range(microbatches):
            noise = torch.Generator().manual_seed(10 * step + number)
            x = (torch.randn(6, 24, generator=noise) * (1 + step)).requires_grad_()
            with autocast(recipe=recipe):
                y = call(x)
            y.square().mean().backward()
            assert x.grad is not None
            tensors.append(x.grad)
        tensors += [p.grad for p in module.parameters() if p.grad is not None]
    return [tensor.clone() for tensor in (*tensors, *module.state_dict().values())]


@pytest.mark.pairwise
@pytest.mark.parametrize(("compiled", "reentrant", "microbatches", "name"), list(combinations()))
def test_every_combination_has_the_eager_bits_or_is_refused(
    compiled: str, reentrant: bool | None, microbatches: int, name: str
) -> None:
    """The scales are updated between the two runs of a region; the second run must use those of the first."""
    module, eager = model(), model()
    call = wrap(module, compiled, reentrant)
    if refusal := REFUSED.get((compiled, reentrant)):
        error, message = refusal
        with pytest.raises(error, match=message):
            train(module, call, RECIPES[name], microbatches)
        return
    actual, expected = (train(m, c, RECIPES[name], microbatches) for m, c in ((module, call), (eager, eager)))
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow
def test_recomputation_inside_the_context_uses_its_scales() -> None:
    """The scales are not updated before the context ends, so a compiled region may be recomputed inside it."""
    results = []
    for compiled, reentrant in (("nothing", None), ("inside", False)):
        module = model()
        call = wrap(module, compiled, reentrant)
        for step in range(3):
            with autocast(recipe=RECIPES["delayed"]):
                call(torch.full((6, 24), 1.0 + step)).square().mean().backward()
        results.append([p.grad for p in module.parameters()] + list(module.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]


def test_record_amax_replaces_only_the_scale_of_its_own_state() -> None:
    """Each replacement runs a kernel, so a layer must not replace both of its scales for each of its two amaxes."""
    recipe = DelayedScaling(amax_history_len=4)
    layer = convert(nn.Linear(8, 8))
    prepare_states(layer, recipe)
    assert isinstance(layer, Linear)
    config_id, _config = layer.session.update_config(recipe, None)
    before = {name: state.scale for name, state in layer.scaling.items()}
    with autocast(recipe=recipe):
        torch.ops.fp8serve.record_amax(
            layer.scaling["input"].amax_history, torch.tensor(2.0), layer.key_tensor, config_id, "forward"
        )
        replaced = {name for name, state in layer.scaling.items() if state.scale is not before[name]}
    assert replaced == {"input"}
    assert layer.scaling["input"].scale == 224
    assert before["input"] == 1
