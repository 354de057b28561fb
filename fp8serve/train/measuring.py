"""The losses of a run's model as it stands, on held-out items and on its first rows. Measuring changes nothing."""

from fp8serve.train.divergence import Outcome
from fp8serve.train.held_out import held_out_metrics
from fp8serve.train.order import Cursor, walk
from fp8serve.train.progress import Course


def validated(course: Course) -> dict[str, float]:
    """See `held_out_metrics`; of the run's held-out items."""
    setup, size = course.setup, course.config.batch_size
    return held_out_metrics(setup.method, setup.forward, setup.eval_items, size, course.ranks)


def first_loss(course: Course) -> float:
    """The mean loss of the first microbatch, with the weights as they are."""
    step, _ = next(walk(course.lengths, course.config, Cursor(), 1))
    items = course.items(step)[0]
    return held_out_metrics(course.setup.method, course.setup.forward, items, len(items))["valid_loss"]


def outcome(course: Course, held_out_after: float | None = None) -> Outcome:
    """Compares the model now with the model before the run."""
    progress = course.progress
    return Outcome(
        before=progress.first_loss,
        after=first_loss(course),
        steps=progress.step,
        skipped=progress.skipped,
        held_out_before=progress.held_out.first,
        held_out_after=held_out_after,
    )
