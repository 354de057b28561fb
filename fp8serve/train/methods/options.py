"""The options of one method of training, or of an adapter, and which combinations are allowed. No torch here.

Each class adds its fields to those before it, so that a job's description stays one flat object.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, cast, get_args

from annotated_types import Ge, Gt, Le, Len, Lt

from fp8serve.errors import JobError, shown
from fp8serve.model.formats.peft import MAX_RANK
from fp8serve.options import About, http_address
from fp8serve.train.run_options import Files, RunOptions

MethodName = Literal["sft", "dpo", "grpo"]
PairLoss = Literal["sigmoid", "sigmoid_norm", "ipo", "simpo"]
AnswerLoss = Literal["dapo", "grpo", "dr_grpo"]
LossType = Literal[PairLoss, AnswerLoss]
ScaleRewards = Literal["group", "batch", "none"]
_SHARED = ("beta", "loss_type")
OPTIONS = {
    "dpo": (*_SHARED, "label_smoothing", "reference_free", "ld_alpha", "simpo_gamma"),
    "grpo": (
        *_SHARED, "num_generations", "num_iterations", "max_completion_length", "temperature", "epsilon",
        "epsilon_high", "scale_rewards", "reward", "grader_url", "reward_seconds",
    ),
}  # fmt: skip
ADAPTER = ("lora_rank", "lora_alpha", "lora_targets", "dora", "lora_dropout")
OF_MASTERS = ("recipe_options", "amax_history_len", "master_weights", "format")
BETA, SIMPO_BETA, SIMPO_GAMMA = 0.1, 2.0, 1.0


@dataclass(frozen=True)
class AdapterOptions(RunOptions):
    """Of a run that trains an adapter."""

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
        adapter = [name for name in ADAPTER if name in changed]
        if self.lora_rank is None and adapter:
            raise JobError(f"{adapter[0]} is an option of an adapter; give lora_rank, too, or leave it out.")
        foreign = [n for n in OF_MASTERS if n in changed and getattr(self, n) not in (None, {})]
        if self.lora_rank is not None and foreign:
            raise JobError(
                f"{foreign[0]} is for training the model's own weights, which lora_rank freezes; leave one out."
            )


@dataclass(frozen=True)
class MethodOptions(AdapterOptions):
    """The method, and what several methods have."""

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

    def _check_loss(self, losses: tuple[str, ...]) -> None:
        if self.loss_type is not None and self.loss_type not in losses:
            raise JobError(f"The method {self.method} has the losses {', '.join(losses)}, and not {self.loss_type}.")


@dataclass(frozen=True)
class PairOptions(MethodOptions):
    """Of a job that learns preferences (dpo)."""

    label_smoothing: Annotated[float, Ge(0), Lt(0.5), About("Share of pairs that may be labelled wrongly (dpo).")] = 0.0
    reference_free: Annotated[bool, About("Compare answers without a reference (dpo).")] = False
    ld_alpha: Annotated[
        float | None,
        Ge(0),
        Le(1),
        About("Weight of the tokens by which one answer is longer than the other (dpo).", unset="1"),
    ] = None
    simpo_gamma: Annotated[float | None, Ge(0), Le(1000), About("Margin that simpo demands.", unset="1")] = None

    @property
    def pair_loss(self) -> PairLoss:
        return cast(PairLoss, self.loss_type or "sigmoid")

    def _check_pairs(self) -> None:
        loss = self.pair_loss
        self._check_loss(get_args(PairLoss))
        if self.simpo_gamma is not None and loss != "simpo":
            raise JobError(f"simpo_gamma belongs to the loss simpo, not to {loss}; leave one of them out.")
        if self.label_smoothing and loss == "ipo":
            raise JobError("The loss ipo takes no label_smoothing; leave one of them out.")
        if self.ld_alpha is not None and loss != "sigmoid":
            raise JobError(f"ld_alpha weighs sums of tokens, and {loss} compares means; leave one of them out.")


@dataclass(frozen=True)
class AnswerOptions(PairOptions):
    """Of a job that learns from rewards (grpo)."""

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

    @property
    def answer_loss(self) -> AnswerLoss:
        return cast(AnswerLoss, self.loss_type or "dapo")

    @property
    def effective_beta(self) -> float:
        """`beta`, or the default of the loss: larger for means, which are smaller than sums; 0 for rewards, which need
        no reference."""
        if self.beta is not None:
            return self.beta
        if self.method == "grpo":
            return 0.0
        return SIMPO_BETA if self.pair_loss == "simpo" else BETA

    @property
    def longest_answer(self) -> int:
        """The largest number of tokens of an answer in a job that learns from rewards."""
        return self.max_completion_length or self.seq_len // 2

    def _check_method(self, changed: frozenset[str]) -> None:
        """JobError for options, of those `changed` from their defaults, that the job's method would ignore."""
        for name in [name for names in OPTIONS.values() for name in names if name in changed]:
            owners = [method for method, names in OPTIONS.items() if name in names]
            if self.method not in owners:
                methods = " or ".join(owners)
                raise JobError(
                    f"{name} is an option of the method {methods}; give method {methods}, too, or leave it out."
                )
        if self.method == "grpo":
            self._check_answers()
        elif self.method == "dpo":
            self._check_pairs()

    def _check_answers(self) -> None:
        self._check_loss(get_args(AnswerLoss))
        if (self.reward is None) == (self.grader_url is None):
            raise JobError(
                "The method grpo wants rewards from one place: give either reward, a Python file, or grader_url."
            )
        if self.grader_url is not None and http_address(self.grader_url) is None:
            raise JobError(
                f"grader_url must be an address such as http://localhost:9000/grade, not {shown(self.grader_url)}."
            )
        if self.longest_answer >= self.seq_len:
            raise JobError(
                f"max_completion_length ({self.max_completion_length}) leaves no token of seq_len ({self.seq_len}) for "
                "the prompt; lower it, or raise seq_len."
            )
        if self.eval_data:
            raise JobError(
                "eval_data is judged by a loss on given answers, which the method grpo does not have; leave it out."
            )
        if self.packing != "rows":
            raise JobError(
                "packing fills a microbatch with rows of known length, and answers are written first; leave it out."
            )
        if self.lora_dropout:
            raise JobError("lora_dropout must be 0 with the method grpo: answers are generated without dropout.")
