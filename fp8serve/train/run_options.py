"""The options that every training method has: model, data, steps, optimizer, checkpoints and validation.

`train.config.TrainConfig` adds the options of adapters and methods (`methods.options`), and those of a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from fp8serve.fp8.recipe import RecipeName
from fp8serve.model.formats import FileFormat
from fp8serve.model.text.data_files import DATA
from fp8serve.options import About
from fp8serve.train.reporting import ReportTool

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
