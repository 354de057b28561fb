"""Slots of modules in the amax collective: copies, large models, models of one rank only, and own sessions."""

import copy
from typing import Any

import pytest
import torch

from fp8serve import DelayedScaling, Linear, Session, autocast, scaling_state
from fp8serve.errors import RecipeError

from .ranks import counted, on_ranks
from .runs import states

pytestmark = pytest.mark.distributed

RECIPE = DelayedScaling(amax_history_len=4)


def newest(layer: Linear) -> float:
    return scaling_state(layer)["input"].amax_history[-1].item()


def run(layer: torch.nn.Module, rank: int, session: Session | None = None) -> None:
    """Runs a forward pass on data of magnitude rank + 1."""
    with autocast(recipe=RECIPE, session=session):
        layer(torch.full((2, 8), float(rank + 1)))


def copying(rank: int) -> Any:
    """Rank 0 alone copies the model, more often than the collective has slots."""
    layer = Linear(8, 8)
    for _ in range(1100 if rank == 0 else 0):
        copied = copy.deepcopy(layer)
        with torch.no_grad(), autocast(recipe=RECIPE):
            copied(torch.full((2, 8), 9.0))
    with counted() as wire:
        run(layer, rank)
    later = Linear(8, 8)
    run(later, rank)
    return newest(layer), newest(later), wire.bytes["allreduce"]


@pytest.mark.smoke
def test_copies_on_one_rank_change_neither_the_length_nor_the_slots_of_the_collective() -> None:
    one, other = on_ranks(2, copying)
    assert one == other
    assert one[:2] == (2.0, 2.0)


def running_copies(rank: int) -> Any:
    """Rank 0 runs copies of the model, with reduction; then all ranks create another model."""
    layer = Linear(8, 8)
    extra = [copy.deepcopy(layer) for _ in range(3 if rank == 0 else 0)]
    with autocast(recipe=RECIPE):
        for module in (layer, *extra):
            module(torch.full((2, 8), float(rank + 1) if module is layer else 100.0))
    later = Linear(8, 8)
    run(later, rank)
    return newest(layer), newest(later)


def test_amaxes_of_a_copy_do_not_enter_another_model() -> None:
    assert on_ranks(2, running_copies) == [(2.0, 2.0), (2.0, 2.0)]


def copied_everywhere(rank: int) -> Any:
    twin = copy.deepcopy(Linear(8, 8))
    run(twin, rank)
    return newest(twin)


def test_a_copy_that_all_ranks_make_is_reduced() -> None:
    assert on_ranks(2, copied_everywhere) == [2.0, 2.0]


def large(rank: int) -> Any:
    """Creates more modules than a group has slots at first; the last module runs on rank 0 only."""
    layers = [Linear(8, 8, bias=False) for _ in range(1030)]
    calls = []
    for _ in range(2):
        with counted() as wire, autocast(recipe=RECIPE):
            y = layers[0](torch.full((2, 8), float(rank + 1)))
            if rank == 0:
                y = y + layers[-1](torch.full((2, 8), 5.0))
        y.sum().backward()
        calls.append(wire.calls["allreduce"])
    return states(layers[0]), states(layers[-1]), calls


def test_a_model_larger_than_the_first_collective_is_reduced_at_once() -> None:
    one, other = on_ranks(2, large)
    assert one == other
    first, last, calls = one
    assert first["input"][1] == [0.0, 0.0, 2.0, 2.0]
    assert last["input"][1] == [0.0, 0.0, 5.0, 5.0]
    assert [state[3] for state in last.values()] == [2, 2, 2]
    assert calls == [2, 1]  # forward passes only; the first update needs a second collective


def growing(rank: int) -> Any:
    """Creates a second model later, for which the group has too few slots; only rank 0 runs it."""
    layer, counters = Linear(8, 8), []
    run(layer, rank)
    later = [Linear(8, 8, bias=False) for _ in range(1030)][-1]
    for _ in range(3):
        with counted() as wire, autocast(recipe=RECIPE):
            layer(torch.full((2, 8), float(rank + 1)))
            if rank == 0:
                later(torch.full((2, 8), 5.0))
        counters.append((wire.calls["allreduce"], [s.steps.item() for s in scaling_state(later).values()][:1]))
    return counters, states(later), newest(layer)


def test_slots_that_are_needed_later_are_added_in_the_next_step() -> None:
    (one, state, newest_here), (other, other_state, newest_there) = on_ranks(2, growing)
    assert one == [(1, [0]), (1, [1]), (1, [2])]
    assert other == [(1, []), (1, [1]), (1, [2])]  # rank 1 has states of a model that it has not run
    assert state == other_state
    assert newest_here == newest_there == 2.0


def owned(rank: int) -> Any:
    """The ranks have created different numbers of modules; rank 1 does not run the model in the first step."""
    others = [Linear(8, 8) for _ in range(3 * rank)]
    model = torch.nn.Sequential(Linear(8, 8), Linear(8, 8))
    session = Session(model)
    for step in range(2):
        with counted() as wire, autocast(recipe=RECIPE, session=session):
            y = model(torch.full((2, 8), float(rank + 1))) if rank == 0 or step == 1 else None
        if y is not None:
            y.sum().backward()
    with autocast(recipe=RECIPE, session=session):
        pass  # reduces the last gradient amaxes, since rank 1 had no backward pass in the first step
    return [states(layer) for layer in model], wire.calls["allreduce"], len(others)  # type: ignore[arg-type]


def test_ranks_that_made_different_modules_agree_in_a_session_of_the_model() -> None:
    one, other = on_ranks(2, owned)
    assert one[0] == other[0]
    assert one[0][0]["input"][1] == [0.0, 0.0, 1.0, 2.0]


def copied_session(rank: int) -> Any:
    """Rank 0 copies a model with its own session, and runs the copy without reduction."""
    model = torch.nn.Sequential(Linear(8, 8))
    session = Session(model)
    local_recipe = DelayedScaling(amax_history_len=4, reduce_amax=False)
    if rank == 0:
        twin = copy.deepcopy(model)
        with autocast(recipe=local_recipe, session=Session.of(twin)):
            twin(torch.full((2, 8), 50.0))
        assert newest(twin[0]) == 50.0
    run(model, rank, session)
    return newest(model[0])  # type: ignore[arg-type]


def test_a_copy_of_a_model_with_a_session_has_a_session_of_its_own() -> None:
    assert on_ranks(2, copied_session) == [2.0, 2.0]


def unnamed(rank: int) -> Any:
    model = torch.nn.Sequential(Linear(8, 8))
    session = Session(model)
    try:
        run(model, rank)
    except RecipeError as error:
        run(model, rank, session)  # the failed step has changed no state
        return str(error), newest(model[0])  # type: ignore[arg-type]
    return "no error", 0.0


def test_a_layer_of_another_session_than_the_context_is_refused() -> None:
    for message, amax in on_ranks(2, unnamed):
        assert "name the session of its model: autocast(session=...)" in message
        assert amax == 2.0
