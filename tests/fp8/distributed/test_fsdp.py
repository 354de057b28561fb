"""FSDP2: the gathered FP8 weights, the bytes that ranks send, and results equal to those of one process."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.errors import RecipeError
from fp8serve.fp8.fsdp import GatheredWeight, gather_in_fp8, load_whole_state, whole_state
from fp8serve.fp8.recipe import Recipe

from .ranks import Wire, counted, on_ranks
from .runs import (
    DELAYED,
    RECIPES,
    Block,
    assert_close,
    assert_same,
    batch,
    layers,
    loss_of,
    network,
    train_on_one_process,
    train_on_rank,
)

pytestmark = pytest.mark.distributed

PER_TENSOR = ["delayed", "current", "power of two"]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Shards every block, and the remaining parameters, over all ranks."""
    over, policy = mesh(), policy or MixedPrecisionPolicy()
    for block in (m for m in model.children() if isinstance(m, Block)):
        fully_shard(block, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)
    return model


def sharded(rank: int, name: str, in_fp8: bool, microbatches: int = 1) -> Any:
    model = network()
    if in_fp8:
        gather_in_fp8(model)
    return train_on_rank(shard(model), rank, RECIPES[name], dist.group.WORLD, microbatches)


@pytest.mark.smoke
@pytest.mark.parametrize("name", PER_TENSOR)
def test_two_ranks_gathering_in_fp8_have_the_bits_of_one_process(name: str) -> None:
    results = on_ranks(2, sharded, name, True)
    for rank, expected in enumerate(train_on_one_process(RECIPES[name], 2)):
        assert_same(results[rank], expected)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_four_ranks_gathering_in_fp8_have_the_results_of_one_process(name: str) -> None:
    results = on_ranks(4, sharded, name, True)
    for rank, expected in enumerate(train_on_one_process(RECIPES[name], 4)):
        assert_close(results[rank], expected)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_accumulated_gradients_have_the_bits_of_one_process(name: str) -> None:
    results = on_ranks(2, sharded, name, True, 3)
    for rank, expected in enumerate(train_on_one_process(RECIPES[name], 2, 3)):
        assert_same(results[rank], expected)


@pytest.mark.parametrize("name", RECIPES)
def test_gathering_in_high_precision_works_with_every_recipe(name: str) -> None:
    results = on_ranks(2, sharded, name, False)
    for rank, expected in enumerate(train_on_one_process(RECIPES[name], 2)):
        assert_same(results[rank], expected)


def weight_data(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Returns the FP8 data and scale_inv that every layer uses for its weight in a forward pass."""
    data: dict[str, Any] = {}

    def keep(layer: str, q: Tensor, scale_inv: Tensor) -> None:
        data[layer] = [q.view(torch.uint8).clone(), scale_inv.clone()]

    def gathered(
        layer: str, weight: Tensor
    ) -> None:  # a gathered weight is already cast, so the layer's observer is not called
        if isinstance(weight, GatheredWeight):
            keep(layer, weight.quantized.q, weight.quantized.scale_inv)

    hooks = []
    for name, layer in layers(model).items():
        layer.observer = lambda tensor, values, *operand, name=name: (
            keep(name, *operand) if tensor == "weight" else None
        )
        hook = layer.register_forward_hook(lambda module, args, y, name=name: gathered(name, module.weight))
        hooks.append(hook)
    model(x)
    for hook, layer in zip(hooks, layers(model).values(), strict=True):
        hook.remove()
        layer.observer = None
    return data


def data_on_rank(rank: int, recipe: Recipe) -> Any:
    model = shard(gather_in_fp8(network()))
    return steps_with_data(model, lambda: autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD))


def steps_with_data(model: nn.Module, context: Callable[[], autocast]) -> list[Any]:
    """Runs three steps on the same data on all ranks; multiplies the weights by 3 after every step."""
    data_of_steps = []
    for i in range(3):
        with context():
            loss = loss_of(model, batch(i, 0))
            data_of_steps.append(weight_data(model, batch(i, 0)))
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
                parameter.grad = None
    return data_of_steps


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PER_TENSOR)
def test_gathered_weights_are_those_of_one_process(world: int, name: str) -> None:
    expected = steps_with_data(network(), lambda: autocast(recipe=RECIPES[name]))
    for actual in on_ranks(world, data_on_rank, RECIPES[name]):
        for here, there in zip(actual, expected, strict=True):
            assert here.keys() == there.keys()
            for layer in there:
                assert torch.equal(here[layer][0], there[layer][0])
                assert torch.equal(here[layer][1], there[layer][1])


def step(model: nn.Module, recipe: Recipe) -> Wire:
    with counted() as wire:
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            loss = model(torch.ones(2, 32)).sum()
        loss.backward()
    return wire


def bytes_on_wire(rank: int) -> Any:
    """Returns the bytes and calls of a step that gathers in FP8, with each recipe, and in BF16."""
    traffic = {}
    for name, recipe in {"delayed": DELAYED, "current": RECIPES["current"], "bf16": RECIPES["current"]}.items():
        model = nn.Sequential(*[Linear(32, 32, bias=False) for _ in range(4)])
        if name != "bf16":
            gather_in_fp8(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model:
            fully_shard(layer, mesh=mesh(), mp_policy=policy)
        fully_shard(model, mesh=mesh(), mp_policy=policy)
        wire = step(model, recipe)
        traffic[name] = {"bytes": dict(wire.bytes), "calls": dict(wire.calls)}
    return traffic


@pytest.mark.parametrize("world", [2, 4])
def test_gathering_in_fp8_sends_half_the_bytes_of_bf16(world: int) -> None:
    traffic = on_ranks(world, bytes_on_wire)[0]
    elements = 4 * 32 * 32 // world  # elements that a rank sends to gather all layers once
    assert traffic["bf16"]["bytes"]["allgather_base"] == 2 * 2 * elements  # forward and backward
    in_fp8 = 2 * (elements + 4 * 4)  # and the amax of each layer's shard
    assert traffic["delayed"]["bytes"]["allgather_base"] == in_fp8
    assert traffic["current"]["bytes"]["allgather_base"] == in_fp8
    assert traffic["delayed"]["calls"]["allreduce"] == 2  # forward and backward amaxes of all four layers
    assert traffic["current"]["calls"]["allreduce"] == 1  # the amaxes of all four weights
    assert "allreduce" not in traffic["bf16"]["calls"]


class Choice(nn.Module):
    """Two layers that are gathered together; each call runs one of them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(32, rows, bias=False), Linear(32, rows, bias=False)])

    def forward(self, x: Tensor, index: int) -> Tensor:
        return self.layers[index](x)  # type: ignore[no-any-return]


