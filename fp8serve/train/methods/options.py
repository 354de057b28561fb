"""The options of all runs, of adapters and of each training method, and checks of combinations. It needs no torch.

Each class adds its fields to the class above it, so that a job's configuration stays one flat object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args

from annotated_types import Ge, Gt, Le, Len, Lt

from fp8serve.errors import JobError, shown
from fp8serve.fp8.recipe import RecipeName
from fp8serve.model.formats import FileFormat
from fp8serve.model.formats.peft import MAX_RANK
from fp8serve.model.text.data_files import DATA
from fp8serve.options import About, http_address
from fp8serve.train.events import ReportTool

MasterWeights = Literal["model", "optimizer"]
OptimizerStates = Literal["fp32", "8bit"]
Packing = Literal["rows", "tokens"]
Schedule = Literal["cosine", "linear", "constant"]
ResultCheckpoint = Literal["last", "best"]
Files = tuple[Annotated[str, Len(1)], ...]
MAX_STEPS = 10**9
RowLength = Annotated[int, Ge(2), Le(1 << 20)]  # tokens


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, which `TrainConfig` documents."""

    model: Annotated[str, Len(1)]
    data: Annotated[Files, Len(1), About(DATA, metavar="PATH")]
    out: Annotated[str, Len(1), About("Output directory of checkpoints/ and model/.", metavar="PATH")]
    recipe: Annotated[str, Len(1), About("How tensors are scaled.", narrowed=RecipeName)] = "delayed"
    recipe_options: Annotated[
        Mapping[str, Any],
        About("A parameter of the recipe, with its value in JSON.", flag="--recipe-option", metavar="NAME=VALUE"),
    ] = field(default_factory=dict)
    amax_history_len: Annotated[
        int | None, Ge(1), Le(1 << 20), About("Length of the amax history (delayed).", "1024", flag="--history-len")
    ] = None
    epochs: Annotated[int, Ge(1), Le(10_000), About("Passes over the data.")] = 1
    max_steps: Annotated[
        int | None, Ge(1), Le(MAX_STEPS), About("Optimizer steps, instead of epochs.", unset="by --epochs")
    ] = None
    batch_size: Annotated[int, Ge(1), Le(65536), About("Rows in a microbatch.")] = 8
    seq_len: Annotated[RowLength, About("Longest row, in tokens.")] = 256
    packing: Annotated[Packing, About("Fill microbatches by rows, or to batch_size x seq_len tokens.")] = "rows"
    accumulate: Annotated[int, Ge(1), Le(65536), About("Gradient accumulation: microbatches in a step.")] = 1
    lr: Annotated[float, Ge(1e-12), Le(10), About("Peak learning rate.")] = 2e-5
    warmup_steps: Annotated[int | None, Ge(0), Le(MAX_STEPS), About("Linear warm-up.", unset="3 % of all")] = None
    lr_schedule: Annotated[Schedule, About("Decay of the learning rate after the warm-up.")] = "cosine"
    min_lr_ratio: Annotated[float, Ge(0), Le(1), About("Final learning rate as a fraction of the peak.")] = 0.0
    weight_decay: Annotated[float, Ge(0), Le(10), About("AdamW's weight decay.")] = 0.01
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    eps: Annotated[float, Gt(0)] = 1e-8
    clip: Annotated[float | None, Gt(0), Le(1_000_000), About("Gradient norm above which to clip.")] = 1.0
    master_weights: Annotated[
        MasterWeights, About("Where the FP32 weights are: in the model, or in the optimizer with a BF16 model.")
    ] = "model"
    optimizer_states: Annotated[
        OptimizerStates, About("Precision of the optimizer's moments of matrices; 8bit needs torchao.")
    ] = "fp32"
    recompute: Annotated[bool, About("Activation checkpointing: keep only the inputs of layers.")] = False
    invariant: Annotated[
        bool,
        About("On a GPU, sum in the order of a server with --invariant, for equal log-probabilities; slower."),
    ] = False
    compile: Annotated[bool, About("Compile the layers with torch.compile.")] = False
    fsdp: Annotated[bool, About("Shard weights, gradients and moments over the processes (FSDP2).")] = False
    seed: Annotated[int, Ge(0), Le(2**31 - 1), About("Seed of the data order.")] = 0
    save_every: Annotated[
        int | None, Ge(1), Le(MAX_STEPS), About("Steps between checkpoints.", unset="by --save-minutes")
    ] = None
    save_minutes: Annotated[float, Gt(0), About("Minutes between checkpoints, without --save-every.")] = 10.0
    keep_last: Annotated[int, Ge(1), Le(1000), About("Number of newest checkpoints to keep.")] = 2
    log_every: Annotated[int, Ge(1)] = 1
    report_to: Annotated[
        tuple[ReportTool, ...],
        About(
            "Also report metrics to tensorboard or wandb, which must be installed.",
            unset="none",
            metavar="TOOL",
            narrowed=tuple[str, ...],
        ),
    ] = ()
    eval_data: Annotated[Files, About("File to validate on.", unset="none", metavar="PATH")] = ()
    eval_every: Annotated[int | None, Ge(1), Le(MAX_STEPS), About("Steps between validations.", unset="at the end")] = (
        None
    )
    patience: Annotated[
        int | None, Ge(1), Le(MAX_STEPS), About("Stop after so many validations without a lower loss.", unset="never")
    ] = None
    result: Annotated[ResultCheckpoint, About("Export the last model, or that of the lowest validation loss.")] = "last"
    format: Annotated[FileFormat, About("Format of the result's FP8 weights.")] = "compressed-tensors"


