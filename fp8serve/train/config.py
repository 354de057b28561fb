"""What a training job is: one frozen dataclass, checked when it is made, and its JSON.

The same object is built by the command line, by `POST /finetune` and by a Python user, and is what `job.json` holds.
Importing it loads no torch: the server's front process checks a request with it.

`batch_size` counts rows in one microbatch and `accumulate` counts microbatches in one optimizer step, as elsewhere in
the field. There is no "auto" value: a job's numbers are the ones written down.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from fp8serve.errors import JobError, RecipeError
from fp8serve.fp8 import recipe
from fp8serve.fp8.recipe import Recipe

MasterWeights = Literal["model", "optimizer"]
Packing = Literal["rows", "tokens"]
FileFormat = Literal["compressed-tensors", "fp8", "modelopt"]
OnDivergence = Literal["fail", "keep"]

# Fields that may differ between the run that wrote a checkpoint and the run that resumes from it: where things lie, how
# often something is written or reported. Every other field changes the trained bits.
_FREE_ON_RESUME = {
    *("model", "data", "eval_data", "eval_every", "out", "save_every", "save_minutes", "keep_last", "log_every"),
    *("format", "on_divergence"),
}
LENGTH = frozenset({"epochs", "max_steps"})  # may differ, too: the run goes on to the new end


@dataclass(frozen=True)
class TrainConfig:
    """One training job.

    model: directory in Hugging Face format; BF16/FP32 weights, or an FP8 directory (then dequantized masters, and the
        histories of its scales.safetensors seed the scaling state).
    data, eval_data: text or JSON-lines files.
    out: directory that receives `checkpoints/step-N/` and, at the end, `model/`.
    recipe: delayed, current, rowwise, block or bf16; `recipe_options` are that recipe's own fields.
        With `fp8_dpa` or `fp8_mha` attention is trained in FP8, too. What is served attends in high precision over a
        BF16 or an FP8 cache; the delayed recipe brings that cache the scales of its keys and values.
    amax_history_len: shorthand for the delayed recipe's field of that name.
    epochs: passes over the data; ignored when `max_steps` is given, which then counts optimizer steps.
    batch_size: rows in a microbatch; with `packing="tokens"` a microbatch is filled to `batch_size * seq_len` tokens.
    seq_len: tokens of context a row may use; longer text is cut into windows, longer conversations are truncated.
    accumulate: microbatches in an optimizer step.
    lr: peak learning rate; rises linearly over `warmup_steps` (None: 3 % of all steps), falls as a cosine to
        `lr * min_lr_ratio`.
    clip: largest global gradient norm; None does not clip.
    master_weights: "model" keeps FP32 in the model and casts on the fly, "optimizer" keeps BF16 in the model.
    save_every: optimizer steps between checkpoints (the last step always gets one); None: by `save_minutes`.
    save_minutes: without `save_every`, a step that ends this long after the last checkpoint gets one.
    keep_last: newest checkpoints kept.
    eval_every: steps between validation passes over `eval_data`; None: only at the end.
    format: spelling of the served model's FP8 weights: compressed-tensors, fp8 or modelopt.
    template_date: the date, as 2026-01-31, that chat templates are told; None: that of the run's first checkpoint, else
        today. A served model is told the day of each request.
    on_divergence: "fail" makes no model of a run that ended worse than it began (`train.divergence`), "keep" does.
    Raises JobError for a value that cannot be used.
    """

    model: str
    data: tuple[str, ...]
    out: str
    recipe: str = "delayed"
    recipe_options: Mapping[str, Any] = field(default_factory=dict)
    amax_history_len: int | None = None
    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 8
    seq_len: int = 256
    packing: Packing = "rows"
    accumulate: int = 1
    lr: float = 2e-5
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0
    master_weights: MasterWeights = "model"
    seed: int = 0
    save_every: int | None = None
    save_minutes: float = 10.0
    keep_last: int = 2
    log_every: int = 1
    eval_data: tuple[str, ...] = ()
    eval_every: int | None = None
    format: FileFormat = "compressed-tensors"
    device: str = "cpu"
    template_date: str | None = None
    on_divergence: OnDivergence = "fail"

    def __post_init__(self) -> None:
        for name in ("data", "eval_data", "betas"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        _check(self)

    @property
    def today(self) -> date | None:
        """`template_date` as a date."""
        return None if self.template_date is None else date.fromisoformat(self.template_date)

    @property
    def fp8_recipe(self) -> Recipe | None:
        """The recipe that the name and the options make; None computes in BF16. Raises RecipeError."""
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
        except ValueError as error:
            raise JobError(f"The job description is not JSON: {error}.") from error
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Any) -> "TrainConfig":
        if not isinstance(values, dict):
            raise JobError(f"A job description must be a JSON object, found {type(values).__name__}.")
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise JobError(f"Unknown training option {unknown[0]!r}; the options are {', '.join(known)}.")
        if missing := [n for n in ("model", "data", "out") if n not in values]:
            raise JobError(f"The job description lacks {missing[0]!r}.")
        return cls(**values)

    def defines(self) -> dict[str, Any]:
        """The fields that decide the trained bits: a resumed run must have the same ones."""
        return {k: v for k, v in json.loads(self.to_json()).items() if k not in _FREE_ON_RESUME}


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise JobError(f"{name} must be a list, found {value!r}.")
    return tuple(value)


_COUNTS = (
    *("epochs", "max_steps", "batch_size", "seq_len", "accumulate"),
    *("save_every", "keep_last", "log_every", "eval_every", "amax_history_len"),
)
_FRACTIONS = ("min_lr_ratio", "weight_decay")
_STRINGS = ("model", "out", "recipe", "device")
_CHOICES = {
    "packing": typing.get_args(Packing),
    "master_weights": typing.get_args(MasterWeights),
    "format": typing.get_args(FileFormat),
    "on_divergence": typing.get_args(OnDivergence),
}


def _check(config: TrainConfig) -> None:
    optional = {f.name for f in dataclasses.fields(config) if f.default is None}
    for name in _COUNTS:
        value = getattr(config, name)
        if not (value is None and name in optional):
            _whole(name, value, least=1)
    _whole("seed", config.seed, least=0)
    if config.warmup_steps is not None:
        _whole("warmup_steps", config.warmup_steps, least=0)
    _check_reals(config)
    _check_words(config)
    _check_recipe(config)


def _check_reals(config: TrainConfig) -> None:
    for name in ("lr", "eps", "save_minutes") + (("clip",) if config.clip is not None else ()):
        _real(name, getattr(config, name), above=True)
    for name in _FRACTIONS:
        _real(name, getattr(config, name), above=False)
    if config.min_lr_ratio > 1:
        raise JobError(f"min_lr_ratio must lie between 0 and 1, found {config.min_lr_ratio}.")
    if len(config.betas) != 2 or not all(_is_real(b) and 0 <= b < 1 for b in config.betas):
        raise JobError(f"betas must be two numbers from 0 up to but not including 1, found {list(config.betas)}.")


def _check_words(config: TrainConfig) -> None:
    for name in _STRINGS:
        if not isinstance(getattr(config, name), str) or not getattr(config, name):
            raise JobError(f"{name} must be a non-empty string, found {getattr(config, name)!r}.")
    for name, allowed in _CHOICES.items():
        if getattr(config, name) not in allowed:
            raise JobError(f"{name} must be one of {', '.join(allowed)}, found {getattr(config, name)!r}.")
    if not config.data or not all(isinstance(p, str) and p for p in config.data + config.eval_data):
        raise JobError("data must name at least one file, and every name must be a string.")
    if config.template_date is not None:
        _date("template_date", config.template_date)
    if config.eval_every is not None and not config.eval_data:
        raise JobError("eval_every was given without eval_data; name the files to validate on, or leave it out.")


def _check_recipe(config: TrainConfig) -> None:
    recipe.from_name(config.recipe)  # an unknown name first
    if not isinstance(config.recipe_options, Mapping):
        raise JobError(f"recipe_options must be an object, found {config.recipe_options!r}.")
    if config.amax_history_len is not None and config.recipe != "delayed":
        raise JobError(f"amax_history_len is the delayed recipe's; the recipe {config.recipe!r} keeps no history.")
    if recipe.name_of(made := config.fp8_recipe) != config.recipe:
        raise RecipeError(f"recipe_options make another recipe than {config.recipe!r}; name that one in `recipe`.")
    # No file format says so: the result would not be served as it was trained.
    if made is not None and any(spec.scale_format != "fp32" for spec in made.specs.linear.values()):
        raise RecipeError("Served models compute their scales unrounded; leave power_2_scale off in training.")


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _real(name: str, value: Any, *, above: bool) -> None:
    if not _is_real(value) or value < 0 or (above and value == 0):
        raise JobError(f"{name} must be a {'positive' if above else 'non-negative'} number, found {value!r}.")


def _date(name: str, value: Any) -> None:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        raise JobError(f"{name} must be a date such as 2026-01-31, found {value!r}.") from None


def _whole(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise JobError(f"{name} must be a whole number of at least {least}, found {value!r}.")
