"""Attention gradients do not depend on other sequences or threads; wrong arguments of them and of wgrad are refused."""

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
    """Returns the gradient of the output, q, k and v, with six query heads and two KV heads."""
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, dim, generator=generator).bfloat16() for heads in (6, 6, 2, 2)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_a_sequence_do_not_depend_on_the_batch(options: tuple[Any, ...]) -> None:
    batched, arguments = backward(*inputs(), LENGTHS, 0.3, *options), inputs()
    parts = zip(*(torch.split(t, LENGTHS) for t in arguments), strict=True)
    alone = [backward(*part, [len(part[0])], 0.3, *options) for part in parts]
    for gradient, *single in zip(batched[:3], *(one[:3] for one in alone), strict=True):
        assert_bits_equal(gradient, torch.cat(single))
    torch.testing.assert_close(batched[3], torch.stack([one[3] for one in alone]).sum(0))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_threads_change_no_bit(threads: None, options: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    expected = backward(*inputs(), LENGTHS, 0.3, *options)
    torch.set_num_threads(3)
    for gradient, one in zip(backward(*inputs(), LENGTHS, 0.3, *options), expected, strict=True):
        assert_bits_equal(gradient, one)


@pytest.mark.parametrize("dim", [1, 64, 130])
def test_gradients_of_a_long_sequence_are_those_of_the_reference(dim: int) -> None:
    arguments = inputs(700, dim)
    for gradient, exact in zip(
        backward(*arguments, [700], 0.1), reference.attention_backward(*arguments, [700], 0.1), strict=True
    ):
        assert (gradient.double() - exact.double()).norm() <= 0.005 * exact.double().norm()


def test_non_contiguous_arguments_give_the_same_bits() -> None:
    arguments = inputs()
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in arguments]
    for gradient, one in zip(backward(*transposed, LENGTHS, 0.3), backward(*arguments, LENGTHS, 0.3), strict=True):
        assert_bits_equal(gradient, one)


def test_nan_reaches_the_gradients_of_its_own_sequence_only() -> None:
    arguments = inputs()
    arguments[0][3, 1, 0] = torch.nan
    d_q, *_ = backward(*arguments, LENGTHS, 0.3)
    assert d_q[3, 1].isnan().any()
    assert not d_q[sum(LENGTHS[:2]) :].isnan().any()  # other sequences


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = dict(zip(("grad", "q", "k", "v"), inputs(), strict=True))
    arguments |= {"lengths": LENGTHS, "softmax_scale": 0.3, "window": None, "softcap": None, "sinks": None} | change
    with pytest.raises(RuntimeError, match=message):
        backward(*arguments.values())


def test_wgrad_requires_equal_numbers_of_tokens() -> None:
    with pytest.raises(RuntimeError, match="wgrad: x: dim 0 is 4, must be T = 5"):
        torch.ops.fp8serve.wgrad(torch.zeros(5, 8).bfloat16(), torch.zeros(4, 9).bfloat16())
