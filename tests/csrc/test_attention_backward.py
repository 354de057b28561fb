"""Gradients of attention and of thin weights: independent of neighbours and threads, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import reference
from tests.csrc.helpers import assert_bits_equal

backward = torch.ops.fp8serve.attention_backward
LENGTHS = [70, 1, 131, 64]
SINKS = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5, 2.0])
OPTIONS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "window": (50,),
    "softcap": (None, 2.0),
    "sinks": (None, None, SINKS),
}


def inputs(tokens: int = sum(LENGTHS), dim: int = 40) -> list[Tensor]:
    """The upstream gradient, q, k and v: six heads over two."""
    noise = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, dim, generator=noise).bfloat16() for heads in (6, 6, 2, 2)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_sequence_has_the_gradients_that_it_has_alone(options: tuple[Any, ...]) -> None:
    together, given = backward(*inputs(), LENGTHS, 0.3, *options), inputs()
    parts = zip(*(torch.split(t, LENGTHS) for t in given), strict=True)
    alone = [backward(*part, [len(part[0])], 0.3, *options) for part in parts]
    for found, *single in zip(together[:3], *(one[:3] for one in alone), strict=True):
        assert_bits_equal(found, torch.cat(single))
    torch.testing.assert_close(together[3], torch.stack([one[3] for one in alone]).sum(0))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_threads_change_no_bit(threads: None, options: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    expected = backward(*inputs(), LENGTHS, 0.3, *options)
    torch.set_num_threads(3)
    for found, one in zip(backward(*inputs(), LENGTHS, 0.3, *options), expected, strict=True):
        assert_bits_equal(found, one)


@pytest.mark.parametrize("dim", [1, 64, 130])
def test_a_long_sequence_has_the_reference_gradients(dim: int) -> None:
    given = inputs(700, dim)
    for found, exact in zip(
        backward(*given, [700], 0.1), reference.attention_backward(*given, [700], 0.1), strict=True
    ):
        assert (found.double() - exact.double()).norm() <= 0.005 * exact.double().norm()


def test_a_view_that_is_not_contiguous_is_read_as_it_is() -> None:
    given = inputs()
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in given]
    for found, one in zip(backward(*turned, LENGTHS, 0.3), backward(*given, LENGTHS, 0.3), strict=True):
        assert_bits_equal(found, one)


def test_nan_is_not_hidden() -> None:
    given = inputs()
    given[0][3, 1, 0] = torch.nan
    d_q, *_ = backward(*given, LENGTHS, 0.3)
    assert d_q[3, 1].isnan().any()
    assert not d_q[sum(LENGTHS[:2]) :].isnan().any()  # of other sequences


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lengths": [70, 1]}, "lengths: add up to 71, must be T = 266"),
        ({"lengths": [300, -34]}, "lengths: holds -34, must not be negative"),
        (dict.fromkeys("kv", torch.zeros(266, 4, 40).bfloat16()), "q: has 6 heads, must be a multiple of the 4 of k"),
        ({"v": torch.zeros(266, 2, 40)}, "v: dtype is Float, must be BFloat16"),
        ({"grad": torch.zeros(266, 6, 8).bfloat16()}, "grad: dim 2 is 8, must be head_dim = 40"),
        ({"window": 0}, "window: is 0, must be positive"),
        ({"softcap": -1.0}, "softcap: is -1, must be positive"),
        ({"sinks": torch.zeros(2)}, "sinks: dim 0 is 2, must be heads = 6"),
    ],
)
def test_wrong_arguments_get_a_sentence(change: dict[str, Any], said: str) -> None:
    given = dict(zip(("grad", "q", "k", "v"), inputs(), strict=True))
    given |= {"lengths": LENGTHS, "softmax_scale": 0.3, "window": None, "softcap": None, "sinks": None} | change
    with pytest.raises(RuntimeError, match=said):
        backward(*given.values())


def test_the_sum_over_tokens_of_a_weights_gradient_needs_as_many_of_both() -> None:
    with pytest.raises(RuntimeError, match="wgrad: x: dim 0 is 4, must be T = 5"):
        torch.ops.fp8serve.wgrad(torch.zeros(5, 8).bfloat16(), torch.zeros(4, 9).bfloat16())
