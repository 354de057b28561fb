"""One step of a run: the gradients of its microbatches, their sum over processes, its updates, and what it reports.

A step is the same for any number of processes: its microbatches compute with the same scales (`Forward.one_update`),
each draws its own random numbers, and gradients are added in the order of the microbatches.

A single process adds g0 + g1 + g2 ... in FP32. A sum depends on its order, so an all-reduce would give other weights.
Here rank i mod N computes microbatch i. After each round of N, every rank gets its N-th part of all N gradients and
adds them to its part of the sum, in order. At the end of the step the parts are gathered. So weights have the same bits
whatever N is. A rank sends its gradients once a microbatch, and its part of the sum once a step; an all-reduce of the
step's sums would send the gradients only once a step.

A missing gradient (of an expert that no token chose, or of a microbatch that does not exist) is sent as -0.0, the only
number whose addition changes nothing, not even the sign of a zero. Gradients travel in buckets, so that beside a rank's
own gradients and its part of the sum only two buckets are in memory.

A gradient that is not finite is never applied: the step is skipped with an event, the moments stay, and ten in a row
end the run, or send it back (`train.recovery`).
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from fp8serve.train.run import Course
from fp8serve.train.validation import DivergenceError, validate_run

if TYPE_CHECKING:
    from fp8serve.train.sharded.building import Sharded

BUCKET = 1 << 24  # elements, unless one parameter has more
NOTHING = -0.0
MAX_SKIPPED_IN_A_ROW = 10


class Exchange:
    """Sums gradients of `parameters` over the microbatches of one step and over `ranks`; with one rank it does
    nothing."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._buckets = [_Bucket(some, ranks) for some in _buckets_of(parameters)] if ranks.size > 1 else []

    def begin(self, working: int) -> None:
        """Before each round, of which so many ranks compute a microbatch."""

    def round(self) -> None:
        """After each rank's next microbatch, if there is one: adds the gradients in `.grad`, and clears them."""
        for bucket in self._buckets:
            bucket.add()

    def finish(self) -> None:
        """Puts the sums into `.grad` of every rank; None where no microbatch gave a gradient."""
        for bucket in self._buckets:
            bucket.gather()


class _Bucket:
    """Some parameters end to end, padded to N parts of `width` elements; this rank sums one part."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._seen = torch.zeros(len(parameters), dtype=torch.uint8, device=parameters[0].device)
        self._width = -(-sum(p.numel() for p in parameters) // ranks.size)
        self._sum = self._filled(self._width)

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, NOTHING, device=self._parameters[0].device)

    def add(self) -> None:
        sent = self._filled(self._ranks.size * self._width)
        for i, (parameter, place) in enumerate(self._places(sent)):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                self._seen[i] = 1
                parameter.grad = None
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for part in received.view(self._ranks.size, -1):
            self._sum += part

    def gather(self) -> None:
        whole = self._filled(self._ranks.size * self._width)
        dist.all_gather(list(whole.view(self._ranks.size, -1).unbind()), self._sum)
        dist.all_reduce(self._seen, dist.ReduceOp.MAX)
        for (parameter, place), seen in zip(self._places(whole), self._seen.tolist(), strict=True):
            parameter.grad = place.clone() if seen else None

    def _places(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of `flat`, in its shape."""
        starts = accumulate((p.numel() for p in self._parameters), initial=0)
        return [(p, flat[at : at + p.numel()].view_as(p)) for p, at in zip(self._parameters, starts, strict=False)]


def _buckets_of(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Buckets of the parameters in their order, as many in each as fit."""
    results: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room < parameter.numel():
            results.append([])
            room = max(BUCKET, parameter.numel())
        results[-1].append(parameter)
        room -= parameter.numel()
    return results


def accumulate_gradients(
    method: Method[Any],
    forward: Forward,
    optimizer: Optimizer,
    microbatches: Sequence[Sequence[Item]],
    *,
    ranks: Ranks = ALONE,
    seed: str = "",
    sharded: "Sharded | None" = None,
) -> list[float]:
    """Accumulate the gradients of all microbatches; returns the means of the loss and of `method.measures`.

    The loss is the mean over the whole step, so neither packing nor accumulation changes what is minimised. Microbatch
    i runs on rank i mod N; the gradients and the means are on all ranks. `seed`: of the step's random numbers.
    `sharded`: where the weights are divided among the ranks; then each rank has the gradients of its own rows.
    """
    weight = method.weight([item for items in microbatches for item in items])
    # FP64 on the model's device: reading each microbatch's figures would wait for a GPU; one read at the end is enough
    result = torch.zeros(len(microbatches), 1 + len(method.measures), dtype=torch.float64, device=forward.device)
    exchange = Exchange(list(optimizer.masters.values()), ranks) if sharded is None else sharded.exchange()
    several = len(microbatches) > ranks.size  # with one microbatch, there is nothing to keep
    with forward.one_update():
        for start in range(0, len(microbatches), ranks.size):
            mine, working = start + ranks.rank, min(ranks.size, len(microbatches) - start)
            has_one = ranks.rank < working
            exchange.begin(working)
            if has_one or ranks.in_step:
                index, first = mine if has_one else start, start == 0 if several else None
                with _random_numbers(f"{seed}:{index}"):
                    sums = _backward(method, forward, microbatches[index], weight, first)
                if has_one:
                    result[mine] = sums
                optimizer.collect()
            exchange.round()
    exchange.finish()
    if ranks.size > 1:
        dist.all_reduce(result)  # each row is zero on all ranks but one
    return [value / weight for value in _sum_in_order(result)]


def _sum_in_order(results: Tensor) -> list[float]:
    """The sum of the rows of `results`, added one after the other: [1 + measures]."""
    sums = torch.zeros_like(results[0])
    for row in results:
        sums += row
    return list(sums.tolist())


@contextmanager
def _random_numbers(seed: str) -> Iterator[None]:
    """Seeds the random numbers of a microbatch, whichever process computes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(seed).getrandbits(63))
        yield