MethodName = Literal["sft", "dpo", "grpo"]
DpoLoss = Literal["sigmoid", "simpo"]
GrpoLoss = Literal["dapo", "grpo", "dr_grpo"]
LossType = Literal[DpoLoss, GrpoLoss]
ScaleRewards = Literal["group", "batch", "none"]
_SHARED_OPTIONS = ("beta", "loss_type")
METHOD_OPTIONS = {
    "dpo": (*_SHARED_OPTIONS, "label_smoothing", "simpo_gamma"),
    "grpo": (
        *_SHARED_OPTIONS, "num_generations", "num_iterations", "max_completion_length", "temperature", "epsilon",
        "epsilon_high", "scale_rewards", "reward", "grader_url", "reward_seconds",
    ),
}  # fmt: skip
ADAPTER_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets", "dora", "lora_dropout")
FULL_TRAINING_OPTIONS = ("recipe_options", "amax_history_len", "master_weights", "format")
BETA, SIMPO_BETA, SIMPO_GAMMA = 0.1, 2.0, 1.0


@dataclass(frozen=True)
class AdapterOptions(RunOptions):
    """The options of LoRA and DoRA adapters."""

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

    def _check_adapter(self, changed: frozenset[str]) -> None:
        adapter_options = [name for name in ADAPTER_OPTIONS if name in changed]
        if self.lora_rank is None and adapter_options:
            raise JobError(f"{adapter_options[0]} is an option of an adapter; give lora_rank, too, or leave it out.")
        full_options = [n for n in FULL_TRAINING_OPTIONS if n in changed and getattr(self, n) not in (None, {})]
        if self.lora_rank is not None and full_options:
            raise JobError(
                f"{full_options[0]} is for training the model's own weights, which lora_rank freezes; leave one out."
            )


@dataclass(frozen=True)
class MethodOptions(AdapterOptions):
    """The method, and the options that DPO and GRPO share."""

    method: Annotated[
        MethodName,
        About(
            "The data to learn from: examples (sft), pairs of completions (dpo), or rewards of own completions (grpo)."
        ),
    ] = "sft"
    beta: Annotated[
        float | None,
        Gt(0),
        Le(1000),
        About("How strongly the model stays near the reference (dpo, grpo).", unset="0.1; simpo: 2; grpo: 0"),
    ] = None
    loss_type: Annotated[
        LossType | None,
        About(
            "Loss of dpo: sigmoid, simpo; loss of grpo: dapo, grpo, dr_grpo.",
            unset="sigmoid; grpo: dapo",
        ),
    ] = None

    def _check_loss(self, losses: tuple[str, ...]) -> None:
        if self.loss_type is not None and self.loss_type not in losses:
            names = ", ".join(losses)
            raise JobError(f"loss_type {self.loss_type} is no loss of the method {self.method}; give {names}.")


