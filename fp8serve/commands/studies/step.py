"""Measure a whole training step in FP8 and in BF16, in turns, on one model.

\b
Examples:
  fp8serve bench step
  fp8serve bench step --recipe delayed --recipe block --rows 8
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from fp8serve.bench.options import Shape, StepOptions
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import Out, measured, publish, show
from fp8serve.terminal import AsJson, print_table


@with_options(hidden_size=768, layers=16)
def command(
    shape: Chosen[Shape],
    options: Chosen[StepOptions],
    vocab_size: Annotated[int, typer.Option(min=256, help="Tokens of its vocabulary.")] = 32000,
    out: Out = None,
    json: AsJson = False,
) -> None:
    made, asked = replace(Shape.of(**shape.values), vocab_size=vocab_size), vars(options())
    from fp8serve.bench.training_step import measure

    figures = measured("Training step", lambda tell: measure(tell, shape=made, **asked))
    show(publish("step", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    print(f"{result['parameters']:,} parameters, {result['tokens']} tokens a step, {result['rounds']} rounds\n")
    table = [
        (name, f"{of['fastest_ms']:.0f}", f"{of['median_ms']:.0f}", f"{of['fastest_x_bf16']:.2f}",
         f"{of['median_x_bf16']:.2f}")
        for name, of in result["steps"].items()
    ]  # fmt: skip
    print_table(("step", "fastest, ms", "median", "fastest x BF16", "median x BF16"), table)
