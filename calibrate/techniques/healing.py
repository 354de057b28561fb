"""Healing: trains an FP8 model for a few hundred steps towards its own output in high precision.

    loss       KL(reference || FP8 model) of the next token, on the calibration text, over the whole vocabulary
    passes     forward and backward under the recipe, so that training rounds as serving will
    weights    FP32 masters of the linears; embeddings and norms do not change

The reference is the same directory, mapped a second time, so its weights need no additional memory. Delayed scaling
continues from the calibrated states. At the end the weights are quantized with the scales of the last step, which are
also those of the served model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from fp8serve.calibration.compare import freeze_function
from fp8serve.calibration.data import Batch, scored_rows
from fp8serve.calibration.observe import Observer, scales_of, share_weight_scales
from fp8serve.calibration.passes import Linears, backpropagate_loss, forward
from fp8serve.calibration.progress import Stages
from fp8serve.errors import ModelError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import Recipe, with_amax_reduction
from fp8serve.model.building import Model

WARMUP_FRACTION = 0.1  # of the steps; the learning rate rises to its maximum in these steps, and then falls to zero


def learning_rate(step: int, steps: int, maximum: float) -> float:
    """Returns the learning rate of a step, counted from 0: linear warmup to `maximum` and cosine decay to zero."""
    warmup = max(1, round(steps * WARMUP_FRACTION))
    if step < warmup:
        return maximum * (step + 1) / warmup
    return maximum * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def heal(
    decoder: Model,
    linears: Linears,
    reference: Model,
    batches: Sequence[Batch],
    recipe: Recipe,
    observer: Observer,
    *,
    steps: int,
    max_rate: float,
    rounded: Mapping[str, FrozenLinear] | None = None,
    shared: Iterable[Sequence[str]] = (),
    seed: int = 0,
    stages: Stages | None = None,
) -> tuple[dict[str, FrozenLinear], list[float]]:
    """Trains `linears` of `decoder`; returns them in FP8 for serving, and the loss of every step in nats per token.

    The learning rate rises to `max_rate` and falls to zero. Training starts from the weights in `rounded`, if given.
    The weights of `linears` are restored at the end. The scaling states of `linears`, and the scales of keys and values
    in `observer`, are those of the last step; each group of linears in `shared` then gets one weight scale. Batches are
    repeated in an order that depends on the seed. Raises ModelError if a loss is not finite.
    """
    order = list(_repeat_batches(batches, steps, seed))
    with _master_weights(linears, rounded) as masters:
        optimizer, losses = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.0), list[float]()
        for step, batch in enumerate((stages or Stages()).steps("heal", order)):
            with autocast(recipe=with_amax_reduction(recipe, reduce_amax=False)):
                hidden = forward(decoder, batch, observer.record_kv)
            losses.append(float(_backpropagate_kl(decoder, hidden, reference, batch)))
            observer.end_batch()
            if not math.isfinite(losses[-1]):
                raise ModelError(f"Healing diverged: the loss of step {step + 1} is {losses[-1]}; lower heal_rate.")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, max_rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        observer.read_records()
        kv_amaxes = {name: observer.records[name].amax for name in observer.kv}
        for name, scale in scales_of(kv_amaxes, observer.target, hidden.device).items():
            observer.kv[name].scale.copy_(scale)
        for state in (states := observer.states()).values():
            state.resize(observer.target.amax_history_len)
        share_weight_scales(states, shared)
        freeze = freeze_function(recipe, states)
        return {name: freeze(name, linear) for name, linear in linears.items()}, losses


@contextmanager
def _master_weights(linears: Linears, rounded: Mapping[str, FrozenLinear] | None) -> Iterator[list[nn.Parameter]]:
    """Inside the context, `linears` have trainable FP32 weights, copied from `rounded` if given."""
    original = {name: linear.weight for name, linear in linears.items()}
    try:
        for name, linear in linears.items():
            if rounded is None:
                weight = original[name].detach().to(torch.float32, copy=True)
            else:
                weight = rounded[name].quantized_weight.dequantize()
            linear.weight = nn.Parameter(weight)
        yield [cast(nn.Parameter, linear.weight) for linear in linears.values()]
    finally:
        for name, linear in linears.items():
            linear.weight = original[name]


def _repeat_batches(batches: Sequence[Batch], steps: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    completed = 0
    while completed < steps:
        for index in torch.randperm(len(batches), generator=generator).tolist()[: steps - completed]:
            yield batches[index]
            completed += 1


def _backpropagate_kl(decoder: Model, hidden: Tensor, reference: Model, batch: Batch) -> Tensor:
    """Backpropagates the mean of KL(reference || decoder) over the scored tokens to the weights; returns this mean.

    The mean, FP64 [], is accumulated on the device, because reading each slice would wait for the device.
    """
    with torch.no_grad():
        exact = forward(reference, batch)
    scored = scored_rows(batch.targets)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)

    def loss(logits: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            log_r = log_softmax(reference.logits(exact[rows]), dim=-1)
        mean = (log_r.exp() * (log_r - log_softmax(logits, dim=-1))).sum() / len(scored)
        total.add_(mean.detach())
        return mean

    backpropagate_loss(decoder, hidden, scored, loss)
    return total
