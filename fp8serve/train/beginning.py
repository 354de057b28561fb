"""What a run does before its first step: scales, the method's own preparations, and the losses it is judged by.

With delayed scaling, a base model that brings no histories is first observed for one microbatch in high precision. A
gradient quantized at scale 1 is mostly below E5M2's smallest number, and zero gradients teach the layers before them no
scale either: without this, scales would become right one layer a step.
"""

import math

from fp8serve.errors import JobError
from fp8serve.train import events, state
from fp8serve.train.measuring import first_loss, validated
from fp8serve.train.order import walk
from fp8serve.train.progress import Course


def begin(course: Course) -> None:
    """Raises JobError where the model has no finite loss."""
    warm_scales(course)
    _begin_method(course)
    loss = _finite_first_loss(course)
    course.progress.first_loss = loss if course.setup.method.is_supervised else None
    _validate(course)


def warm_scales(course: Course) -> None:
    """Fills the histories that the base model does not bring with one observed microbatch."""
    if not any(entry.amax_history.count_nonzero() == 0 for _, entry in state.states(course.setup.forward)):
        return
    step, _ = next(walk(course.lengths, course.config, course.progress.cursor, 1))
    method, microbatches = course.setup.method, course.items(step)
    weight = method.weight([item for items in microbatches for item in items])
    course.setup.observe(lambda logits: method.sums(logits, microbatches[0])[0] / weight)
    text = "Scales start from the amaxes of one pass in high precision"
    course.on_event(events.message("scales_observed", text))


def _begin_method(course: Course) -> None:
    """Computes what the method needs to know about the model before its first step."""
    course.setup = course.setup.begun(course.ranks)
    if course.setup.kept():
        text = f"The reference: what the model computes for {len(course.setup.items)} items before its first step"
        course.on_event(events.message("reference", text))


def _finite_first_loss(course: Course) -> float:
    loss = first_loss(course)
    if not math.isfinite(loss):
        raise JobError(f"The loss of the first rows is {loss} before any step; check the model's weights and scales.")
    return loss


def _validate(course: Course) -> None:
    """At its end the run is judged by this loss."""
    if course.setup.eval_items:
        loss = course.progress.held_out.first = validated(course)["valid_loss"]
        course.on_event(events.message("validated", f"Validation loss before the first step: {loss:.4f}", loss=loss))
