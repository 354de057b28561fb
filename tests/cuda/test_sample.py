"""Sampling on the device draws the tokens of the reference, unless a random number is within 1e-15 of a border.

Several thread blocks share a row of more than 2048 tokens.
"""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference, sampling
from tests.csrc.test_sample import arguments, flat_rows, naive, on_borders, refused
from tests.cuda import emulated
from tests.cuda.conftest import kernels_on

NEUTRAL = {2: 0, 3: 1.0, 4: 0.0}  # index of the argument -> value that disables it: top_k, top_p, min_p
BELOW_1 = 1 - 2.0**-53


def assert_drawn(actual, args):
    """Checks that tokens are those of the reference for the random numbers, or for numbers 1e-15 above or below."""
    *others, uniform = args
    nearby = [(uniform + step).clamp(0, BELOW_1) for step in (0.0, -1e-15, 1e-15)]
    near = torch.stack([reference.sample(*others, at) for at in nearby])
    assert actual.dtype == torch.int64
    assert (actual == near).any(0).all(), (actual, near[0])


@pytest.mark.parametrize("case", cases("sample"), ids=lambda case: case.name)
def test_registered_cases_draw_the_tokens_of_the_reference(kernels, case):
    assert_drawn(kernels.run("sample", *case.make()), case.make())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 16, 37, 255, 257, 5000, 32000])
def test_tokens_are_those_of_the_reference(kernels, vocab, ties):
    args = arguments(vocab, 40 if vocab < 1000 else 10, vocab, ties)
    assert_drawn(kernels.run("sample", *args), args)


@pytest.mark.parametrize("active", [*NEUTRAL, None])
@pytest.mark.parametrize("vocab", [520, 1001, 8193])
def test_each_filter_without_the_others(kernels, vocab, active):
    args = arguments(vocab, 20, vocab, True)
    for place, value in NEUTRAL.items():
        if place != active:
            args[place].fill_(value)
    assert_drawn(kernels.run("sample", *args), args)


def test_the_filters_draw_the_tokens_of_the_naive_implementation(kernels):
    args = arguments(37, 100, 7, True)
    expected = [naive(*row) for row in zip(*(column.tolist() for column in args), strict=True)]
    assert kernels.run("sample", *args).tolist() == expected


