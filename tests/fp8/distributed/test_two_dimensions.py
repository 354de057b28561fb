"""FSDP2 over one dimension of a 2 x 2 mesh and tensor parallelism over the other have the results of one process.

Each row of the mesh has its own batches, and its columns share each layer's weight. Weights are gathered in FP8. Sums
have another order than in one process; `RUN` of test_tensor_parallel.py bounds the difference.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8serve import Linear, autocast
from fp8serve.fp8.fsdp import GatheredWeight, gather_in_fp8
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.tensor_parallel import ParallelLinear, parallelize, sum_gradients

from .ranks import on_ranks
from .runs import RECIPES, states
from .test_tensor_parallel import RUN, blocks

pytestmark = pytest.mark.distributed

STEPS = 4
LAYOUT: Any = {"*.up": "column", "*.down": "row"}


def batch(step: int, row: int) -> Tensor:
    """Returns x [8, 32]; its magnitude depends on the row of the mesh."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + row)) * (1 + row)


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return (model(x) - target).square().sum() / (32 * 8)


def alone(recipe: Recipe) -> tuple[list[list[float]], list[Any]]:
    """Trains one process on the batches of both rows; returns the losses of every step for each row, and all scales."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        with autocast(recipe=recipe):
            losses_of_rows = [loss_of(model, x, x.sin()) for x in (batch(step, row) for row in range(2))]
        torch.stack(losses_of_rows).sum().backward()
        for parameter in model.parameters():
            parameter.grad = (
                None if parameter.grad is None else parameter.grad / 2
            )  # FSDP2 takes the mean over the rows
        losses.append([loss.item() for loss in losses_of_rows])
        optimizer.step()
        optimizer.zero_grad()
    return losses, [states(m) for m in model.modules() if isinstance(m, Linear)]


def on_a_mesh(rank: int, name: str, sequence_parallel: bool) -> Any:
    """Returns this rank's row, its losses, all scales, and whether all layers used weights gathered in FP8."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    row, column, tensor = mesh["data"].get_local_rank(), mesh["tensor"].get_local_rank(), mesh["tensor"].get_group()
    model = gather_in_fp8(parallelize(blocks(), LAYOUT, tensor, sequence_parallel))
    for block in model.children():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    in_fp8: list[bool] = []
    for layer in (m for m in model.modules() if isinstance(m, ParallelLinear)):
        layer.register_forward_hook(lambda m, args, y: in_fp8.append(isinstance(m.weight, GatheredWeight)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = batch(step, row)
        if sequence_parallel:
            x = x.chunk(2)[column]
        with autocast(recipe=RECIPES[name], amax_reduction_group=dist.group.WORLD):
            loss = loss_of(model, x, x.sin())
        loss.backward()
        if sequence_parallel:
            sum_gradients([p for n, p in model.named_parameters() if "norm" in n], tensor)
            dist.all_reduce(loss.detach(), group=tensor)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    scales = [states(m) for m in model.modules() if isinstance(m, Linear)]
    return row, losses, scales, all(in_fp8) and len(in_fp8) == 4 * STEPS


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [pytest.param("delayed", marks=pytest.mark.smoke), "current"])
def test_two_by_two_ranks_have_the_results_of_one_process(name: str, sequence_parallel: bool) -> None:
    losses, scales = alone(RECIPES[name])
    for row, actual_losses, actual_scales, in_fp8 in on_ranks(4, on_a_mesh, name, sequence_parallel):
        assert in_fp8
        assert actual_losses == pytest.approx([step_losses[row] for step_losses in losses], rel=RUN)
        for actual, reference in zip(actual_scales, scales, strict=True):
            assert actual.keys() == reference.keys()
            for tensor in reference:
                assert actual[tensor][0] == pytest.approx(reference[tensor][0], rel=RUN)
                assert actual[tensor][1] == pytest.approx(reference[tensor][1], rel=RUN)
                assert actual[tensor][2:] == reference[tensor][2:]
