"""Compares the results of the FP8 kernels with the reference implementation, bit by bit, on all inputs of a cast.

The comparison runs every op that casts, at every instruction-set level of this processor. It has two parts:

* Casts. Values are cast with scale 1 and with a scale that is no power of two. A kernel computes `x * scale` in FP32
  and casts the product. So the FP32 values at scale 1 cover all possible products, and the other scale covers the
  rounding of the product.
* Scales. Each value is a row of one element, so its scale is computed from the value alone, with and without
  power-of-two scales. An amax has no sign, so negative values are skipped here.

All BF16 and FP16 values are compared. For FP32, `stratified()` returns 2^24 values with every sign, every exponent and
every rounding boundary, and `all_values(torch.float32)` yields all 2^32 values in chunks. Ops that compute something
before the cast (a norm, a gated activation) get inputs for which that result is exact, so their casts get the same
values.

The bits of a NaN must also match, including the sign, with two exceptions. IEEE does not define the sign of a NaN that
arithmetic has produced before the cast. And on a GPU, the instruction that converts FP16 to FP32 drops the sign of a
NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8 import ops as fp8_ops
from fp8serve.fp8.ops import LEVELS, arithmetic, reference

Report = Callable[[str, int, int], None]  # called with the name, the done and the total number of values
Probe = Callable[[Any, Tensor, torch.dtype], tuple[Tensor, ...]]  # called with ops or reference, values, FP8 dtype
CHUNK_VALUES = 1 << 22
E4M3 = torch.float8_e4m3fn
STRATIFIED_MANTISSAS = 1 << 15  # for each sign and exponent
_INT_DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stratified() -> Tensor:
    """Returns 2^24 FP32 values: 2^15 mantissas for each of the 512 combinations of sign and exponent.

    384 of the mantissas are the multiples of 1/128 and their neighbours. They cover every BF16 value, every FP8 value,
    every midpoint of two FP8 values, and the values next to those. The other mantissas are random, one in each of equal
    intervals.
    """
    boundaries = (torch.arange(128) << 16).unsqueeze(1) + torch.tensor([-1, 0, 1]) & 0x7FFFFF
    num_random = STRATIFIED_MANTISSAS - boundaries.numel()
    starts = (torch.arange(num_random) << 23) // num_random
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randint((1 << 23) // num_random, (512, num_random), generator=generator, dtype=torch.int32)
    mantissas = torch.cat([boundaries.flatten().int().expand(512, -1), starts.int() + offsets], 1)
    sign_and_exponent = torch.arange(-256, 256, dtype=torch.int32) << 23
    return (sign_and_exponent.unsqueeze(1) | mantissas).view(torch.float32).flatten()


def all_values(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields all values of FP32, BF16 or FP16 in the order of their bits, positive values first, in chunks."""
    int_dtype = _INT_DTYPES[dtype]
    half = 1 << (8 * int_dtype.itemsize - 1)
    for begin in (0, -half):
        for first in range(begin, begin + half, CHUNK_VALUES):
            yield torch.arange(first, min(first + CHUNK_VALUES, begin + half), dtype=int_dtype).view(dtype)


def _scalar(x: Tensor, value: float = 1.0) -> Tensor:
    return torch.tensor(value, device=x.device)


