"""Casts and scales have the bits of the reference on every instruction set."""

import pytest
import torch

from fp8serve.fp8.ops import arithmetic, reference
from tests.csrc.helpers import (
    FLOAT_MAX,
    FORMATS,
    HIGH,
    all_bf16,
    all_fp16,
    assert_bits_equal,
    assert_fp8_equal,
    hostile,
    stratified_fp32,
)

OPS = torch.ops.fp8serve
SHAPES = [(1, 1), (1, 128), (3, 127), (130, 129), (5, 300), (129, 64)]
EMPTY = [(0, 5), (5, 0), (0, 0)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("values", [all_bf16, all_fp16, stratified_fp32])
@pytest.mark.parametrize("scale", [1.0, 0.37, 448.0])
def test_every_value_casts_like_the_reference(level, values, dtype, scale):
    x, factor = values(), torch.tensor(scale)
    q, amax = OPS.quantize(x, factor, dtype)
    expected, expected_amax = reference.quantize(x, factor, dtype)
    assert_fp8_equal(q, expected)
    assert_bits_equal(amax, expected_amax)


@pytest.mark.parametrize("dtype", FORMATS)
def test_edge_cases_of_the_cast(level, dtype):
    limit = arithmetic.FP8_MAX[dtype]
    x = torch.tensor([limit, limit * 1.06, FLOAT_MAX, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45])
    q, amax = OPS.quantize(x, torch.tensor(1.0), dtype)
    expected = torch.tensor([limit, limit, limit, limit, -limit, torch.nan, 0.0, -0.0, 0.0])
    assert_bits_equal(q.float(), expected)
    assert amax == torch.inf


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_every_granularity_with_special_values(level, shape, power_2, high, dtype):
    x = hostile(*shape, high)
    cases = [
        (OPS.quantize_current, reference.quantize_current, (dtype, power_2)),
        (OPS.quantize_rowwise, reference.quantize_rowwise, (dtype, power_2)),
        (OPS.quantize_block, reference.quantize_block, (dtype, 1, power_2)),
        (OPS.quantize_block, reference.quantize_block, (dtype, 128, power_2)),
    ]
    for op, oracle, args in cases:
        q, scale_inv = op(x, *args)
        expected, expected_scale = oracle(x, *args)
        assert_fp8_equal(q, expected)
        assert_bits_equal(scale_inv, expected_scale)


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1.3e-36, 1.0, FLOAT_MAX, torch.inf, torch.nan])
@pytest.mark.parametrize("power_2", [False, True])
def test_scale_of_every_kind_of_amax(level, amax, power_2):
    x = torch.tensor([[amax, 0.0]])
    actual = OPS.quantize_rowwise(x, torch.float8_e4m3fn, power_2)
    expected = reference.quantize_rowwise(x, torch.float8_e4m3fn, power_2)
    assert_fp8_equal(actual[0], expected[0])
    assert_bits_equal(actual[1], expected[1])


def test_several_tasks_share_a_large_tensor(level):
    x = hostile(600, 700, torch.bfloat16)
    for actual, expected in zip(
        OPS.quantize_current(x.nan_to_num(0, 9, -9), torch.float8_e4m3fn, False),
        reference.quantize_current(x.nan_to_num(0, 9, -9), torch.float8_e4m3fn, False),
        strict=True,
    ):
        assert torch.equal(actual.float(), expected.float())
    assert_bits_equal(OPS.quantize(x, torch.tensor(2.0), torch.float8_e4m3fn)[1], arithmetic.amax(x))


def test_non_contiguous_input(level):
    x = hostile(96, 140, torch.float32)
    for view in (x.t(), x[::2, 1::3], x[:, 5].unsqueeze(0).expand(4, -1)):
        actual = OPS.quantize_rowwise(view, torch.float8_e4m3fn, False)
        expected = reference.quantize_rowwise(view, torch.float8_e4m3fn, False)
        assert_fp8_equal(actual[0], expected[0])
        assert_bits_equal(actual[1], expected[1])


def test_any_number_of_dimensions(level):
    x = hostile(6, 20, torch.float32).view(2, 3, 4, 5)
    q, _ = OPS.quantize(x, torch.tensor(1.0), torch.float8_e5m2)
    assert_fp8_equal(q, reference.quantize(x, torch.tensor(1.0), torch.float8_e5m2)[0])
    scalar = OPS.quantize_current(torch.tensor(3.0), torch.float8_e4m3fn, False)
    assert scalar[0].shape == ()
    assert scalar[0].float() * scalar[1] == 3.0


def test_threads_do_not_change_the_result(threads):
    x = hostile(300, 500, torch.bfloat16)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(OPS.quantize_block(x, torch.float8_e4m3fn, 128, False))
    for q, scale_inv in results[1:]:
        assert_fp8_equal(q, results[0][0])
        assert_bits_equal(scale_inv, results[0][1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: OPS.quantize(x.int(), x[0, 0], torch.float8_e4m3fn), "x: dtype is Int, must be Float or BFloat16"),
        (lambda x: OPS.quantize(x, x[0], torch.float8_e4m3fn), "scale: has 1 dimensions, must have 0"),
        (lambda x: OPS.quantize(x, x[0, 0], torch.float16), "dtype: is Half, must be Float8_e4m3fn or Float8_e5m2"),
        (lambda x: OPS.quantize_rowwise(x[0], torch.float8_e4m3fn, False), "x: has 1 dimensions, must have 2"),
        (lambda x: OPS.quantize_block(x, torch.float8_e4m3fn, 2, False), "block_rows: is 2, must be 1 or 128"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(4, 4))
