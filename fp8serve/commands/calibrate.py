"""Write MODEL in FP8, with scales from sample data.

Writes a directory that every FP8 server can load, with scales.safetensors, calibration.json and report.html. --report
writes the report to another file, too. Scales depend on all of --data, but not on the order of files and lines. Quality
is measured on other text: --holdout, or passages that are part of fp8serve.

\b
Examples:
  fp8serve calibrate ./llama --out ./llama-fp8
  fp8serve calibrate ./llama --out ./llama-fp8 --data chats.jsonl --holdout test.jsonl --kv-cache
  zcat corpus.jsonl.gz | fp8serve calibrate ./llama --out ./llama-fp8 --data - --data more.txt.gz
  fp8serve calibrate ./llama --out ./scales --scales-only --json --report ./llama.html
  torchrun --standalone --nproc-per-node 2 -m fp8serve calibrate ./llama --out ./llama-fp8 --rounding gptq
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.calibration.options import CalibrationOptions, ScalingOptions
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.terminal import (
    AsJson,
    Model,
    ReportFile,
    check_report,
    command_line,
    on_device,
    print_report,
    remark,
    stage_progress,
    write_report,
)


@with_options()
def command(
    context: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
    scaling: OptionValues[ScalingOptions],
    options: OptionValues[CalibrationOptions],
    report_file: ReportFile = None,
    json: AsJson = False,
) -> None:
    from fp8serve.calibration.checks import quantized_notes
    from fp8serve.calibration.pipeline import calibrate, calibrate_encoder
    from fp8serve.calibration.reports.page import html_encoder_report, html_report
    from fp8serve.calibration.reports.tables import embedding_table, summary_table
    from fp8serve.engine.task import task_of
    from fp8serve.hub import find_model
    from fp8serve.ranks import is_rank, torchrun

    check_report(report_file)
    directory, recipe = find_model(model), scaling().recipe
    values = dict(options.values) if is_rank() else on_device(options.values, directory)
    arguments: dict[str, Any] = {"out": out, "recipe": recipe, "command": command_line(context), **values}
    run: Callable[..., Any]
    page: Callable[[Any], str]
    table: Callable[[Any], Any]
    if task_of(directory) == "generate":
        run, page, table = calibrate, html_report, summary_table
    else:
        run, page, table = calibrate_encoder, html_encoder_report, embedding_table
    # Every rank checks the model, so that all fail together: torchrun would kill ranks that fail later than the first.
    notes = quantized_notes(directory, scales_only=options.values.get("scales_only", False))
    with torchrun() as ranks, stage_progress("Calibrating") if ranks.is_first else nullcontext() as progress:
        if ranks.is_first:
            for note in notes:
                remark(note)
        report: Any = run(directory, progress=progress, ranks=ranks, **arguments)
    if ranks.is_first:
        write_report(report_file, lambda: page(report))
        print_report(report, table, json, printed=notes)
