"""The order of the data is a pure function of (seed, epoch), and every row is seen once per epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Cursor, Step, epoch_steps, iterate_steps, permutation, total_steps


def config(**values: object) -> TrainConfig:
    return TrainConfig.from_dict({"model": "m", "data": ["d"], "out": "o", "seq_len": 10, **values})


def rows(steps: list[Step]) -> list[int]:
    return [row for step in steps for microbatch in step for row in microbatch]


@given(
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=40),
    batch=st.integers(1, 5),
    accumulate=st.integers(1, 4),
    packing=st.sampled_from(["rows", "tokens"]),
)
def test_an_epoch_has_every_row_once(lengths: list[int], batch: int, accumulate: int, packing: str) -> None:
    cfg = config(batch_size=batch, accumulate=accumulate, packing=packing)
    steps = epoch_steps(lengths, cfg, 3)
    assert rows(steps) == permutation(len(lengths), 0, 3)
    assert all(1 <= len(step) <= accumulate for step in steps)
    for microbatch in (m for step in steps for m in step):
        assert len(microbatch) <= batch if packing == "rows" else sum(lengths[r] for r in microbatch) <= batch * 10


def test_token_packing_fills_a_microbatch() -> None:
    steps = epoch_steps([5] * 8, config(batch_size=2, packing="tokens"), 0)
    assert [len(m) for step in steps for m in step] == [4, 4]


def test_order_depends_on_seed_and_epoch_and_is_reproducible() -> None:
    orders = [tuple(permutation(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(permutation(50, 0, 0))


def test_the_permutation_is_the_same_on_every_machine() -> None:
    """It may change only together with the checkpoint version: a saved cursor points into it."""
    assert permutation(8, 0, 0) == [5, 0, 3, 6, 4, 7, 2, 1]


@pytest.mark.parametrize("cut", range(7))
def test_iterating_from_a_saved_cursor_yields_the_remaining_steps(cut: int) -> None:
    cfg, lengths = config(batch_size=2, epochs=2), [3, 4, 5, 6, 7]
    whole = list(iterate_steps(lengths, cfg, Cursor(), total_steps(lengths, cfg)))
    cursor = whole[cut - 1][1] if cut else Cursor()
    assert list(iterate_steps(lengths, cfg, cursor, len(whole) - cut)) == whole[cut:]
    assert [c for _, c in whole] == [Cursor(0, 1), Cursor(0, 2), Cursor(1, 0), Cursor(1, 1), Cursor(1, 2), Cursor(2, 0)]


def test_max_steps_beyond_one_epoch_starts_the_next() -> None:
    cfg = config(batch_size=2, max_steps=7)
    steps = [step for step, _ in iterate_steps([1] * 4, cfg, Cursor(), total_steps([1] * 4, cfg))]
    assert len(steps) == 7
    assert sorted(rows(steps[2:4])) == [0, 1, 2, 3]
