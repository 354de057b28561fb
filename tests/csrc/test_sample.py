"""Sampling draws the tokens of the reference, and those of a naive implementation of the filters."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8serve.fp8.ops import LEVELS, Case, cases, reference, sampling

OPS = torch.ops.fp8serve


def arguments(vocab: int, rows: int, seed: int, ties: bool) -> tuple[Any, ...]:
    """Returns arguments of `sample`: each row has its own filters; logits range from nearly equal to very different."""
    make = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (rows,), generator=make)]

    logits = torch.randn(rows, vocab, generator=make) * pick(0.01, 1.0, 4.0, 30.0)[:, None].float()
    logits = logits.bfloat16().float() if ties else logits
    top_k = pick(0, 0, 1, 2, 10, vocab - 1, vocab, 2 * vocab).long().clamp(min=0)
    uniform = torch.rand(rows, dtype=torch.float64, generator=make)
    uniform[0], uniform[-1] = 0.0, 1 - 2.0**-53
    return logits, pick(0.01, 0.7, 1.0, 5.0), top_k, pick(1.0, 1e-9, 0.3, 0.95), pick(0.0, 0.001, 0.3, 1.0), uniform


def flat_rows(top_k: int) -> tuple[tuple[Any, ...], list[int]]:
    """Returns arguments with 1000 equal logits, in one row all but one -inf, and the expected tokens."""
    one = torch.ones(3, dtype=torch.float64)
    flat = torch.zeros(3, 1000)
    flat[1], flat[1, 777] = -torch.inf, 5.0
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    return (flat, one, top_k * one.long(), one, 0 * one, uniform), [0, 777, (top_k or 1000) - 1]


def on_borders() -> tuple[Any, ...]:
    """Returns arguments with 64 equal probabilities, whose sums are exact. Random number i / 64 is the lower border of
    token i and must draw it."""
    one = torch.ones(64, dtype=torch.float64)
    return torch.zeros(64, 64), one, 0 * one.long(), one, 0 * one, torch.arange(64, dtype=torch.float64) / 64


def refused() -> Iterator[tuple[list[Any], str]]:
    """Yields wrong arguments and the expected error message."""
    good = list(arguments(5, 3, 0, False))
    for index, change, message in (
        (0, torch.zeros(3, 5).double(), "logits: dtype is Double"),
        (0, torch.zeros(3, 0), "logits: have no tokens"),
        (2, torch.zeros(3), "top_k: dtype is Float, must be Long"),
        (5, torch.zeros(2).double(), "uniform: dim 0 is 2, must be rows = 3"),
    ):
        yield [*good[:index], change, *good[index + 1 :]], message


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("sample"), ids=lambda case: case.name)
def test_registered_cases_draw_the_tokens_of_the_reference(level: str, case: Case) -> None:
    assert torch.equal(OPS.sample(*case.make()), reference.sample(*case.make()))


@pytest.mark.pairwise
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 16, 37, 255, 257, 5000])
def test_tokens_are_those_of_the_reference(level: str, vocab: int, ties: bool) -> None:
    args = arguments(vocab, 400 if vocab < 1000 else 60, vocab, ties)
    assert torch.equal(OPS.sample(*args), reference.sample(*args))


def naive(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Sorts, filters and draws for one row in plain Python."""
    wide = torch.tensor(logits, dtype=torch.float64)
    probs = torch.softmax(wide / temperature, 0).tolist()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[: top_k or None]
    total, before, candidates = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if candidates and (before >= top_p * total or probs[i] < min_p * probs[order[0]]):
            break
        candidates.append(i)
        before += probs[i]
    at = uniform * sum(probs[i] for i in candidates)
    for i in sorted(candidates):
        at -= probs[i]
        if at < 0:
            return i
    return max(i for i in candidates if probs[i] > 0)


@pytest.mark.parametrize("case", cases("sample"), ids=lambda case: case.name)
def test_filtering_every_row_draws_the_same_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the reference filters all rows and selects afterwards, to avoid a synchronization."""
    expected = reference.sample(*case.make())
    monkeypatch.setattr(sampling, "_on_cpu", lambda x: False)
    assert torch.equal(reference.sample(*case.make()), expected)


@pytest.mark.parametrize("kernel", [OPS.sample, reference.sample])
def test_the_filters_draw_the_tokens_of_the_naive_implementation(kernel: Any) -> None:
    args = arguments(37, 500, 7, True)
    expected = [naive(*row) for row in zip(*(column.tolist() for column in args), strict=True)]
    assert kernel(*args).tolist() == expected


def test_every_level_draws_the_same() -> None:
    args, draws = arguments(3001, 300, 1, False), []
    for cap in LEVELS:
        OPS.cpu_isa(cap)
        draws.append(OPS.sample(*args))
    OPS.cpu_isa("best")
    assert all(torch.equal(tokens, draws[0]) for tokens in draws)


def test_tokens_do_not_depend_on_other_rows_or_threads(threads: None) -> None:
    args, draws = arguments(501, 40, 2, True), []
    for count in (1, 3):
        torch.set_num_threads(count)
        draws.append(OPS.sample(*args))
    draws.append(torch.cat([OPS.sample(*(column[i : i + 1] for column in args)) for i in range(40)]))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("top_k", [0, 10])
def test_equal_logits_draw_the_tokens_of_their_random_numbers(level: str, top_k: int) -> None:
    args, expected = flat_rows(top_k)
    assert OPS.sample(*args).tolist() == expected


def test_a_random_number_on_a_border_draws_the_token_above_it(level: str) -> None:
    assert OPS.sample(*on_borders()).tolist() == list(range(64))


def test_top_p_of_1_keeps_tokens_too_small_to_change_the_sum() -> None:
    """Another filter is on, too; a random number of 0 draws the first token."""
    one = torch.ones(1, dtype=torch.float64)
    args = torch.tensor([[0.0, 50.0, 0.0, -1.0]]), one, 3 * one.long(), one, 0 * one, 0 * one
    for kernel in (OPS.sample, reference.sample):
        assert kernel(*args).tolist() == [0]


def test_wrong_arguments_are_refused() -> None:
    for args, message in refused():
        with pytest.raises(RuntimeError, match=message):
            OPS.sample(*args)
