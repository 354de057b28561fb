"""Training that diverges by its scaling: weights become garbage at one step, under delayed scaling alone."""

from typing import Any

import torch

from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.train import train_step

WHEN = {0: 5, 2: 8}  # margin -> the number of steps before the one that spoils
_REAL = train_step.accumulate_gradients


def spoiled(method: Any, forward: Any, optimizer: Any, *rest: Any, **named: Any) -> list[float]:
    """`accumulate_gradients`, and then other weights where it is time."""
    means = _REAL(method, forward, optimizer, *rest, **named)
    step, recipe = int(named["seed"].split(":")[1]), forward.recipe
    if isinstance(recipe, DelayedScaling) and WHEN.get(recipe.margin) == step:
        with torch.no_grad():
            for master in optimizer.masters.values():
                master.mul_(30.0)
    return means


def spoil() -> None:
    """In this process, from now on."""
    train_step.accumulate_gradients = spoiled
