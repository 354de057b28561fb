"""Measure what FP8 costs in quality.

Perplexity; with --against also KL divergence, top-1 agreement and the noise of each layer.

\b
Examples:
  fp8serve eval ./llama-fp8 --data held-out.jsonl
  fp8serve eval ./llama-fp8 --data held-out.jsonl --against ./llama --report eval.html
"""

from dataclasses import replace
from typing import Annotated

import typer

from fp8serve.calibration.options import EvaluationOptions
from fp8serve.commands.from_options import Chosen, with_options
from fp8serve.terminal import (
    AsJson,
    Model,
    ReportFile,
    check_report,
    print_report,
    stages,
    typed,
    write_report,
)


@with_options()
def command(
    context: typer.Context,
    model: Model,
    options: Chosen[EvaluationOptions],
    against: Annotated[str | None, typer.Option(help="Reference model, run in high precision.")] = None,
    report_file: ReportFile = None,
    json: AsJson = False,
) -> None:
    from fp8serve.hub import find_model

    check_report(report_file)
    directory, reference = find_model(model), find_model(against) if against else None
    from fp8serve.calibration.evaluate import evaluate
    from fp8serve.calibration.page.pages import html_evaluation
    from fp8serve.calibration.report import eval_table

    with stages("Evaluating") as progress:
        report = evaluate(directory, against=reference, progress=progress, command=typed(context), **options.values)
    report = replace(report, model=model, against=against)  # as they were named: a directory may lie in a cache
    write_report(report_file, lambda: html_evaluation(report))
    print_report(report, eval_table, json)
