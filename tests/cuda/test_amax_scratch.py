"""Casts by many blocks keep their amax in scratch memory of the stream, without a memset outside of CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import reference
from tests.csrc.helpers import assert_bits_equal
from tests.cuda import emulated
from tests.cuda.conftest import Kernels, kernels_on

E4M3 = torch.float8_e4m3fn
SIZE = (130, 1032)  # several thread blocks for every op


def matrix(seed: int) -> Tensor:
    """Returns a matrix whose largest value falls with `seed`, so that an amax of an earlier launch would be noticed."""
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16() / (1 + seed)


def experts(count: int) -> Callable[[int], tuple[Any, ...]]:
    ends = (torch.arange(1, count + 1) * SIZE[0] // count).int()
    return lambda seed: (matrix(seed), torch.full((count,), 0.5), ends, E4M3)


SCALE = torch.tensor(0.5)
ONES = torch.ones(SIZE[1]).bfloat16()
CASTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "quantize": lambda seed: (matrix(seed), SCALE, E4M3),
    "quantize_current": lambda seed: (matrix(seed), E4M3, False),
    "quantize_transpose": lambda seed: (matrix(seed), SCALE, E4M3),
    "rms_norm_quantize": lambda seed: (matrix(seed), ONES / (1 + seed), 1e-5, SCALE, E4M3),
    "layer_norm_quantize": lambda seed: (matrix(seed), ONES / (1 + seed), ONES / 8, 1e-5, SCALE, E4M3),
    "silu_mul_quantize": lambda seed: (matrix(seed), matrix(seed), SCALE, E4M3),
    "grouped_quantize": experts(9),
    "scaled_mm_quantize": lambda seed: product(seed, rows=5),
    "scaled_mm_quantize by mma": lambda seed: product(seed, rows=130),
}


def product(seed: int, rows: int) -> tuple[Any, ...]:
    a, b = (matrix(seed)[:rows, :1024].to(E4M3), matrix(seed)[:72, :1024].to(E4M3))
    return a, b, SCALE, SCALE, None, SCALE, E4M3


@pytest.fixture
def gpu() -> Iterator[emulated.Emulator]:
    kernels_on("emulated")
    gpu = emulated.emulator()
    gpu.set_chip(89, 4, 99 * 1024)
    gpu.ops.quantize(matrix(0), SCALE, E4M3)  # allocates the stream's scratch
    yield gpu
    gpu.capture(False)


def amax_of(outputs: Any) -> Tensor:
    return outputs[-1]  # type: ignore[no-any-return]


@pytest.mark.emulator
@pytest.mark.parametrize("case", CASTS)
def test_no_memset_is_launched_outside_of_a_graph(gpu: emulated.Emulator, case: str) -> None:
    op, make = case.split()[0], CASTS[case]
    for capturing, memsets in ((False, 0), (True, 1), (False, 0)):
        gpu.capture(capturing)
        for seed in range(3):
            gpu.launches()
            outputs = getattr(gpu.ops, op)(*make(seed))
            assert [name for name, _ in gpu.launches()].count("memset") == memsets
            assert_near(op, outputs, make(seed))


@pytest.mark.emulator
def test_more_experts_than_the_scratch_has_maxima_need_a_memset(gpu: emulated.Emulator) -> None:
    for count, memsets in ((256, 0), (257, 1)):
        gpu.launches()
        outputs = gpu.ops.grouped_quantize(*experts(count)(0))
        assert [name for name, _ in gpu.launches()].count("memset") == memsets
        assert_bits_equal(amax_of(outputs), amax_of(reference.grouped_quantize(*experts(count)(0))))


@pytest.mark.parametrize("case", CASTS)
def test_the_amax_of_every_call_is_correct(kernels: Kernels, case: str) -> None:
    op = case.split()[0]
    for seed in range(4):
        assert_near(op, kernels.run(op, *CASTS[case](seed)), CASTS[case](seed))


def assert_near(op: str, outputs: Any, arguments: tuple[Any, ...]) -> None:
    """Compares the amax (of quantize_current, the scale): bit for bit for ops without sums, otherwise approximately."""
    actual, expected = amax_of(outputs), amax_of(getattr(reference, op)(*arguments))
    if op in {"quantize", "quantize_current", "quantize_transpose", "grouped_quantize"}:
        assert_bits_equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0.0)


@pytest.mark.gpu
def test_streams_do_not_disturb_each_other() -> None:
    kernels = kernels_on("cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [matrix(seed).cuda() for seed in range(4)]
    scale = SCALE.cuda()
    torch.cuda.synchronize()
    amaxes_of_streams: list[list[Tensor]] = [[] for _ in streams]
    for _ in range(50):
        for stream, x, amaxes in zip(streams, inputs, amaxes_of_streams, strict=True):
            with torch.cuda.stream(stream):
                amaxes.append(kernels.ops.quantize(x, scale, E4M3)[1])
    torch.cuda.synchronize()
    for x, amaxes in zip(inputs, amaxes_of_streams, strict=True):
        assert {float(amax) for amax in amaxes} == {float(x.abs().max())}