def amaxes_of_weights(rank: int, rows: int) -> list[list[float]]:
    """Runs another layer on each rank; returns the amaxes in the weights' histories, and the expected amaxes."""
    torch.manual_seed(0)
    model = Choice(rows)
    with torch.no_grad():
        for layer, rows_of_other_rank in zip(model.layers, (slice(17, None), slice(0, 16)), strict=True):
            cast(Any, layer).weight[rows_of_other_rank] *= (
                8  # the maximum is in the shard of the rank that does not run the layer
            )
    expected = [float(cast(Any, layer).weight.detach().abs().max()) for layer in model.layers]
    gather_in_fp8(model)
    fully_shard(model, mesh=mesh())
    with autocast(recipe=DELAYED):
        model(torch.randn(4, 32), rank)
    return [[float(cast(Any, layer).scaling["weight"].amax_history.max()) for layer in model.layers], expected]


@pytest.mark.parametrize("rows", [32, 33])
def test_a_layer_that_runs_on_one_rank_has_the_amax_of_its_whole_weight(rows: int) -> None:
    for actual, expected in on_ranks(2, amaxes_of_weights, rows):
        assert actual == expected


def amaxes_of_two_microbatches(rank: int) -> list[list[float]]:
    """Runs one layer in each of two microbatches; returns the amaxes in the histories, and the expected amaxes."""
    torch.manual_seed(0)
    model = Choice(32)
    expected = [float(cast(Any, layer).weight.detach().abs().max()) for layer in model.layers]
    gather_in_fp8(model)
    fully_shard(model, mesh=mesh())
    for index in (0, 1):
        with autocast(recipe=DELAYED, is_first_microbatch=index == 0):
            model(torch.randn(4, 32), index)
    return [[float(cast(Any, layer).scaling["weight"].amax_history.max()) for layer in model.layers], expected]


def test_a_layer_that_runs_only_in_a_later_microbatch_records_its_amax() -> None:
    for actual, expected in on_ranks(2, amaxes_of_two_microbatches):
        assert actual == expected


REFUSED: dict[str, tuple[Recipe, bool, str]] = {
    "row-wise": (RECIPES["rowwise"], True, "one scale for a whole tensor"),
    "block": (Float8BlockScaling(), True, "one scale for a whole tensor"),
    "another group": (DELAYED, False, "amax_reduction_group"),
    "not reduced": (DelayedScaling(reduce_amax=False), True, "reduce_amax"),
    "dgrad": (Float8CurrentScaling(override_linear_precision=(False, True, False)), True, "override_linear_precision"),
}


