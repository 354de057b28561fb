"""Recovery of a diverged run (on_divergence="return"): it returns to its last good checkpoint and changes its scaling.

    returns   scaling of the following steps
    0         as configured
    1         a margin larger by 2: a scale leaves four times as much headroom above the largest amax of the history
    2         current scaling: each tensor is scaled by its own amax, so no value saturates

A run keeps a scaling until it diverges again. Checkpoints record the number of returns. With recovery, the trainer
evaluates the run before it writes a checkpoint, so all checkpoints at multiples of `save_every` are good. A run that is
killed between a return and its next checkpoint repeats the divergence and the return, so it ends with the same bytes.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.recipe import MAX_MARGIN
from fp8serve.train import events
from fp8serve.train.config import TrainConfig
from fp8serve.train.run import TrainingRun

if TYPE_CHECKING:
    from fp8serve.train.checkpointing import Checkpointer

MARGIN_INCREASE = 2
_SHARED = ("fp8_format", "override_linear_precision", "fp8_dpa", "fp8_mha")  # parameters of both recipes


def recovery_configs(config: TrainConfig) -> list[TrainConfig]:
    """Returns the job's configuration after 0, 1, ... returns. Recipes other than delayed have only the first."""
    if config.recipe != "delayed" or config.lora_rank is not None:
        return [config]
    margin = _margin(config)
    options = dict(config.recipe_options)
    larger = {**options, "margin": min(margin + MARGIN_INCREASE, MAX_MARGIN)}
    shared = {name: value for name, value in options.items() if name in _SHARED}
    configs = [config]
    if margin < MAX_MARGIN:
        configs.append(dataclasses.replace(config, recipe_options=larger, on_divergence="fail"))
    current = dataclasses.replace(
        config, recipe="current", recipe_options=shared, amax_history_len=None, on_divergence="fail"
    )
    return [*configs, current]


def config_after(config: TrainConfig, returns: int) -> TrainConfig:
    """Returns the job's configuration after this number of returns."""
    configs = recovery_configs(config)
    return configs[min(returns, len(configs) - 1)]


def describe_scaling(config: TrainConfig) -> str:
    return f"margin {_margin(config)}" if config.recipe == "delayed" else f"{config.recipe} scaling"


def convert_scaling(scaling: Mapping[str, Tensor], source: TrainConfig, target: TrainConfig) -> dict[str, Tensor]:
    """Returns the scaling state of a checkpoint with the configuration `source` for a run with `target`."""
    if target.recipe != "delayed":
        return {}
    factor = 2.0 ** (_margin(source) - _margin(target))  # a power of two, so the product is exact
    return {name: tensor * factor if name.endswith(".scale") else tensor for name, tensor in scaling.items()}


def _margin(config: TrainConfig) -> int:
    return int(config.recipe_options.get("margin", 0))


def return_to_good_checkpoint(run: TrainingRun, checkpointer: "Checkpointer", reason: str, *, is_repeated: bool) -> int:
    """Removes the checkpoints after the last good one, and returns the new number of returns.

    Raises JobError if all scalings have been tried. `is_repeated` means that the weights of the previous return's
    checkpoint had already diverged. The run then returns to an earlier checkpoint, and this return is not counted.
    """
    configs, progress = recovery_configs(run.job_config), run.progress
    returns = progress.returns + (not is_repeated)
    if returns == len(configs):
        names = " nor ".join(describe_scaling(config) for config in configs[1:])
        raise JobError(f"{reason}, and neither {names} helped; lower lr ({run.config.lr}), or check the data.")
    step = run.ranks.run_on_first(lambda: checkpointer.remove_after_good(run))
    scaling = describe_scaling(configs[returns])
    text = f"{reason}. The run returns from step {progress.step} to step {step} and continues with {scaling}"
    details = {"step": step, "from_step": progress.step, "returns": returns, "tried": scaling}
    run.on_event(events.message("returned", text, level="warn", **details))
    return returns
