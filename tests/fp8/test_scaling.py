"""Delayed scaling has the bits of a Python model of docs/numerics.md; rows D of that page."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8serve import DelayedScaling
from fp8serve.fp8.ops import Case, cases, reference
from fp8serve.fp8.ops.arithmetic import FLT_MAX
from fp8serve.fp8.recipe import Recipe
from fp8serve.fp8.scaling import Entry, ScalingState, update

CPU = torch.device("cpu")


@dataclass
class Model:
    """The state of one tensor by the rules of docs/numerics.md, in Python numbers, rounded to FP32 where required."""

    length: int
    fp8_max: float
    margin: int = 0
    interval: int = 1
    most_recent: bool = False
    scale: float = 1.0
    history: list[float] = field(default_factory=list)
    nonfinite: int = 0
    recorded: int = 0

    def __post_init__(self) -> None:
        self.history = [0.0] * self.length

    def step(self, amaxes: list[float]) -> None:
        """Runs a step in which the tensor is quantized once for each amax; with no amax, its module does not run."""
        for amax in amaxes:
            self.history[0] = max(self.history[0], float(np.float32(amax)))
        staged = self.history[0]
        if np.isinf(staged):  # rule 6
            self.history[0], self.nonfinite = 0.0, self.nonfinite + 1
        elif staged > 0:  # if it is 0, rule 5: nothing changes
            if self.recorded % self.interval == 0:
                self.rescale(staged if self.most_recent else max(self.history))
            self.recorded += 1
            self.rotate()

    def rescale(self, amax: float) -> None:  # rule 3
        with np.errstate(over="ignore"):
            quotient = np.float32(self.fp8_max / 2.0**self.margin) / np.float32(amax)
        self.scale = float(min(quotient, np.float32(FLT_MAX)))

    def rotate(self) -> None:  # rule 4
        old = self.history
        new = [0.0] * self.length
        for i in range(1, self.length - 1):
            new[i] = old[i + 1]
        if self.length > 1:
            new[self.length - 1] = old[0]
        self.history = new

    def equals(self, state: ScalingState) -> bool:
        return (
            state.scale.item() == self.scale
            and state.amax_history.tolist() == self.history
            and state.nonfinite.item() == self.nonfinite
            and state.steps.item() == self.recorded
        )


def state_of(length: int) -> ScalingState:
    return ScalingState.create(length, CPU)


def run(state: ScalingState, recipe: DelayedScaling, *steps: float, fp8_max: float = 448.0) -> list[float]:
    """Runs an update for each amax; returns the scale after each."""
    scales = []
    for amax in steps:
        state.stage(torch.tensor(amax))
        update([Entry(state, fp8_max)], recipe)
        scales.append(state.scale.item())
    return scales


finite = st.floats(min_value=0, max_value=float(FLT_MAX), width=32)
spikes = st.sampled_from([0.0, 1e-45, 1e-38, 1e-3, 1.0, 100.0, 448.0, 1e30, FLT_MAX, float("inf")])
amaxes = st.lists(finite | spikes, max_size=3)
steps = st.lists(st.lists(amaxes, min_size=3, max_size=3), max_size=30)


@settings(max_examples=150)
@given(
    steps=steps,
    length=st.sampled_from([1, 2, 3, 5, 8]),
    margin=st.integers(-8, 8),
    interval=st.integers(1, 4),
    most_recent=st.booleans(),
)
@example(steps=[[[1.0]] * 3, [[float("inf")], [], [2.0]]] * 3, length=3, margin=0, interval=1, most_recent=False)
def test_random_runs_match_the_model(
    steps: list[list[list[float]]], length: int, margin: int, interval: int, most_recent: bool
) -> None:
    """Rules 1 to 6 with spikes, zeros, steps without an amax and infinities; one update of three states and formats."""
    maxes = [448.0, 57344.0, 448.0]
    models = [Model(length, fp8_max, margin, interval, most_recent) for fp8_max in maxes]
    states = [state_of(length) for _ in maxes]
    algo = "most_recent" if most_recent else "max"
    recipe = DelayedScaling(margin=margin, interval=interval, amax_history_len=length, amax_compute_algo=algo)
    for step in steps:
        for model, state, values in zip(models, states, step, strict=True):
            model.step(values)
            for value in values:
                state.stage(torch.tensor(value))
        update([Entry(state, fp8_max) for state, fp8_max in zip(states, maxes, strict=True)], recipe)
        assert all(model.equals(state) for model, state in zip(models, states, strict=True))


@pytest.mark.parametrize("case", cases("delayed_update"), ids=lambda c: c.name)
def test_the_op_equals_its_reference(case: Case) -> None:
    expected, actual = case.make(), case.make()
    reference.delayed_update(*expected)
    torch.ops.fp8serve.delayed_update(*actual)
    for a, b in zip(expected[:4], actual[:4], strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_a_tensor_without_an_amax_keeps_its_state() -> None:
    """Row D1."""
    state = state_of(4)
    run(state, DelayedScaling(), 2.0)
    before = (state.scale.item(), state.amax_history.tolist(), state.steps.item())
    run(state, DelayedScaling(), 0.0, 0.0)
    assert (state.scale.item(), state.amax_history.tolist(), state.steps.item()) == before


@pytest.mark.parametrize("amax", [float("inf"), float("nan")])
def test_nonfinite_amax_is_dropped_and_counted(amax: float) -> None:
    """Row D2."""
    state = state_of(4)
    run(state, DelayedScaling(), 2.0)
    assert run(state, DelayedScaling(), amax, 4.0) == [224.0, 112.0]
    assert state.nonfinite.item() == 1
    assert state.amax_history.tolist() == [0.0, 0.0, 2.0, 4.0]


def test_overflowing_quotient_is_the_largest_finite_number() -> None:
    """Row D3."""
    assert run(state_of(2), DelayedScaling(), 1e-38) == [FLT_MAX]


def test_staged_oldest_and_newest_slots_all_count() -> None:
    """Row D4: the oldest row counts once more before it is rotated out."""
    recipe = DelayedScaling(amax_history_len=3)
    assert run(state_of(3), recipe, 4.0, 2.0, 1.0, 1.0) == [112.0, 112.0, 112.0, 224.0]


def test_a_history_of_one_slot_is_the_staged_amax() -> None:
    """Row D5."""
    state = state_of(1)
    assert run(state, DelayedScaling(amax_history_len=1), 4.0, 2.0) == [112.0, 224.0]
    assert state.amax_history.tolist() == [0.0]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(5, [9.0, 1.0, 2.0, 3.0, 4.0]), (3, [9.0, 3.0, 4.0]), (2, [9.0, 4.0]), (1, [9.0]), (7, [9.0, 0, 0, 1, 2, 3, 4])],
)
def test_changing_the_length_keeps_the_newest(length: int, expected: list[float]) -> None:
    """Row D6."""
    state = state_of(5)
    state.amax_history = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0])
    state.resize(length)
    assert state.amax_history.tolist() == expected


def test_interval_counts_recorded_steps() -> None:
    """Row D9: the first and then every third recorded step sets the scale, from the amaxes of all steps between."""
    recipe = DelayedScaling(interval=3, amax_history_len=8)
    scales = run(state_of(8), recipe, 1.0, 2.0, 0.0, 4.0, 1.0, 8.0)
    assert scales == [448.0, 448.0, 448.0, 448.0, 112.0, 112.0]


def test_margin_divides_by_a_power_of_two() -> None:
    assert run(state_of(2), DelayedScaling(margin=3), 2.0) == [28.0]
    assert run(state_of(2), DelayedScaling(margin=-1), 2.0) == [448.0]


def test_callable_amax_sees_the_history_before_it_rotates() -> None:
    histories: list[list[float]] = []

    def second_largest(history: torch.Tensor) -> torch.Tensor:
        histories.append(history.tolist())
        return history.sort().values[-2]

    recipe = DelayedScaling(amax_compute_algo=second_largest, amax_history_len=3)
    assert run(state_of(3), recipe, 4.0, 2.0, 1.0) == [1.0, 224.0, 224.0]
    assert histories == [[4.0, 0.0, 0.0], [2.0, 0.0, 4.0], [1.0, 4.0, 2.0]]


def test_callable_scale_gets_amax_old_scale_limit_and_recipe() -> None:
    def damped(amax: torch.Tensor, old: torch.Tensor, fp8_max: float, recipe: Recipe) -> torch.Tensor:
        assert isinstance(recipe, DelayedScaling)
        return (old + fp8_max / amax) / 2

    recipe = DelayedScaling(scaling_factor_compute_algo=damped)
    assert run(state_of(4), recipe, 2.0, 4.0) == [112.5, 112.25]
    recipe = DelayedScaling(scaling_factor_compute_algo=damped, amax_compute_algo="most_recent")
    assert run(state_of(4), recipe, 4.0, 2.0) == [56.5, 140.25]


@pytest.mark.parametrize("answer", [0.0, -1.0, float("inf"), float("nan")])
def test_an_invalid_scale_of_a_callable_is_ignored(answer: float) -> None:
    """Row D10."""
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda amax, old, fp8_max, recipe: answer)
    assert run(state_of(4), recipe, 2.0) == [1.0]


def test_callables_follow_the_rules_for_intervals_zeros_and_infinities() -> None:
    recipe = DelayedScaling(interval=2, scaling_factor_compute_algo=lambda amax, old, fp8_max, recipe: fp8_max / amax)
    plain = DelayedScaling(interval=2)
    amaxes = (1.0, 2.0, 0.0, float("inf"), 4.0, 8.0)
    assert run(state_of(4), recipe, *amaxes) == run(state_of(4), plain, *amaxes)


def test_one_update_sets_the_scales_of_states_of_different_lengths() -> None:
    states = [state_of(length) for length in (2, 3, 2, 5)]
    for amax, state in enumerate(states):
        state.stage(torch.tensor(float(amax)))
    update([Entry(state, 448.0) for state in states], DelayedScaling())
    assert [state.scale.item() for state in states] == [1.0, 448.0, 224.0, float(np.float32(448) / np.float32(3))]
    assert all(a.scale is not b.scale for a, b in pairwise(states))
