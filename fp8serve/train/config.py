"""What a training job is: one frozen dataclass, checked when it is made, and its JSON.

The same object is built by the command line, by `POST /finetune` and by a Python user, and is what `job.json` holds.
Importing it loads no torch: the server's front process checks a request with it.

`batch_size` counts rows in one microbatch and `accumulate` counts microbatches in one optimizer step, as elsewhere in
the field. There is no "auto" value: a job uses the numbers that are written down.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from fp8serve.errors import JobError, RecipeError, json_fault, json_kind
from fp8serve.fp8 import recipe
from fp8serve.fp8.recipe import Recipe, RecipeName
from fp8serve.model.formats import FileFormat
from fp8serve.model.formats.peft import MAX_RANK
from fp8serve.model.text.data_files import DATA, LIMITS, STDIN, DataLimits
from fp8serve.options import About, check
from fp8serve.train.methods.options import LossType, MethodName, ScaleRewards, check_method
from fp8serve.train.reporting import ReportTool

MasterWeights = Literal["model", "optimizer"]
OptimizerStates = Literal["fp32", "8bit"]
Packing = Literal["rows", "tokens"]
OnDivergence = Literal["fail", "keep", "return"]
Schedule = Literal["cosine", "linear", "constant"]
Which = Literal["last", "best"]
Files = tuple[Annotated[str, Len(1)], ...]
MANY = 10**9  # steps
RowLength = Annotated[int, Ge(2), Le(1 << 20)]  # tokens

# Fields that may differ between the run that wrote a checkpoint and the run that resumes from it: paths, and how
# often something is written or reported. Every other field changes the trained bits.
_FREE_ON_RESUME = {
    *("model", "data", "eval_data", "eval_every", "out", "save_every", "save_minutes", "keep_last", "log_every"),
    *("max_rows", "max_row_bytes", "max_data_bytes", "max_data_memory"),
    *("format", "fsdp", "on_divergence", "recompute", "report_to", "result", "reward", "grader_url", "reward_seconds"),
}
ADAPTER = ("lora_rank", "lora_alpha", "lora_targets", "dora", "lora_dropout")
_OF_MASTERS = ("recipe_options", "amax_history_len", "master_weights", "format")
LENGTH = frozenset({"epochs", "max_steps", "patience"})  # may differ, too: the run continues to the new end


@dataclass(frozen=True)
class TrainConfig:
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

    model: Annotated[str, Len(1)]
    data: Annotated[Files, Len(1), About(DATA, metavar="PATH")]
    out: Annotated[str, Len(1), About("Directory for checkpoints/ and, at the end, model/.", metavar="PATH")]
    recipe: Annotated[str, Len(1), About("How tensors are scaled.", narrowed=RecipeName)] = "delayed"
    recipe_options: Annotated[
        Mapping[str, Any],
        About("A parameter of the recipe, its value in JSON.", flag="--recipe-option", metavar="NAME=VALUE"),
    ] = field(default_factory=dict)
    amax_history_len: Annotated[
        int | None, Ge(1), Le(1 << 20), About("Length of the amax history (delayed).", "1024", flag="--history-len")
    ] = None
    epochs: Annotated[int, Ge(1), Le(10_000), About("Passes over the data.")] = 1
    max_steps: Annotated[
        int | None, Ge(1), Le(MANY), About("Optimizer steps, instead of epochs.", unset="by --epochs")
    ] = None
    batch_size: Annotated[int, Ge(1), Le(65536), About("Rows in a microbatch.")] = 8
    seq_len: Annotated[RowLength, About("Longest row, in tokens.")] = 256
    packing: Annotated[Packing, About("Fill a microbatch by rows, or to batch_size x seq_len tokens.")] = "rows"
    accumulate: Annotated[int, Ge(1), Le(65536), About("Microbatches in an optimizer step.")] = 1
    lr: Annotated[float, Ge(1e-12), Le(10), About("Peak learning rate.")] = 2e-5
    warmup_steps: Annotated[int | None, Ge(0), Le(MANY), About("Steps of linear rise.", unset="3 % of all")] = None
    lr_schedule: Annotated[Schedule, About("How the rate falls after its rise.")] = "cosine"
    min_lr_ratio: Annotated[float, Ge(0), Le(1), About("Where the rate ends, as a part of the peak.")] = 0.0
    weight_decay: Annotated[float, Ge(0), Le(10), About("AdamW's weight decay.")] = 0.01
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    eps: Annotated[float, Gt(0)] = 1e-8
    clip: Annotated[float | None, Gt(0), Le(1_000_000), About("Largest gradient norm.")] = 1.0
    master_weights: Annotated[
        MasterWeights, About("FP32 weights in the model, or in the optimizer beside a BF16 model.")
    ] = "model"
    optimizer_states: Annotated[
        OptimizerStates, About("Moments of matrices in FP32, or in 8 bits, which needs torchao.")
    ] = "fp32"
    recompute: Annotated[
        bool, About("Keep only the inputs of layers for the backward pass, and compute the rest again.")
    ] = False
    fsdp: Annotated[
        bool, About("Divide weights, gradients and moments among the processes (FSDP2), instead of a copy in each.")
    ] = False
    seed: Annotated[int, Ge(0), Le(2**31 - 1), About("Seed of the data order.")] = 0
    save_every: Annotated[
        int | None, Ge(1), Le(MANY), About("Steps between checkpoints.", unset="by --save-minutes")
    ] = None
    save_minutes: Annotated[float, Gt(0), About("Minutes between checkpoints, without --save-every.")] = 10.0
    keep_last: Annotated[int, Ge(1), Le(1000), About("Newest checkpoints to keep.")] = 2
    log_every: Annotated[int, Ge(1)] = 1
    report_to: Annotated[
        tuple[ReportTool, ...],
        About(
            "Also write metrics for tensorboard or wandb, which must be installed.",
            unset="none",
            metavar="TOOL",
            narrowed=tuple[str, ...],
        ),
    ] = ()
    eval_data: Annotated[Files, About("File to validate on.", unset="none", metavar="PATH")] = ()
    eval_every: Annotated[int | None, Ge(1), Le(MANY), About("Steps between validations.", unset="at the end")] = None
    patience: Annotated[
        int | None, Ge(1), Le(MANY), About("Validations without a lower loss that end the run.", unset="none")
    ] = None
    result: Annotated[Which, About("Make the model of the last step, or of the lowest validation loss.")] = "last"
    format: Annotated[FileFormat, About("Format of the result's FP8 weights.")] = "compressed-tensors"
    lora_rank: Annotated[
        int | None, Ge(1), Le(MAX_RANK), About("Train an adapter of this rank beside the frozen model.", unset="none")
    ] = None
    lora_alpha: Annotated[
        float | None, Gt(0), Le(1_000_000), About("Scales the adapter by alpha / rank.", unset="2 x rank")
    ] = None
    lora_targets: Annotated[
        Files,
        About("Layers with an adapter, by name or pattern.", unset="all projections", metavar="PATTERN"),
    ] = ()
    dora: Annotated[bool, About("DoRA: also train a magnitude for each row of a weight.")] = False
    lora_dropout: Annotated[float, Ge(0), Lt(1), About("Dropout on the adapter's input.")] = 0.0
    method: Annotated[
        MethodName,
        About(
            "What is learnt: the next token (sft), which of two answers is better (dpo), or what earns a reward (grpo)."
        ),
    ] = "sft"
    beta: Annotated[
        float | None,
        Gt(0),
        Le(1000),
        About("How the model is kept near the reference (dpo, grpo).", unset="0.1; simpo: 2; grpo: not at all"),
    ] = None
    loss_type: Annotated[
        LossType | None,
        About(
            "Loss of pairs (dpo): sigmoid, sigmoid_norm, ipo, simpo; of answers (grpo): dapo, grpo, dr_grpo.",
            unset="sigmoid; grpo: dapo",
        ),
    ] = None
    label_smoothing: Annotated[float, Ge(0), Lt(0.5), About("Share of pairs that may be labelled wrongly (dpo).")] = 0.0
    reference_free: Annotated[bool, About("Compare answers without a reference (dpo).")] = False
    ld_alpha: Annotated[
        float | None,
        Ge(0),
        Le(1),
        About("Weight of the tokens by which one answer is longer than the other (dpo).", unset="1"),
    ] = None
    simpo_gamma: Annotated[float | None, Ge(0), Le(1000), About("Margin that simpo demands.", unset="1")] = None
    num_generations: Annotated[int, Ge(2), Le(1024), About("Answers to a prompt (grpo).")] = 8
    num_iterations: Annotated[int, Ge(1), Le(100), About("Updates by the answers of a step (grpo).")] = 1
    max_completion_length: Annotated[
        int | None, Ge(1), Le(1 << 20), About("Tokens of an answer (grpo).", unset="half of seq_len")
    ] = None
    temperature: Annotated[float, Ge(0.01), Le(100), About("Temperature at which answers are drawn (grpo).")] = 1.0
    epsilon: Annotated[float, Gt(0), Lt(1), About("Clips the importance ratio at 1 +- this (grpo).")] = 0.2
    epsilon_high: Annotated[float | None, Gt(0), Le(100), About("The same, above 1 (grpo).", unset="--epsilon")] = None
    scale_rewards: Annotated[
        ScaleRewards, About("Advantages are divided by the deviation of the group, of the step, or by nothing (grpo).")
    ] = "group"
    reward: Annotated[
        str | None,
        Len(1),
        About("Python file with a function `reward(prompt, completion, row)` (grpo).", "none", metavar="FILE"),
    ] = None
    grader_url: Annotated[
        str | None, Len(1, 2048), About("Address of a server that grades instead (grpo).", unset="none", metavar="URL")
    ] = None
    reward_seconds: Annotated[
        float, Gt(0), Le(86400), About("Seconds for a reward (grpo): of an answer by a file, of a step by a URL.")
    ] = 60.0
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
        _check_adapter(self, changed)
        _check_fsdp(self)
        if self.on_divergence == "return":
            _check_return(self)
        check_method(self, changed)

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
    if not recipe.trains(made := config.fp8_recipe):
        raise RecipeError(f"The recipe {config.recipe!r} is for serving only; train with another.")
    if recipe.name_of(made) != config.recipe:
        raise RecipeError(
            f"With these recipe_options it is another recipe than {config.recipe!r}; name that one in `recipe`."
        )
    # No file format can express it, so the result would not be served as it was trained.
    inputs = None if made is None else made.specs.linear["input"]
    if inputs is not None and inputs.source == "current" and inputs.scale_format != "fp32":
        raise RecipeError("Served models compute their scales unrounded; leave power_2_scale off in training.")


def _changed(config: TrainConfig) -> frozenset[str]:
    """The fields whose value differs from the default."""
    return frozenset(f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default)


def _check_adapter(config: TrainConfig, changed: frozenset[str]) -> None:
    given = [n for n in ADAPTER if n in changed]
    if config.lora_rank is None and given:
        raise JobError(f"{given[0]} is an option of an adapter; give lora_rank, too, or leave it out.")
    foreign = [n for n in _OF_MASTERS if n in changed and getattr(config, n) not in (None, {})]
    if config.lora_rank is not None and foreign:
        raise JobError(f"{foreign[0]} is for training the model's own weights, which lora_rank freezes; leave one out.")


def _check_fsdp(config: TrainConfig) -> None:
    if config.fsdp and config.lora_rank is not None:
        raise JobError("fsdp divides what is trained, and an adapter is small beside its frozen base; leave it out.")
    if config.fsdp and not config.divides:
        raise JobError(f"fsdp divides a model among processes, and {config.method} runs in one; leave it out.")


def _check_return(config: TrainConfig) -> None:
    given = 'on_divergence="return"'
    if config.recipe != "delayed" or config.lora_rank is not None:
        what = f"the recipe {config.recipe!r}" if config.lora_rank is None else "an adapter"
        raise JobError(f'{given} changes the margin of delayed scaling, which {what} does not have; use "fail".')
    if config.save_every is None:
        raise JobError(f"{given} goes back to checkpoints at fixed steps; give save_every, too.")


def _date(name: str, value: Any) -> None:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        raise JobError(f"{name} must be a date such as 2026-01-31, found {value!r}.") from None
