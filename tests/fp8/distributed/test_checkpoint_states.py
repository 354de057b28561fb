"""torch.distributed.checkpoint saves and loads the scaling states of converted models, too."""

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
    tensor: Tensor = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return tensor


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
    """Returns the scaling states, by their names in the unwrapped model."""
    parts = ("scale", "amax_history", "nonfinite", "steps")
    tensors = {n.removeprefix("module.").removeprefix("_orig_mod."): v for n, v in model.state_dict().items()}
    return {n: whole(v) for n, v in tensors.items() if n.endswith(parts)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() != set() and all(torch.equal(a[name], b[name]) for name in a)


def test_get_state_dict_and_set_state_dict_restore_a_run_with_the_same_bits() -> None:
    source, target = prepared(network()), prepared(network())
    for number in range(2):
        step(source, number)
    state_dict, optimizer_state = get_state_dict(*source)
    assert list(state_dict) == list(source[0].state_dict())
    optimizer_copy = copy.deepcopy(optimizer_state)  # optimizers share the tensors of a loaded state dict
    set_state_dict(*target, model_state_dict=state_dict, optim_state_dict=optimizer_copy)
    assert same(states(source[0]), states(target[0]))
    assert [step(source, n) for n in range(2, 5)] == [step(target, n) for n in range(2, 5)]


def test_states_can_be_set_on_a_model_that_has_not_run() -> None:
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
    loaded, loaded_optimizer = get_state_dict(*target)
    dcp.load({"model": loaded, "optimizer": loaded_optimizer}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(*target, model_state_dict=loaded, optim_state_dict=loaded_optimizer)
    assert [step(source, n) for n in range(2, 5)] == [step(target, n) for n in range(2, 5)]


def test_the_state_dict_of_a_compiled_model_has_the_names_of_the_original() -> None:
    source, target = prepared(network()), prepared(network())
    step(source, 0)
    state_dict = get_model_state_dict(torch.compile(source[0], backend="eager"))
    assert list(state_dict) == list(source[0].state_dict())
    set_model_state_dict(torch.compile(target[0], backend="eager"), state_dict)
    assert same(states(source[0]), states(target[0]))


def test_states_of_attention_are_saved_and_loaded() -> None:
    source, target = DotProductAttention(), DotProductAttention()
    q, k, v = (torch.randn(4, 2, 8).requires_grad_() for _ in range(3))
    with autocast(recipe=DelayedScaling(amax_history_len=4, fp8_dpa=True)):
        source(q, k, v, [4], 0.3).sum().backward()
    set_model_state_dict(nn.Sequential(target), get_model_state_dict(nn.Sequential(source)))
    assert same(source.state_dict(), target.state_dict())


def test_states_are_not_listed_as_buffers() -> None:
    model, _ = prepared(network())
    assert list(model.buffers()) == []
    layer = model[2]  # type: ignore[index]
    assert list(layer.buffers()) == []
    assert list(layer.buffers(recurse=False)) == []


def test_accelerate_offloads_a_trained_model_and_loads_it() -> None:
    """accelerate accesses every listed buffer as an attribute of its layer, so states must not be listed."""
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
def test_states_are_restored_after_accelerate_has_loaded_the_weights(
    tmp_path: Path, restore: Callable[[nn.Module, Path], Any]
) -> None:
    """accelerate's loader resolves keys as attributes, and states are no attributes. So it loads the weights into a
    model that has not run, and the states are restored afterwards, also for layers that are offloaded to disk."""
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
    """Without a device map, accelerate calls torch's load_state_dict, which loads states; the map is applied later."""
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
    """accelerate moves parameters to several devices. The device "meta" stands for the second one."""
    model, _ = prepared(network())
    for state in scaling_state(model[2]).values():  # type: ignore[index]
        state.move(torch.device("meta"))
    prepare_states(model, DELAYED)
    assert {s.scale.device.type for s in scaling_state(model[2]).values()} == {"cpu"}  # type: ignore[index]


def test_states_prepared_on_meta_are_reset_by_to_empty() -> None:
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
    """Returns the losses of four steps, and of two steps, a checkpoint, and two steps of a newly sharded model."""
    uninterrupted, before, after = (sharded(in_fp8) for _ in range(3))
    expected = [step(uninterrupted, n, rank) for n in range(4)]
    losses = [step(before, n, rank) for n in range(2)]
    if in_fp8:  # a shard that is gathered in FP8 is saved as whole tensors
        options = StateDictOptions(full_state_dict=True)
        model_state, optimizer_state = get_state_dict(*before, options=options)
        set_state_dict(*after, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    else:
        model_state, optimizer_state = get_state_dict(*before)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        loaded, loaded_optimizer = get_state_dict(*after)
        dcp.load({"model": loaded, "optimizer": loaded_optimizer}, checkpoint_id=folder)
        set_state_dict(*after, model_state_dict=loaded, optim_state_dict=loaded_optimizer)
    return expected, losses + [step(after, n, rank) for n in range(2, 4)]


@pytest.mark.distributed
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_sharded_model_resumes_with_the_same_bits(tmp_path: Path, in_fp8: bool) -> None:
    for expected, actual in on_ranks(2, interrupted, str(tmp_path), in_fp8):
        assert actual == expected


def broadcast(rank: int) -> Any:
    """Rank 0 broadcasts the state of a trained DDP model into new DDP models on all ranks."""
    source = prepared(DistributedDataParallel(network()))
    for number in range(2):
        step(source, number, rank)
    target = DistributedDataParallel(network())
    prepare_states(target, DELAYED)
    state_dict = get_model_state_dict(source[0])
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
    set_model_state_dict(target, dict(state_dict) if rank == 0 else {}, options=options)
    return list(state_dict), states(source[0]), states(target), states(source[0].module)


@pytest.mark.smoke
@pytest.mark.distributed
def test_states_reach_every_rank_of_a_wrapped_model() -> None:
    for names, expected, actual, unwrapped in on_ranks(2, broadcast):
        assert "0.up.weight.scale" in names
        assert same(expected, actual)
        assert same(expected, unwrapped)
