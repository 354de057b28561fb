"""A rule that computes an amax from a history needs one entry in RULES; recipes, updates and files use that table."""

import pytest
import torch

from fp8serve import DelayedScaling
from fp8serve.errors import RecipeError
from fp8serve.fp8.amax_rules import RULES, AmaxRule
from fp8serve.fp8.recipe import from_json, to_json
from fp8serve.fp8.scaling import Entry, ScalingState, update
from fp8serve.model.formats.scales import ScalingCheckpoint, TensorScale, find_problems

AMAXES = (1.0, 4.0, 2.0, 3.0, 8.0)


@pytest.fixture
def mean(monkeypatch: pytest.MonkeyPatch) -> DelayedScaling:
    """A recipe whose rule is added to the table."""
    monkeypatch.setitem(RULES, "mean", AmaxRule(lambda history: history.mean()))  # type: ignore[misc]
    return DelayedScaling(amax_history_len=4, amax_compute_algo="mean")  # type: ignore[arg-type]


def run(recipe: DelayedScaling) -> ScalingState:
    state = ScalingState.create(recipe.amax_history_len, torch.device("cpu"))
    for amax in AMAXES:
        state.stage(torch.tensor(amax))
        update([Entry(state, 448.0)], recipe)
    return state


def test_a_named_rule_gives_the_scales_of_the_same_callable(mean: DelayedScaling) -> None:
    actual = run(mean)
    expected = run(DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.mean()))
    assert torch.equal(actual.scale, expected.scale)
    assert torch.equal(actual.amax_history, expected.amax_history)
    assert float(actual.scale) == pytest.approx(448 / ((4 + 2 + 3 + 8) / 4))


def test_a_named_rule_is_stored_and_its_scales_are_checked_against_it(mean: DelayedScaling) -> None:
    assert from_json(to_json(mean)) == mean
    state = run(mean)
    entry = TensorScale(state.scale, state.amax_history)
    assert not list(find_problems(ScalingCheckpoint(mean, {"layer.input": entry})))
    by_max = DelayedScaling(amax_history_len=4)
    assert [key for key, _ in find_problems(ScalingCheckpoint(by_max, {"layer.input": entry}))] == ["layer.input"]


@pytest.mark.parametrize("name", RULES)
def test_the_op_gives_the_scales_of_every_builtin_rule(name: str) -> None:
    assert RULES[name].in_op  # type: ignore[index]
    by_op = run(DelayedScaling(amax_history_len=4, amax_compute_algo=name))  # type: ignore[arg-type]
    by_callable = run(DelayedScaling(amax_history_len=4, amax_compute_algo=RULES[name].compute_amax))  # type: ignore[index]
    assert torch.equal(by_op.scale, by_callable.scale)
    assert torch.equal(by_op.amax_history, by_callable.amax_history)


def test_a_name_that_is_no_rule_is_refused(mean: DelayedScaling) -> None:
    with pytest.raises(RecipeError, match='must be "max", "most_recent", "mean" or a callable'):
        DelayedScaling(amax_compute_algo="median")  # type: ignore[arg-type]
