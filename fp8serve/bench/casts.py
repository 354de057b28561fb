"""Compares the kernels' casts and scales with the reference's, bit for bit, on every value.

Two things are compared, for every op that casts and every instruction-set level of this processor:

* the cast: each value by scale 1, and by a scale that is no power of two, where `x * scale` is rounded before the cast.
  A kernel multiplies in FP32 and casts the product, so the values at scale 1 are all the products there can be;
* the scale: each value is a row of one element, and its FP8 value and scale_inv are compared, with and without
  power-of-two scales. An amax has no sign, so the negative half of the values is left out there.

`stratified()` is 2^24 FP32 values that leave out no sign, no exponent and no rounding boundary; `every(FP32)` is all
2^32, in the order of their bits, four million at a time, so that memory does not matter. All BF16 and FP16 values are
always included. Kernels that compute something before the cast (a norm, a gated activation) get inputs for which the
result is exact, so that their casts see the same values.

A NaN's bits must be the reference's too, sign included. The exceptions are a NaN that arithmetic made before the cast,
whose sign IEEE does not define and which torch and our kernels convert to BF16 differently, and a NaN in FP16 on a GPU,
whose instruction from FP16 to FP32 forgets the sign.
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

Report = Callable[[str, int, int], None]  # (what, done, in all)
Probe = Callable[[Any, Tensor, torch.dtype], tuple[Tensor, ...]]  # (ops or reference, values, FP8 dtype)
CHUNK = 1 << 22
E4M3 = torch.float8_e4m3fn
MANTISSAS = 1 << 15  # per sign and exponent in the stratified set
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stratified(seed: int = 0) -> Tensor:
    """2^24 FP32 values: for each of the 512 signs and exponents 2^15 mantissas.

    384 of them are the multiples of 1/128 and their neighbours: every BF16 value, every value of both formats, every
    midpoint of two neighbours, and the values one bit to either side. The others are drawn at random, one from each of
    equal intervals.
    """
    near = (torch.arange(128) << 16).unsqueeze(1) + torch.tensor([-1, 0, 1]) & 0x7FFFFF
    drawn = MANTISSAS - near.numel()
    starts = (torch.arange(drawn) << 23) // drawn
    make = torch.Generator().manual_seed(seed)
    inside = torch.randint((1 << 23) // drawn, (512, drawn), generator=make, dtype=torch.int32)
    mantissas = torch.cat([near.flatten().int().expand(512, -1), starts.int() + inside], 1)
    head = torch.arange(-256, 256, dtype=torch.int32) << 23  # sign and exponent
    return (head.unsqueeze(1) | mantissas).view(torch.float32).flatten()


def every(dtype: torch.dtype) -> Iterator[Tensor]:
    """All values of FP32, BF16 or FP16 in the order of their bits, the positive first, in chunks of at most 2^22."""
    kind = _BITS[dtype]
    half = 1 << (8 * kind.itemsize - 1)
    for begin in (0, -half):
        for first in range(begin, begin + half, CHUNK):
            yield torch.arange(first, min(first + CHUNK, begin + half), dtype=kind).view(dtype)


def _one(x: Tensor, value: float = 1.0) -> Tensor:
    return torch.tensor(value, device=x.device)


def _by(value: float) -> Probe:
    return lambda ops, x, dtype: ops.quantize(x, _one(x, value), dtype)


def _ungridded(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The values divided by the scale before it multiplies them: so the products lie at the boundaries again. A CPU
    divides them, because a GPU's arithmetic makes every NaN the positive one."""
    divided = (x.cpu() / torch.tensor(0.37).to(x.dtype)).to(x.device)
    return tuple(ops.quantize(divided, _one(x, 0.37), dtype))


def _norm(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A norm of ones is 1, exactly, and the weight comes out."""
    return _computed(*ops.rms_norm_quantize(torch.ones_like(x).unsqueeze(0), x, 0.0, _one(x), dtype))


def _gated(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """silu(128) is 128 in FP32, BF16 and FP16; a scale of 1/128 undoes it."""
    row = x.unsqueeze(0)
    return _computed(*ops.silu_mul_quantize(torch.full_like(row, 128.0), row, _one(x, 2.0**-7), dtype))


def _computed(q: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
    """Results of a cast after arithmetic: the sign of a NaN is not compared."""
    return _of_one_nan((q, amax))


def _of_one_nan(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same, with every NaN of FP8 data the positive one."""
    return tuple(
        torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8)).view(t.dtype) if t.itemsize == 1 else t
        for t in results
    )


