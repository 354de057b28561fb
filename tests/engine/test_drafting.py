"""Drafts: which tokens they repeat, how long they are, and what a sequence pays for them."""

import itertools
import random

import pytest

from fp8serve.engine.drafting import (
    ALLOWANCE,
    MAX_STEPS,
    MIN_DRAFT_TOKENS,
    ROW_COST,
    START_STEPS,
    Drafter,
    row_price,
    sequences_to_sample,
)
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.sequence import Sequence


def drafts(tokens: list[int], most: int = 4, room: int = 100) -> list[int]:
    return Drafter(most).propose(tokens, room, rows=1)


def test_what_followed_the_last_time_comes_again() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert drafts([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]) == [5, 6, 1, 2]  # the latest


def test_the_longest_known_ending_counts() -> None:
    assert drafts([7, 1, 2, 3, 4, 5, 9, 1, 2, 8, 8, 7, 1, 2]) == [3, 4, 5, 9]


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert drafts([5, 1, 2, 1, 2]) == [1, 2, 1, 2]
    assert drafts([3, 3, 3]) == [3, 3, 3, 3]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 2, 4], list(range(500))])
def test_nothing_known_is_no_draft(tokens: list[int]) -> None:
    assert drafts(tokens) == []


@pytest.mark.parametrize(("most", "room", "length"), [(4, 3, 3), (2, 100, 2), (4, 0, 0), (1, 1, 1)])
def test_a_draft_keeps_to_its_bounds(most: int, room: int, length: int) -> None:
    assert len(drafts([1, 2, 3, 4, 5, 6, 7, 1, 2], most, room)) == length


def test_token_ids_may_be_larger_than_characters() -> None:
    large = [2**31 - 1, 0x110000, 0xD800, 5, 6, 7, 2**31 - 1, 0x110000]
    assert drafts(large) == [0xD800, 5, 6, 7]


def test_a_drafter_follows_its_sequence() -> None:
    """It finds the same as a new drafter."""
    rng, drafter, tokens = random.Random(0), Drafter(8), [1]
    for _ in range(300):
        tokens += [rng.randrange(6) for _ in range(rng.randrange(3))]
        found, fresh = drafter.propose(tokens, 2, 1), Drafter(8).propose(tokens, 2, 1)
        assert found == fresh


def loss(drafter: Drafter, accepted: float, steps: int = 400) -> float:
    """The share of the time that drafts cost, less their gain, if their tokens are right so often."""
    rng, cost, gained = random.Random(0), 0.0, 0
    for _ in range(steps):
        draft = drafter.propose([1, 2, 3, 1, 2], 1000, 1)
        if draft:
            right = sum(itertools.takewhile(bool, (rng.random() < accepted for _ in draft)))
            drafter.record(len(draft), right)
            cost, gained = cost + ROW_COST * len(draft), gained + right
    return (cost - gained) / (steps + gained)


@pytest.mark.parametrize("accepted", [0.0, 0.02, 0.1, 0.2])
def test_what_is_seldom_right_costs_little(accepted: float) -> None:
    assert loss(Drafter(16), accepted) < ALLOWANCE + START_STEPS / 400


def test_what_is_right_pays() -> None:
    assert loss(Drafter(16), 1.0) < -0.4
    assert loss(Drafter(16), 0.8) < -0.3


def test_a_rich_sequence_becomes_poor_soon() -> None:
    drafter = Drafter(16)
    assert loss(drafter, 1.0) < 0
    assert loss(drafter, 0.0) < ALLOWANCE + MAX_STEPS / 400


def test_lengths_follow_what_was_right() -> None:
    drafter, tokens = Drafter(64), [1, 2, 3] * 9
    lengths = []
    for _ in range(5):
        lengths.append(len(drafter.propose(tokens, 1000, 1)))
        drafter.record(lengths[-1], lengths[-1])
    assert lengths == [4, 8, 16, int(MAX_STEPS / ROW_COST), int(MAX_STEPS / ROW_COST)]
    drafter.propose(tokens, 1000, 1)
    drafter.record(20, 1)
    assert len(drafter.propose(tokens, 1000, 1)) == MIN_DRAFT_TOKENS


def test_a_row_costs_a_share_of_what_a_sequence_pays_for_its_step() -> None:
    assert row_price(1) == pytest.approx(ROW_COST)
    assert row_price(1) < row_price(2) < row_price(8) < row_price(1000) < 1


def test_sequences_to_sample() -> None:
    seq = Sequence.of(Request("r", (1, 2), SamplingParams(seed=3)))
    seq.token_ids.append(4)
    rows = sequences_to_sample(seq, (5, 6))
    assert rows[0] is seq
    assert [row.token_ids for row in rows] == [[1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 5, 6]]
    assert [row.num_generated for row in rows] == [1, 2, 3]
    assert {row.seed for row in rows} == {seq.seed}
