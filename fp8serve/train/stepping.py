"""One step of a run: its updates of the weights, and what is reported about them.

A gradient that is not finite is never applied: the step is skipped with an event, the moments stay, and ten in a row
end the run, or send it back (`train.returning`).
"""

import math
import time
from collections.abc import Sequence

from fp8serve.errors import JobError
from fp8serve.train import events
from fp8serve.train.data import Item
from fp8serve.train.divergence import DivergenceError
from fp8serve.train.gradients import accumulate
from fp8serve.train.measuring import validated
from fp8serve.train.optimizer import learning_rate
from fp8serve.train.order import Step
from fp8serve.train.progress import Course

MAX_SKIPPED_IN_A_ROW = 10


def take(course: Course, step: Step) -> float:
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
        _measured(course, means, rate, norm, tokens / (time.monotonic() - began))
    else:
        _skipped(course, norm)
    return means[0]


def _update(course: Course, microbatches: Sequence[Sequence[Item]], rate: float) -> tuple[list[float], float]:
    """Makes all updates of a step; returns the means that the step reports, and the norm of the last gradient. A norm
    that is not finite ends the updates."""
    method, forward, optimizer = course.setup.method, course.setup.forward, course.setup.optimizer
    seed, found, norm = f"{course.config.seed}:{course.progress.step}", list[list[float]](), 0.0
    while len(found) < method.updates and math.isfinite(norm):
        found.append(
            accumulate(
                method,
                forward,
                optimizer,
                microbatches,
                ranks=course.ranks,
                seed=f"{seed}:{len(found)}",
                sharded=course.setup.sharded,
            )
        )
        norm = optimizer.step(rate)
    of_first = [False, *(measure.of_first for measure in method.measures)]
    return [a if is_first else b for a, b, is_first in zip(found[0], found[-1], of_first, strict=True)], norm


def _skipped(course: Course, norm: float) -> None:
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


def _measured(course: Course, means: Sequence[float], rate: float, norm: float, speed: float) -> None:
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
        values |= validated(course)
        progress.held_out.note(values["valid_loss"], progress.step)
    progress.metrics = {k: v if math.isfinite(v) else None for k, v in values.items()}
    if course.due(course.config.log_every) or "valid_loss" in values or is_last:
        words = {measure.name: measure.words for measure in measures if measure.words}
        course.on_event(events.metrics({**progress.metrics, "tokens_per_second": speed}, words))
