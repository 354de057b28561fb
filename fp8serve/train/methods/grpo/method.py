"""The losses of group relative policy optimisation, and the method that the trainer calls.

Each step generates G completions of each of its prompts, computes their rewards, and then updates the weights
`num_iterations` times with these rollouts. Checkpoints are written between steps and hold no rollouts: a resumed run
generates the same rollouts again.

The engine returns the log-probabilities of the sampled tokens. Where training and serving are bit-identical
(model/parity.py), the importance ratio of a step's first update is exactly 1. At a temperature other than 1, the policy
is the model at that temperature, and a separate forward pass computes the log-probabilities.

For G completions of one prompt with rewards r, the advantage of each is A = (r - mean(r)) / (std(r) + 1e-4). The
standard deviation is that of the group or of the step, or the division is left out (`scale_rewards`: group, batch,
none). For a token with log-probabilities l (policy), l_old (policy that sampled it) and l_ref (reference model),

    w = exp(l - l_old)
    loss = -min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A) + beta (exp(l_ref - l) - (l_ref - l) - 1)

The loss of a step is an average of these terms, which `loss_type` chooses:

    grpo       the mean over the tokens of a completion, then over completions     Shao et al. 2024, eq. 3
    dapo       the mean over all tokens of the step                                Yu et al. 2025, eq. 8
    dr_grpo    sums divided by max_completion_length; use scale_rewards none       Liu et al. 2025

Names and details (the unbiased standard deviation, the 1e-4) are those of TRL.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.storage.files import atomic_file
from fp8serve.model.storage.shards import load_tensors, save_tensors
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item, Row
from fp8serve.train.forward import Logits, Network, collate, prepare_as_server, summed_loss, target_log_probs
from fp8serve.train.lora import base_recipe
from fp8serve.train.methods.grpo.data import Prompt
from fp8serve.train.methods.grpo.grading import Grader, RewardInput, grader_of
from fp8serve.train.methods.grpo.rollouts import Rollout, RolloutEngine, served_model
from fp8serve.train.methods.interface import Method, Metric, RunContext
from fp8serve.train.methods.options import GrpoLoss, ScaleRewards

STD_EPSILON = 1e-4  # added to a standard deviation before the division, as in TRL
REFERENCE_FILE = "reference.safetensors"
LogProbs = npt.NDArray[np.float32]


def advantages(rewards: Tensor, scale: ScaleRewards) -> Tensor:
    """Returns the advantages FP64 [prompts, G] of rewards with the same shape."""
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    std = rewards.std(1, keepdim=True) if scale == "group" else rewards.std()
    return centred / (std + STD_EPSILON)


def token_loss_weights(lengths: Sequence[int], loss_type: GrpoLoss, max_completion_tokens: int) -> list[float]:
    """Returns, for each completion, the weight of its tokens. The loss is the weighted sum over a completion's tokens,
    averaged over completions."""
    if loss_type == "grpo":
        return [1 / length for length in lengths]
    if loss_type == "dapo":
        return [len(lengths) / sum(lengths)] * len(lengths)
    return [1 / max_completion_tokens] * len(lengths)


def token_losses(
    ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float, beta: float, kl: Tensor | None
) -> Tensor:
    """Returns the loss of every token, FP32 [P]. `advantage` [P] repeats a completion's advantage for its tokens."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    losses = -torch.min(ratio * advantage, clipped * advantage)
    return losses if kl is None else losses + beta * kl


def token_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns Schulman's estimate of KL(policy || reference), FP32 [P]. It is never negative."""
    difference = reference - log_probs
    return torch.expm1(difference) - difference


@dataclass(frozen=True)
class Completion:
    """A graded completion; `row` is the prompt followed by the completion.

    Log-probabilities of the completion's tokens, FP32 [n]: `engine_log_probs` are the engine's at temperature 1,
    `old_log_probs` those of the policy that sampled it, `ref_log_probs` those of the reference model. A token has the
    weight `loss_weight` in the loss. In metrics it has `metric_weight`, which is equal for all tokens of a step.
    """

    row: Row
    engine_log_probs: LogProbs
    is_truncated: bool
    reward: float
    advantage: float
    loss_weight: float
    metric_weight: float
    old_log_probs: LogProbs
    ref_log_probs: LogProbs | None = None


