"""Measure how the error of an FP8 product grows with the number of its terms.

Compares sums in FP32, which our kernels use, with sums in BF16 and in the 14 bits reported for Hopper's tensor cores,
with and without promotion to FP32. It takes seconds and uses no GPU.

\b
Examples:
  fp8serve bench accumulation
  fp8serve bench accumulation --out figures
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


def command(out: Out = None, json: AsJson = False) -> None:
    from fp8serve.bench import accumulation as bench

    figures = measured("Accumulation", bench.study)
    show(publish("accumulation", figures, out, lambda result: {"terms": bench.chart(result)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    names = [name for name in result["rows"][0] if name not in ("terms", "values")]
    rows = [(row["terms"], row["values"], *(f"{row[name]:.1e}" for name in names)) for row in result["rows"]]
    print_table(("terms", "values of", *names), rows)
