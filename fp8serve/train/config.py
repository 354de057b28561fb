"""The configuration of a training job: a frozen dataclass that checks its values, and its JSON.

The command line, `POST /finetune` and Python users create the same object, and `job.json` holds it. This module imports
no torch, because the HTTP server checks requests with it.

`batch_size` counts the rows of a microbatch, and `accumulate` counts the microbatches of an optimizer step (gradient
accumulation). No option has an "auto" value: `finetune` and the command choose a device before they create the object.
"""

import dataclasses
import json
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

from annotated_types import Ge, Len

from fp8serve.errors import JobError, RecipeError, json_fault, json_kind
from fp8serve.fp8 import recipe
from fp8serve.fp8.recipe import Recipe
from fp8serve.model.text.data_files import LIMITS, STDIN, DataLimits
from fp8serve.options import About, check
from fp8serve.train.methods.options import GrpoOptions

OnDivergence = Literal["fail", "keep", "return"]
LENGTH_OPTIONS = frozenset({"epochs", "max_steps", "patience"})  # may differ on resume, which moves the last step

# Fields that may differ between the run that wrote a checkpoint and the run that resumes from it, such as paths, limits
# and how often something is written or reported. Every other field changes the trained bits.
_FREE_ON_RESUME = {
    *("model", "data", "eval_data", "eval_every", "out", "save_every", "save_minutes", "keep_last", "log_every"),
    *("max_rows", "max_row_bytes", "max_data_bytes", "max_data_memory"),
    *("format", "fsdp", "on_divergence", "recompute", "compile", "report_to", "result"),
    *("reward", "grader_url", "reward_seconds"),
}

REMOVED_OPTIONS = {"ld_alpha": None, "reference_free": False}
"""Options of earlier versions, with their defaults. Their job.json and trainer.json have every option."""

API_NAMES = {"lr": "learning_rate"}
"""Names of options in the HTTP API that differ from the field names."""
NOT_IN_API = ("data", "out", "eval_data", "save_minutes", "format", "device", "template_date", "reward",
                   "report_to", "compile")  # fmt: skip
"""Options that clients of the HTTP API cannot give: the server's operator or the server itself sets them."""


@dataclass(frozen=True)
class TrainConfig(GrpoOptions):
    """One training job.

    `model` may be an FP8 directory. Its weights are then dequantized to FP32 masters, and its scales.safetensors
    initialises the scaling state. The run writes `checkpoints/step-N/` and finally `model/` into `out`.

    `recipe_options` are fields of the recipe. With `fp8_dpa` or `fp8_mha`, attention is trained in FP8, too. A server
    computes attention in high precision over a BF16 or FP8 KV cache; the delayed recipe provides the scales of an FP8
    cache. `amax_history_len` is short for the field of that name in `recipe_options` of the delayed recipe.

    The learning rate rises linearly over `warmup_steps`. `lr_schedule` then lowers it to `lr * min_lr_ratio`, or keeps
    it constant. With `packing="tokens"` a microbatch is filled to `batch_size * seq_len` tokens. Longer texts are split
    into windows of `seq_len`, longer conversations are truncated. The last step always writes a checkpoint. Chat
    templates receive `template_date` as the current date; in a server they receive the day of the request.
    `on_divergence` concerns runs that made the model worse, which `train.run` defines.

    A run with `eval_data` and `eval_every` stops early after `patience` validations in a row without a new lowest loss.
    With `result="best"`, `out/model/` is made of the checkpoint with the lowest validation loss.

    With `lora_rank` the base model is frozen and computes as a server does ("delayed" uses its stored scales). The run
    trains an adapter, and `out/model/` holds that adapter (`train.lora`).

    `max_rows`, `max_row_bytes` and `max_data_bytes` limit each file after decompression, and `max_data_memory` limits
    the memory of all files. A server sets its own limits.

    `method` chooses the loss and the kind of data (`train.methods`). Raises JobError for an invalid value.
    """

    device: Annotated[
        str, Len(1), About("cpu or cuda; for the command also auto: a GPU if fp8serve can use it and the model fits.")
    ] = "cpu"
    template_date: Annotated[
        str | None, About("Current date for chat templates.", unset="day of the first checkpoint", metavar="DATE")
    ] = None
    on_divergence: Annotated[
        OnDivergence,
        About(
            "A run that made the model worse fails (fail), or still writes its model (keep). With return, a run that "
            "diverges continues from its last good checkpoint with a larger margin, then with current scaling."
        ),
    ] = "fail"

    max_rows: Annotated[int, Ge(1)] = LIMITS.rows
    max_row_bytes: Annotated[int, Ge(1)] = LIMITS.row_bytes
    max_data_bytes: Annotated[int, Ge(1)] = LIMITS.bytes
    max_data_memory: Annotated[int | None, Ge(1)] = LIMITS.memory

    def __post_init__(self) -> None:
        recipe.from_name(self.recipe)  # reports an unknown name before any other error
        check(self, JobError)
        if self.template_date is not None:
            try:
                date.fromisoformat(self.template_date)
            except ValueError:
                message = f"template_date must be a date such as 2026-01-31, found {self.template_date!r}."
                raise JobError(message) from None
        if self.eval_every is not None and not self.eval_data:
            raise JobError("eval_every was given without eval_data; name the files to validate on, or leave it out.")
        if (self.patience is not None or self.result == "best") and self.eval_every is None:
            name = "patience" if self.patience is not None else 'result="best"'
            raise JobError(f"{name} compares validations; give eval_data and eval_every, too, or leave it out.")
        if STDIN in (*self.data, *self.eval_data):
            raise JobError("A resumed run reads its data again, so standard input ('-') cannot be used; name a file.")
        _check_recipe(self)
        changed = frozenset(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        self._check_adapter(changed)
        _check_fsdp(self)
        _check_compile(self)
        if self.on_divergence == "return":
            _check_return(self)
        self._check_method(changed)

    @property
    def today(self) -> date | None:
        """The date that chat templates receive, or None if they receive the actual date."""
        return None if self.template_date is None else date.fromisoformat(self.template_date)

    @property
    def supports_processes(self) -> bool:
        """Whether several processes can share a step. GRPO cannot: its rollouts are generated during the step."""
        return self.method != "grpo"

    @property
    def data_limits(self) -> DataLimits:
        return DataLimits(self.max_rows, self.max_row_bytes, self.max_data_bytes, self.max_data_memory)

    def usable_processes(self, count: int) -> int:
        """Returns how many of `count` processes a step can use; each needs a microbatch."""
        return min(count, self.accumulate) if self.supports_processes else 1

    @property
    def fp8_recipe(self) -> Recipe | None:
        """The recipe with `recipe_options`, or None for BF16. Raises RecipeError for invalid options."""
        history = {} if self.amax_history_len is None else {"amax_history_len": self.amax_history_len}
        options = {**self.recipe_options, **history}
        base = recipe.from_name(self.recipe, **({} if self.recipe != "bf16" else options))
        return recipe.from_json(json.dumps({**json.loads(recipe.to_json(base)), **options})) if base else None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Returns the configuration in JSON text. Raises JobError for invalid JSON, unknown keys and invalid values."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise JobError(f"The job's configuration is not valid JSON: {json_fault(error)}.") from error
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Any) -> "TrainConfig":
        if not isinstance(values, dict):
            raise JobError(f"A job's configuration must be a JSON object, not {json_kind(values)}.")
        names = [f.name for f in dataclasses.fields(cls)]
        values = {k: v for k, v in values.items() if k not in REMOVED_OPTIONS or v != REMOVED_OPTIONS[k]}
        if unknown := sorted(set(values) - set(names)):
            raise JobError(f"Unknown training option {unknown[0]!r}; the options are {', '.join(names)}.")
        if missing := [n for n in ("model", "data", "out") if n not in values]:
            raise JobError(f"The job's configuration has no {missing[0]!r}.")
        return cls(**values)

    def identity(self) -> dict[str, Any]:
        """Returns the fields that change the trained weights. A resumed run must have equal values."""
        return {k: v for k, v in json.loads(self.to_json()).items() if k not in _FREE_ON_RESUME}


