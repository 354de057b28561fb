"""Casts on the device: FP8 data and scales have the bits of the reference for all registered cases and more."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from tests.csrc.helpers import (
    FORMATS,
    HIGH,
    all_bf16,
    all_fp16,
    assert_bits_equal,
    assert_fp8_equal,
    hostile,
    stratified_fp32,
)

CASTS = ("quantize", "quantize_current", "quantize_rowwise", "quantize_block")
ALL = [(op, case) for op in CASTS for case in cases(op)]


def assert_same(actual, expected, equal=assert_fp8_equal):
    equal(actual[0], expected[0])
    assert actual[1].shape == expected[1].shape
    assert_bits_equal(actual[1], expected[1])


@pytest.mark.pairwise(each=("op",))
@pytest.mark.parametrize(("op", "case"), ALL, ids=[f"{op}: {case.name}" for op, case in ALL])
def test_registered_cases_have_the_bits_of_the_reference(kernels, op, case):
    assert_same(kernels.run(op, *case.make()), getattr(reference, op)(*case.make()))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("values", [all_bf16, all_fp16, stratified_fp32])
def test_every_value_is_cast_like_the_reference(kernels, dtype, values):
    """Compares all bits, including NaN; but a GPU's conversion from FP16 to FP32 loses the sign of NaN."""
    x = values()
    equal = assert_bits_equal if kernels.device == "cuda" and values is all_fp16 else assert_fp8_equal
    for scale in (torch.tensor(1.0), torch.tensor(0.37)):
        assert_same(kernels.run("quantize", x, scale, dtype), reference.quantize(x, scale, dtype), equal)


# Row lengths that each take another code path: scalar, one to four chunks per thread, rows read twice, partial blocks.
@pytest.mark.pairwise
@pytest.mark.parametrize("cols", [8, 1000, 1024, 4096, 4104, 8192, 32768, 32776])
@pytest.mark.parametrize("high", HIGH)
def test_every_length_of_row(kernels, cols, high):
    x = hostile(3, cols, high, seed=cols)
    dtype = FORMATS[cols % 3 == 0]
    assert_same(kernels.run("quantize_rowwise", x, dtype, False), reference.quantize_rowwise(x, dtype, False))
    assert_same(kernels.run("quantize_block", x, dtype, 1, True), reference.quantize_block(x, dtype, 1, True))


@pytest.mark.parametrize("shape", [(129, 264), (300, 128), (2, 1016)])
def test_square_blocks_at_the_edges(kernels, shape):
    x = hostile(*shape, torch.bfloat16)
    assert_same(
        kernels.run("quantize_block", x, FORMATS[0], 128, False), reference.quantize_block(x, FORMATS[0], 128, False)
    )


@pytest.mark.parametrize("high", HIGH)
def test_one_amax_over_many_blocks(kernels, high):
    """A tensor for many thread blocks, with the amax in the last element, in a partial chunk."""
    x = torch.randn(70000, generator=torch.Generator().manual_seed(1)).to(high)
    x[-1] = -77.0
    scale = torch.tensor(2.0)
    assert_same(kernels.run("quantize", x, scale, FORMATS[0]), reference.quantize(x, scale, FORMATS[0]))
    assert_same(kernels.run("quantize_current", x, FORMATS[1], False), reference.quantize_current(x, FORMATS[1], False))


def test_an_unaligned_input_is_cast_like_the_reference(kernels):
    x = kernels.here(torch.randn(4097, generator=torch.Generator().manual_seed(1)))[1:]
    q, amax = kernels.ops.quantize(x, kernels.here(torch.tensor(3.0)), FORMATS[0])
    assert_same((q.cpu(), amax.cpu()), reference.quantize(x.cpu(), torch.tensor(3.0), FORMATS[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["quantize_current", "quantize_rowwise"])
def test_large_tensors_have_the_bits_of_the_reference(gpu, op):
    x = torch.randn(4096, 8192, dtype=torch.bfloat16)
    assert_same(gpu.run(op, x, FORMATS[0], False), getattr(reference, op)(x, FORMATS[0], False))


def test_the_error_names_the_wrong_argument(kernels):
    with pytest.raises(RuntimeError, match="fp8serve::quantize_block: block_rows: is 7, must be 1 or 128"):
        kernels.run("quantize_block", torch.ones(2, 128), FORMATS[0], 7, False)
    with pytest.raises(RuntimeError, match="x: dtype is Double, must be Float or BFloat16 or Half"):
        kernels.run("quantize_current", torch.ones(2, 128).double(), FORMATS[0], False)
