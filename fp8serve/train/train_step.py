"""One training step: gradient accumulation over its microbatches and over processes, its updates, and its metrics.

A step gives the same bits for any number of processes. Its microbatches compute with the same scales
(`Forward.accumulated_update`), each microbatch seeds its own random numbers, and gradients are added in the order of
the microbatches.

A single process adds g0 + g1 + g2 ... in FP32. A floating-point sum depends on its order, so an all-reduce would give
other weights. Here rank i mod N computes microbatch i. After each round of N microbatches, every rank receives its N-th
part of the N gradients and adds them to its part of the sum, in order. The parts are gathered at the end of the step.
This sends the gradients once a microbatch, where an all-reduce of the step's sums would send them once a step.

A missing gradient (of an expert that no token chose, or of a rank without a microbatch) is sent as -0.0. This is the
only number whose addition changes nothing, not even the sign of a zero. Gradients are sent in buckets, so that a rank
holds only two buckets in addition to its gradients and its part of the sum.

Gradients that are not finite are never applied. Such a step is skipped with an event and leaves the moments unchanged.
Ten skipped steps in a row end the run, or make it return to an earlier checkpoint (`train.checkpointing`).
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8serve.errors import JobError
from fp8serve.ranks import ALONE, Ranks
from fp8serve.train import events
from fp8serve.train.data import Item, Step
from fp8serve.train.forward import Forward
from fp8serve.train.methods.interface import Method
from fp8serve.train.optimizer import Optimizer, learning_rate
from fp8serve.train.run import DivergenceError, TrainingRun, evaluate_run

if TYPE_CHECKING:
    from fp8serve.train.sharded.building import ShardedModel

BUCKET_ELEMENTS = 1 << 24  # of a bucket, unless one parameter has more
NO_GRADIENT = -0.0  # x + -0.0 has the bits of x, also for x = -0.0
MAX_SKIPPED_IN_A_ROW = 10


class GradientExchange:
    """Sums the gradients of `parameters` over the microbatches of one step and over `ranks`.

    With one rank its methods do nothing, because autograd accumulates into `.grad`.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._buckets = [_Bucket(part, ranks) for part in _partition(parameters)] if ranks.size > 1 else []

    def start_round(self, active_ranks: int) -> None:
        """Must be called before each round, in which the first `active_ranks` ranks compute a microbatch."""

    def finish_round(self) -> None:
        """Adds the gradients in `.grad` of all ranks to the sums, and clears them."""
        for bucket in self._buckets:
            bucket.add_gradients()

    def finish_step(self) -> None:
        """Sets `.grad` on every rank to the sums, or to None where no microbatch gave a gradient."""
        for bucket in self._buckets:
            bucket.gather_sums()


class _Bucket:
    """Some of the parameters, concatenated and padded to N parts of equal width. This rank sums one part."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._has_gradient = torch.zeros(len(parameters), dtype=torch.uint8, device=parameters[0].device)
        self._width = -(-sum(p.numel() for p in parameters) // ranks.size)
        self._sum = self._filled(self._width)

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, NO_GRADIENT, device=self._parameters[0].device)

    def add_gradients(self) -> None:
        send_buffer = self._filled(self._ranks.size * self._width)
        for i, (parameter, view) in enumerate(self._views(send_buffer)):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                self._has_gradient[i] = 1
                parameter.grad = None
        received = torch.empty_like(send_buffer)
        dist.all_to_all_single(received, send_buffer)
        for part in received.view(self._ranks.size, -1):
            self._sum += part

    def gather_sums(self) -> None:
        flat = self._filled(self._ranks.size * self._width)
        dist.all_gather(list(flat.view(self._ranks.size, -1).unbind()), self._sum)
        dist.all_reduce(self._has_gradient, dist.ReduceOp.MAX)
        for (parameter, view), has_gradient in zip(self._views(flat), self._has_gradient.tolist(), strict=True):
            parameter.grad = view.clone() if has_gradient else None

    def _views(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns each parameter with its part of `flat`, in the parameter's shape."""
        starts = accumulate((p.numel() for p in self._parameters), initial=0)
        return [(p, flat[i : i + p.numel()].view_as(p)) for p, i in zip(self._parameters, starts, strict=False)]


