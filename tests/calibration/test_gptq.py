"""GPTQ rounding: it equals the formula of the paper, and reduces the error of outputs."""

import pytest
import torch
from torch import Tensor

from fp8serve.calibration.techniques.rounding import DAMPING, E4M3, round_compensated
from fp8serve.fp8.ops.arithmetic import dequantize, expand
from fp8serve.fp8.ops.casts import quantize_block, quantize_rowwise

ROWS, COLUMNS = 130, 200


def weight_and_inputs() -> tuple[Tensor, Tensor]:
    """Each input is a mixture of a few others, so that one column can compensate for another."""
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=noise)
    inputs = torch.randn(500, 20, generator=noise) @ torch.randn(20, COLUMNS, generator=noise)
    return weight, inputs + 0.1 * torch.randn(500, COLUMNS, generator=noise)


def products(inputs: Tensor) -> Tensor:
    return inputs.t() @ inputs


def round_to_nearest(weight: Tensor, scale_inv: Tensor) -> Tensor:
    return (weight / expand(scale_inv, *weight.shape)).clamp(-448, 448).to(E4M3)


def output_error(weight: Tensor, inputs: Tensor, q: Tensor, scale_inv: Tensor) -> float:
    return float((inputs @ (weight - dequantize(q, scale_inv)).t()).square().sum())


SCALES = {
    "tensor": lambda w: w.abs().max() / 448,
    "row": lambda w: quantize_rowwise(w, E4M3, False)[1],
    "block": lambda w: quantize_block(w, E4M3, 128, False)[1],
}


@pytest.mark.parametrize("granularity", SCALES)
def test_output_error_is_smaller_than_with_rounding_to_nearest(granularity: str) -> None:
    weight, inputs = weight_and_inputs()
    scale_inv = SCALES[granularity](weight)
    codes = round_compensated(weight, products(inputs), scale_inv)
    assert codes.dtype is E4M3
    error, plain = (output_error(weight, inputs, q, scale_inv) for q in (codes, round_to_nearest(weight, scale_inv)))
    assert error < 0.3 * plain


def test_uncorrelated_inputs_give_rounding_to_nearest() -> None:
    weight, _ = weight_and_inputs()
    scale_inv = SCALES["row"](weight)
    codes = round_compensated(weight, torch.diag(torch.rand(COLUMNS) + 0.5), scale_inv)
    assert torch.equal(codes.view(torch.uint8), round_to_nearest(weight, scale_inv).view(torch.uint8))


def test_columns_that_no_input_reaches_are_rounded_to_nearest() -> None:
    weight, inputs = weight_and_inputs()
    inputs[:, 7] = 0
    scale_inv = SCALES["tensor"](weight)
    codes = round_compensated(weight, products(inputs), scale_inv)
    assert torch.equal(codes[:, 7].float(), round_to_nearest(weight, scale_inv)[:, 7].float())


def test_without_inputs_weights_are_rounded_to_nearest() -> None:
    weight, _ = weight_and_inputs()
    scale_inv = SCALES["tensor"](weight)
    codes = round_compensated(weight, torch.zeros(COLUMNS, COLUMNS), scale_inv)
    assert torch.equal(codes.float(), round_to_nearest(weight, scale_inv).float())


def test_gptq_equals_optimal_brain_surgeon_column_by_column() -> None:
    """GPTQ reads the inverse of H over the remaining columns from a Cholesky factor; this test inverts H after each
    column."""
    weight, inputs = weight_and_inputs()
    hessian, scale_inv = inputs.t() @ inputs, SCALES["row"](weight)
    order = hessian.diagonal().argsort(descending=True).tolist()
    damped = hessian.double() + DAMPING * hessian.diagonal().mean() * torch.eye(COLUMNS, dtype=torch.float64)
    remaining, expected = weight.double(), torch.zeros(ROWS, COLUMNS)
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = damped[rest][:, rest].inverse()
        expected[:, column] = round_to_nearest(remaining[:, column : column + 1].float(), scale_inv)[:, 0].float()
        error = remaining[:, column] - expected[:, column] * scale_inv[:, 0]
        remaining[:, rest] -= torch.outer(error, inverse[0] / inverse[0, 0])
    codes = round_compensated(weight, products(inputs), scale_inv).float()
    assert (codes != expected).float().mean() < 0.002  # a few differences by FP32 rounding near ties
    assert torch.equal(codes[:, order[0]], expected[:, order[0]])