@dataclass(frozen=True)
class Group(Item):
    """All completions of one prompt."""

    completions: tuple[Completion, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(completion.row for completion in self.completions)

    @property
    def reward_std(self) -> float:
        return float(np.std([completion.reward for completion in self.completions], ddof=1))


class Grpo(Method[Any]):
    """Group relative policy optimisation. Items are prompts, and within a step groups of completions. The metrics have
    TRL's names."""

    is_supervised = False

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.beta, self.updates = config, config.effective_beta, config.num_iterations
        self.metrics: tuple[Metric, ...] = (
            Metric("reward", "reward"),
            Metric("reward_std"),
            Metric("frac_reward_zero_std"),
            Metric("completions/mean_length", "mean completion length"),
            Metric("completions/clipped_ratio"),
            Metric("sampling/sampling_logp_difference/mean", from_first_update=True),
            Metric("sampling/importance_sampling_ratio/mean", from_first_update=True),
            Metric("clip_ratio/region_mean"),
            *([Metric("kl")] if self.beta else []),
        )
        self._grader: Grader | None = None
        self._rollout_engine: RolloutEngine | None = None
        self._reference_model: Network | None = None

    def start(self, context: RunContext) -> None:
        self._grader = grader_of(self.config)
        self._rollout_engine = RolloutEngine(self.config, context)
        self._reference_model = _reference_model(self.config, context) if self.beta else None
        self._forward = context.forward

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()

    def count_loss_terms(self, items: Sequence[Prompt | Group]) -> int:
        """Returns the number of completions or, for prompts that have no completions yet, of prompt tokens."""
        return sum(len(item.completions) if isinstance(item, Group) else item.tokens for item in items)

    def compute_sums(self, logits: Logits, items: Sequence[Prompt | Group]) -> tuple[Tensor, ...]:
        if not all(isinstance(item, Group) for item in items):
            return self._prompt_sums(logits, cast(Sequence[Prompt], items))
        groups = cast(Sequence[Group], items)
        completions = [completion for group in groups for completion in group.completions]
        batch = collate([completion.row for completion in completions], self.config.device)
        batch_logits = logits(batch)
        device = batch_logits.device
        lengths = torch.tensor([completion.row.trainable_tokens for completion in completions], device=device)

        def per_token(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            """Repeats each completion's value for each of its tokens."""
            return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(lengths)

        def concatenated(parts: Sequence[LogProbs]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device)

        log_probs = target_log_probs(batch_logits, batch.targets, self.config.temperature)
        ratio = torch.exp(log_probs - concatenated([c.old_log_probs for c in completions]))
        kl = None
        if self.beta:
            kl = token_kl(log_probs, concatenated([cast(LogProbs, c.ref_log_probs) for c in completions]))
        advantage = per_token([c.advantage for c in completions])
        low = self.config.epsilon
        high = low if self.config.epsilon_high is None else self.config.epsilon_high
        losses = token_losses(ratio, advantage, low, high, self.beta, kl)
        with torch.no_grad():
            metric_weights = per_token([c.metric_weight for c in completions], torch.float64)
            unscaled = log_probs if self.config.temperature == 1 else target_log_probs(batch_logits, batch.targets)
            differences = (unscaled - concatenated([c.engine_log_probs for c in completions])).abs()
            clipped = ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
            values = [differences, ratio, clipped.float(), *([] if kl is None else [kl])]
            token_sums = [(value.double() * metric_weights).sum() for value in values]
        loss = (losses * per_token([c.loss_weight for c in completions])).sum()
        return loss, *_completion_sums(groups, device), *token_sums

    def _prompt_sums(self, logits: Logits, prompts: Sequence[Prompt]) -> tuple[Tensor, ...]:
        """Returns the cross-entropy of the prompts, with zeros as metrics. It stands in for the loss where there are no
        completions: when scales are initialised before the first step, and when the run's result is checked."""
        rows = [Row(prompt.row.ids, np.ones(len(prompt.row.ids), np.bool_)) for prompt in prompts]
        batch = collate(rows, self.config.device)
        loss = summed_loss(logits(batch), batch.targets)[0]
        return loss, *(torch.zeros_like(loss) for _ in self.metrics)

    def prepare_step(self, step: int, microbatches: Sequence[Sequence[Prompt]]) -> list[list[Group]]:
        """Returns graded completions of the prompts, generated with the current weights."""
        assert self._rollout_engine is not None, "call start first"
        prompts = [prompt for items in microbatches for prompt in items]
        self._rollout_engine.update_weights()
        rollouts = self._rollout_engine.generate(step, [prompt.row.ids for prompt in prompts])
        rewards = self._rewards(prompts, rollouts)
        group_advantages = advantages(torch.tensor(rewards, dtype=torch.float64), self.config.scale_rewards).tolist()
        lengths = [len(rollout.token_ids) for group in rollouts for rollout in group]
        weights = iter(token_loss_weights(lengths, self.config.grpo_loss, self.config.max_completion_tokens))
        metric_weight = len(lengths) / sum(lengths)
        groups = iter(
            Group(
                tuple(
                    _completion(prompt, rollout, reward, advantage, next(weights), metric_weight)
                    for rollout, reward, advantage in zip(*lists, strict=True)
                )
            )
            for prompt, *lists in zip(prompts, rollouts, rewards, group_advantages, strict=True)
        )
        return [self._with_log_probs(list(islice(groups, len(items)))) for items in microbatches]

    def _rewards(self, prompts: Sequence[Prompt], rollouts: Sequence[Sequence[Rollout]]) -> list[list[float]]:
        assert self._grader is not None, "call start first"
        inputs = [
            RewardInput(
                example.row.get("prompt", example.row.get("messages")), rollout.text, example.row, example.where
            )
            for example, group in zip([prompt.example for prompt in prompts], rollouts, strict=True)
            for rollout in group
        ]
        rewards = iter(self._grader.rewards(inputs))
        return [list(islice(rewards, len(group))) for group in rollouts]

    @torch.no_grad()
    def _with_log_probs(self, groups: list[Group]) -> list[Group]:
        """Adds the log-probabilities that the engine does not return: those of the reference model and those at a
        temperature other than 1."""
        completions = [completion for group in groups for completion in group.completions]
        if self.config.temperature != 1:
            parts = self._compute_log_probs(self._forward.logits, completions)
            completions = [replace(c, old_log_probs=part) for c, part in zip(completions, parts, strict=True)]
        if self._reference_model is not None:
            parts = self._compute_log_probs(self._reference_model, completions)
            completions = [replace(c, ref_log_probs=part) for c, part in zip(completions, parts, strict=True)]
        remaining = iter(completions)
        return [Group(tuple(islice(remaining, len(group.completions)))) for group in groups]

    def _compute_log_probs(self, logits: Logits, completions: Sequence[Completion]) -> list[LogProbs]:
        batch = collate([completion.row for completion in completions], self.config.device)
        log_probs = target_log_probs(logits(batch), batch.targets, self.config.temperature).cpu().numpy()
        return np.split(log_probs, np.cumsum([completion.row.trainable_tokens for completion in completions])[:-1])


def _completion(
    prompt: Prompt, rollout: Rollout, reward: float, advantage: float, loss_weight: float, metric_weight: float
) -> Completion:
    ids = np.concatenate([prompt.row.ids, np.asarray(rollout.token_ids, np.int32)])
    row, log_probs = Row(ids, np.arange(len(ids)) >= len(prompt.row.ids)), rollout.log_probs
    return Completion(
        row, log_probs, rollout.is_truncated, reward, advantage, loss_weight, metric_weight, old_log_probs=log_probs
    )


def _completion_sums(groups: Sequence[Group], device: torch.device) -> list[Tensor]:
    """Returns the sums over completions of the first five metrics."""
    completions = [completion for group in groups for completion in group.completions]
    sums = (
        sum(completion.reward for completion in completions),
        sum(len(group.completions) * group.reward_std for group in groups),
        sum(len(group.completions) for group in groups if group.reward_std == 0),
        sum(completion.row.trainable_tokens for completion in completions),
        sum(completion.is_truncated for completion in completions),
    )
    return [torch.tensor(float(value), dtype=torch.float64, device=device) for value in sums]


def _reference_model(config: TrainConfig, context: RunContext) -> Network:
    """Returns the initial model as a server computes it: the base model of an adapter, or the run's initial weights,
    which its first start saved. Raises JobError if their file is missing."""
    model = load_servable(config.model, base_recipe(config)) if config.lora_rank else _initial_model(context)
    prepare_as_server(model, config.device, config.seq_len)
    return Network(model.to(config.device))


def _initial_model(context: RunContext) -> Model:
    model, path = served_model(context.forward), context.out / REFERENCE_FILE
    if context.is_new_run:
        tensors = dict(model.state_dict(keep_vars=True))
        first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # tied weights are stored once
        with atomic_file(path) as file:
            save_tensors(file, {name: tensors[name] for name in first_names.values()}, {"format": "pt"})
    elif not path.is_file():
        raise JobError(
            f"The reference model {path}, which the run saved at its start, is missing; use another output directory."
        )
    model.load_state_dict(load_tensors(path), strict=False)
    return model
