"""`fp8serve eval`: what a model's FP8 costs in quality, in figures."""

from pathlib import Path
from typing import Annotated

import typer

from fp8serve.commands.serve import RecipeChoice
from fp8serve.terminal import AsJson, print_rich, progress, remark


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face-format directory, or a name on the hub.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text or JSON-lines file; repeat for several.", show_default="passages that ship with fp8serve"
        ),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Reference model, run in high precision.")] = None,
    scales: Annotated[Path | None, typer.Option(help="scales.safetensors to use instead of MODEL's own.")] = None,
    recipe: Annotated[
        RecipeChoice, typer.Option(help="How MODEL runs; 'stored': the scales in its directory.")
    ] = "stored",
    samples: Annotated[int, typer.Option(min=1, help="Sequences to score.")] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest sequence, in tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the choice of samples.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: AsJson = False,
) -> None:
    """Measure what FP8 costs in quality.

    Perplexity; with --against also KL divergence, top-1 agreement and the noise of each layer.

    \b
    Examples:
      fp8serve eval ./llama-fp8 --data held-out.jsonl
      fp8serve eval ./llama-fp8 --data held-out.jsonl --against ./llama
    """
    from fp8serve.hub import find_model

    directory, reference = find_model(model), find_model(against) if against else None
    from fp8serve.calibration.evaluate import evaluate
    from fp8serve.calibration.report import eval_table
    from fp8serve.fp8.recipe import from_name

    with progress("Evaluating") as advance:
        report = evaluate(
            directory,
            data,
            reference,
            recipe=recipe if recipe == "stored" else from_name(recipe) or "bf16",
            scales=scales,
            samples=samples,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            device=device,
            progress=lambda stage, done, total: advance(done, total, stage),
        )
    for note in report.notes:
        remark(note)
    print(report.to_json()) if json else print_rich(eval_table(report))
