"""A run continues from a checkpoint: the same job, the same state, and words about what has changed since."""

from pathlib import Path
from typing import Any

from fp8serve.errors import JobError
from fp8serve.train import checkpoint, events, fallback, state
from fp8serve.train.held_out import HeldOut
from fp8serve.train.identity import check_same_job
from fp8serve.train.order import Cursor
from fp8serve.train.progress import Course, Progress
from fp8serve.train.setup import environment


def resume(course: Course, path: Path) -> None:
    """Takes over the state and the progress of a verified checkpoint; `course.progress.returns` stays.

    Raises JobError for a checkpoint of another job, or of more steps than the job asks for.
    """
    saved = checkpoint.read_checkpoint(path)
    check_same_job(course.identity, saved.meta["identity"], path)
    _tell_changes(course, saved.meta)
    values = dict(saved.meta["progress"])
    before = fallback.attempt(course.asked, values.pop("returns", 0))  # an older version has none
    if before != course.config:  # another attempt, which counts its skipped steps from 0
        saved.scaling = fallback.rescaled(saved.scaling, before, course.config)
        values["skipped_in_a_row"] = 0
    restore(course, saved)
    course.setup = course.setup.recalled(saved.method)
    held_out = HeldOut(**values.pop("held_out", {}))  # a checkpoint of an older version has none
    values |= {"cursor": Cursor(**values["cursor"]), "held_out": held_out, "returns": course.progress.returns}
    course.progress = Progress(**values)
    step = course.progress.step
    course.on_event(events.message("resumed", f"Resumed from step {step}", step=step))


def restore(course: Course, saved: checkpoint.TrainState) -> None:
    """Weights, moments, scales and random numbers of a checkpoint."""
    state.restore(course.setup.forward, course.setup.optimizer, saved, course.setup.sharded)


def _tell_changes(course: Course, meta: dict[str, Any]) -> None:
    then, total = meta["progress"].get("total_steps"), course.setup.total_steps
    if total < meta["step"]:
        raise JobError(
            f"The run in {course.out} is at step {meta['step']} already, this job says {total}; ask for more."
        )
    if then is not None and total != then:
        text = f"The run was to end at step {then}, now at {total}: its learning rate follows that from here on"
        course.on_event(events.message("length_changed", text, level="warn", total_steps=total))
    if (here := environment(course.config)) != meta["environment"]:
        changed = [k for k in here if here[k] != meta["environment"].get(k)]
        text = f"{', '.join(changed)} changed since the checkpoint was written: the result may differ in its last bits"
        course.on_event(events.message("machine_changed", text, level="warn"))
