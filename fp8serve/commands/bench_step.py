"""`fp8serve bench step | monitor`: what a training step takes, two kinds of it in turns."""

from functools import partial
from typing import Annotated

import typer

from fp8serve.commands.bench_speed import Out, measured
from fp8serve.terminal import AsJson, print_table

Rows = Annotated[int, typer.Option(min=1, help="Sequences of 128 tokens in a step.")]


def monitor(
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 384,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 6,
    rows: Rows = 4,
    every: Annotated[int, typer.Option(min=1, help="Steps from one count to the next.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of that many steps, with and without.")] = 10,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """A training step with and without the monitor, in turns: what it costs to leave it on.

    \b
    Examples:
      fp8serve bench monitor
      fp8serve bench monitor --rounds 30 --out figures
    """
    from fp8serve.bench import monitor as bench
    from fp8serve.bench.training import Shape

    shape = Shape.of(hidden_size, layers)
    measure = partial(bench.measure, shape=shape, rows=rows, every=every, rounds=rounds)
    result = measured("monitor", "Monitor", measure, out, json)
    if result is None:
        return
    print(
        f"{result['parameters']:,} parameters, {result['linears']} FP8 linears, {result['tokens']} tokens a step; "
        f"values counted every {result['every']} steps, {result['rounds']} rounds\n"
    )
    table = [
        (kind, f"{result[f'{kind}_without_ms']:.2f}", f"{result[f'{kind}_with_ms']:.2f}",
         f"{result[f'{kind}_share_percent']:+.2f} %")
        for kind in ("fastest", "median")
    ]  # fmt: skip
    print_table(("round", "without, ms a step", "with", "monitor"), table)


def step(
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 768,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 16,
    vocab_size: Annotated[int, typer.Option(min=256, help="Tokens of its vocabulary.")] = 32000,
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe to measure.", show_default="delayed")] = None,
    rows: Rows = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 10,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """A whole training step in FP8 and in BF16, in turns, on one model.

    \b
    Examples:
      fp8serve bench step
      fp8serve bench step --recipe delayed --recipe block --rows 8
    """
    from dataclasses import replace

    from fp8serve.bench import training_step as bench
    from fp8serve.bench.training import Shape

    shape = replace(Shape.of(hidden_size, layers), vocab_size=vocab_size)
    measure = partial(bench.measure, shape=shape, recipes=recipe or ["delayed"], rows=rows, rounds=rounds)
    result = measured("step", "Training step", measure, out, json)
    if result is None:
        return
    print(f"{result['parameters']:,} parameters, {result['tokens']} tokens a step, {result['rounds']} rounds\n")
    table = [
        (name, f"{of['fastest_ms']:.0f}", f"{of['median_ms']:.0f}", f"{of['fastest_x_bf16']:.2f}",
         f"{of['median_x_bf16']:.2f}")
        for name, of in result["steps"].items()
    ]  # fmt: skip
    print_table(("step", "fastest, ms", "median", "fastest x BF16", "median x BF16"), table)
