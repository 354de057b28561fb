"""rms_norm, silu_mul and their gradients on the device equal the reference up to roundings; rotary has its bits."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from tests.csrc.helpers import FORMATS, HIGH, assert_bits_equal, assert_fp8_equal, hostile, tame
from tests.csrc.test_fused import assert_fp8_close
from tests.cuda.test_fused import assert_last_bit

REFERENCE = {
    "rms_norm": reference.rms_norm,
    "rms_norm_backward": reference.rms_norm_backward,
    "silu_mul": reference.silu_mul,
    "silu_mul_backward": reference.silu_mul_backward,
}


def assert_near(actual, expected, steps=2):
    """Allows a few roundings of the element, or of the largest element, since sums may cancel."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    eps = steps * torch.finfo(expected.dtype).eps
    size = float(expected.abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=eps, atol=eps * size)


@pytest.mark.parametrize("op", REFERENCE)
def test_registered_cases_are_close_to_the_reference(kernels, op):
    for case in cases(op):
        actual, expected = kernels.run(op, *case.make()), REFERENCE[op](*case.make())
        pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
        for one, expected_tensor in pairs:
            assert_near(one, expected_tensor, steps=8)


@pytest.mark.parametrize("case", cases("rotary"), ids=lambda case: case.name)
def test_rotary_has_the_bits_of_the_reference(kernels, case):
    assert_bits_equal(kernels.run("rotary", *case.make()), reference.rotary(*case.make()))


def test_rotary_of_a_slice_of_a_projection(kernels):
    qkv, angle = hostile(5, 128, torch.bfloat16).view(5, 8, 16), tame(5, 16, seed=2)
    rest = angle.cos().bfloat16().unsqueeze(1), angle.sin().bfloat16().unsqueeze(1)
    actual = kernels.ops.rotary(kernels.here(qkv)[:, 4:6], *kernels.here(rest))
    assert_bits_equal(actual.cpu(), reference.rotary(qkv[:, 4:6], *rest))


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("shape", [(3, 520), (2, 2100), (600, 24)])
def test_norms_of_every_length(kernels, shape, dtype):
    """Rows for one warp, rows longer than a block has threads, and more rows than the backward kernel has chunks."""
    x, weight, grad = tame(*shape, dtype), tame(1, shape[1], dtype, 1)[0], tame(*shape, dtype, 2)
    assert_near(kernels.run("rms_norm", x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    wide = [t.double() for t in (grad, x, weight)]
    actual = kernels.run("rms_norm_backward", grad, x, weight, 1e-5)
    for one, exact in zip(actual, exact_gradients(*wide, dtype), strict=True):
        assert_near(one, exact.to(dtype), steps=8)


def exact_gradients(grad, x, weight, dtype):
    """Returns the gradients in FP64, except that the normed input is rounded to `dtype`."""
    factor = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed, upstream = x * factor, grad * weight
    d_x = factor * (upstream - normed * (upstream * normed).mean(-1, keepdim=True))
    return d_x, (grad * normed.to(dtype).double()).sum(0)


@pytest.mark.parametrize("width", [64, 300, 520])
def test_fused_casts_have_the_bits_of_the_op_and_a_cast(kernels, width):
    x, up, weight = (tame(n, width, torch.bfloat16, seed) for seed, n in enumerate((5, 5, 1)))
    scale = torch.tensor(3.0)
    pairs = [
        (kernels.run("rms_norm_quantize", x, weight[0], 1e-5, scale, FORMATS[0]),
         kernels.run("rms_norm", x, weight[0], 1e-5)),
        (kernels.run("silu_mul_quantize", x, up, scale, FORMATS[0]), kernels.run("silu_mul", x, up)),
    ]  # fmt: skip
    for (q, amax), y in pairs:
        expected = reference.quantize(y, scale, FORMATS[0])
        assert_fp8_equal(q, expected[0])
        assert torch.equal(amax, expected[1])


def test_gates_at_the_limits(kernels):
    gate = torch.tensor([[-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -89.0, -88.0, -100.0, 88.0, 1e30, -1e30]])
    up = torch.ones_like(gate)
    torch.testing.assert_close(kernels.run("silu_mul", gate, up), reference.silu_mul(gate, up), equal_nan=True)


def test_slices_of_a_fused_projection(kernels):
    gate, up = hostile(6, 80, torch.bfloat16, seed=1).nan_to_num(0.0, 1e3, -1e3).chunk(2, 1)
    grad = tame(6, 40, torch.bfloat16)
    actual = kernels.run("silu_mul_backward", grad, gate, up)
    for one, expected in zip(actual, reference.silu_mul_backward(grad, gate, up), strict=True):
        assert_near(one, expected)


def test_layer_norm_quantize(kernels):
    for case in cases("layer_norm_quantize"):
        assert_last_bit(kernels.run("layer_norm_quantize", *case.make()), reference.layer_norm_quantize(*case.make()))


def test_a_layer_norm_of_numbers_far_from_zero(kernels):
    """The kernel squares deviations from the mean, not values, so a mean of 1000 costs no precision."""
    x = 1000 + tame(4, 520, seed=3)
    args = torch.linspace(0.5, 2, 520), None, 1e-5, torch.tensor(30.0), FORMATS[0]
    actual, expected = kernels.run("layer_norm_quantize", x, *args), reference.layer_norm_quantize(x, *args)
    assert_fp8_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=0)
