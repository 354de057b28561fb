"""Group relative policy optimisation as the trainer uses it, and the losses of answers to one prompt, as published.

A step draws G answers to each of its prompts with its initial weights, has them graded, and then updates
the weights `num_iterations` times by them. A checkpoint is written between steps, so it holds no answers: a resumed
run draws the same ones again.

The engine returns an answer's log-probabilities under the policy that drew it. If the trainer has
the server's bits (model/parity.py), the importance ratio of a step's first update is exactly 1. At a temperature other
than 1 the policy is the model at that temperature, and a separate forward pass computes its log-probabilities.

For G answers with rewards r to one prompt, the advantage of each is A = r - mean(r), divided by (std(r) + 1e-4): the
deviation within the group, within the whole step, or not at all (`scale_rewards`: group, batch, none). For a token with
log-probabilities l of the policy, l_old of the policy that drew it and l_ref of the reference,

    w = exp(l - l_old)
    loss = -min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A) + beta (exp(l_ref - l) - (l_ref - l) - 1)

and these are averaged (`loss_type`)

    grpo       over an answer's tokens, then over answers       Shao et al. 2024, eq. 3
    dapo       over all tokens of the step                      Yu et al. 2025, eq. 8
    dr_grpo    answers' sums over max_completion_length          Liu et al. 2025; with scale_rewards none

Names and details (the unbiased deviation, its 1e-4) are TRL's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.batch_invariant_linear import has_batch_invariant_products, use_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.storage.files import save_tensors, whole_file
from fp8serve.model.storage.shards import load_tensors
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row
from fp8serve.train.forward import Logits, Network, collate, summed_loss, target_log_probs
from fp8serve.train.lora import base_recipe
from fp8serve.train.methods.grpo.data import Prompt
from fp8serve.train.methods.grpo.grading import Answer, Grader, grader_of
from fp8serve.train.methods.grpo.rollouts import Drawn, Rollouts, served_model
from fp8serve.train.methods.interface import FromData, Measure, Scene
from fp8serve.train.methods.options import AnswerLoss, ScaleRewards

LEAST_DEVIATION = 1e-4
REFERENCE = "reference.safetensors"
Numbers = npt.NDArray[np.float32]


def advantages(rewards: Tensor, scale: ScaleRewards) -> Tensor:
    """FP64 [groups, G], from rewards of the same shape."""
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    deviation = rewards.std(1, keepdim=True) if scale == "group" else rewards.std()
    return centred / (deviation + LEAST_DEVIATION)


def token_shares(lengths: Sequence[int], loss_type: AnswerLoss, longest: int) -> list[float]:
    """The weight of a token of each answer, such that the mean over answers of weighted sums is the loss."""
    if loss_type == "grpo":
        return [1 / length for length in lengths]
    if loss_type == "dapo":
        return [len(lengths) / sum(lengths)] * len(lengths)
    return [1 / longest] * len(lengths)


def token_losses(
    ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float, beta: float, kl: Tensor | None
) -> Tensor:
    """FP32 [P], the loss of every token; advantage: that of its answer."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    losses = -torch.min(ratio * advantage, clipped * advantage)
    return losses if kl is None else losses + beta * kl


def token_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's estimate of KL(policy || reference), FP32 [P]: never negative, and 0 where the two are equal."""
    apart = reference - log_probs
    return torch.expm1(apart) - apart


@dataclass(frozen=True)
class Graded:
    """One answer with its prompt. old, reference: log-probabilities of its tokens, FP32 [n], by the policy that drew it
    and by the reference. share: the weight of a token in the loss; even: the same weight for all tokens of a step."""

    row: Row
    sampled: Numbers
    is_cut: bool
    reward: float
    advantage: float
    share: float
    even: float
    old: Numbers
    reference: Numbers | None = None


