"""Measure every op at the sizes of real models: time, bandwidth, arithmetic, share of this machine's peak, x torch
BF16.

\b
Examples:
  fp8serve bench ops
  fp8serve bench ops --only scaled_mm --json
  fp8serve bench ops --goals --seconds 3
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


def command(
    only: Annotated[
        str | None, typer.Option(help="Ops whose names contain this.", show_default="all", metavar="TEXT")
    ] = None,
    goals: Annotated[bool, typer.Option("--goals", help="Only ops with a goal.")] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for each op and size.")] = 0.5,
    out: Out = None,
    json: AsJson = False,
) -> None:
    from fp8serve.bench.ops import measure

    figures = measured("Ops", lambda tell: measure(seconds, tell, only, goals))
    show(publish("ops", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    peaks = result["peaks"]
    print(f"measured peaks: {peaks['gb_per_s']:.0f} GB/s read, {peaks['gflop_per_s']:.0f} GFLOP/s (torch BF16)\n")
    rows = [
        (r["op"], r["size"], f"{r['us']:.1f}", f"{r['gb_per_s']:.1f}", f"{r['gflop_per_s']:.0f}",
         f"{100 * r['share_of_peak']:.0f} %", "" if r["times_torch_bf16"] is None else f"{r['times_torch_bf16']:.2f}",
         "" if r["goal"] is None else f"{r['goal']:g} {'reached' if r['reached'] else 'not reached'}")
        for r in result["ops"]
    ]  # fmt: skip
    print_table(("op", "size", "us", "GB/s", "GFLOP/s", "of peak", "x torch BF16", "goal"), rows)
