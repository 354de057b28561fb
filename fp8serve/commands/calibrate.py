"""Write MODEL in FP8, with scales from sample data.

Writes a directory that every FP8 server can load, scales.safetensors, calibration.json and report.html; --report also
writes the page elsewhere. Scales are made from all of --data, whatever the order of files and lines; quality is
measured on other text: --holdout, or passages that ship with fp8serve.

\b
Examples:
  fp8serve calibrate ./llama --out ./llama-fp8
  fp8serve calibrate ./llama --out ./llama-fp8 --data chats.jsonl --holdout test.jsonl --kv-cache
  zcat corpus.jsonl.gz | fp8serve calibrate ./llama --out ./llama-fp8 --data - --data more.txt.gz
  fp8serve calibrate ./llama --out ./scales --scales-only --json --report ./llama.html
  torchrun --standalone --nproc-per-node 2 -m fp8serve calibrate ./llama --out ./llama-fp8 --rounding gptq
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8serve.calibration.options import CalibrationOptions, ScalingOptions
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.terminal import (
    AsJson,
    Model,
    ReportFile,
    check_report,
    print_report,
    remark,
    stages,
    typed,
    write_report,
)

if TYPE_CHECKING:
    from fp8serve.fp8.recipe import Recipe


@with_options()
def command(
    context: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
    scaling: Chosen[ScalingOptions],
    options: Chosen[CalibrationOptions],
    report_file: ReportFile = None,
    json: AsJson = False,
) -> None:
    from fp8serve.calibration.checks import quantized_notes
    from fp8serve.calibration.pipeline import calibrate
    from fp8serve.calibration.reports.page import html_report
    from fp8serve.calibration.reports.tables import summary_table
    from fp8serve.engine.task import task_of
    from fp8serve.hub import find_model
    from fp8serve.ranks import torchrun

    check_report(report_file)
    directory, recipe = find_model(model), scaling().recipe
    if task_of(directory) != "generate":
        return _encoder(directory, out, recipe, {**options.values, "command": typed(context)}, report_file, json)
    # on every rank: torchrun ends one that is late before it can tell an error
    notes = quantized_notes(directory, scales_only=options.values.get("scales_only", False))
    with torchrun() as ranks, stages("Calibrating") if ranks.first else nullcontext() as progress:
        if ranks.first:
            _print(notes)
        report = calibrate(
            directory,
            out=out,
            recipe=recipe,
            progress=progress,
            ranks=ranks,
            command=typed(context),
            **options.values,
        )
    if ranks.first:
        write_report(report_file, lambda: html_report(report))
        print_report(report, summary_table, json, printed=notes)
    return None


def _encoder(
    directory: Path,
    out: Path,
    recipe: "Recipe",
    options: Mapping[str, Any],
    report_file: Path | None,
    json: bool,
) -> None:
    from fp8serve.calibration.checks import quantized_notes
    from fp8serve.calibration.pipeline import calibrate_encoder
    from fp8serve.calibration.reports.page import html_encoder_report
    from fp8serve.calibration.reports.tables import embedding_table

    notes = quantized_notes(directory)
    _print(notes)
    with stages("Calibrating") as progress:
        report = calibrate_encoder(directory, out=out, recipe=recipe, progress=progress, **options)
    write_report(report_file, lambda: html_encoder_report(report))
    print_report(report, embedding_table, json, printed=notes)


def _print(notes: Sequence[str]) -> None:
    """Before the work: what the owner of the model may not know about it."""
    for note in notes:
        remark(note)
