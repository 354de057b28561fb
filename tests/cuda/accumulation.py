"""How far a product may be from the exact one. Every test of products judges by this."""

import torch

from tests.csrc.test_gemm import exact

SHARP = 2.0**-12  # of the magnitudes behind an element, for FP32 sums: on a CPU and on the emulated GPU
MOST = 2.0**-8  # for tensor cores that keep 13 fraction bits, as Hopper's (tests/cuda/hopper.py); see agreement.py
MEAN = 2.0**-13  # on average over the elements of such a product, because what is cut off has both signs


def magnitudes(a, b, a_scale, b_scale):
    """The sum of |a| |b| of every output, relative to which an error of accumulation is measured."""
    return exact(a.float().abs(), b.float().abs(), a_scale, b_scale)


def assert_within_accumulation(found, a, b, a_scale, b_scale, bias=None, residual=None, device="cpu"):
    """`found` is the product plus the bias, rounded, and plus the residual, rounded again, to what sums on `device`
    ("cpu", also for the emulated GPU, or "cuda") may lose."""
    truth = exact(a, b, a_scale, b_scale) + (0 if bias is None else bias.double())
    eps = torch.finfo(found.dtype).eps
    rounding = eps * truth.abs()
    if residual is not None:
        truth = truth + residual.double()
        rounding = rounding + eps * truth.abs()
    size = magnitudes(a, b, a_scale, b_scale)
    error = (found.double() - truth).abs() - rounding
    assert (error <= (MOST if device == "cuda" else SHARP) * size).all()
    if device == "cuda":
        shares = error.clamp(min=0) / size.clamp(min=1e-300)
        assert shares.sum() <= MEAN * shares.numel()
