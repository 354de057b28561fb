"""Casts on the device equal the reference on FP32 values of every sign, exponent and rounding boundary.

A GPU gets all 2^24 values and every BF16 value. The emulated GPU gets every 61st value, which covers all signs and
exponents, and fewer for ops that use a thread block for each row, which takes the emulator a millisecond.
"""

import pytest
import torch

from fp8serve.bench import casts

pytestmark = pytest.mark.exhaustive
STRIDES = {"quantize_rowwise": 241} | dict.fromkeys(casts.SCALES, 8191)


def no_progress(what: str, completed: int, total: int) -> None:
    """A progress callback that does nothing."""


def check(kernels, values, probe, stride):
    """Compares the probe on every `stride`-th value (on a GPU: all), in chunks of a multiple of 1024 values."""
    x = values if kernels.device == "cuda" else values[::stride].contiguous()
    chunk = min(1 << 14, len(x) // 1024 * 1024)
    whole = x[: len(x) // chunk * chunk]
    findings = casts.compare(
        iter(whole.view(-1, chunk)), len(whole), no_progress,
        probes=[probe], at=[kernels.device], kernels=kernels.ops, device=kernels.device,
    )  # fmt: skip
    assert findings
    assert [f for f in findings if f.differing] == []


@pytest.mark.parametrize("probe", casts.PROBES)
def test_every_kernel_casts_stratified_values_like_the_reference(kernels, probe):
    check(kernels, casts.stratified(), probe, STRIDES.get(probe, 61))


@pytest.mark.parametrize("probe", casts.PROBES)
def test_every_kernel_casts_every_bf16_value_like_the_reference(kernels, probe):
    check(kernels, torch.cat(list(casts.all_values(torch.bfloat16))), probe, 61 if probe in casts.SCALES else 1)