def _check_recipe(config: TrainConfig) -> None:
    if config.amax_history_len is not None and config.recipe != "delayed":
        raise JobError(f"amax_history_len needs the delayed recipe; the recipe {config.recipe!r} has no amax history.")
    if not recipe.can_train(base := config.fp8_recipe):
        raise RecipeError(f"The recipe {config.recipe!r} is for serving only; train with another.")
    if recipe.name_of(base) != config.recipe:
        raise RecipeError(
            f"The recipe_options change the recipe {config.recipe!r} into another one; name the other one in `recipe`."
        )
    # No file format can store such scales, so the served model would differ from the trained one.
    inputs = None if base is None else base.specs.linear["input"]
    if inputs is not None and inputs.source == "current" and inputs.scale_format == "power_of_2":
        raise RecipeError("Servers do not round scales to powers of two; leave power_2_scale off in training.")
    if inputs is not None and inputs.is_nvfp4 and not inputs.row_scaled:
        raise RecipeError("Servers scale NVFP4 inputs by row; leave row_scaled_activation on in training.")


def _check_fsdp(config: TrainConfig) -> None:
    if config.fsdp and config.lora_rank is not None:
        raise JobError("fsdp shards trained weights only, and an adapter has few of them; leave fsdp or lora_rank out.")
    if config.fsdp and not config.supports_processes:
        raise JobError(f"fsdp shards a model over several processes, and {config.method} uses one; leave fsdp out.")


def _check_compile(config: TrainConfig) -> None:
    for name in ("recompute", "fsdp"):
        if config.compile and getattr(config, name):
            raise JobError(f"compile needs layers that run once and have their weights; leave compile or {name} out.")
    if config.compile and config.invariant:
        raise JobError(
            "Compiled layers may round differently than a server with invariant; leave compile or invariant out."
        )


def _check_return(config: TrainConfig) -> None:
    option = 'on_divergence="return"'
    if config.recipe != "delayed" or config.lora_rank is not None:
        subject = f"the recipe {config.recipe!r}" if config.lora_rank is None else "an adapter"
        raise JobError(f'{option} changes the margin of delayed scaling, which {subject} does not have; use "fail".')
    if config.save_every is None:
        raise JobError(f"{option} needs checkpoints at fixed steps; give save_every, too.")
