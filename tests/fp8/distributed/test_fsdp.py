"""FSDP2: the gathered FP8 data, the bytes they send, and comparison with the run of one process."""

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
from .runs import DELAYED, RECIPES, Block, alone, batch, close, layers, loss_of, network, on_rank, same

pytestmark = pytest.mark.distributed

PER_TENSOR = ["delayed", "current", "power of two"]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """Every block and the rest, over all ranks."""
    over, policy = mesh(), policy or MixedPrecisionPolicy()
    for block in (m for m in model.children() if isinstance(m, Block)):
        fully_shard(block, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)
    return model


def sharded(rank: int, name: str, in_fp8: bool, microbatches: int = 1) -> Any:
    model = network()
    if in_fp8:
        gather_in_fp8(model)
    return on_rank(shard(model), rank, RECIPES[name], dist.group.WORLD, microbatches)


@pytest.mark.smoke
@pytest.mark.parametrize("name", PER_TENSOR)
def test_two_ranks_gathering_in_fp8_are_one_process_bit_for_bit(name: str) -> None:
    found = on_ranks(2, sharded, name, True)
    for rank, wanted in enumerate(alone(RECIPES[name], 2)):
        same(found[rank], wanted)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_four_ranks_gathering_in_fp8_are_one_process_to_the_last_bits(name: str) -> None:
    found = on_ranks(4, sharded, name, True)
    for rank, wanted in enumerate(alone(RECIPES[name], 4)):
        close(found[rank], wanted)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_accumulating_gradients_is_one_process_bit_for_bit(name: str) -> None:
    found = on_ranks(2, sharded, name, True, 3)
    for rank, wanted in enumerate(alone(RECIPES[name], 2, 3)):
        same(found[rank], wanted)


@pytest.mark.parametrize("name", RECIPES)
def test_gathering_in_high_precision_serves_every_recipe(name: str) -> None:
    found = on_ranks(2, sharded, name, False)
    for rank, wanted in enumerate(alone(RECIPES[name], 2)):
        same(found[rank], wanted)


def seen_data(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """The FP8 data and scale_inv of every weight as its layer sees them in a forward pass."""
    found: dict[str, Any] = {}

    def keep(layer: str, q: Tensor, scale_inv: Tensor) -> None:
        found[layer] = [q.view(torch.uint8).clone(), scale_inv.clone()]

    def gathered(layer: str, weight: Tensor) -> None:  # cast elsewhere, so that its layer's observer sees nothing
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
    return found


def data_on_rank(rank: int, recipe: Recipe) -> Any:
    model = shard(gather_in_fp8(network()))
    return steps_with_data(model, lambda: autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD))