def refusals(rank: int) -> Any:
    messages, own_group = {}, [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for name, (recipe, uses_default_group, _) in REFUSED.items():
        model = shard(gather_in_fp8(network()))
        with (
            pytest.raises(RecipeError) as error,
            autocast(recipe=recipe, amax_reduction_group=None if uses_default_group else own_group),
        ):
            model(batch(0, 0))
        messages[name] = str(error.value)
    with pytest.raises(RecipeError) as error:
        shard(gather_in_fp8(network()))(batch(0, 0))
    messages["outside"] = str(error.value)
    messages["island"] = in_an_island(shard(gather_in_fp8(nn.Sequential(Island(network())))))
    return messages


class Island(nn.Module):
    """Runs a module in high precision inside FP8 autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        with autocast(enabled=False):
            return self.inner(x)


def in_an_island(model: nn.Module) -> str:
    with pytest.raises(RecipeError) as error, autocast(recipe=RECIPES["current"]):
        model(batch(0, 0))
    return str(error.value)


def test_recipes_that_need_high_precision_weights_are_refused_with_a_reason() -> None:
    for messages in on_ranks(2, refusals):
        assert all(words in messages[name] for name, (_, _, words) in REFUSED.items())
        assert "inside autocast" in messages["outside"]
        assert "no high-precision values" in messages["island"]


def evaluated(rank: int) -> Any:
    """Alternates evaluations and steps; as in one process, an evaluation must not change any state."""
    model = shard(gather_in_fp8(network()))
    return [step_and_evaluate(model, dist.group.WORLD) for _ in range(3)]


def step_and_evaluate(model: nn.Module, group: Any) -> list[float]:
    with torch.no_grad(), autocast(recipe=DELAYED, amax_reduction_group=group):
        before = loss_of(model, batch(7, 0)).item()
    with autocast(recipe=DELAYED, amax_reduction_group=group):
        loss = loss_of(model, batch(0, 0))
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * cast(Tensor, parameter.grad))
            parameter.grad = None
    return [before, loss.item()]


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_evaluating_between_steps_changes_nothing() -> None:
    model = network()
    expected = [step_and_evaluate(model, None) for _ in range(3)]
    assert on_ranks(2, evaluated) == [expected, expected]


def loaded(rank: int) -> Any:
    """Creates the model on the device "meta", shards it, allocates it and fills it."""
    filled = network().state_dict()
    with torch.device("meta"):
        model = network()
    shard(gather_in_fp8(model)).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        shard_of_rank = cast(DTensor, parameter).to_local()
        start = sum(len(part) for part in filled[name].chunk(dist.get_world_size())[:rank])
        with torch.no_grad():
            shard_of_rank.copy_(filled[name][start : start + len(shard_of_rank)])
    return train_on_rank(model, rank, DELAYED, dist.group.WORLD)


def test_a_model_from_the_meta_device_has_the_bits_of_one_process() -> None:
    results = on_ranks(2, loaded)
    for rank, expected in enumerate(train_on_one_process(DELAYED, 2)):
        assert_same(results[rank], expected)


def interrupted(rank: int) -> Any:
    """Returns the losses of four steps; of two steps, a checkpoint and two steps of a newly sharded model; and of one
    step of an unsharded model from that checkpoint."""
    uninterrupted, before = (shard(gather_in_fp8(network())) for _ in range(2))
    group = dist.group.WORLD
    losses = [step_and_evaluate(uninterrupted, group) for _ in range(4)]
    resumed = [step_and_evaluate(before, group) for _ in range(2)]
    state = whole_state(before)
    after = shard(gather_in_fp8(network()))
    load_whole_state(after, {name: value.clone() for name, value in state.items()})
    unsharded = network()
    unsharded.load_state_dict(state)
    return losses, resumed + [step_and_evaluate(after, group) for _ in range(2)], step_and_evaluate(unsharded, None)


@pytest.mark.smoke
def test_a_sharded_model_is_saved_whole_and_resumes_with_the_same_bits() -> None:
    for losses, resumed, unsharded in on_ranks(2, interrupted):
        assert resumed == losses
        assert unsharded == losses[2]


class Recomputed(nn.Module):
    """A block whose activations are recomputed in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def variants(rank: int) -> Any:
    """Common uses of FSDP2: recomputed activations, weights kept between forward and backward, prefetched weights."""
    group = dist.group.WORLD
    recomputed = gather_in_fp8(nn.Sequential(*[Recomputed(m) if isinstance(m, Block) else m for m in network()]))
    for module in recomputed:
        fully_shard(module, mesh=mesh())
    no_reshard = gather_in_fp8(network())
    for module in no_reshard:
        fully_shard(module, mesh=mesh(), reshard_after_forward=False)
    prefetched = gather_in_fp8(network())
    sharded = [fully_shard(module, mesh=mesh()) for module in prefetched]
    sharded[0].set_modules_to_forward_prefetch(sharded[1:])
    models = recomputed, no_reshard, prefetched
    return [train_on_rank(fully_shard(m, mesh=mesh()), rank, DELAYED, group)["losses"] for m in models]


def test_recomputing_keeping_and_prefetching_do_not_change_the_losses() -> None:
    expected = train_on_one_process(DELAYED, 2)
    for rank, losses in enumerate(on_ranks(2, variants)):
        assert losses == [expected[rank]["losses"]] * 3
