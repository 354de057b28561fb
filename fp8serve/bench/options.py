"""The options of the studies; imported without torch, so that the command line can show them."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len

from fp8serve.calibration.options import SHIPPED, Files
from fp8serve.engine.options import EngineOptions, KvDtype
from fp8serve.errors import JobError
from fp8serve.fp8.recipe import NAMES, HeadDtype
from fp8serve.options import About, check, options_of

Prompt = Annotated[int, Ge(1), About("Tokens of each prompt.")]
New = Annotated[int, Ge(2), About("Tokens of each answer.")]
Rows = Annotated[int, Ge(1), About("Sequences of 128 tokens in a step.")]
_ENGINE = {option.name: option.default for option in options_of(EngineOptions)}


class Checked:
    """Raises JobError for a value that cannot be used."""

    def __post_init__(self) -> None:
        check(self, JobError)


@dataclass(frozen=True)
class NumericsOptions(Checked):
    data: Annotated[Files | None, About("Text or JSON-lines file.", unset=SHIPPED, metavar="PATH")] = None
    samples: Annotated[int, Ge(2), About("Sequences to calibrate on; an eighth more is measured.")] = 64
    seq_len: Annotated[int, Ge(2), About("Longest sequence, in tokens.")] = 256
    own_steps: Annotated[int, Ge(2), About("Training steps of the small model; unused with MODEL.")] = 200


@dataclass(frozen=True)
class EngineLoad(Checked):
    recipe: Annotated[str, About("Recipe, bf16, or 'stored': what the directory stores.")] = _ENGINE["recipe"]
    kv_cache_dtype: Annotated[KvDtype, About("Element type of the KV cache.")] = _ENGINE["kv_cache_dtype"]
    head_dtype: Annotated[HeadDtype, About("Element type of the matrix that makes logits.")] = _ENGINE["head_dtype"]
    batches: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Len(1), About("Sequences decoded together.", flag="--batch")
    ] = (1, 4, 8, 16)
    prompt: Prompt = 256
    new: New = 64
    device: Annotated[str, Len(1), About("cpu or cuda.")] = "cpu"


DEFAULT_OUTPUT = 64


@dataclass(frozen=True)
class SpeculationLoad(Checked):
    recipe: Annotated[str, About("Recipe, bf16, or 'stored': what the directory stores.")] = _ENGINE["recipe"]
    kv_cache_dtype: Annotated[KvDtype, About("Element type of the KV cache.")] = _ENGINE["kv_cache_dtype"]
    speculative_tokens: Annotated[int, Ge(1), Le(64), About("Tokens of a draft, at most.")] = 8
    draft_model: Annotated[
        str | None, About("Model that drafts tokens, instead of the text so far.", unset="none", metavar="MODEL")
    ] = None
    new: New = 128
    rounds: Annotated[int, Ge(1), About("Answers of each kind, in turn with and without drafts.")] = 5
    temperature: Annotated[float, Ge(0), Le(100), About("0: greedy.")] = 0.0


@dataclass(frozen=True)
class Load(Checked):
    """The requests of the clients, and their times."""

    num_prompts: Annotated[int, Ge(1), About("Requests in all.")] = 32
    max_concurrency: Annotated[int | None, Ge(1), About("Requests at the same time.", unset="no limit")] = None
    request_rate: Annotated[float | None, Gt(0), About("Requests sent in a second.", unset="all at once")] = None
    burstiness: Annotated[float, Gt(0), About("1: a Poisson process; less: burstier; more: more even.")] = 1.0
    dataset: Annotated[
        Literal["random", "sharegpt", "jsonl"], About("Random token ids, ShareGPT's JSON, or JSON lines with prompt.")
    ] = "random"
    dataset_path: Annotated[str | None, About("The file of the data set.", unset="none", metavar="FILE")] = None
    input_len: Annotated[int, Ge(1), About("Tokens of each random prompt.")] = 256
    output_len: Annotated[
        int | None, Ge(1), About("Longest answer, in tokens.", unset=f"the data set's, or {DEFAULT_OUTPUT}")
    ] = None
    ignore_eos: Annotated[
        bool | None, About("Answers continue after the end-of-text token.", unset="for random prompts")
    ] = None
    api: Annotated[Literal["completions", "chat"], About("The route for the requests.")] = "completions"
    seed: Annotated[int, Ge(0), About("Seed of prompts, their order, and their sending times.")] = 0
    vocab: int = 1000  # random prompts use ids below this


@dataclass(frozen=True)
class Shape(Checked):
    """A Llama with tied embeddings; the default has 10.2 million parameters."""

    hidden_size: Annotated[int, Ge(64), About("Width of the model.")] = 384
    layers: Annotated[int, Ge(1), About("Layers of the model.")] = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate_size: int = 1024
    vocab_size: int = 2048

    @classmethod
    def of(cls, hidden_size: int, layers: int) -> "Shape":
        """The same proportions in another size: heads of 64, a feed-forward layer of 8/3 of the width."""
        if hidden_size % 64:
            raise JobError(f"hidden_size must be a multiple of 64, found {hidden_size}.")
        heads = hidden_size // 64
        wide = 128 * math.ceil(hidden_size * 8 / (3 * 128))
        return cls(hidden_size, layers, heads, 2 if heads % 2 == 0 else 1, wide)


TWIN = "twin"  # a second run in BF16 whose rate differs so little that only chance separates the two
TWIN_RATE = 1.0001


@dataclass(frozen=True)
class StudyPlan(Checked):
    """The model and the length of the training. A step reads `batch_size` rows of at most `seq_len` tokens, packed.

    model: directory of the initial weights; None: random ones of `shape`. lr: the peak, reached after `warmup_steps`
    (None: 3 % of all) and falling along a cosine to `final_lr` of it. With so few tokens per step a rate above the
    default does not help: at 1e-3 BF16 itself ends 7 % higher (docs/studies.md).
    """

    recipes: Annotated[
        tuple[str, ...],
        Len(1),
        About("Recipe, or twin: BF16 at a rate 0.01 % higher; the first one is the baseline.", flag="--recipe"),
    ] = (
        "bf16",
        "delayed",
        "current",
        "rowwise",
        "block",
    )
    resumed: str = "delayed"
    steps: Annotated[int, Ge(4), About("Optimizer steps of each run; an even number.")] = 1000
    batch_size: Annotated[int, Ge(1), About("Rows in a step.")] = 4
    seq_len: Annotated[int, Ge(2), About("Longest row, in tokens.")] = 128
    lr: Annotated[float, Gt(0), About("Peak learning rate.")] = 3e-4
    warmup_steps: Annotated[
        int | None, Ge(0), About("Steps in which the rate rises to its peak.", unset="3 % of all")
    ] = None
    final_lr: Annotated[float, Ge(0), Le(1), About("Final rate as a fraction of the peak.")] = 0.1
    seed: Annotated[int, Ge(0), About("Seed of random weights and of the order of rows.")] = 0
    shape: Shape = field(default_factory=Shape)
    model: str | None = None

    def __post_init__(self) -> None:
        check(self, JobError)
        if unknown := [r for r in self.recipes if r not in (*NAMES, TWIN)]:
            raise JobError(f"There is no recipe {unknown[0]!r}; choose from {', '.join((*NAMES, TWIN))}.")
        if self.steps % 2:
            raise JobError(f"steps must be an even number, found {self.steps}.")

    @property
    def averaged(self) -> int:
        """Steps at the end whose mean is the final training loss."""
        return max(1, self.steps // 20)


# The options of `calibrate` for each method: fields of CalibrationOptions and ScalingOptions.
METHODS: dict[str, dict[str, Any]] = {
    "static": {},
    "static-search": {"input_scales": "search"},
    "static-gptq": {"rounding": "gptq"},
    "static-heal": {"rounding": "gptq", "heal": 100},
    "static-mixed": {"rounding": "gptq", "target_kl": 0.015},
    "current": {"name": "current"},
    "rowwise": {"name": "rowwise"},
    "rowwise-gptq": {"name": "rowwise", "rounding": "gptq"},
    "block": {"name": "block"},
    "block-gptq": {"name": "block", "rounding": "gptq"},
    "w8a16": {"name": "w8a16"},
    "w8a16-gptq": {"name": "w8a16", "rounding": "gptq"},
}


@dataclass(frozen=True)
class QualityOptions(Checked):
    methods: Annotated[tuple[str, ...], About("Method to measure.", flag="--method")] = (
        "static",
        "static-gptq",
        "rowwise",
        "rowwise-gptq",
        "block",
        "block-gptq",
        "w8a16",
        "w8a16-gptq",
    )
    peers: Annotated[
        tuple[str, ...],
        About("NAME=DIRECTORY of FP8 weights, or NAME=COMMAND that measures itself.", flag="--peer", unset="none"),
    ] = ()
    data: Annotated[Files | None, About("File to calibrate on.", unset=SHIPPED, metavar="PATH")] = None
    holdout: Annotated[Files | None, About("File to measure on.", unset="a quarter of these", metavar="PATH")] = None
    samples: Annotated[int, Ge(1), About("Sequences to calibrate on.")] = 128
    measured: Annotated[int, Ge(2), About("Sequences to measure on.", flag="--measured")] = 64
    seq_len: Annotated[int, Ge(2), About("Longest sequence, in tokens.")] = 512
    new: Annotated[int, Ge(0), About("Tokens decoded to measure the speed; 0: speed is not measured.")] = 64
    seed: Annotated[int, About("Seed of the choice of samples.")] = 0

    def __post_init__(self) -> None:
        check(self, JobError)
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise JobError(f"There is no method {unknown[0]!r}; choose from {', '.join(METHODS)}.")
        if bool(self.data) != bool(self.holdout):
            raise JobError("Give both --data and --holdout, or neither: what is measured must not be calibrated on.")


@dataclass(frozen=True)
class ArmsPlan(Checked):
    """Short trainings of a small model that differ only in the recipe."""

    steps: Annotated[int, Ge(1), About("Optimizer steps of each run.")] = 600
    batch_size: Annotated[int, Ge(1), About("Rows in a step.")] = 2
    seq_len: Annotated[int, Ge(2), About("Longest row, in tokens.")] = 128
    lr: Annotated[float, Gt(0), About("Peak learning rate.")] = 3e-4
    seeds: Annotated[int, Ge(1), About("Number of repetitions, with other weights and in another order.")] = 3
    shape: Shape = field(default_factory=lambda: Shape.of(192, 4))


@dataclass(frozen=True)
class PartsPlan(ArmsPlan):
    """The trainings of `bench parts`."""


@dataclass(frozen=True)
class JumpsPlan(ArmsPlan):
    """The trainings of `bench jumps`. jump: the step at which the activations jump, from 0."""

    steps: Annotated[int, Ge(2), About("Optimizer steps of each run.")] = 160
    lr: Annotated[float, Gt(0), About("Peak learning rate.")] = 1e-3
    jump: Annotated[int, Ge(1), About("Step at which activations jump.")] = 100
    shape: Shape = field(default_factory=lambda: Shape.of(128, 2))

    def __post_init__(self) -> None:
        check(self, JobError)
        if self.jump + 1 >= self.steps:
            raise JobError(f"The jump at step {self.jump} leaves nothing to look at in {self.steps} steps.")


@dataclass(frozen=True)
class StepOptions(Checked):
    recipes: Annotated[tuple[str, ...], Len(1), About("Recipe to measure.", flag="--recipe")] = ("delayed",)
    rows: Rows = 4
    rounds: Annotated[int, Ge(1), About("Steps of each kind.")] = 10


@dataclass(frozen=True)
class MonitorOptions(Checked):
    rows: Rows = 4
    every: Annotated[int, Ge(1), About("Steps from one count of the codes to the next.")] = 16
    rounds: Annotated[int, Ge(1), About("Rounds of that many steps, with and without.")] = 10
