"""Measure the quality of a model, such as the loss by FP8.

Measures perplexity, and with --against also KL divergence, top-1 agreement and the noise of each layer. For embedding
models and rerankers it measures the changes of vectors and scores, and whether the same texts are retrieved.

\b
Examples:
  fp8serve eval ./llama-fp8 --data held-out.jsonl
  fp8serve eval ./llama-fp8 --data held-out.jsonl --against ./llama --report eval.html
  fp8serve eval ./llama-fp8 --head-dtype fp8 --against ./llama
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.calibration.options import EvaluationOptions
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.errors import RequestError
from fp8serve.terminal import (
    AsJson,
    Model,
    ReportFile,
    check_report,
    command_line,
    on_device,
    print_report,
    stage_progress,
    write_report,
)


@with_options()
def command(
    context: typer.Context,
    model: Model,
    options: OptionValues[EvaluationOptions],
    against: Annotated[str | None, typer.Option(help="Reference model, run in high precision.")] = None,
    report_file: ReportFile = None,
    json: AsJson = False,
) -> None:
    from fp8serve.engine.task import task_of
    from fp8serve.hub import find_model

    check_report(report_file)
    directory, reference = find_model(model), find_model(against) if against else None
    values = on_device(options.values, directory)
    from fp8serve.calibration.evaluate import evaluate
    from fp8serve.calibration.reports.page import html_evaluation
    from fp8serve.calibration.reports.tables import eval_table

    if task_of(directory) != "generate":
        return _evaluate_encoder(context, directory, reference, values, (model, against), report_file, json)
    with stage_progress("Evaluating") as progress:
        report = evaluate(directory, against=reference, progress=progress, command=command_line(context), **values)
    report = replace(
        report, model=model, against=against
    )  # the names that the user gave, instead of directories in a cache
    write_report(report_file, lambda: html_evaluation(report))
    print_report(report, eval_table, json)
    return None


def _evaluate_encoder(
    context: typer.Context,
    directory: Path,
    reference: Path | None,
    options: dict[str, Any],
    names: tuple[str, str | None],
    report_file: Path | None,
    json: bool,
) -> None:
    if options.pop("head_dtype") != "bf16":
        raise RequestError(f"{names[0]} computes no logits of tokens; leave --head-dtype out.")
    from fp8serve.calibration.evaluate import evaluate_encoder
    from fp8serve.calibration.reports.page import html_encoder_evaluation
    from fp8serve.calibration.reports.tables import encoder_eval_table

    with stage_progress("Evaluating") as progress:
        report = evaluate_encoder(
            directory, against=reference, progress=progress, command=command_line(context), **options
        )
    report = replace(report, model=names[0], against=names[1])
    write_report(report_file, lambda: html_encoder_evaluation(report))
    print_report(report, encoder_eval_table, json)
