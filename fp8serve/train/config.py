"""What a training job is: one frozen dataclass, checked when it is made, and its JSON.

The same object is built by the command line, by `POST /finetune` and by a Python user, and is what `job.json` holds.
Importing it loads no torch: the server's front process checks a request with it.

`batch_size` counts rows in one microbatch and `accumulate` counts microbatches in one optimizer step, as elsewhere in
the field. There is no "auto" value: a job uses the numbers that are written down.
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
from fp8serve.train.methods.options import AnswerOptions

OnDivergence = Literal["fail", "keep", "return"]
LENGTH = frozenset({"epochs", "max_steps", "patience"})  # may differ, too: the run continues to the new end

# Fields that may differ between the run that wrote a checkpoint and the run that resumes from it: paths, and how
# often something is written or reported. Every other field changes the trained bits.
_FREE_ON_RESUME = {
    *("model", "data", "eval_data", "eval_every", "out", "save_every", "save_minutes", "keep_last", "log_every"),
    *("max_rows", "max_row_bytes", "max_data_bytes", "max_data_memory"),
    *("format", "fsdp", "on_divergence", "recompute", "report_to", "result", "reward", "grader_url", "reward_seconds"),
}

WIRE_NAMES = {"lr": "learning_rate"}
"""How a server's clients name an option where the name differs."""
NOT_ON_THE_WIRE = ("data", "out", "eval_data", "save_minutes", "format", "device", "template_date", "reward",
                   "report_to")  # fmt: skip
"""Options that are a server's operator's, or that the server fills in."""


@dataclass(frozen=True)
class TrainConfig(AnswerOptions):
    """One training job.

    `model` may also be an FP8 directory: then masters are dequantized, and the histories of its scales.safetensors seed
    the scaling state. `out` receives `checkpoints/step-N/` and, at the end, `model/`.

    `recipe_options` are the recipe's own fields. With `fp8_dpa` or `fp8_mha` attention is trained in FP8, too. The
    served model attends in high precision over a BF16 or an FP8 cache; the delayed recipe gives that cache its scales
    of keys and values. `amax_history_len` is shorthand for the delayed recipe's field of that name.

    The learning rate rises linearly over `warmup_steps` and falls by `lr_schedule` to `lr * min_lr_ratio`, or stays.
    With `packing="tokens"` a microbatch is filled to `batch_size * seq_len` tokens. Longer texts are cut into windows
    of `seq_len`, longer conversations are truncated. The last step always gets a checkpoint. A served model's chat
    template is told the day of each request; in training it is told `template_date`. `train.validation` says when a run
    has made its model worse.

    A run that validates (`eval_data`, `eval_every`) may end early: after `patience` validations in a row without a new
    lowest loss. With `result="best"` its model is made of the checkpoint with the lowest loss.

    With `lora_rank` the model stays as it is and computes as it is served, under "delayed" with its stored scales; the
    run trains an adapter, which is what `out/model/` then holds (`train.lora`).

    `max_rows`, `max_row_bytes` and `max_data_bytes` bound each file, unpacked, and `max_data_memory` what all of them
    take; a server sets its own.

    `method` says what is minimised and what the data are (`train.methods`).
    Raises JobError for a value that cannot be used.
    """

    device: Annotated[str, Len(1), About("cpu or cuda.")] = "cpu"
    template_date: Annotated[
        str | None, About("Date that chat templates are told.", unset="day of the first checkpoint", metavar="DATE")
    ] = None
    on_divergence: Annotated[
        OnDivergence,
        About(
            "A run that made the model worse fails, or gives a model all the same (keep). With return, a run that "
            "diverges continues from its last good checkpoint with a larger margin, then with current scaling."
        ),
    ] = "fail"

    max_rows: Annotated[int, Ge(1)] = LIMITS.rows
    max_row_bytes: Annotated[int, Ge(1)] = LIMITS.row_bytes
    max_data_bytes: Annotated[int, Ge(1)] = LIMITS.bytes
    max_data_memory: Annotated[int | None, Ge(1)] = LIMITS.memory

    def __post_init__(self) -> None:
        recipe.from_name(self.recipe)  # an unknown name first
        check(self, JobError)
        if self.template_date is not None:
            _date("template_date", self.template_date)
        if self.eval_every is not None and not self.eval_data:
            raise JobError("eval_every was given without eval_data; name the files to validate on, or leave it out.")
        if (self.patience is not None or self.result == "best") and self.eval_every is None:
            name = "patience" if self.patience is not None else 'result="best"'
            raise JobError(f"{name} compares validations; give eval_data and eval_every, too, or leave it out.")
        if STDIN in (*self.data, *self.eval_data):
            raise JobError(
                "Data are read again when a run goes on, so standard input ('-') cannot be used; name a file."
            )
        _check_recipe(self)
        changed = _changed(self)
        self._check_adapter(changed)
        _check_fsdp(self)
        if self.on_divergence == "return":
            _check_return(self)
        self._check_method(changed)

    @property
    def today(self) -> date | None:
        """`template_date` as a date."""
        return None if self.template_date is None else date.fromisoformat(self.template_date)

    @property
    def divides(self) -> bool:
        """Whether several processes can take a step together: its items are known beforehand."""
        return self.method != "grpo"

    @property
    def data_limits(self) -> DataLimits:
        """What a file of data may hold."""
        return DataLimits(self.max_rows, self.max_row_bytes, self.max_data_bytes, self.max_data_memory)

    def processes(self, most: int) -> int:
        """How many of so many processes a step has work for."""
        return min(most, self.accumulate) if self.divides else 1

    @property
    def fp8_recipe(self) -> Recipe | None:
        """The recipe of this name with these options; None for BF16. Raises RecipeError."""
        history = {} if self.amax_history_len is None else {"amax_history_len": self.amax_history_len}
        options = {**self.recipe_options, **history}
        base = recipe.from_name(self.recipe, **({} if self.recipe != "bf16" else options))
        return recipe.from_json(json.dumps({**json.loads(recipe.to_json(base)), **options})) if base else None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Raises JobError for text that is not an object, for an unknown key, and for a value of the wrong kind."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise JobError(f"The job description is not valid JSON: {json_fault(error)}.") from error
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Any) -> "TrainConfig":
        if not isinstance(values, dict):
            raise JobError(f"A job description must be a JSON object, and is {json_kind(values)}.")
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise JobError(f"Unknown training option {unknown[0]!r}; the options are {', '.join(known)}.")
        if missing := [n for n in ("model", "data", "out") if n not in values]:
            raise JobError(f"The job description lacks {missing[0]!r}.")
        return cls(**values)

    def defines(self) -> dict[str, Any]:
        """The fields that decide the trained bits: a resumed run must have the same ones."""
        return {k: v for k, v in json.loads(self.to_json()).items() if k not in _FREE_ON_RESUME}