@dataclass(frozen=True)
class Group:
    """All answers to one prompt."""

    answers: tuple[Graded, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(answer.row for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def trainable(self) -> int:
        return sum(row.trainable for row in self.rows)

    @property
    def extra(self) -> bytes:
        return b""

    @property
    def deviation(self) -> float:
        """The standard deviation of the rewards."""
        return float(np.std([answer.reward for answer in self.answers], ddof=1))


class Grpo(FromData):
    """See `interface.Method`. Items are prompts and, within a step, groups of answers. The measures have TRL's
    names."""

    is_supervised = False

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.beta, self.updates = config, config.effective_beta, config.num_iterations
        self.measures: tuple[Measure, ...] = (
            Measure("reward", "reward"),
            Measure("reward_std"),
            Measure("frac_reward_zero_std"),
            Measure("completions/mean_length", "tokens of an answer"),
            Measure("completions/clipped_ratio"),
            Measure("sampling/sampling_logp_difference/mean", of_first=True),
            Measure("sampling/importance_sampling_ratio/mean", of_first=True),
            Measure("clip_ratio/region_mean"),
            *([Measure("kl")] if self.beta else []),
        )
        self._grader: Grader | None = None
        self._rollouts: Rollouts | None = None
        self._reference: Network | None = None

    def start(self, scene: Scene) -> None:
        self._grader = grader_of(self.config)
        self._rollouts = Rollouts(self.config, scene)
        self._reference = _reference(self.config, scene) if self.beta else None
        self._forward = scene.forward

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()

    def weight(self, items: Sequence[Prompt | Group]) -> int:
        """The number of answers or, if there are none yet, of tokens of prompts."""
        return sum(len(item.answers) if isinstance(item, Group) else item.tokens for item in items)

    def sums(self, logits: Logits, items: Sequence[Prompt | Group]) -> tuple[Tensor, ...]:
        if not all(isinstance(item, Group) for item in items):
            return self._of_prompts(logits, cast(Sequence[Prompt], items))
        groups = cast(Sequence[Group], items)
        answers = [answer for group in groups for answer in group.answers]
        batch = collate([answer.row for answer in answers], self.config.device)
        result = logits(batch)
        lengths = torch.tensor([answer.row.trainable for answer in answers], device=result.device)

        def spread(values: Sequence[float]) -> Tensor:
            """A number for every answer -> for every token."""
            return torch.tensor(values, dtype=torch.float32, device=result.device).repeat_interleave(lengths)

        def joined(parts: Sequence[Numbers]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(result.device)

        new = target_log_probs(result, batch.targets, self.config.temperature)  # of the policy that drew the answers
        ratio = torch.exp(new - joined([answer.old for answer in answers]))
        kl = None
        if self.beta:
            kl = token_kl(new, joined([cast(Numbers, answer.reference) for answer in answers]))
        advantage, low, high = spread([answer.advantage for answer in answers]), *self._clips
        losses = token_losses(ratio, advantage, low, high, self.beta, kl)
        with torch.no_grad():
            even = torch.tensor([answer.even for answer in answers], dtype=torch.float64, device=result.device)
            own = new if self.config.temperature == 1 else target_log_probs(result, batch.targets)
            apart = (own - joined([answer.sampled for answer in answers])).abs()
            clipped = ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
            means = [apart, ratio, clipped.float(), *([] if kl is None else [kl])]
            of_tokens = [(each.double() * even.repeat_interleave(lengths)).sum() for each in means]
        return (losses * spread([answer.share for answer in answers])).sum(), *_of_answers(groups, result), *of_tokens

    @property
    def _clips(self) -> tuple[float, float]:
        config = self.config
        return config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high

    def _of_prompts(self, logits: Logits, prompts: Sequence[Prompt]) -> tuple[Tensor, ...]:
        """The log-probabilities of the prompts themselves: at the start of scales and at the end of a run there are no
        answers."""
        rows = [Row(prompt.row.ids, np.ones(len(prompt.row.ids), np.bool_)) for prompt in prompts]
        batch = collate(rows, self.config.device)
        loss = summed_loss(logits(batch), batch.targets)[0]
        return loss, *(torch.zeros_like(loss) for _ in self.measures)

    def collect(self, step: int, microbatches: Sequence[Sequence[Prompt]]) -> list[list[Group]]:
        assert self._rollouts is not None, "start comes first"
        prompts = [prompt for items in microbatches for prompt in items]
        self._rollouts.push()
        drawn = self._rollouts.draw(step, [prompt.row.ids for prompt in prompts])
        rewards = self._rewards(prompts, drawn)
        lengths = [len(answer.token_ids) for answers in drawn for answer in answers]
        shares = iter(token_shares(lengths, self.config.answer_loss, self.config.longest_answer))
        even = len(lengths) / sum(lengths)
        better = advantages(torch.tensor(rewards, dtype=torch.float64), self.config.scale_rewards).tolist()
        groups = [
            Group(tuple(_graded(prompt, a, r, by, next(shares), even) for a, r, by in zip(*of_group, strict=True)))
            for prompt, *of_group in zip(prompts, drawn, rewards, better, strict=True)
        ]
        left = iter(groups)
        return [self._scored(list(islice(left, len(items)))) for items in microbatches]

    def _rewards(self, prompts: Sequence[Prompt], drawn: Sequence[Sequence[Drawn]]) -> list[list[float]]:
        """[prompts, G]."""
        assert self._grader is not None, "start comes first"
        request = [
            Answer(example.row.get("prompt", example.row.get("messages")), answer.text, example.row, example.where)
            for example, answers in zip([prompt.example for prompt in prompts], drawn, strict=True)
            for answer in answers
        ]
        result = iter(self._grader.rewards(request))
        return [list(islice(result, len(answers))) for answers in drawn]

    @torch.no_grad()
    def _scored(self, groups: list[Group]) -> list[Group]:
        """Adds the log-probabilities that the engine does not return: the reference's, and those at other
        temperatures."""
        answers = [answer for group in groups for answer in group.answers]
        if self.config.temperature != 1:
            result = self._log_probs_by(self._forward.logits, answers)
            answers = [replace(answer, old=old) for answer, old in zip(answers, result, strict=True)]
        if self._reference is not None:
            result = self._log_probs_by(self._reference, answers)
            answers = [replace(answer, reference=of_it) for answer, of_it in zip(answers, result, strict=True)]
        left = iter(answers)
        return [Group(tuple(islice(left, len(group.answers)))) for group in groups]

    def _log_probs_by(self, logits: Logits, answers: Sequence[Graded]) -> list[Numbers]:
        """The log-probabilities of each answer's tokens by a forward pass."""
        batch = collate([answer.row for answer in answers], self.config.device)
        result = target_log_probs(logits(batch), batch.targets, self.config.temperature).cpu().numpy()
        return np.split(result, np.cumsum([answer.row.trainable for answer in answers])[:-1])


def _graded(prompt: Prompt, answer: Drawn, reward: float, advantage: float, share: float, even: float) -> Graded:
    ids = np.concatenate([prompt.row.ids, np.asarray(answer.token_ids, np.int32)])
    row = Row(ids, np.arange(len(ids)) >= len(prompt.row.ids))
    return Graded(row, answer.log_probs, answer.is_cut, reward, advantage, share, even, answer.log_probs)


def _of_answers(groups: Sequence[Group], like: Tensor) -> list[Tensor]:
    """The first measures, summed over answers."""
    answers = [answer for group in groups for answer in group.answers]
    results = (
        sum(answer.reward for answer in answers),
        sum(len(group.answers) * group.deviation for group in groups),
        sum(len(group.answers) for group in groups if group.deviation == 0),
        sum(answer.row.trainable for answer in answers),
        sum(answer.is_cut for answer in answers),
    )
    return [torch.tensor(float(value), dtype=torch.float64, device=like.device) for value in results]


def _reference(config: TrainConfig, scene: Scene) -> Network:
    """The model before its first step, computed as it is served: the base of an adapter, or the initial weights that
    the run has kept. JobError: they are gone."""
    model = load_servable(config.model, base_recipe(config)) if config.lora_rank else _initial_model(scene)
    for layer in (module for module in model.modules() if isinstance(module, FrozenLinear)):
        layer.make_rows_independent()
    if has_batch_invariant_products(config.device):
        use_batch_invariant_products(model)
    model.expect(config.seq_len)
    return Network(model.to(config.device))


def _initial_model(scene: Scene) -> Model:
    model, path = served_model(scene.forward), scene.out / REFERENCE
    if scene.is_fresh:
        tensors = dict(model.state_dict(keep_vars=True))
        once = {id(tensor): name for name, tensor in reversed(tensors.items())}
        with whole_file(path) as file:
            save_tensors(file, {name: tensors[name].detach().contiguous() for name in once.values()}, {"format": "pt"})
    elif not path.is_file():
        raise JobError(
            f"{path}, the model that the run began with, is gone, but is its reference; use another output directory."
        )
    model.load_state_dict(load_tensors(path), strict=False)
    return model