@dataclass(frozen=True)
class DpoOptions(MethodOptions):
    """The options of direct preference optimisation (dpo)."""

    label_smoothing: Annotated[float, Ge(0), Lt(0.5), About("Share of pairs that may be labelled wrongly (dpo).")] = 0.0
    simpo_gamma: Annotated[float | None, Ge(0), Le(1000), About("Target margin of the loss simpo.", unset="1")] = None

    @property
    def dpo_loss(self) -> DpoLoss:
        return cast(DpoLoss, self.loss_type or "sigmoid")

    def _check_dpo(self) -> None:
        self._check_loss(get_args(DpoLoss))
        if self.simpo_gamma is not None and self.dpo_loss != "simpo":
            raise JobError("simpo_gamma belongs to the loss simpo, not to sigmoid; leave one of them out.")


@dataclass(frozen=True)
class GrpoOptions(DpoOptions):
    """The options of group relative policy optimisation (grpo)."""

    num_generations: Annotated[int, Ge(2), Le(1024), About("Completions of a prompt (grpo).")] = 8
    num_iterations: Annotated[int, Ge(1), Le(100), About("Updates with the completions of a step (grpo).")] = 1
    max_completion_length: Annotated[
        int | None, Ge(1), Le(1 << 20), About("Maximum tokens of a completion (grpo).", unset="half of seq_len")
    ] = None
    temperature: Annotated[float, Ge(0.01), Le(100), About("Sampling temperature of completions (grpo).")] = 1.0
    epsilon: Annotated[float, Gt(0), Lt(1), About("Clips the importance ratio at 1 +- this (grpo).")] = 0.2
    epsilon_high: Annotated[float | None, Gt(0), Le(100), About("The same, above 1 (grpo).", unset="--epsilon")] = None
    scale_rewards: Annotated[
        ScaleRewards, About("Divide advantages by the standard deviation of the group, of the step, or not (grpo).")
    ] = "group"
    reward: Annotated[
        str | None,
        Len(1),
        About("Python file with a function `reward(prompt, completion, row)` (grpo).", "none", metavar="FILE"),
    ] = None
    grader_url: Annotated[
        str | None, Len(1, 2048), About("URL of a server that computes rewards (grpo).", unset="none", metavar="URL")
    ] = None
    reward_seconds: Annotated[
        float, Gt(0), Le(86400), About("Seconds for rewards (grpo): of a completion (--reward), of a step (URL).")
    ] = 60.0

    @property
    def grpo_loss(self) -> GrpoLoss:
        return cast(GrpoLoss, self.loss_type or "dapo")

    @property
    def effective_beta(self) -> float:
        """`beta` or its default: 0.1 for dpo, 2 for simpo, whose means are smaller than sums, and 0 for grpo."""
        if self.beta is not None:
            return self.beta
        if self.method == "grpo":
            return 0.0
        return SIMPO_BETA if self.dpo_loss == "simpo" else BETA

    @property
    def max_completion_tokens(self) -> int:
        """The maximum tokens of a completion (grpo)."""
        return self.max_completion_length or self.seq_len // 2

    def _check_method(self, changed: frozenset[str]) -> None:
        """Raises JobError if an option that is `changed` from its default belongs to another method."""
        for name in [name for names in METHOD_OPTIONS.values() for name in names if name in changed]:
            allowed_methods = [method for method, names in METHOD_OPTIONS.items() if name in names]
            if self.method not in allowed_methods:
                methods = " or ".join(allowed_methods)
                raise JobError(
                    f"{name} is an option of the method {methods}; give method {methods}, too, or leave it out."
                )
        if self.method == "grpo":
            self._check_grpo()
        elif self.method == "dpo":
            self._check_dpo()

    def _check_grpo(self) -> None:
        self._check_loss(get_args(GrpoLoss))
        if (self.reward is None) == (self.grader_url is None):
            raise JobError(
                "The method grpo needs one source of rewards: give either reward, a Python file, or grader_url."
            )
        if self.grader_url is not None and http_address(self.grader_url) is None:
            raise JobError(
                f"grader_url must be an address such as http://localhost:9000/grade, not {shown(self.grader_url)}."
            )
        if self.max_completion_tokens >= self.seq_len:
            raise JobError(
                f"max_completion_length ({self.max_completion_length}) leaves no token of seq_len ({self.seq_len}) for "
                "the prompt; lower it, or raise seq_len."
            )
        if self.eval_data:
            raise JobError(
                "eval_data is evaluated by the loss of given completions, which the method grpo lacks; leave it out."
            )
        if self.packing != "rows":
            raise JobError(
                "packing needs rows of known length, and the method grpo generates completions; leave it out."
            )
        if self.lora_dropout:
            raise JobError("lora_dropout must be 0 with the method grpo: completions are generated without dropout.")
