"""Data-parallel training of a small network on several ranks, and the same training in one process.

The single process runs the batches of all ranks in one autocast, runs one backward pass of the sum of their losses, and
divides the gradients by the number of ranks. So its amaxes are maxima over all batches and its gradients are averages,
as on the ranks. Only the order in which the ranks' gradients are added may differ. Two ranks have only one order, so
they have the bits of one process (`assert_same`). With four ranks, the last bits of a sum depend on the algorithm of
the collective (`assert_close`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast, convert, scaling_state
from fp8serve.fp8.recipe import Recipe

STEPS = 4
DELAYED = DelayedScaling(amax_history_len=3)
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    "current": Float8CurrentScaling(),
    "power of two": Float8CurrentScaling(power_2_scale=True),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "block": Float8BlockScaling(),
}


class Block(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner, bias=False), nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))  # type: ignore[no-any-return]


def network(inner: int = 49) -> nn.Module:
    """Two blocks 24 -> inner -> 24; no number of ranks divides 49 rows evenly."""
    torch.manual_seed(0)
    return convert(nn.Sequential(Block(24, inner), Block(24, inner), nn.Linear(24, 8)))


def batch(step: int, rank: int) -> Tensor:
    """Returns x [6, 24]. Its values grow with the rank, so that the ranks have different amaxes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 24, generator=generator) * (1 + rank)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :8].sin()).square().mean()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def result(model: nn.Module, losses: list[float]) -> dict[str, Any]:
    """Returns the losses and the unsharded state dict, including scaling states."""
    state = {name: whole(value).detach() for name, value in model.state_dict().items()}
    return {"losses": losses, "state": {name.removeprefix("module."): value for name, value in state.items()}}


def train(model: nn.Module, step: Callable[[int], float]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i in range(STEPS):
        losses.append(step(i))
        optimizer.step()
        optimizer.zero_grad()
    return result(model, losses)


def is_first_microbatch(m: int, microbatches: int) -> bool | None:
    """Returns the argument of `autocast` for microbatch `m` of a step."""
    return m == 0 if microbatches > 1 else None


def train_on_one_process(recipe: Recipe, world: int, microbatches: int = 1) -> list[dict[str, Any]]:
    """Trains one process on the batches of `world` ranks; returns the losses of each rank, and the final state."""
    model = network()
    losses: list[list[float]] = [[] for _ in range(world)]

    def step(i: int) -> float:
        for m in range(microbatches):
            with autocast(recipe=recipe, is_first_microbatch=is_first_microbatch(m, microbatches)):
                step_losses = [loss_of(model, batch(i * microbatches + m, rank)) for rank in range(world)]
            torch.stack(step_losses).sum().backward()  # type: ignore[no-untyped-call]
            for rank, loss in enumerate(step_losses):
                losses[rank].append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world
        return 0.0

    state = train(model, step)["state"]
    return [{"losses": of_rank, "state": state} for of_rank in losses]


def train_on_rank(model: nn.Module, rank: int, recipe: Recipe, group: Any, microbatches: int = 1) -> dict[str, Any]:
    """Trains this rank on its own batches."""
    losses = []

    def step(i: int) -> float:
        for m in range(microbatches):
            first = is_first_microbatch(m, microbatches)
            with autocast(recipe=recipe, amax_reduction_group=group, is_first_microbatch=first):
                loss = loss_of(model, batch(i * microbatches + m, rank))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        return 0.0

    return {**train(model, step), "losses": losses}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that losses, weights and scaling states are equal, bit for bit."""
    assert actual["losses"] == expected["losses"]
    assert actual["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(actual["state"][name], value, atol=0, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


LOSSES, SCALES = 1e-5, 1e-5


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that losses and scales differ by at most 1e-5, and that counters are equal.

    Another order of four summands changes the last bit of a gradient (2^-24), and the steps of AdamW by as much. After
    a few steps, the difference is far below 1e-5, unless a value is rounded to another FP8 value, which does not happen
    in these runs.
    """
    torch.testing.assert_close(torch.tensor(actual["losses"]), torch.tensor(expected["losses"]), rtol=LOSSES, atol=0)
    assert actual["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        if name.endswith(("steps", "nonfinite")):
            assert torch.equal(actual["state"][name], value), name
        elif name.endswith(("scale", "amax_history")):
            torch.testing.assert_close(actual["state"][name], value, rtol=SCALES, atol=0)


def layers(model: nn.Module) -> dict[str, Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def states(layer: Linear) -> dict[str, list[Any]]:
    return {
        name: [s.scale.item(), s.amax_history.tolist(), s.nonfinite.item(), s.steps.item()]
        for name, s in scaling_state(layer).items()
    }
