"""Which options of a job belong to a method, and which combinations are allowed. No torch here."""

from typing import TYPE_CHECKING, Literal, cast, get_args

from fp8serve.errors import JobError, shown
from fp8serve.options import http_address

if TYPE_CHECKING:
    from fp8serve.train.config import TrainConfig

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
BETA, SIMPO_BETA, SIMPO_GAMMA = 0.1, 2.0, 1.0


def pair_loss(config: "TrainConfig") -> PairLoss:
    """The loss of a job that learns preferences."""
    return cast(PairLoss, config.loss_type or "sigmoid")


def answer_loss(config: "TrainConfig") -> AnswerLoss:
    """The loss of a job that learns from rewards."""
    return cast(AnswerLoss, config.loss_type or "dapo")


def beta_of(config: "TrainConfig") -> float:
    """The job's beta, or the default of its loss: larger for means, which are smaller than sums; 0 for rewards, which
    need no reference."""
    if config.beta is not None:
        return config.beta
    if config.method == "grpo":
        return 0.0
    return SIMPO_BETA if pair_loss(config) == "simpo" else BETA


def longest_answer(config: "TrainConfig") -> int:
    """The largest number of tokens of an answer in a job that learns from rewards."""
    return config.max_completion_length or config.seq_len // 2


def check_method(config: "TrainConfig", changed: frozenset[str]) -> None:
    """JobError for options, of those `changed` from their defaults, that the job's method would ignore."""
    for name in [name for names in OPTIONS.values() for name in names if name in changed]:
        owners = [method for method, names in OPTIONS.items() if name in names]
        if config.method not in owners:
            said = " or ".join(owners)
            raise JobError(f"{name} is an option of the method {said}; give method {said}, too, or leave it out.")
    if config.method == "grpo":
        _check_answers(config)
    elif config.method == "dpo":
        _check_pairs(config)


def _check_loss(config: "TrainConfig", own: tuple[str, ...]) -> None:
    if config.loss_type is not None and config.loss_type not in own:
        raise JobError(f"The method {config.method} has the losses {', '.join(own)}, and not {config.loss_type}.")


def _check_pairs(config: "TrainConfig") -> None:
    loss = pair_loss(config)
    _check_loss(config, get_args(PairLoss))
    if config.simpo_gamma is not None and loss != "simpo":
        raise JobError(f"simpo_gamma belongs to the loss simpo, not to {loss}; leave one of them out.")
    if config.label_smoothing and loss == "ipo":
        raise JobError("The loss ipo takes no label_smoothing; leave one of them out.")
    if config.ld_alpha is not None and loss != "sigmoid":
        raise JobError(f"ld_alpha weighs sums of tokens, and {loss} compares means; leave one of them out.")


def _check_answers(config: "TrainConfig") -> None:
    _check_loss(config, get_args(AnswerLoss))
    if (config.reward is None) == (config.grader_url is None):
        raise JobError(
            "The method grpo wants rewards from one place: give either reward, a Python file, or grader_url."
        )
    if config.grader_url is not None and http_address(config.grader_url) is None:
        raise JobError(
            f"grader_url must be an address such as http://localhost:9000/grade, not {shown(config.grader_url)}."
        )
    if longest_answer(config) >= config.seq_len:
        raise JobError(
            f"max_completion_length ({config.max_completion_length}) leaves no token of seq_len ({config.seq_len}) for "
            "the prompt; lower it, or raise seq_len."
        )
    if config.eval_data:
        raise JobError(
            "eval_data is judged by a loss on given answers, which the method grpo does not have; leave it out."
        )
    if config.packing != "rows":
        raise JobError(
            "packing fills a microbatch with rows of known length, and answers are written first; leave it out."
        )
    if config.lora_dropout:
        raise JobError("lora_dropout would train another policy than the one that answered; leave it out.")
