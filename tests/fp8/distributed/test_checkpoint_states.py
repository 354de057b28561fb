"""torch.distributed.checkpoint of converted models: it gets, saves, loads and sets their scaling states, too."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8serve import (
    DelayedScaling,
    DotProductAttention,
    Float8CurrentScaling,
    autocast,
    restore_scaling,
    scaling_state,
)
from fp8serve.fp8.fsdp import gather_in_fp8
from fp8serve.fp8.stateful import prepare_states

from .ranks import on_ranks
from .runs import DELAYED, batch, loss_of, network
from .test_fsdp import shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Trained = tuple[nn.Module, torch.optim.Optimizer]


def whole(value: Any) -> Tensor:
    found: Tensor = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def load_saved(model: nn.Module, folder: Path) -> None:
    model.load_state_dict(load_file(folder / "model.safetensors"))


def prepared(model: nn.Module) -> Trained:
    prepare_states(model, DELAYED)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(trained: Trained, number: int, rank: int = 0) -> float:
    """One optimizer step; returns its loss."""
    model, optimizer = trained
    with autocast(recipe=DELAYED):
        loss = loss_of(model, batch(number, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def states(model: nn.Module) -> dict[str, Tensor]:
    """The scaling states, by the names of the unwrap_model model."""
    parts = ("scale", "amax_history", "nonfinite", "steps")
    found = {n.removeprefix("module.").removeprefix("_orig_mod."): v for n, v in model.state_dict().items()}
    return {n: whole(v) for n, v in found.items() if n.endswith(parts)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() != set() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_torch_gets_is_the_state_dict_and_what_it_sets_continues_with_the_same_bits() -> None:
    source, target = prepared(network()), prepared(network())
    for number in range(2):
        step(source, number)
    got, optimizer_state = get_state_dict(*source)
    assert list(got) == list(source[0].state_dict())
    alone = copy.deepcopy(optimizer_state)  # torch's optimizers share the tensors that they are given
    set_state_dict(*target, model_state_dict=got, optim_state_dict=alone)
    assert same(states(source[0]), states(target[0]))
    assert [step(source, n) for n in range(2, 5)] == [step(target, n) for n in range(2, 5)]


def test_a_model_that_has_never_run_takes_the_states_too() -> None:
    source, target = prepared(network()), network()
    step(source, 0)
    set_model_state_dict(target, get_model_state_dict(source[0]))
    assert same(states(source[0]), states(target))


def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    source, target = prepared(network()), prepared(network())
    for number in range(2):
        step(source, number)
    model_state, optimizer_state = get_state_dict(*source)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    places, optimizer_places = get_state_dict(*target)
    dcp.load({"model": places, "optimizer": optimizer_places}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(*target, model_state_dict=places, optim_state_dict=optimizer_places)
    assert [step(source, n) for n in range(2, 5)] == [step(target, n) for n in range(2, 5)]


def test_a_compiled_model_is_named_like_the_original() -> None:
    source, target = prepared(network()), prepared(network())
    step(source, 0)
    got = get_model_state_dict(torch.compile(source[0], backend="eager"))
    assert list(got) == list(source[0].state_dict())
    set_model_state_dict(torch.compile(target[0], backend="eager"), got)
    assert same(states(source[0]), states(target[0]))


def test_attention_is_named_too() -> None:
    source, target = DotProductAttention(), DotProductAttention()
    q, k, v = (torch.randn(4, 2, 8).requires_grad_() for _ in range(3))
    with autocast(recipe=DelayedScaling(amax_history_len=4, fp8_dpa=True)):
        source(q, k, v, [4], 0.3).sum().backward()
    set_model_state_dict(nn.Sequential(target), get_model_state_dict(nn.Sequential(source)))
    assert same(source.state_dict(), target.state_dict())


def test_the_states_are_no_buffers_where_tensors_are_moved_or_broadcast() -> None:
    model, _ = prepared(network())
    assert list(model.buffers()) == []
    layer = model[2]  # type: ignore[index]
    assert list(layer.buffers()) == []
    assert list(layer.buffers(recurse=False)) == []


def test_accelerate_offloads_a_trained_model_and_loads_it() -> None:
    """It looks every buffer that a layer lists up as an attribute of the layer."""
    accelerate = pytest.importorskip("accelerate")
    trained = prepared(network())
    step(trained, 0)
    model, _ = trained
    with torch.no_grad(), autocast(recipe=DELAYED):
        expected = loss_of(model, batch(1, 0))
        accelerate.cpu_offload(model, execution_device="cpu")
        assert torch.equal(loss_of(model, batch(1, 0)), expected)


@pytest.mark.parametrize("restore", [restore_scaling, load_saved])
@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter:UserWarning")  # torch: offloaded weights
def test_accelerate_places_the_weights_and_the_states_are_restored(
    tmp_path: Path, restore: Callable[[nn.Module, Path], Any]
) -> None:
    """Its loader follows keys by attributes, which a state has none of: it loads the weights of a model that has not
    run, and the states are restored afterwards, also of layers whose weights are on disk while they do not run."""
    accelerate = pytest.importorskip("accelerate")
    trained, model = prepared(network()), network()
    step(trained, 0)
    save_file(trained[0].state_dict(), tmp_path / "model.safetensors")
    places = {name: "cpu" if name == "0" else "disk" for name, _ in model.named_children()}
    accelerate.load_checkpoint_and_dispatch(model, tmp_path, places, offload_folder=tmp_path / "offloaded")
    restore(model, tmp_path)
    assert same(states(trained[0]), states(model))
    with torch.no_grad(), autocast(recipe=DELAYED):
        assert torch.equal(loss_of(model, batch(1, 0)), loss_of(trained[0], batch(1, 0)))


def test_accelerate_loads_into_a_model_that_has_states(tmp_path: Path) -> None:
    """Without a map of devices it calls torch's function, which finds states; the map is given afterwards."""
    accelerate = pytest.importorskip("accelerate")
    trained, (model, _) = prepared(network()), prepared(network())
    step(trained, 0)
    save_file(trained[0].state_dict(), tmp_path / "model.safetensors")
    accelerate.load_checkpoint_in_model(model, tmp_path)
    accelerate.dispatch_model(model, dict.fromkeys([n for n, _ in model.named_children()], "cpu"), force_hooks=True)
    assert same(states(trained[0]), states(model))
    with torch.no_grad(), autocast(recipe=DELAYED):
        assert torch.equal(loss_of(model, batch(1, 0)), loss_of(trained[0], batch(1, 0)))


