"""What a run tries when it has diverged: the same steps again from its last good checkpoint, with other scales.

    0   as the job says
    1   a margin larger by 2: four times the room above the largest value that a history holds
    2   current scaling: every tensor is scaled by its own largest value, and none is ever cut off

Each is tried once; a run keeps what it tries until it diverges again. Its checkpoints record how often it went back. A
run that is killed after it went back, but before its next checkpoint, finds the same divergence and goes back again, so
it ends with the same bytes.
"""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from fp8serve.fp8.recipe import MAX_MARGIN
from fp8serve.train.config import TrainConfig

LARGER = 2
_SHARED = ("fp8_format", "override_linear_precision", "fp8_dpa", "fp8_mha")  # parameters of both recipes


def attempts(config: TrainConfig) -> list[TrainConfig]:
    """The job as it is after 0, 1, ... returns; of another recipe than delayed, only itself."""
    if config.recipe != "delayed" or config.lora_rank is not None:
        return [config]
    margin = _margin(config)
    options = dict(config.recipe_options)
    larger = {**options, "margin": min(margin + LARGER, MAX_MARGIN)}
    shared = {name: value for name, value in options.items() if name in _SHARED}
    found = [config]
    if margin < MAX_MARGIN:
        found.append(dataclasses.replace(config, recipe_options=larger, on_divergence="fail"))
    current = dataclasses.replace(
        config, recipe="current", recipe_options=shared, amax_history_len=None, on_divergence="fail"
    )
    return [*found, current]


def attempt(config: TrainConfig, returns: int) -> TrainConfig:
    """The job after `returns` returns."""
    return (found := attempts(config))[min(returns, len(found) - 1)]


def described(config: TrainConfig) -> str:
    """The scaling of an attempt, in words."""
    return f"margin {_margin(config)}" if config.recipe == "delayed" else f"{config.recipe} scaling"


def rescaled(scaling: Mapping[str, Tensor], before: TrainConfig, now: TrainConfig) -> dict[str, Tensor]:
    """The scaling state of a checkpoint that was written under `before`, to go on with under `now`."""
    if now.recipe != "delayed":
        return {}
    factor = 2.0 ** (_margin(before) - _margin(now))  # a power of two: exact
    return {name: tensor * factor if name.endswith(".scale") else tensor for name, tensor in scaling.items()}


def _margin(config: TrainConfig) -> int:
    return int(config.recipe_options.get("margin", 0))
