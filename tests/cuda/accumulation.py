"""The tolerance of products: how far a sum of FP8 products may be from the exact one."""

import torch

from tests.csrc.test_gemm import exact

SHARP = 2.0**-12  # share of `magnitudes`, for FP32 sums (CPU and emulated GPU)
MOST = 2.0**-8  # the same for tensor cores that keep 13 fraction bits, as Hopper's (tests/cuda/hopper.py)
MEAN = 2.0**-13  # mean share over all elements of such a product; truncated bits have both signs


def magnitudes(a, b, a_scale, b_scale):
    """Returns the sum of |a| |b| for every output; an accumulation error is measured relative to it."""
    return exact(a.float().abs(), b.float().abs(), a_scale, b_scale)


def assert_within_accumulation(actual, a, b, a_scale, b_scale, bias=None, residual=None, device="cpu"):
    """Checks that `actual` is the product plus bias, rounded, plus residual, rounded again, within the tolerance of
    `device` ("cuda", or "cpu", also for the emulated GPU)."""
    truth = exact(a, b, a_scale, b_scale) + (0 if bias is None else bias.double())
    eps = torch.finfo(actual.dtype).eps
    rounding = eps * truth.abs()
    if residual is not None:
        truth = truth + residual.double()
        rounding = rounding + eps * truth.abs()
    size = magnitudes(a, b, a_scale, b_scale)
    error = (actual.double() - truth).abs() - rounding
    assert (error <= (MOST if device == "cuda" else SHARP) * size).all()
    if device == "cuda":
        shares = error.clamp(min=0) / size.clamp(min=1e-300)
        assert shares.sum() <= MEAN * shares.numel()
