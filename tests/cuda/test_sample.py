"""The draw of a token on the device: the reference's, but where the random number is within 1e-15 of a border.

Rows of more than 2048 tokens are shared by several blocks.
"""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference, sampling
from tests.csrc.test_sample import arguments, flat_rows, naive, on_borders, refused
from tests.cuda import emulated
from tests.cuda.conftest import kernels_on

NEUTRAL = {2: 0, 3: 1.0, 4: 0.0}  # top_k, top_p, min_p, by their place among the arguments
BELOW_1 = 1 - 2.0**-53


def assert_drawn(found, args):
    """The tokens of the reference, at the random numbers or 1e-15 beside them."""
    *others, uniform = args
    beside = [(uniform + step).clamp(0, BELOW_1) for step in (0.0, -1e-15, 1e-15)]
    near = torch.stack([reference.sample(*others, at) for at in beside])
    assert found.dtype == torch.int64
    assert (found == near).any(0).all(), (found, near[0])


@pytest.mark.parametrize("case", cases("sample"), ids=lambda case: case.name)
def test_cases(kernels, case):
    assert_drawn(kernels.run("sample", *case.make()), case.make())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 16, 37, 255, 257, 5000, 32000])
def test_tokens_are_the_references(kernels, vocab, ties):
    args = arguments(vocab, 40 if vocab < 1000 else 10, vocab, ties)
    assert_drawn(kernels.run("sample", *args), args)


@pytest.mark.parametrize("alone", [*NEUTRAL, None])
@pytest.mark.parametrize("vocab", [520, 1001, 8193])
def test_each_filter_alone(kernels, vocab, alone):
    args = arguments(vocab, 20, vocab, True)
    for place, value in NEUTRAL.items():
        if place != alone:
            args[place].fill_(value)
    assert_drawn(kernels.run("sample", *args), args)


def test_the_filters_mean_what_they_say(kernels):
    args = arguments(37, 100, 7, True)
    expected = [naive(*row) for row in zip(*(column.tolist() for column in args), strict=True)]
    assert kernels.run("sample", *args).tolist() == expected


@pytest.mark.parametrize("vocab", [300, 9001])
@pytest.mark.parametrize("uniform", [0.0, 1e-300, 1e-12, 1 - 1e-12, BELOW_1])
def test_random_numbers_at_both_ends(kernels, uniform, vocab):
    """Also there the token is one that was kept."""
    *filters, _ = arguments(vocab, 20, 3, False)
    args = *filters, torch.full((20,), uniform, dtype=torch.float64)
    found = kernels.run("sample", *args)
    assert_drawn(found, args)
    probs = torch.softmax(args[0].double() / args[1][:, None], -1)
    kept = sampling.filtered(probs, *args[2:5])
    assert (kept.gather(1, found[:, None]) > 0).all()


@pytest.mark.parametrize("top_k", [0, 10])
def test_a_flat_row_and_a_row_of_one_token(kernels, top_k):
    args, expected = flat_rows(top_k)
    assert kernels.run("sample", *args).tolist() == expected


def test_a_random_number_on_a_border_draws_the_token_behind_it(kernels):
    assert kernels.run("sample", *on_borders()).tolist() == list(range(64))


def test_top_p_below_1_by_a_rounding_does_not_leave_top_k(kernels):
    """Ten likely tokens, then equal ones, which top_k cuts: a last place that rounding must not move."""
    logits, one = torch.zeros(60, 100), torch.ones(60, dtype=torch.float64)
    logits[:, :10] = 0.1 + torch.arange(60)[:, None] / 60
    top_k = 11 + torch.arange(60)
    found = kernels.run("sample", logits, one, top_k, BELOW_1 * one, 0 * one, BELOW_1 * one)
    assert torch.equal(found, top_k - 1)


@pytest.mark.parametrize("vocab", [700, 9001])
@pytest.mark.parametrize("never", [-torch.inf, -3.4e38, -1e4])
def test_forbidden_tokens(kernels, never, vocab):
    """Most of a row, however it is written; zeros of both signs are equal, so that the smaller id stays."""
    args = arguments(vocab, 12, 5, True)
    noise = torch.Generator().manual_seed(6)
    args[0][torch.rand(args[0].shape, generator=noise) < 0.7] = never
    args[0][:, ::9], args[0][:, 4::9] = 0.0, -0.0
    args[0][:, vocab // 2 :] = never  # whole parts, where a row has such
    assert_drawn(kernels.run("sample", *args), args)


@pytest.mark.parametrize("vocab", [504, 8200])
def test_rows_do_not_matter_to_each_other(kernels, vocab):
    """Bit for bit: a row alone, in another order, in memory that begins elsewhere."""
    args = arguments(vocab, 12, 2, True)
    found = kernels.run("sample", *args)
    alone = [kernels.run("sample", *(column[i : i + 1] for column in args)) for i in range(12)]
    assert torch.equal(torch.cat(alone), found)
    assert torch.equal(kernels.run("sample", *(column.flip(0) for column in args)), found.flip(0))
    moved = torch.cat([torch.zeros(1), args[0].flatten()]).to(kernels.device)[1:].view_as(args[0])
    assert torch.equal(kernels.ops.sample(moved, *kernels.here(args[1:])).cpu(), found)


@pytest.mark.parametrize("vocab", [300, 8200])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_numbers_end_on_some_token(kernels, broken, vocab):
    """The engine gives their sequences up, but not before the step is over."""
    args = arguments(vocab, 8, 1, False)
    args[0][::2] = broken
    args[0][::4, 7] = 1.0
    found = kernels.run("sample", *args)
    assert ((found >= 0) & (found < vocab)).all()
    whole = [column[1::2] for column in args]
    assert_drawn(found[1::2], whole)


@pytest.mark.parametrize("likely", [300, 6000])
def test_a_bin_with_more_tokens_than_are_listed(kernels, likely):
    """One logit far below the others leaves these in one bin: with different values, or all but a few equal."""
    args = arguments(9001, 12, 4, True)
    args[0].mul_(0.01)
    args[0][:, likely:] = 0.25
    args[0][:, 5] = -1000.0
    args[1].clamp_(min=0.7)
    args[3].mul_(0.997)  # no share of some equal tokens is a whole number of them
    args[2].copy_(torch.tensor([0, 10, 4000, 8900] * 3))
    args[3][:4] = 1.0
    assert_drawn(kernels.run("sample", *args), args)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("rows", "vocab", "parts"), [(1, 2048, 1), (1, 4000, 2), (1, 128256, 8), (2, 32000, 4), (12, 32000, 1)]
)
def test_long_rows_are_shared(rows, vocab, parts):
    """By two blocks for each of the four multiprocessors: six launches, of which the last draws."""
    kernels_on("emulated")
    gpu = emulated.emulator()
    args = arguments(vocab, rows, 1, False)
    gpu.blocks()
    assert_drawn(gpu.ops.sample(*args), args)
    assert gpu.blocks() == 6 * [rows * parts]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [5000, 32000])
def test_in_a_captured_graph(gpu, vocab):
    """Filters and random numbers are read on the device: a replay draws by those that are there then."""
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


def test_errors_name_the_argument(kernels):
    for args, message in refused():
        with pytest.raises(RuntimeError, match=message):
            kernels.run("sample", *args)


@pytest.mark.parametrize("case", cases("greedy_tokens"), ids=lambda case: case.name)
def test_greedy_tokens_are_the_first_of_the_largest(kernels, case):
    assert torch.equal(kernels.run("greedy_tokens", *case.make()), reference.greedy_tokens(*case.make()))
