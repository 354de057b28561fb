"""`Outcome.failure`: which runs count as failed because training made the model worse."""

import pytest

from fp8serve.train.run import MAX_LOSS_RISE, Outcome

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("before", "after", "steps", "skipped", "problem"),
    [
        (5.0, 4.0, 10, 0, None),
        (0.1, 0.1 + MAX_LOSS_RISE, 10, 0, None),
        (5.0, 839.0, 10, 0, "rose from 5.00 to 839.00"),
        (0.1, 1.2, 10, 0, "rose from 0.10 to 1.20"),
        (None, 839.0, 10, 0, None),
        (5.0, NAN, 10, 0, "is nan after step 10"),
        (None, INF, 10, 0, "is inf after step 10"),
        (5.0, 5.0, 4, 4, "gradients of all 4 steps were not finite"),
        (5.0, 5.0, 4, 3, None),
    ],
)
def test_failure_names_a_risen_or_nonfinite_loss_and_skipped_steps(
    before: float | None, after: float, steps: int, skipped: int, problem: str | None
) -> None:
    failure = Outcome(before, after, steps, skipped).failure
    assert (failure is None) == (problem is None)
    assert problem is None or problem in (failure or "")


@pytest.mark.parametrize(("before", "after", "worse"), [(2.0, 2.1, True), (2.0, 2.0, False), (None, 2.0, False)])
def test_failure_names_a_risen_validation_loss(before: float | None, after: float, worse: bool) -> None:
    failure = Outcome(5.0, 4.0, 10, 0, before, after).failure
    assert failure == (
        "Training made the model worse: its validation loss rose from 2.0000 to 2.1000" if worse else None
    )
