"""Measure what it costs to leave the monitor on: training steps with and without it, in turns.

\b
Examples:
  fp8serve bench monitor
  fp8serve bench monitor --rounds 30 --out figures
"""

from collections.abc import Mapping
from typing import Any

from fp8serve.bench.options import MonitorOptions, Shape
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


@with_options()
def command(shape: Chosen[Shape], options: Chosen[MonitorOptions], out: Out = None, json: AsJson = False) -> None:
    made, asked = Shape.of(**shape.values), vars(options())
    from fp8serve.bench.monitor import measure

    figures = measured("Monitor", lambda tell: measure(tell, shape=made, **asked))
    show(publish("monitor", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    print(
        f"{result['parameters']:,} parameters, {result['linears']} FP8 linears, {result['tokens']} tokens a step; "
        f"codes counted every {result['every']} steps, {result['rounds']} rounds\n"
    )
    table = [
        (kind, f"{result[f'{kind}_without_ms']:.2f}", f"{result[f'{kind}_with_ms']:.2f}",
         f"{result[f'{kind}_share_percent']:+.2f} %")
        for kind in ("fastest", "median")
    ]  # fmt: skip
    print_table(("round", "without, ms a step", "with", "monitor"), table)
