"""Write MODEL in FP8, with scales from sample data.

Writes a directory that every FP8 server can load, scales.safetensors, calibration.json and report.html.
All of --data makes scales, whatever the order of files and lines; quality is measured on other text: --holdout,
or passages that ship with fp8serve.

\b
Examples:
  fp8serve calibrate ./llama --out ./llama-fp8
  fp8serve calibrate ./llama --out ./llama-fp8 --data chats.jsonl --holdout test.jsonl --kv-cache
  zcat corpus.jsonl.gz | fp8serve calibrate ./llama --out ./llama-fp8 --data - --data more.txt.gz
  fp8serve calibrate ./llama --out ./scales --scales-only --json
"""

from pathlib import Path
from typing import Annotated

import typer

from fp8serve.calibration.options import CalibrationOptions, ScalingOptions
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.terminal import AsJson, Model, print_report, stages


@with_options()
def command(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
    scaling: Chosen[ScalingOptions],
    options: Chosen[CalibrationOptions],
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    directory, recipe = find_model(model), scaling().recipe
    from fp8serve.calibration.pipeline import calibrate
    from fp8serve.calibration.report import summary_table

    with stages("Calibrating") as progress:
        report = calibrate(directory, out=out, recipe=recipe, progress=progress, **options.values)
    print_report(report, summary_table, json)
