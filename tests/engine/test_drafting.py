"""Prompt lookup: which earlier tokens a draft repeats, how long it is, and how the cost of rejected drafts is
bounded."""

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


def propose(tokens: list[int], most: int = 4, room: int = 100) -> list[int]:
    return Drafter(most).propose(tokens, room, rows=1)


def test_a_draft_repeats_what_followed_the_latest_match() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert propose([1, 2, 3, 4, 1, 2, 5, 6, 1, 2]) == [5, 6, 1, 2]  # the latest of two matches


def test_the_longest_match_is_used() -> None:
    assert propose([7, 1, 2, 3, 4, 5, 9, 1, 2, 8, 8, 7, 1, 2]) == [3, 4, 5, 9]


def test_a_draft_may_overlap_the_end_of_the_text() -> None:
    assert propose([5, 1, 2, 1, 2]) == [1, 2, 1, 2]
    assert propose([3, 3, 3]) == [3, 3, 3, 3]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 2, 4], list(range(500))])
def test_without_a_match_there_is_no_draft(tokens: list[int]) -> None:
    assert propose(tokens) == []


@pytest.mark.parametrize(("most", "room", "length"), [(4, 3, 3), (2, 100, 2), (4, 0, 0), (1, 1, 1)])
def test_a_draft_is_no_longer_than_its_limits(most: int, room: int, length: int) -> None:
    assert len(propose([1, 2, 3, 4, 5, 6, 7, 1, 2], most, room)) == length


def test_token_ids_may_be_larger_than_characters() -> None:
    large = [2**31 - 1, 0x110000, 0xD800, 5, 6, 7, 2**31 - 1, 0x110000]
    assert propose(large) == [0xD800, 5, 6, 7]


def test_a_drafter_reused_while_tokens_grow_equals_a_new_one() -> None:
    rng, drafter, tokens = random.Random(0), Drafter(8), [1]
    for _ in range(300):
        tokens += [rng.randrange(6) for _ in range(rng.randrange(3))]
        reused, new = drafter.propose(tokens, 2, 1), Drafter(8).propose(tokens, 2, 1)
        assert reused == new


def relative_cost(drafter: Drafter, accepted: float, steps: int = 400) -> float:
    """Returns the time spent on drafts less the time saved, as a share of the total, if each draft token is right with
    the probability `accepted`."""
    rng, cost, gained = random.Random(0), 0.0, 0
    for _ in range(steps):
        draft = drafter.propose([1, 2, 3, 1, 2], 1000, 1)
        if draft:
            right = sum(itertools.takewhile(bool, (rng.random() < accepted for _ in draft)))
            drafter.record(len(draft), right)
            cost, gained = cost + ROW_COST * len(draft), gained + right
    return (cost - gained) / (steps + gained)


@pytest.mark.parametrize("accepted", [0.0, 0.02, 0.1, 0.2])
def test_the_cost_of_rejected_drafts_is_bounded(accepted: float) -> None:
    assert relative_cost(Drafter(16), accepted) < ALLOWANCE + START_STEPS / 400


def test_accepted_drafts_save_time() -> None:
    assert relative_cost(Drafter(16), 1.0) < -0.4
    assert relative_cost(Drafter(16), 0.8) < -0.3


def test_the_cost_is_bounded_after_a_long_run_of_accepted_drafts() -> None:
    drafter = Drafter(16)
    assert relative_cost(drafter, 1.0) < 0
    assert relative_cost(drafter, 0.0) < ALLOWANCE + MAX_STEPS / 400


def test_draft_length_doubles_when_accepted_and_drops_when_rejected() -> None:
    drafter, tokens = Drafter(64), [1, 2, 3] * 9
    lengths = []
    for _ in range(5):
        lengths.append(len(drafter.propose(tokens, 1000, 1)))
        drafter.record(lengths[-1], lengths[-1])
    assert lengths == [4, 8, 16, int(MAX_STEPS / ROW_COST), int(MAX_STEPS / ROW_COST)]
    drafter.propose(tokens, 1000, 1)
    drafter.record(20, 1)
    assert len(drafter.propose(tokens, 1000, 1)) == MIN_DRAFT_TOKENS


def test_the_price_of_a_row_grows_with_the_batch_and_stays_below_one_step() -> None:
    assert row_price(1) == pytest.approx(ROW_COST)
    assert row_price(1) < row_price(2) < row_price(8) < row_price(1000) < 1


def test_sequences_to_sample_has_one_entry_per_draft_token_and_one_more() -> None:
    seq = Sequence.of(Request("r", (1, 2), SamplingParams(seed=3)))
    seq.token_ids.append(4)
    rows = sequences_to_sample(seq, (5, 6))
    assert rows[0] is seq
    assert [row.token_ids for row in rows] == [[1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 5, 6]]
    assert [row.num_generated for row in rows] == [1, 2, 3]
    assert {row.seed for row in rows} == {seq.seed}
