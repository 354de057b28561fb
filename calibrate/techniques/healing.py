"""Healing: trains an FP8 model for a few hundred steps towards its own output in high precision.

    loss      KL(reference || FP8 model) of the next token, on the calibration text, over the whole vocabulary
    forward   and backward under the recipe itself, as in training: every step rounds what serving will round
    weights   those of the linears, as FP32 masters; embeddings and norms stay what they are

The reference is the same directory, mapped a second time: its weights take no memory of their own. Delayed scaling
continues from the calibrated states. The served model has the scales of the last step, and its weights are quantized
again with them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from fp8serve.calibration.compare import freezer
from fp8serve.calibration.data import IGNORED, Batch
from fp8serve.calibration.measure import LOGIT_ROWS
from fp8serve.calibration.observe import Observer, scale_of
from fp8serve.calibration.passes import Linears, forward
from fp8serve.calibration.progress import Stages
from fp8serve.errors import ModelError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.recipe import Recipe, reduced
from fp8serve.model.building import Model

WARMUP = 0.1  # fraction of the steps in which the learning rate rises to its maximum; after that it falls to zero


@dataclass(frozen=True)
class Schedule:
    """The number of steps and the learning rate, which rises over the first steps and then falls along half a
    cosine."""

    steps: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        warm = max(1, round(self.steps * WARMUP))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


def heal(
    decoder: Model,
    linears: Linears,
    reference: Model,
    batches: Sequence[Batch],
    recipe: Recipe,
    schedule: Schedule,
    observer: Observer,
    *,
    rounded: Mapping[str, FrozenLinear] | None = None,
    seed: int = 0,
    stages: Stages | None = None,
) -> tuple[dict[str, FrozenLinear], list[float]]:
    """(`linears` of `decoder` as they are to be served, the loss of every step in nats per token).

    rounded: weights from which training starts instead of those of `linears`, which are unchanged at the end. The
    delayed states of `linears`, and the scales of keys and values in `observer`, are those of the last step. Batches
    are repeated, in an order that depends on the seed. ModelError when a loss is not finite.
    """
    order = list(_order(batches, schedule.steps, seed))
    with _masters(linears, rounded) as masters:
        optimizer, losses = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.0), list[float]()
        for step, batch in enumerate((stages or Stages()).steps("heal", order)):
            with autocast(recipe=reduced(recipe, by_group=False)):
                hidden = forward(decoder, batch, observer.tap)
            losses.append(_backward(decoder, hidden, reference, batch))
            observer.end_batch()
            if not math.isfinite(losses[-1]):
                raise ModelError(f"Healing diverged: the loss of step {step + 1} is {losses[-1]}; lower heal_rate.")
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for name, state in observer.kv.items():
            state.scale.copy_(scale_of(observer.seen[name].amax, name, observer.target))
        for state in (states := observer.states()).values():
            state.resize(observer.target.amax_history_len)
        freeze = freezer(recipe, states)
        return {name: freeze(name, linear) for name, linear in linears.items()}, losses


@contextmanager
def _masters(linears: Linears, rounded: Mapping[str, FrozenLinear] | None) -> Iterator[list[nn.Parameter]]:
    """Inside the context, the weights of `linears` are trainable FP32 copies, of `rounded` if that is given."""
    before = {name: linear.weight for name, linear in linears.items()}
    try:
        for name, linear in linears.items():
            linear.weight = nn.Parameter(_start(before[name], rounded[name] if rounded else None))
        yield [cast(nn.Parameter, linear.weight) for linear in linears.values()]
    finally:
        for name, linear in linears.items():
            linear.weight = before[name]


def _start(weight: Tensor, rounded: FrozenLinear | None) -> Tensor:
    if rounded is None:
        return weight.detach().to(torch.float32, copy=True)
    return dequantize(rounded.weight_q, rounded.weight_scale_inv)


def _order(batches: Sequence[Batch], steps: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for index in torch.randperm(len(batches), generator=generator).tolist()[: steps - done]:
            yield batches[index]
            done += 1


def _backward(decoder: Model, hidden: Tensor, reference: Model, batch: Batch) -> float:
    """Gradients of KL(reference || decoder), mean over the scored tokens, down to the weights; that mean."""
    with torch.no_grad():
        exact = forward(reference, batch)
    scored = (batch.targets != IGNORED).nonzero().squeeze(1)
    leaf, total = hidden.detach().requires_grad_(), 0.0
    for rows in torch.split(scored, LOGIT_ROWS):
        with torch.no_grad():
            expected = log_softmax(reference.logits(exact[rows]), dim=-1)
        got = log_softmax(decoder.logits(leaf[rows]), dim=-1)
        loss = (expected.exp() * (expected - got)).sum() / len(scored)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    if leaf.grad is not None:
        hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
    return total
