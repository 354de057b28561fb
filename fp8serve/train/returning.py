"""A run that has diverged goes back to its last good checkpoint, if it may. `train.fallback` says what it tries next.

Every checkpoint of such a run is judged before it is written, so those of the multiples of `save_every` are good.
"""

from fp8serve.errors import JobError
from fp8serve.train import events, fallback
from fp8serve.train.divergence import DivergenceError
from fp8serve.train.measuring import outcome
from fp8serve.train.progress import Course
from fp8serve.train.saving import Saving


def go_back_if_diverged(course: Course) -> None:
    """Raises DivergenceError, on all ranks."""
    found = course.ranks.gather(outcome(course).divergence) if course.may_go_back else []
    if (why := next(filter(None, found), None)) is not None:
        raise DivergenceError(why)


def go_back(course: Course, saving: Saving, why: str, *, again: bool) -> int:
    """Removes what was written since the last good checkpoint, where the next run begins. Returns how often the run has
    gone back now. JobError when everything has been tried.

    again: the model had already diverged at the checkpoint that the run went back to. Then it goes back to the one
    before it, and this counts as the same return.
    """
    tried, progress = fallback.attempts(course.asked), course.progress
    returns = progress.returns + (not again)
    if returns == len(tried):
        names = " nor ".join(fallback.described(config) for config in tried[1:])
        raise JobError(f"{why}, and neither {names} helped; lower lr ({course.config.lr}), or look at the data.")
    to = course.ranks.by_first(lambda: saving.removed_since_good(course))
    with_ = fallback.described(tried[returns])
    text = f"{why}. Going back from step {progress.step} to step {to}, and on with {with_}"
    details = {"step": to, "from_step": progress.step, "returns": returns, "tried": with_}
    course.on_event(events.message("returned", text, level="warn", **details))
    return returns