def _cache(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The values as keys, and negated (by a CPU, as above) as values, into the slots of a cache of E4M3: the only
    format it has."""
    tokens = x.view(-1, 1, 64)
    negated = (-tokens.cpu()).to(x.device)
    keys, values = (torch.zeros(1, *tokens.shape, dtype=E4M3, device=x.device) for _ in range(2))
    slots = torch.arange(len(tokens), device=x.device)
    ops.write_kv(tokens, negated, keys, values, slots, _one(x), _one(x))
    return keys, values


def _transposed(ops: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(ops.quantize_transpose(x.view(-1, 64), _one(x), dtype))


def _rows(width: int, power_2: bool) -> Probe:
    return lambda ops, x, dtype: ops.quantize_rowwise(x.view(-1, width), dtype, power_2)


def _blocks(rows: int) -> Probe:
    return lambda ops, x, dtype: ops.quantize_block(x.view(-1, 128), dtype, rows, False)


CASTS: Mapping[str, Probe] = {
    "quantize": _by(1.0),
    "quantize, scale 0.37": _ungridded,
    "quantize_transpose": _transposed,
    "quantize_current": lambda ops, x, dtype: ops.quantize_current(x, dtype, False),
    "quantize_rowwise": _rows(64, False),
    "quantize_block 1x128": _blocks(1),
    "quantize_block 128x128": _blocks(128),
    "rms_norm_quantize": _norm,
    "silu_mul_quantize": _gated,
    "write_kv": _cache,
}
SCALES: Mapping[str, Probe] = {
    "scale of each value": _rows(1, False),
    "the same, power of two": _rows(1, True),
}
PROBES = {**CASTS, **SCALES}


@dataclass
class Finding:
    """One op at one level on the values of one type: how many results were compared, and how many differ."""

    probe: str
    level: str
    source: str
    target: str
    values: int = 0
    differing: int = 0
    first: str | None = None  # describes the first chunk of values that has a difference

    def see(self, x: Tensor, wrong: int) -> None:
        self.values += x.numel()
        self.differing += wrong
        if wrong and self.first is None:
            self.first = f"among the {x.numel()} values from {float(x.flatten()[0]).hex()} on"


def differing(result: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Elements whose bits differ, over all results; FP32 results (amaxes, scales) may be any NaN."""
    return sum(_differing(*pair) for pair in zip(result, expected, strict=True))


def _differing(result: Tensor, expected: Tensor) -> int:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(result.numel(), 1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[result.itemsize]
    apart = result.contiguous().view(kind) != expected.contiguous().view(kind)
    if result.itemsize > 1:
        apart &= ~(result.isnan() & expected.isnan())
    return int(apart.sum())


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """The CPU library limited to an instruction-set level; "cuda" is a device and needs no limit."""
    if level in LEVELS:
        torch.ops.fp8serve.cpu_isa(level)
    try:
        yield
    finally:
        if level in LEVELS:
            torch.ops.fp8serve.cpu_isa("best")


def levels(device: str) -> tuple[str, ...]:
    """The levels the CPU library has here, or the device itself. Raises JobError where no kernel was built."""
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
    chosen: Sequence[str] = tuple(PROBES),
    at: Sequence[str] = LEVELS[-1:],
    kernels: Any = None,
    device: str = "cpu",
) -> list[Finding]:
    """Every chosen probe on every chunk, both formats: kernels at each level against the reference on the CPU."""
    findings: dict[tuple[str, str, torch.dtype], Finding] = {}
    done = 0
    for x in chunks:
        for name, dtype in _probes(x, chosen):
            expected = PROBES[name](reference, x, dtype)
            for level in at:
                result = _run(PROBES[name], kernels or torch.ops.fp8serve, x, dtype, level, device)
                if device != "cpu" and x.dtype == torch.float16:
                    expected, result = _of_one_nan(expected), _of_one_nan(result)
                fresh = Finding(name, level, _name(x.dtype), _name(dtype))
                findings.setdefault((name, level, dtype), fresh).see(x, differing(result, expected))
        done += x.numel()
        report(_name(x.dtype), done, total)
    return list(findings.values())


def _probes(x: Tensor, chosen: Sequence[str]) -> list[tuple[str, torch.dtype]]:
    """(probe, format) for one chunk: scales of negative values are left out, and a cache has one format."""
    unsigned = [name for name in chosen if name not in SCALES or not x.signbit().all()]
    return [(n, dtype) for n in unsigned for dtype in arithmetic.FP8_MAX if n != "write_kv" or dtype == E4M3]


def _run(probe: Probe, ops: Any, x: Tensor, dtype: torch.dtype, level: str, device: str) -> tuple[Tensor, ...]:
    with at_level(level):
        return tuple(t.cpu() for t in probe(ops, x.to(device), dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def study(report: Report, *, exhaustive: bool, chosen: Sequence[str] = (), device: str = "cpu") -> dict[str, Any]:
    """All BF16 and FP16 values, and 2^24 or all 2^32 of FP32, against every level of the device's kernels.

    `chosen`: names of PROBES, none for all. Raises JobError where there is no kernel or no such probe.
    """
    if unknown := [name for name in chosen if name not in PROBES]:
        raise JobError(f"No op that casts is called {unknown[0]!r}; there are: {'; '.join(PROBES)}.")
    at, chosen = levels(device), chosen or tuple(PROBES)
    findings = []
    for dtype in (torch.bfloat16, torch.float16):
        findings += compare(every(dtype), 1 << 16, report, chosen=chosen, at=at, device=device)
    chunks = every(torch.float32) if exhaustive else iter(stratified().split(CHUNK))  # type: ignore[no-untyped-call]
    count = 1 << (32 if exhaustive else 24)
    findings += compare(chunks, count, report, chosen=chosen, at=at, device=device)
    return {"device": device, "levels": list(at), "fp32_values": count, "findings": [vars(f) for f in findings]}
