"""Train one model under every recipe from the same seed, and compare where they end.

It trains on text that every Python installation carries. One run is also resumed half-way and must end with the same
bytes.

\b
Examples:
  fp8serve bench training --out study
  fp8serve bench training --out study --recipe bf16 --recipe delayed --steps 200
  fp8serve bench training smollm2 --out study --recipe bf16 --recipe twin --recipe delayed --steps 300
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.bench.options import Shape, StudyPlan
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.commands.studies.publishing import measured, publish, show
from fp8serve.errors import JobError
from fp8serve.terminal import AsJson, print_table

LOSSES = {"final": "final loss", "running": "running loss", "valid": "held-out loss"}


@with_options()
def command(
    out: Annotated[
        Path, typer.Option(help="Directory for the runs, the figures and the plot; continues if it exists.")
    ],
    options: Chosen[StudyPlan],
    shape: Chosen[Shape],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face-format directory in high precision, GGUF file, smollm2, or a name on the hub.",
            show_default="random weights",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    random = Shape.of(**shape.values)
    if model and random != Shape():
        raise JobError("MODEL has its own width and layers; leave out --hidden-size and --layers.")
    plan = options(shape=random, model=str(find_model(model)) if model else None)
    from fp8serve.bench import training as bench

    figures = measured("Training", lambda tell: bench.study(out, plan, tell))
    show(publish("training", figures, out, lambda result: {"curves": bench.chart(result)}), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    plan, resumed = result["plan"], result["resumed"]
    print(
        f"{result['parameters']:,} parameters, {plan['steps']} steps of {plan['batch_size'] * plan['seq_len']} tokens, "
        f"seed {plan['seed']}; {result['text']['source']}, {result['text']['characters']:,} characters\n"
    )
    rows = [
        (name, *(cell for kind in LOSSES for cell in (f"{r[kind + '_loss']:.4f}", _apart(r, kind))),
         f"{r['tokens_per_second']:.0f}")
        for name, r in result["runs"].items()
    ]  # fmt: skip
    heading = (column for title in LOSSES.values() for column in (title, "apart"))
    print_table(("recipe", *heading, "tokens/s"), rows)
    if resumed:
        bytes_ = "the same bytes" if resumed["identical"] else f"other bytes in {', '.join(resumed['differing_files'])}"
        print(f"\n{resumed['recipe']} resumed from step {resumed['from_step']}: {bytes_} at the end")


def _apart(run: Mapping[str, Any], kind: str) -> str:
    return f"{run[kind + '_difference_percent']:+.2f} %"
