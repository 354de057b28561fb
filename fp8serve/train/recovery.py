"""A run that has diverged goes back to its last good checkpoint, if it may, and takes the same steps with other scales.

    0   as the job says
    1   a margin larger by 2: four times the room above the largest value that a history holds
    2   current scaling: every tensor is scaled by its own largest value, and none is ever cut off

Each is tried once; a run keeps what it tries until it diverges again. Its checkpoints record how often it went back.
Every checkpoint of such a run is judged before it is written, so those of the multiples of `save_every` are good. A run
that is killed after it went back, but before its next checkpoint, finds the same divergence and goes back again, so it
ends with the same bytes.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.recipe import MAX_MARGIN
from fp8serve.train import events
from fp8serve.train.config import TrainConfig
from fp8serve.train.run import Course
from fp8serve.train.validation import DivergenceError, outcome

if TYPE_CHECKING:
    from fp8serve.train.checkpointing import Saving

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
    results = [config]
    if margin < MAX_MARGIN:
        results.append(dataclasses.replace(config, recipe_options=larger, on_divergence="fail"))
    current = dataclasses.replace(
        config, recipe="current", recipe_options=shared, amax_history_len=None, on_divergence="fail"
    )
    return [*results, current]


def attempt(config: TrainConfig, returns: int) -> TrainConfig:
    """The job after `returns` returns."""
    return (result := attempts(config))[min(returns, len(result) - 1)]


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


def go_back_if_diverged(course: Course) -> None:
    """Raises DivergenceError, on all ranks."""
    results = course.ranks.gather(outcome(course).divergence) if course.may_go_back else []
    if (why := next(filter(None, results), None)) is not None:
        raise DivergenceError(why)


def go_back(course: Course, saving: "Saving", why: str, *, again: bool) -> int:
    """Removes what was written since the last good checkpoint, where the next run begins. Returns how often the run has
    gone back now. JobError when everything has been tried.

    again: the model had already diverged at the checkpoint that the run went back to. Then it goes back to the one
    before it, and this counts as the same return.
    """
    tried, progress = attempts(course.job), course.progress
    returns = progress.returns + (not again)
    if returns == len(tried):
        names = " nor ".join(described(config) for config in tried[1:])
        raise JobError(f"{why}, and neither {names} helped; lower lr ({course.config.lr}), or look at the data.")
    to = course.ranks.by_first(lambda: saving.removed_since_good(course))
    with_ = described(tried[returns])
    text = f"{why}. Going back from step {progress.step} to step {to}, and on with {with_}"
    details = {"step": to, "from_step": progress.step, "returns": returns, "tried": with_}
    course.on_event(events.message("returned", text, level="warn", **details))
    return returns