def _quantize(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(ops.quantize(x, _scalar(x), dtype))


def _quantize_scaled(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Quantizes values that were divided by the scale, so that the products are near rounding boundaries again. A CPU
    divides them, because GPU arithmetic makes every NaN positive."""
    divided = (x.cpu() / torch.tensor(0.37).to(x.dtype)).to(x.device)
    return tuple(ops.quantize(divided, _scalar(x, 0.37), dtype))


def _norm(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Casts the result of an RMSNorm of ones, which is exactly the weight `x`."""
    return _with_positive_nan(ops.rms_norm_quantize(torch.ones_like(x).unsqueeze(0), x, 0.0, _scalar(x), dtype))


def _gated(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Casts 128 * x with a scale of 1/128. silu(128) is exactly 128 in FP32, BF16 and FP16."""
    row = x.unsqueeze(0)
    return _with_positive_nan(ops.silu_mul_quantize(torch.full_like(row, 128.0), row, _scalar(x, 2.0**-7), dtype))


def _with_positive_nan(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Replaces every NaN of FP8 tensors by the positive NaN, so that its sign is not compared."""
    return tuple(
        torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8)).view(t.dtype) if t.itemsize == 1 else t
        for t in results
    )


def _cache(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Writes the values as keys, and their negatives as values, to an E4M3 cache. A CPU negates them, because GPU
    arithmetic makes every NaN positive."""
    tokens = x.view(-1, 1, 64)
    negated = (-tokens.cpu()).to(x.device)
    keys, values = (torch.zeros(1, *tokens.shape, dtype=E4M3, device=x.device) for _ in range(2))
    slots = torch.arange(len(tokens), device=x.device)
    ops.write_kv(tokens, negated, keys, values, slots, _scalar(x), _scalar(x))
    return keys, values


def _transposed(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(ops.quantize_transpose(x.view(-1, 64), _scalar(x), dtype))


def _rows(width: int, power_2: bool) -> Probe:
    return lambda ops, x, dtype: ops.quantize_rowwise(x.view(-1, width), dtype, power_2)


def _blocks(rows: int) -> Probe:
    return lambda ops, x, dtype: ops.quantize_block(x.view(-1, 128), dtype, rows, False)


CASTS: Mapping[str, Probe] = {
    "quantize": _quantize,
    "quantize, scale 0.37": _quantize_scaled,
    "quantize_transpose": _transposed,
    "quantize_current": lambda ops, x, dtype: ops.quantize_current(x, dtype, False),
    "quantize_rowwise": _rows(64, False),
    "quantize_block 1x128": _blocks(1),
    "quantize_block 128x128": _blocks(128),
    "rms_norm_quantize": _norm,
    "silu_mul_quantize": _gated,
    "write_kv": _cache,
}
SCALES: Mapping[str, Probe] = {"scale of each value": _rows(1, False), "the same, power of two": _rows(1, True)}
PROBES = {**CASTS, **SCALES}


@dataclass
class Finding:
    """The comparison of one op at one level, for one source and one target dtype. `values` counts the values that were
    cast, `differing` the elements of results whose bits differ."""

    probe: str
    level: str
    source: str
    target: str
    values: int = 0
    differing: int = 0
    first: str | None = None  # describes the first chunk of values with a difference

    def add(self, x: Tensor, num_differing: int) -> None:
        """Counts the values of a chunk and the elements of its results that differ."""
        self.values += x.numel()
        self.differing += num_differing
        if num_differing and self.first is None:
            self.first = f"in {x.numel()} values that start at {float(x.flatten()[0]).hex()}"


def count_differing(results: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Returns the number of elements whose bits differ. In FP32 results (amaxes, scales), all NaNs are equal."""
    return sum(_count_differing(*pair) for pair in zip(results, expected, strict=True))


def _count_differing(result: Tensor, expected: Tensor) -> int:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(result.numel(), 1)
    int_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[result.itemsize]
    differs = result.contiguous().view(int_dtype) != expected.contiguous().view(int_dtype)
    if result.itemsize > 1:
        differs &= ~(result.isnan() & expected.isnan())
    return int(differs.sum())


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Limits the CPU library to an instruction-set level within the block. The level "cuda" has no effect."""
    if level in LEVELS:
        torch.ops.fp8serve.cpu_isa(level)
    try:
        yield
    finally:
        if level in LEVELS:
            torch.ops.fp8serve.cpu_isa("best")


def levels(device: str) -> tuple[str, ...]:
    """Returns the instruction-set levels of the CPU library on this machine, or the name of another device. Raises
    JobError if no kernel was built for the device."""
    if fp8_ops.LIBRARIES.get(device) is None:
        raise JobError(f"There are no {device} kernels here to compare with the reference; fp8serve doctor says why.")
    if device != "cpu":
        return (device,)

    def has(level: str) -> bool:
        with at_level(level):
            return bool(fp8_ops.cpu_isa() == level)

    return tuple(filter(has, LEVELS))


def compare(
    chunks: Iterator[Tensor],
    total: int,
    report: Report,
    *,
    probes: Sequence[str] = tuple(PROBES),
    at: Sequence[str] = LEVELS[-1:],
    kernels: Any = None,
    device: str = "cpu",
) -> list[Finding]:
    """Runs probes on all chunks, for both FP8 formats, and compares the kernels with the reference on the CPU.

    Args:
        chunks: the values, `total` in all.
        probes: names of PROBES.
        at: the instruction-set levels.
        kernels: the ops to compare; by default those of fp8serve.
    """
    findings: dict[tuple[str, str, torch.dtype], Finding] = {}
    completed = 0
    for x in chunks:
        for name, dtype in _applicable(x, probes):
            expected = PROBES[name](reference, x, dtype)
            for level in at:
                result = _run(PROBES[name], kernels or torch.ops.fp8serve, x, dtype, level, device)
                if device != "cpu" and x.dtype == torch.float16:
                    expected, result = _with_positive_nan(expected), _with_positive_nan(result)
                new = Finding(name, level, _name(x.dtype), _name(dtype))
                findings.setdefault((name, level, dtype), new).add(x, count_differing(result, expected))
        completed += x.numel()
        report(_name(x.dtype), completed, total)
    return list(findings.values())


def _applicable(x: Tensor, probes: Sequence[str]) -> list[tuple[str, torch.dtype]]:
    """Returns the probes and FP8 dtypes for a chunk. Scales of negative values are skipped, and a cache is E4M3."""
    names = [name for name in probes if name not in SCALES or not x.signbit().all()]
    return [(n, dtype) for n in names for dtype in arithmetic.FP8_MAX if n != "write_kv" or dtype == E4M3]


def _run(probe: Probe, ops: Any, x: Tensor, dtype: torch.dtype, level: str, device: str) -> tuple[Tensor, ...]:
    with at_level(level):
        return tuple(t.cpu() for t in probe(ops, x.to(device), dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def study(report: Report, *, exhaustive: bool, probes: Sequence[str] = (), device: str = "cpu") -> dict[str, Any]:
    """Compares all kernels of a device with the reference: on all BF16 and FP16 values, and on 2^24 FP32 values, or all
    2^32 if `exhaustive`. `probes` are names of PROBES; if it is empty, all probes run. Raises JobError if there is no
    kernel, or no probe of a name."""
    if unknown := [name for name in probes if name not in PROBES]:
        raise JobError(f"No op that casts is called {unknown[0]!r}; there are: {'; '.join(PROBES)}.")
    at, probes = levels(device), probes or tuple(PROBES)
    findings = []
    for dtype in (torch.bfloat16, torch.float16):
        findings += compare(all_values(dtype), 1 << 16, report, probes=probes, at=at, device=device)
    chunks = iter(stratified().split(CHUNK_VALUES))  # type: ignore[no-untyped-call]
    count = 1 << (32 if exhaustive else 24)
    findings += compare(
        all_values(torch.float32) if exhaustive else chunks, count, report, probes=probes, at=at, device=device
    )
    return {"device": device, "levels": list(at), "fp32_values": count, "findings": [vars(f) for f in findings]}