def steps_with_data(model: nn.Module, context: Callable[[], autocast]) -> list[Any]:
    """Three steps on the same data everywhere; the weights grow from step to step."""
    found = []
    for i in range(3):
        with context():
            loss = loss_of(model, batch(i, 0))
            found.append(seen_data(model, batch(i, 0)))
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
                parameter.grad = None
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PER_TENSOR)
def test_the_data_are_those_of_one_process(world: int, name: str) -> None:
    wanted = steps_with_data(network(), lambda: autocast(recipe=RECIPES[name]))
    for found in on_ranks(world, data_on_rank, RECIPES[name]):
        for here, there in zip(found, wanted, strict=True):
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
    """The bytes that a step gathers: in FP8 under either recipe, and in BF16."""
    found = {}
    for name, recipe in {"delayed": DELAYED, "current": RECIPES["current"], "bf16": RECIPES["current"]}.items():
        model = nn.Sequential(*[Linear(32, 32, bias=False) for _ in range(4)])
        if name != "bf16":
            gather_in_fp8(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model:
            fully_shard(layer, mesh=mesh(), mp_policy=policy)
        fully_shard(model, mesh=mesh(), mp_policy=policy)
        wire = step(model, recipe)
        found[name] = {"bytes": dict(wire.bytes), "calls": dict(wire.calls)}
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_half_the_bytes_of_bf16(world: int) -> None:
    found = on_ranks(world, bytes_on_wire)[0]
    elements = 4 * 32 * 32 // world  # that a rank sends in one gather of all layers
    assert found["bf16"]["bytes"]["allgather_base"] == 2 * 2 * elements  # forward and backward
    in_fp8 = 2 * (elements + 4 * 4)  # and the amax of each layer's rows
    assert found["delayed"]["bytes"]["allgather_base"] == in_fp8
    assert found["current"]["bytes"]["allgather_base"] == in_fp8
    assert found["delayed"]["calls"]["allreduce"] == 2  # forward and backward amaxes of all four layers
    assert found["current"]["calls"]["allreduce"] == 1  # the amaxes of all four weights
    assert "allreduce" not in found["bf16"]["calls"]


class Choice(nn.Module):
    """Two layers that are gathered together, of which one runs."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(32, rows, bias=False), Linear(32, rows, bias=False)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)  # type: ignore[no-any-return]


def amaxes_of_weights(rank: int, rows: int) -> list[list[float]]:
    """What the weights' histories hold after each layer has run on one rank, and what it should be."""
    torch.manual_seed(0)
    model = Choice(rows)
    with torch.no_grad():
        for layer, other in zip(model.layers, (slice(17, None), slice(0, 16)), strict=True):
            cast(Any, layer).weight[other] *= 8  # of the rank on which it does not run
    wanted = [float(cast(Any, layer).weight.detach().abs().max()) for layer in model.layers]
    gather_in_fp8(model)
    fully_shard(model, mesh=mesh())
    with autocast(recipe=DELAYED):
        model(torch.randn(4, 32), rank)
    return [[float(cast(Any, layer).scaling["weight"].amax_history.max()) for layer in model.layers], wanted]


@pytest.mark.parametrize("rows", [32, 33])
def test_a_layer_that_runs_on_one_rank_has_the_amax_of_its_whole_weight(rows: int) -> None:
    for found, wanted in on_ranks(2, amaxes_of_weights, rows):
        assert found == wanted


def amaxes_of_two_microbatches(rank: int) -> list[list[float]]:
    """What the weights' histories hold after each layer has run in one of two microbatches, and what they should."""
    torch.manual_seed(0)
    model = Choice(32)
    wanted = [float(cast(Any, layer).weight.detach().abs().max()) for layer in model.layers]
    gather_in_fp8(model)
    fully_shard(model, mesh=mesh())
    for which in (0, 1):
        with autocast(recipe=DELAYED, is_first_microbatch=which == 0):
            model(torch.randn(4, 32), which)
    return [[float(cast(Any, layer).scaling["weight"].amax_history.max()) for layer in model.layers], wanted]


def test_a_layer_that_runs_in_a_later_microbatch_only_has_its_amax() -> None:
    for found, wanted in on_ranks(2, amaxes_of_two_microbatches):
        assert found == wanted


REFUSED: dict[str, tuple[Recipe, bool, str]] = {
    "row-wise": (RECIPES["rowwise"], True, "one scale for a whole tensor"),
    "block": (Float8BlockScaling(), True, "one scale for a whole tensor"),
    "another group": (DELAYED, False, "amax_reduction_group"),
    "not reduced": (DelayedScaling(reduce_amax=False), True, "reduce_amax"),
    "dgrad": (Float8CurrentScaling(override_linear_precision=(False, True, False)), True, "override_linear_precision"),
}


def refusals(rank: int) -> Any:
    said, only_this_one = {}, [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for name, (recipe, spanning, _) in REFUSED.items():
        model = shard(gather_in_fp8(network()))
        with (
            pytest.raises(RecipeError) as error,
            autocast(recipe=recipe, amax_reduction_group=None if spanning else only_this_one),
        ):
            model(batch(0, 0))
        said[name] = str(error.value)
    with pytest.raises(RecipeError) as error:
        shard(gather_in_fp8(network()))(batch(0, 0))
    said["outside"] = str(error.value)
    said["island"] = in_an_island(shard(gather_in_fp8(nn.Sequential(Island(network())))))
    return said


class Island(nn.Module):
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


def test_what_needs_high_precision_weights_is_refused_in_words() -> None:
    for said in on_ranks(2, refusals):
        assert all(words in said[name] for name, (_, _, words) in REFUSED.items())
        assert "inside autocast" in said["outside"]
        assert "no high-precision values" in said["island"]


def evaluated(rank: int) -> Any:
    """A step, an evaluation, and a step: as in one process, evaluating leaves no trace."""
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
    wanted = [step_and_evaluate(model, None) for _ in range(3)]
    assert on_ranks(2, evaluated) == [wanted, wanted]


def loaded(rank: int) -> Any:
    """From the meta device: shard first, then allocate and fill."""
    filled = network().state_dict()
    with torch.device("meta"):
        model = network()
    shard(gather_in_fp8(model)).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        mine = cast(DTensor, parameter).to_local()
        start = sum(len(part) for part in filled[name].chunk(dist.get_world_size())[:rank])
        with torch.no_grad():
            mine.copy_(filled[name][start : start + len(mine)])
    return on_rank(model, rank, DELAYED, dist.group.WORLD)


def test_a_model_from_the_meta_device() -> None:
    found = on_ranks(2, loaded)
    for rank, wanted in enumerate(alone(DELAYED, 2)):
        same(found[rank], wanted)


def interrupted(rank: int) -> Any:
    """Two steps, saved and loaded into a model sharded anew; two more: against four without a break."""
    through, before = (shard(gather_in_fp8(network())) for _ in range(2))
    group = dist.group.WORLD
    found = [step_and_evaluate(through, group) for _ in range(4)]
    again = [step_and_evaluate(before, group) for _ in range(2)]
    state = whole_state(before)
    after = shard(gather_in_fp8(network()))
    load_whole_state(after, {name: value.clone() for name, value in state.items()})
    alone = network()
    alone.load_state_dict(state)
    return found, again + [step_and_evaluate(after, group) for _ in range(2)], step_and_evaluate(alone, None)


@pytest.mark.smoke
def test_a_sharded_model_is_saved_whole_and_resumes_with_the_same_bits() -> None:
    for found, resumed, unsharded in on_ranks(2, interrupted):
        assert resumed == found
        assert unsharded == found[2]


class Recomputed(nn.Module):
    """A block whose activations are dropped and computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def variants(rank: int) -> Any:
    """FSDP2 as it is often used: activations recomputed; weights kept between forward and backward; prefetched."""
    group = dist.group.WORLD
    recomputed = gather_in_fp8(nn.Sequential(*[Recomputed(m) if isinstance(m, Block) else m for m in network()]))
    for module in recomputed:
        fully_shard(module, mesh=mesh())
    kept = gather_in_fp8(network())
    for module in kept:
        fully_shard(module, mesh=mesh(), reshard_after_forward=False)
    prefetched = gather_in_fp8(network())
    sharded = [fully_shard(module, mesh=mesh()) for module in prefetched]
    sharded[0].set_modules_to_forward_prefetch(sharded[1:])
    models = recomputed, kept, prefetched
    return [on_rank(fully_shard(m, mesh=mesh()), rank, DELAYED, group)["losses"] for m in models]


def test_recomputing_keeping_and_prefetching_change_nothing() -> None:
    wanted = alone(DELAYED, 2)
    for rank, found in enumerate(on_ranks(2, variants)):
        assert found == [wanted[rank]["losses"]] * 3