@pytest.mark.parametrize("vocab", [300, 9001])
@pytest.mark.parametrize("uniform", [0.0, 1e-300, 1e-12, 1 - 1e-12, BELOW_1])
def test_random_numbers_near_0_and_1_draw_a_token_that_was_kept(kernels, uniform, vocab):
    *filters, _ = arguments(vocab, 20, 3, False)
    args = *filters, torch.full((20,), uniform, dtype=torch.float64)
    tokens = kernels.run("sample", *args)
    assert_drawn(tokens, args)
    probs = torch.softmax(args[0].double() / args[1][:, None], -1)
    probabilities = sampling.filtered(probs, *args[2:5])
    assert (probabilities.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("top_k", [0, 10])
def test_equal_logits_draw_the_tokens_of_their_random_numbers(kernels, top_k):
    args, expected = flat_rows(top_k)
    assert kernels.run("sample", *args).tolist() == expected


def test_a_random_number_on_a_border_draws_the_token_above_it(kernels):
    assert kernels.run("sample", *on_borders()).tolist() == list(range(64))


def test_top_p_just_below_1_does_not_exceed_top_k(kernels):
    """Ten likely tokens, then equal ones, of which top_k keeps some. Rounding must not change the last kept token."""
    logits, one = torch.zeros(60, 100), torch.ones(60, dtype=torch.float64)
    logits[:, :10] = 0.1 + torch.arange(60)[:, None] / 60
    top_k = 11 + torch.arange(60)
    tokens = kernels.run("sample", logits, one, top_k, BELOW_1 * one, 0 * one, BELOW_1 * one)
    assert torch.equal(tokens, top_k - 1)


@pytest.mark.parametrize("vocab", [700, 9001])
@pytest.mark.parametrize("forbidden", [-torch.inf, -3.4e38, -1e4])
def test_forbidden_tokens_are_not_drawn(kernels, forbidden, vocab):
    """Most tokens of each row are forbidden. 0.0 and -0.0 are equal, so the smaller id comes first."""
    args = arguments(vocab, 12, 5, True)
    generator = torch.Generator().manual_seed(6)
    args[0][torch.rand(args[0].shape, generator=generator) < 0.7] = forbidden
    args[0][:, ::9], args[0][:, 4::9] = 0.0, -0.0
    args[0][:, vocab // 2 :] = forbidden  # if several blocks share a row, all tokens of some blocks
    assert_drawn(kernels.run("sample", *args), args)


@pytest.mark.parametrize("vocab", [504, 8200])
def test_tokens_do_not_depend_on_other_rows_or_on_the_address(kernels, vocab):
    """Compares single rows, another order of rows, and logits at an unaligned address."""
    args = arguments(vocab, 12, 2, True)
    tokens = kernels.run("sample", *args)
    alone = [kernels.run("sample", *(column[i : i + 1] for column in args)) for i in range(12)]
    assert torch.equal(torch.cat(alone), tokens)
    assert torch.equal(kernels.run("sample", *(column.flip(0) for column in args)), tokens.flip(0))
    moved = torch.cat([torch.zeros(1), args[0].flatten()]).to(kernels.device)[1:].view_as(args[0])
    assert torch.equal(kernels.ops.sample(moved, *kernels.here(args[1:])).cpu(), tokens)


@pytest.mark.parametrize("vocab", [300, 8200])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_rows_draw_a_valid_token(kernels, broken, vocab):
    """The engine stops their sequences, but only after the step."""
    args = arguments(vocab, 8, 1, False)
    args[0][::2] = broken
    args[0][::4, 7] = 1.0
    tokens = kernels.run("sample", *args)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    finite = [column[1::2] for column in args]
    assert_drawn(tokens[1::2], finite)


@pytest.mark.parametrize("likely", [300, 6000])
def test_a_histogram_bin_with_more_tokens_than_the_list_holds(kernels, likely):
    """One logit far below the others puts all others into one bin, with different or with mostly equal values."""
    args = arguments(9001, 12, 4, True)
    args[0].mul_(0.01)
    args[0][:, likely:] = 0.25
    args[0][:, 5] = -1000.0
    args[1].clamp_(min=0.7)
    args[3].mul_(0.997)  # top_p must not be exactly the share of a number of equal tokens
    args[2].copy_(torch.tensor([0, 10, 4000, 8900] * 3))
    args[3][:4] = 1.0
    assert_drawn(kernels.run("sample", *args), args)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("rows", "vocab", "parts"), [(1, 2048, 1), (1, 4000, 2), (1, 128256, 8), (2, 32000, 4), (12, 32000, 1)]
)
def test_several_blocks_share_a_long_row(rows, vocab, parts):
    """Up to two blocks for each of the four multiprocessors share the rows; six launches, of which the last draws."""
    kernels_on("emulated")
    gpu = emulated.emulator()
    args = arguments(vocab, rows, 1, False)
    gpu.blocks()
    assert_drawn(gpu.ops.sample(*args), args)
    assert gpu.blocks() == 6 * [rows * parts]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [5000, 32000])
def test_a_captured_graph_reads_new_arguments(gpu, vocab):
    """Kernels read filters and random numbers on the device, so a replay uses their current values."""
    before, after = (gpu.here(arguments(vocab, 10, seed, True)) for seed in (1, 2))
    expected = [gpu.ops.sample(*args).cpu() for args in (before, after)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = gpu.ops.sample(*before)
    graph.replay()
    assert torch.equal(tokens.cpu(), expected[0])
    for old, new in zip(before, after, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(tokens.cpu(), expected[1])


def test_no_rows(kernels):
    args = [column[:0] for column in arguments(8, 2, 0, False)]
    assert kernels.run("sample", *args).shape == (0,)


def test_wrong_arguments_are_refused(kernels):
    for args, message in refused():
        with pytest.raises(RuntimeError, match=message):
            kernels.run("sample", *args)


@pytest.mark.parametrize("case", cases("greedy_tokens"), ids=lambda case: case.name)
def test_greedy_tokens_are_the_first_of_the_largest(kernels, case):
    assert torch.equal(kernels.run("greedy_tokens", *case.make()), reference.greedy_tokens(*case.make()))
