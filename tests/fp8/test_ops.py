"""The ops' public wrappers, their registration, and which kernel serves them."""

import pytest
import torch

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8 import ops


def test_every_op_answers_on_cpu() -> None:
    assert set(ops.backends()) == set(ops.OPS)
    assert all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"fp8serve::{op}", "CompositeExplicitAutograd") for op in ops.OPS
    )


def test_no_kernel_is_registered_under_a_mistyped_name() -> None:
    dangling = [line for line in torch._C._dispatch_find_dangling_impls() if "fp8serve" in line]
    assert not dangling


@pytest.mark.parametrize(
    ("granularity", "shape"), [("tensor", ()), ("row", (5, 1)), ("block1x128", (5, 3)), ("block128x128", (1, 3))]
)
def test_quantize_shapes_and_round_trip(granularity: str, shape: tuple[int, ...]) -> None:
    x = torch.linspace(-7, 7, 1500).view(5, 300).bfloat16()
    q, scale_inv = fp8serve.quantize(x, granularity=granularity)
    assert q.shape == x.shape
    assert tuple(scale_inv.shape) == shape
    torch.testing.assert_close(fp8serve.dequantize(q, scale_inv), x.float(), rtol=2**-4, atol=0.02)


def test_unknown_names_are_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(RecipeError, match="no FP8 format 'e3m4'"):
        fp8serve.quantize(x, fmt="e3m4")
    with pytest.raises(RecipeError, match="no granularity 'column'"):
        fp8serve.quantize(x, granularity="column")
