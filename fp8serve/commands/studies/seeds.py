"""Combine training studies of several seeds: how far each recipe ends from BF16, and the scatter of that distance.

\b
Examples:
  fp8serve bench seeds seed-0/training.json seed-1/training.json --out figures
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.commands.studies.publishing import Out, publish
from fp8serve.commands.studies.training import LOSSES
from fp8serve.terminal import AsJson, print_json, print_table


def command(
    results: Annotated[list[Path], typer.Argument(help="training.json files that bench training wrote.")],
    out: Out = None,
    json: AsJson = False,
) -> None:
    from fp8serve.bench import seeds as bench

    found = bench.read(results)
    result = publish("seeds", bench.combine(found), out, lambda _: {"curves": bench.chart(found)})
    print_json(result) if json else _print(result)


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (name, LOSSES[kind], *(f"{apart:+.2f} %" for apart in f["apart"]), f"{f['mean']:+.2f} %",
         f"{f['deviation']:.2f} %", f"{f['error']:.2f} %")
        for name, kinds in result["recipes"].items() for kind, f in kinds.items()
    ]  # fmt: skip
    heading = ("recipe", "loss", *(f"seed {s}" for s in result["seeds"]), "mean", "deviation", "error of the mean")
    print_table(heading, rows)