def _partition(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divides the parameters, in their order, into buckets of at most BUCKET_ELEMENTS."""
    buckets: list[list[nn.Parameter]] = []
    remaining = 0
    for parameter in parameters:
        if remaining < parameter.numel():
            buckets.append([])
            remaining = max(BUCKET_ELEMENTS, parameter.numel())
        buckets[-1].append(parameter)
        remaining -= parameter.numel()
    return buckets


def accumulate_gradients(
    method: Method[Any],
    forward: Forward,
    optimizer: Optimizer,
    microbatches: Sequence[Sequence[Item]],
    *,
    ranks: Ranks = ALONE,
    seed: str = "",
    sharded: "ShardedModel | None" = None,
) -> list[float]:
    """Accumulates the gradients of all microbatches. Returns the means of the loss and of `method.metrics`.

    The loss is the mean over the whole step, independent of packing and of the number of microbatches. Rank i mod N
    computes microbatch i, and all ranks receive the gradients and the means. `seed` determines the step's random
    numbers. If `sharded` is given, each rank receives the gradients of its own rows only.
    """
    terms = method.count_loss_terms([item for items in microbatches for item in items])
    # The sums stay on the model's device: reading them after each microbatch would synchronize with the GPU.
    sums = torch.zeros(len(microbatches), 1 + len(method.metrics), dtype=torch.float64, device=forward.device)
    exchange = GradientExchange(list(optimizer.masters.values()), ranks) if sharded is None else sharded.exchange()
    has_several_rounds = len(microbatches) > ranks.size  # otherwise caching quantized weights saves nothing
    with forward.accumulated_update():
        for start in range(0, len(microbatches), ranks.size):
            active_ranks = min(ranks.size, len(microbatches) - start)
            is_active = ranks.rank < active_ranks
            exchange.start_round(active_ranks)
            if is_active or ranks.is_sharded:  # a sharded rank without a microbatch repeats rank 0's
                index = start + ranks.rank if is_active else start
                is_first = start == 0 if has_several_rounds else None
                with _seeded(f"{seed}:{index}"):
                    microbatch_sums = _backward(method, forward, microbatches[index], terms, is_first)
                if is_active:
                    sums[index] = microbatch_sums
                optimizer.accumulate_in_fp32()
            exchange.finish_round()
    exchange.finish_step()
    if ranks.size > 1:
        dist.all_reduce(sums)  # each row is zero on all ranks but one
    totals = torch.zeros_like(sums[0])
    for microbatch_sums in sums:  # in order, as one process adds them
        totals += microbatch_sums
    return [total / terms for total in totals.tolist()]


@contextmanager
def _seeded(seed: str) -> Iterator[None]:
    """Seeds torch's random numbers within the block, and restores their state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(seed).getrandbits(63))
        yield


def _backward(
    method: Method[Any], forward: Forward, items: Sequence[Item], terms: int, is_first: bool | None
) -> Tensor:
    """Adds the gradients of a microbatch to `.grad`. Returns the sums of its loss and metrics."""
    sums = method.compute_sums(partial(forward.logits, is_first_microbatch=is_first), items)
    (sums[0] / terms).backward()  # type: ignore[no-untyped-call]
    return torch.stack([value.detach().double() for value in sums])


def take_step(run: TrainingRun, step: Step) -> float:
    """Takes a step, reports it, and returns its loss. It updates all of `run.progress` except the cursor.

    After ten skipped steps in a row it raises DivergenceError if the run may recover, else JobError.
    """
    start, progress = time.monotonic(), run.progress
    rate = learning_rate(run.config, progress.step, run.setup.total_steps)
    microbatches = run.setup.method.prepare_step(progress.step, run.microbatches(step))
    compiled = run.setup.compiled
    with nullcontext() if compiled is None else compiled.running(run.on_event, progress.step + 1):
        means, norm = _update(run, microbatches, rate)
    tokens = sum(item.tokens for items in microbatches for item in items)
    progress.step += 1
    progress.trained_tokens += tokens
    if math.isfinite(norm):
        progress.skipped_in_a_row = 0
        _report(run, means, rate, norm, tokens / (time.monotonic() - start))
    else:
        _skip(run, norm)
    return means[0]


def _update(run: TrainingRun, microbatches: Sequence[Sequence[Item]], rate: float) -> tuple[list[float], float]:
    """Makes all updates of a step. Returns the means to report and the last gradient norm. It stops at the first norm
    that is not finite."""
    method, forward, optimizer = run.setup.method, run.setup.forward, run.setup.optimizer
    seed, means, norm = f"{run.config.seed}:{run.progress.step}", list[list[float]](), 0.0
    while len(means) < method.updates and math.isfinite(norm):
        means.append(
            accumulate_gradients(
                method,
                forward,
                optimizer,
                microbatches,
                ranks=run.ranks,
                seed=f"{seed}:{len(means)}",
                sharded=run.setup.sharded,
            )
        )
        norm = optimizer.step(rate)
    use_first = [False, *(metric.from_first_update for metric in method.metrics)]
    return [first if use else last for first, last, use in zip(means[0], means[-1], use_first, strict=True)], norm


def _skip(run: TrainingRun, norm: float) -> None:
    progress = run.progress
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    text = f"Step {progress.step} was skipped: its gradient norm is {norm}"
    run.on_event(events.message("step_skipped", text, level="warn", step=progress.step))
    if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        reason = (
            f"Training diverged: the gradients of {MAX_SKIPPED_IN_A_ROW} steps in a row up to step "
            f"{progress.step} were not finite"
        )
        if run.may_recover:
            raise DivergenceError(reason)
        raise JobError(f"{reason}; lower lr ({run.config.lr}) or clip ({run.config.clip}).")


def _report(run: TrainingRun, means: Sequence[float], rate: float, norm: float, tokens_per_second: float) -> None:
    """Reports the metrics of a step. Evaluates the validation data first if a validation is due."""
    progress, setup, method_metrics = run.progress, run.setup, run.setup.method.metrics
    is_last = progress.step == setup.total_steps
    values = {
        "step": progress.step,
        "total_steps": setup.total_steps,
        "epoch": progress.cursor.epoch,
        "train_loss": means[0],
        **{metric.name: mean for metric, mean in zip(method_metrics, means[1:], strict=True)},
        "learning_rate": rate,
        "grad_norm": norm,
        "trained_tokens": progress.trained_tokens,
        **({"returns": progress.returns} if progress.returns else {}),
    }
    if setup.eval_items and (run.is_due(run.config.eval_every) or is_last):
        values |= evaluate_run(run)
        progress.held_out.record(values["valid_loss"], progress.step)
    progress.metrics = {k: v if math.isfinite(v) else None for k, v in values.items()}
    if run.is_due(run.config.log_every) or "valid_loss" in values or is_last:
        labels = {metric.name: metric.label for metric in method_metrics if metric.label}
        run.on_event(events.metrics({**progress.metrics, "tokens_per_second": tokens_per_second}, labels))
