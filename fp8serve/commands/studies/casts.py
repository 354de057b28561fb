"""Compare every casting kernel with the reference, bit for bit: FP8 data and scales, on every kind of value.

Runs all BF16 and FP16 values, and FP32 values of every sign and exponent, at every instruction-set level of this
processor. The exit status is 1 if one bit differs.

\b
Examples:
  fp8serve bench casts
  fp8serve bench casts --all --op quantize --out figures
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


def command(
    all_values: Annotated[
        bool, typer.Option("--all", help="All 2^32 values of FP32, which takes an hour, instead of 2^24 of them.")
    ] = False,
    op: Annotated[
        list[str] | None, typer.Option(help="Op to compare, as the table names it; repeat.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Out = None,
    json: AsJson = False,
) -> None:
    from fp8serve.bench.casts import study

    asked: dict[str, Any] = {"exhaustive": all_values, "chosen": tuple(op or ()), "device": device}
    result = publish("casts", measured("Comparing", lambda tell: study(tell, **asked)), out)
    show(result, json, _print)
    if any(found["differing"] for found in result["findings"]):
        raise typer.Exit(1)


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (f["probe"], f["level"], f["source"], f["target"], f"{f['values']:,}", f["differing"], f["first"] or "")
        for f in result["findings"]
    ]
    print_table(("op", "level", "from", "to", "values", "differing", "first"), rows)