def _check_recipe(config: TrainConfig) -> None:
    if config.amax_history_len is not None and config.recipe != "delayed":
        raise JobError(f"amax_history_len is the delayed recipe's; the recipe {config.recipe!r} keeps no history.")
    if not recipe.trains(base := config.fp8_recipe):
        raise RecipeError(f"The recipe {config.recipe!r} is for serving only; train with another.")
    if recipe.name_of(base) != config.recipe:
        raise RecipeError(
            f"With these recipe_options it is another recipe than {config.recipe!r}; name that one in `recipe`."
        )
    # No file format can express it, so the result would not be served as it was trained.
    inputs = None if base is None else base.specs.linear["input"]
    if inputs is not None and inputs.source == "current" and inputs.scale_format != "fp32":
        raise RecipeError("Served models compute their scales unrounded; leave power_2_scale off in training.")


def _changed(config: TrainConfig) -> frozenset[str]:
    """The fields whose value differs from the default."""
    return frozenset(f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default)


def _check_fsdp(config: TrainConfig) -> None:
    if config.fsdp and config.lora_rank is not None:
        raise JobError("fsdp divides what is trained, and an adapter is small beside its frozen base; leave it out.")
    if config.fsdp and not config.divides:
        raise JobError(f"fsdp divides a model among processes, and {config.method} runs in one; leave it out.")


def _check_return(config: TrainConfig) -> None:
    option = 'on_divergence="return"'
    if config.recipe != "delayed" or config.lora_rank is not None:
        what = f"the recipe {config.recipe!r}" if config.lora_rank is None else "an adapter"
        raise JobError(f'{option} changes the margin of delayed scaling, which {what} does not have; use "fail".')
    if config.save_every is None:
        raise JobError(f"{option} goes back to checkpoints at fixed steps; give save_every, too.")


def _date(name: str, value: Any) -> None:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        raise JobError(f"{name} must be a date such as 2026-01-31, found {value!r}.") from None
