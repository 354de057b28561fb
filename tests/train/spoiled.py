"""A training run that diverges at a chosen step under delayed scaling, and under no other recipe."""

from typing import Any

import torch

from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.train import train_step

WHEN = {0: 5, 2: 8}  # margin of the recipe -> number of steps after which the next one multiplies the weights by 30
_REAL = train_step.accumulate_gradients


def spoiled(method: Any, forward: Any, optimizer: Any, *rest: Any, **named: Any) -> list[float]:
    """Calls `accumulate_gradients`, and then multiplies the weights by 30 if this is the step to diverge at."""
    means = _REAL(method, forward, optimizer, *rest, **named)
    step, recipe = int(named["seed"].split(":")[1]), forward.recipe
    if isinstance(recipe, DelayedScaling) and WHEN.get(recipe.margin) == step:
        with torch.no_grad():
            for master in optimizer.masters.values():
                master.mul_(30.0)
    return means


def spoil() -> None:
    """Makes all later runs of this process diverge."""
    train_step.accumulate_gradients = spoiled
