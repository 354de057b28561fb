"""Amax reduction: one collective for each update, equal scales, and no hang if a rank skips a module or all modules."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from fp8serve import DelayedScaling, Linear, autocast, scaling_state
from fp8serve.errors import RecipeError
from fp8serve.fp8 import autocast as contexts

from .ranks import counted, on_ranks
from .runs import states

pytestmark = pytest.mark.distributed

RECIPE = DelayedScaling(amax_history_len=4)


def train(rank: int) -> Any:
    """Rank r multiplies its data by r + 1; odd ranks skip the second layer at first; rank 0 sees an infinity."""
    torch.manual_seed(0)
    first, second, never = Linear(8, 8), Linear(8, 8), Linear(8, 8)
    group = dist.group.WORLD
    with counted() as wire:
        for step in range(3):
            x = torch.full((2, 8), float(rank + 1))
            if step == 2 and rank == 0:
                x[0, 0] = torch.inf
            with autocast(recipe=RECIPE, amax_reduction_group=group):
                y = first(x)
                if not (step == 0 and rank % 2 == 1):
                    y = second(y)
            (y.sum() * (rank + 1)).backward()
        with autocast(recipe=RECIPE, amax_reduction_group=group):
            if rank == 1:
                first(torch.full((2, 8), 7.0))  # the other ranks run no module
    return states(first), states(second), states(never), dict(wire.calls)


@pytest.mark.smoke
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_equal_scales_whatever_modules_they_ran(world: int) -> None:
    ranks = on_ranks(world, train)
    assert all(r == ranks[0] for r in ranks)
    first, second, never, calls = ranks[0]
    largest = float(world)
    assert first["input"][1] == [0.0, largest, largest, 7.0]  # maxima over ranks; the infinite step was dropped
    assert first["input"][2] == 1
    assert {name: entry[3] for name, entry in second.items()} == {"input": 3, "weight": 3, "grad_output": 3}
    assert never == {}
    assert calls == {"allreduce": 3 * 2 + 1}  # one for each forward and one for each backward pass, for all layers


def batches(step: int, rank: int) -> Any:
    """Rank r has data in the first r + 1 steps only, so that every rank has steps without data."""
    return torch.full((2, 8), float(step + rank + 1)) if step <= rank else None


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(8, 8), Linear(8, 8))


def idle(rank: int) -> Any:
    """A training loop without FP8 code: gradients are averaged by hand, and a rank without data skips both passes."""
    model, group, world = two_layers(), dist.group.WORLD, dist.get_world_size()
    scales = []
    for step in range(world + 1):
        with autocast(recipe=RECIPE, amax_reduction_group=group):
            x = batches(step, rank)
            y = None if x is None else model(x)
        if y is not None:
            y.square().sum().backward()
        for parameter in model.parameters():  # a collective between the others' backward and this rank's next context
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.data -= 1e-3 * gradient
            parameter.grad = None
        scales.append([states(layer) for layer in model])
    return scales[-1], model.state_dict()["0.weight"]


def idle_alone(world: int) -> Any:
    """Runs the batches of all ranks in one process, with one context and one backward pass for each step."""
    model = two_layers()
    for step in range(world + 1):
        with autocast(recipe=RECIPE):
            losses = [model(x).square().sum() for r in range(world) if (x := batches(step, r)) is not None]
        if losses:
            torch.stack(losses).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= 1e-3 * parameter.grad
                parameter.grad = None
    return [states(layer) for layer in model], model.state_dict()["0.weight"]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_run_nothing_neither_hang_nor_diverge(world: int) -> None:
    ranks = on_ranks(world, idle)
    expected, weight = idle_alone(world)
    assert expected[1]["grad_output"][3] == world
    for rank_states, rank_weight in ranks:
        assert rank_states == ranks[0][0]
        assert torch.equal(rank_weight, ranks[0][1])
        torch.testing.assert_close(rank_weight, weight, rtol=1e-5, atol=1e-6)
        for layer, alone in zip(rank_states, expected, strict=True):
            for name, (scale, history, nonfinite, steps) in alone.items():
                assert layer[name][0] == pytest.approx(scale, rel=1e-5)  # sums of gradients in another order
                assert layer[name][1] == pytest.approx(history, rel=1e-5)
                assert layer[name][2:] == [nonfinite, steps]


def skipping(rank: int) -> Any:
    """Rank 1 runs the layer with gradients, and then no backward pass."""
    layer, group = Linear(8, 8), dist.group.WORLD
    try:
        for _ in range(2):
            with autocast(recipe=RECIPE, amax_reduction_group=group):
                y = layer(torch.ones(2, 8))
            if rank == 0:
                y.sum().backward()
    except RecipeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_skips_its_backward_pass_gets_an_error() -> None:
    for message in on_ranks(2, skipping):
        assert "must call backward when the others do" in message


def compiled(rank: int) -> Any:
    """Rank 0 runs a compiled layer, rank 1 no layer."""
    layer, group = Linear(8, 8), dist.group.WORLD
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with autocast(recipe=RECIPE, amax_reduction_group=group):
            y = run(torch.ones(2, 8)) if rank == 0 else None
            assert bool(contexts.current_step().configs_with_backward) is (rank == 0)
        if y is not None:
            y.sum().backward()
    return states(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its tracer; forked ranks inherit the filter
def test_compiled_layers_announce_their_backward_pass() -> None:
    one, other = on_ranks(2, compiled)
    assert one["input"] == other["input"]
    assert {name: entry[3] for name, entry in other.items()} == {"input": 3, "weight": 3, "grad_output": 2}


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
@pytest.mark.parametrize(
    ("frozen", "graph", "override", "expected"),
    [
        (False, True, (False, False, False), True),
        (False, False, (False, False, False), False),
        (True, True, (False, False, False), False),  # nothing requires a gradient
        (False, True, (False, True, True), False),  # gradients in high precision are not staged
        (False, True, (True, True, False), True),
    ],
)
def test_a_backward_pass_is_expected_if_gradients_will_be_staged(
    frozen: bool, graph: bool, override: tuple[bool, bool, bool], expected: bool
) -> None:
    layer = Linear(8, 8, bias=False).requires_grad_(not frozen)
    recipe = DelayedScaling(amax_history_len=4, override_linear_precision=override)
    with autocast(recipe=recipe), torch.set_grad_enabled(graph):
        layer(torch.ones(2, 8))
        assert bool(contexts.current_step().configs_with_backward) is expected


def discarding(rank: int) -> Any:
    """Rank 0 keeps modules that the other ranks have deleted, and runs a copy that they do not have."""
    dropped = [Linear(8, 8) for _ in range(40)]
    layer = Linear(8, 8)
    if rank != 0:
        dropped.clear()
    extra = copy.deepcopy(layer) if rank == 0 else None
    with autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        layer(torch.full((2, 8), float(rank + 1)))
        if extra is not None:
            extra(torch.ones(2, 8))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_modules_of_one_rank_only_do_not_disturb_the_reduction() -> None:
    assert on_ranks(2, discarding) == [2.0, 2.0]


def halves(rank: int) -> Any:
    """Ranks 0 and 1 reduce in one group, ranks 2 and 3 in another."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = Linear(8, 8)
    with autocast(recipe=RECIPE, amax_reduction_group=groups[rank // 2]):
        layer(torch.full((2, 8), float(rank + 1)))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_amaxes_are_reduced_over_the_given_group_only() -> None:
    assert on_ranks(4, halves) == [2.0, 2.0, 4.0, 4.0]


def without_reduction(rank: int) -> Any:
    layer = Linear(8, 8)
    with autocast(recipe=DelayedScaling(amax_history_len=4, reduce_amax=False), amax_reduction_group=dist.group.WORLD):
        layer(torch.full((2, 8), float(rank + 1)))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_reduce_amax_false_keeps_each_ranks_own_amax() -> None:
    assert on_ranks(2, without_reduction) == [1.0, 2.0]


def failing(rank: int) -> Any:
    if rank == 1:
        raise RecipeError("as planned")
    dist.barrier()


def test_a_failing_rank_fails_the_test_at_once() -> None:
    with pytest.raises(ProcessRaisedException, match=r"as planned|closed by peer"):
        on_ranks(2, failing)
