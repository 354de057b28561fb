"""Inputs and comparisons that the kernel tests share."""

import torch
from torch import Tensor

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
HIGH = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_MAX = torch.finfo(torch.float32).max


def assert_fp8_equal(actual: Tensor, expected: Tensor) -> None:
    """Checks that all bits are equal, including those of NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_bits_equal(actual: Tensor, expected: Tensor) -> None:
    """Checks that all bits are equal, except that any NaN equals any other NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = actual.float().isnan()
    assert torch.equal(nan, expected.float().isnan())
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    same = actual.contiguous().view(kind) == expected.contiguous().view(kind)
    assert bool((same | nan).all())


def all_bf16() -> Tensor:
    """Returns all 65536 BF16 values."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def all_fp16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)


def stratified_fp32() -> Tensor:
    """Returns FP32 values of every sign and exponent. Mantissas are random, or at, just below and just above every
    rounding boundary of both FP8 formats."""
    eighths = torch.arange(64, dtype=torch.int64) << 17
    near = (eighths.unsqueeze(1) + torch.tensor([-1, 0, 1])).flatten() & 0x7FFFFF
    random = torch.randint(0, 1 << 23, (64,), generator=torch.Generator().manual_seed(1))
    mantissas = torch.cat([near, random])
    exponents = torch.arange(256, dtype=torch.int64) << 23
    magnitudes = (exponents.unsqueeze(1) + mantissas).flatten()
    return torch.cat([magnitudes, magnitudes - (1 << 31)]).to(torch.int32).view(torch.float32)


def hostile(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns a random matrix with another magnitude in every 128 x 128 tile, and 1 % of special values: zeros,
    subnormals, maxima, infinities and NaN."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=make)
    magnitude = torch.randint(-40, 40, (-(-rows // 128), -(-cols // 128)), generator=make).float().exp2()
    x = x * magnitude.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    special = torch.tensor([0.0, -0.0, 1e-45, 6e-8, 448.0, 57344.0, FLOAT_MAX, torch.inf, -torch.inf, torch.nan])
    picks = torch.randint(0, len(special), (rows, cols), generator=make)
    is_special = torch.rand(rows, cols, generator=make) < 0.01
    return torch.where(is_special, special[picks], x).to(dtype)


def tame(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Returns a random matrix with another magnitude in every 128 x 128 tile, without special values."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=make)
    magnitude = torch.randint(-6, 6, (-(-rows // 128), -(-cols // 128)), generator=make).float().exp2()
    return (x * magnitude.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]).to(dtype)