def _backward(method: Method[Any], forward: Forward, items: Sequence[Item], weight: int, first: bool | None) -> Tensor:
    result = method.sums(partial(forward.logits, is_first_microbatch=first), items)
    (result[0] / weight).backward()  # type: ignore[no-untyped-call]
    return torch.stack([value.detach().double() for value in result])


def take_step(course: Course, step: Step) -> float:
    """Takes a step and reports it; returns its loss. All of `course.progress` moves on but the cursor.

    After ten steps in a row that were skipped: DivergenceError for a run that may go back, else JobError.
    """
    began, progress = time.monotonic(), course.progress
    rate = learning_rate(course.config, progress.step, course.setup.total_steps)
    microbatches = course.setup.method.collect(progress.step, course.items(step))
    means, norm = _update(course, microbatches, rate)
    tokens = sum(item.tokens for items in microbatches for item in items)
    progress.step += 1
    progress.trained_tokens += tokens
    if math.isfinite(norm):
        progress.skipped_in_a_row = 0
        _report(course, means, rate, norm, tokens / (time.monotonic() - began))
    else:
        _skip(course, norm)
    return means[0]


def _update(course: Course, microbatches: Sequence[Sequence[Item]], rate: float) -> tuple[list[float], float]:
    """Makes all updates of a step; returns the means that the step reports, and the norm of the last gradient. A norm
    that is not finite ends the updates."""
    method, forward, optimizer = course.setup.method, course.setup.forward, course.setup.optimizer
    seed, result, norm = f"{course.config.seed}:{course.progress.step}", list[list[float]](), 0.0
    while len(result) < method.updates and math.isfinite(norm):
        result.append(
            accumulate_gradients(
                method,
                forward,
                optimizer,
                microbatches,
                ranks=course.ranks,
                seed=f"{seed}:{len(result)}",
                sharded=course.setup.sharded,
            )
        )
        norm = optimizer.step(rate)
    of_first = [False, *(measure.of_first for measure in method.measures)]
    return [a if is_first else b for a, b, is_first in zip(result[0], result[-1], of_first, strict=True)], norm


def _skip(course: Course, norm: float) -> None:
    progress = course.progress
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    text = f"Step {progress.step} was skipped: its gradient norm is {norm}"
    course.on_event(events.message("step_skipped", text, level="warn", step=progress.step))
    if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        why = (
            f"Training diverged: the gradients of {MAX_SKIPPED_IN_A_ROW} steps in a row up to step "
            f"{progress.step} were not finite"
        )
        if course.may_go_back:
            raise DivergenceError(why)
        raise JobError(f"{why}; lower lr ({course.config.lr}) or clip ({course.config.clip}).")


def _report(course: Course, means: Sequence[float], rate: float, norm: float, speed: float) -> None:
    """Reports the figures of a step that was taken, and validates where that is due."""
    progress, setup, measures = course.progress, course.setup, course.setup.method.measures
    is_last = progress.step == setup.total_steps
    values = {
        "step": progress.step,
        "total_steps": setup.total_steps,
        "epoch": progress.cursor.epoch,
        "train_loss": means[0],
        **{measure.name: mean for measure, mean in zip(measures, means[1:], strict=True)},
        "learning_rate": rate,
        "grad_norm": norm,
        "trained_tokens": progress.trained_tokens,
        **({"returns": progress.returns} if progress.returns else {}),
    }
    if setup.eval_items and (course.due(course.config.eval_every) or is_last):
        values |= validate_run(course)
        progress.held_out.note(values["valid_loss"], progress.step)
    progress.metrics = {k: v if math.isfinite(v) else None for k, v in values.items()}
    if course.due(course.config.log_every) or "valid_loss" in values or is_last:
        words = {measure.name: measure.words for measure in measures if measure.words}
        course.on_event(events.metrics({**progress.metrics, "tokens_per_second": speed}, words))