def test_states_follow_parameters_that_are_moved_one_by_one() -> None:
    """As accelerate moves them to several devices. "meta" stands for the second device."""
    model, _ = prepared(network())
    for state in scaling_state(model[2]).values():  # type: ignore[index]
        state.move(torch.device("meta"))
    prepare_states(model, DELAYED)
    assert {s.scale.device.type for s in scaling_state(model[2]).values()} == {"cpu"}  # type: ignore[index]


def test_states_prepared_on_meta_begin_anew_on_a_device() -> None:
    with torch.device("meta"):
        model, _ = prepared(network())
    model.to_empty(device="cpu")
    assert same(states(model), states(prepared(network())[0]))


def test_a_recipe_without_states_prepares_none() -> None:
    model = network()
    prepare_states(model, Float8CurrentScaling())
    assert states(model) == {}


def sharded(in_fp8: bool) -> Trained:
    model = network()
    return prepared(shard(gather_in_fp8(model) if in_fp8 else model))


def interrupted(rank: int, folder: str, in_fp8: bool) -> Any:
    """Four steps; two, saved and loaded into a model sharded anew, and two more. Then as whole tensors."""
    through, before, after = (sharded(in_fp8) for _ in range(3))
    expected = [step(through, n, rank) for n in range(4)]
    found = [step(before, n, rank) for n in range(2)]
    if in_fp8:  # a shard that is gathered in FP8 is saved as whole tensors
        options = StateDictOptions(full_state_dict=True)
        model_state, optimizer_state = get_state_dict(*before, options=options)
        set_state_dict(*after, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    else:
        model_state, optimizer_state = get_state_dict(*before)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        places, optimizer_places = get_state_dict(*after)
        dcp.load({"model": places, "optimizer": optimizer_places}, checkpoint_id=folder)
        set_state_dict(*after, model_state_dict=places, optim_state_dict=optimizer_places)
    return expected, found + [step(after, n, rank) for n in range(2, 4)]


@pytest.mark.distributed
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_sharded_model_resumes_with_the_same_bits(tmp_path: Path, in_fp8: bool) -> None:
    for expected, found in on_ranks(2, interrupted, str(tmp_path), in_fp8):
        assert found == expected


def broadcast(rank: int) -> Any:
    """The first rank has the state of a trained DDP model, and gives it to all, in a model wrapped anew."""
    source = prepared(DistributedDataParallel(network()))
    for number in range(2):
        step(source, number, rank)
    target = DistributedDataParallel(network())
    prepare_states(target, DELAYED)
    got = get_model_state_dict(source[0])
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
    set_model_state_dict(target, dict(got) if rank == 0 else {}, options=options)
    return list(got), states(source[0]), states(target), states(source[0].module)


@pytest.mark.smoke
@pytest.mark.distributed
def test_states_reach_every_rank_of_a_wrapped_model() -> None:
    for names, expected, found, unwrap_model in on_ranks(2, broadcast):
        assert "0.up.weight.scale" in names
        assert same(expected, found)
        assert same(expected, unwrap_model)
