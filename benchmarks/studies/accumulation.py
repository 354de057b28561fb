"""How the error of an FP8 product grows with the number of its terms, for several precisions of the accumulator.

Values and weights are cast to E4M3, with one scale for each tensor. The reference is the product of the cast values in
FP64; the error of the casts themselves is reported as "cast". There are four ways to add up the terms:

    ours        this machine's kernels, which accumulate in FP32
    bf16        the sum is rounded to BF16 after every 32 terms
    14 bits     the sum is truncated to 14 significant bits after every 32 terms
    promoted    as "14 bits", but after every 128 terms the sum is added to an FP32 accumulator and set to zero

DeepSeek-V3's report (arXiv 2412.19437, section 3.3.2) measured the third on Hopper's tensor cores and uses the fourth
as the remedy. Both are computed here from that description, with the 32 terms of one instruction added exactly; no GPU
runs. The error is the root mean square divided by the product's own root mean square. Values of one sign, as after a
ReLU or in a mean, are the hard case, because the truncated parts always have the same sign.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8serve.charts import Panel, svg_file
from fp8serve.commands.bench import Out, measured, publish, show
from fp8serve.fp8.ops import dequantize, quantize, scaled_mm
from fp8serve.terminal import AsJson, print_table

ROWS = 64  # of both operands
TERMS = (256, 1024, 4096, 16384, 65536)
INSTRUCTION, PROMOTED, BITS = 32, 128, 14
KINDS: dict[str, Callable[[Tensor], Tensor]] = {"both signs": lambda x: x, "one sign": torch.abs}
SUMS = ("ours", "bf16", "14 bits", "promoted", "cast")


def study(report: Callable[[str, int, int], None]) -> dict[str, Any]:
    """{"rows": the errors of each way to add up, for every number of terms and kind of values}."""
    return {"rows": list(_rows(report)), "bits": BITS, "instruction": INSTRUCTION, "promoted": PROMOTED}


def _rows(report: Callable[[str, int, int], None]) -> Iterator[dict[str, Any]]:
    for index, terms in enumerate(TERMS):
        report(f"{terms} terms", index, len(TERMS))
        for kind, change in KINDS.items():
            generator = torch.Generator().manual_seed(terms)
            x, w = (change(torch.randn(ROWS, terms, generator=generator)) for _ in range(2))
            yield {"terms": terms, "values": kind, **errors(x, w)}


def errors(x: Tensor, w: Tensor) -> dict[str, float]:
    """The relative error of x [M, K] times w [N, K] transposed for each way to add up; "cast": that of the casts alone,
    with exact sums."""
    (x_q, x_inv), (w_q, w_inv) = quantize(x), quantize(w)
    x_cast, w_cast = dequantize(x_q, x_inv).double(), dequantize(w_q, w_inv).double()
    exact = x_cast @ w_cast.t()
    pieces = zip(torch.split(x_cast, INSTRUCTION, 1), torch.split(w_cast, INSTRUCTION, 1), strict=True)
    parts = torch.stack([a @ b.t() for a, b in pieces])
    sums_by_method = {"ours": scaled_mm(x_q, w_q, x_inv, w_inv, out_dtype=torch.float32)}
    sums_by_method |= {"bf16": in_bf16(parts), "14 bits": cut_off(parts), "promoted": promoted(parts)}
    errors_by_method = {name: relative(sums.double(), exact) for name, sums in sums_by_method.items()}
    return errors_by_method | {"cast": relative(exact, x.double() @ w.double().t())}


def relative(sums: Tensor, exact: Tensor) -> float:
    return math.sqrt(float((sums - exact).square().mean() / exact.square().mean()))


def in_bf16(parts: Tensor) -> Tensor:
    """Adds up parts [K / 32, M, N], the exact FP64 sums of every 32 terms, and rounds to BF16 after each. Returns FP64
    [M, N]."""
    sums = torch.zeros_like(parts[0])
    for part in parts:
        sums = (sums + part).bfloat16().double()
    return sums


def cut_off(parts: Tensor) -> Tensor:
    """Adds up like `in_bf16`, but truncates to BITS significant bits."""
    sums = torch.zeros_like(parts[0])
    for part in parts:
        fraction, exponent = torch.frexp(sums + part)
        sums = torch.ldexp((fraction * 2**BITS).trunc() / 2**BITS, exponent)
    return sums


def promoted(parts: Tensor) -> Tensor:
    """Adds up the results of `cut_off` for every PROMOTED terms. Returns FP32 [M, N]."""
    sums = torch.zeros_like(parts[0], dtype=torch.float32)
    for group in torch.split(parts, PROMOTED // INSTRUCTION):
        sums += cut_off(group).float()
    return sums


def chart(result: Mapping[str, Any]) -> str:
    """Error against the number of terms, for values of both signs and of one."""
    panels = []
    for kind in KINDS:
        rows = [row for row in result["rows"] if row["values"] == kind]
        curves = {name: [(math.log2(row["terms"]), row[name]) for row in rows] for name in SUMS}
        panels.append(Panel(f"error, values of {kind}", curves, log=True))
    return svg_file("Relative error of a product, by its accumulator", panels, "log2 of the number of terms")


def command(out: Out = None, json: AsJson = False) -> None:
    """Measure how the error of an FP8 product grows with the number of its terms.

    Compares sums in FP32, which our kernels use, with sums in BF16 and in the 14 bits reported for Hopper's tensor
    cores, with and without promotion to FP32. It takes seconds and uses no GPU.

    
    Examples:
      python -m benchmarks.studies accumulation
      python -m benchmarks.studies accumulation --out figures
    """
    figures = measured("Accumulation", study)
    show(publish("accumulation", figures, out, lambda result: {"terms": chart(result)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    names = [name for name in result["rows"][0] if name not in ("terms", "values")]
    rows = [(row["terms"], row["values"], *(f"{row[name]:.1e}" for name in names)) for row in result["rows"]]
    print_table(("terms", "values of", *names), rows)
