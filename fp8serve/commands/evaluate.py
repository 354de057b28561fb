"""Measure the quality of a model, such as the loss by FP8.

Measures perplexity, and with --against also KL divergence, top-1 agreement and the noise of each layer. For embedding
models and rerankers it measures the changes of vectors and scores, and whether the same texts are retrieved.

\b
Examples:
  fp8serve eval ./llama-fp8 --data held-out.jsonl
  fp8serve eval ./llama-fp8 --data held-out.jsonl --against ./llama --report eval.html
  fp8serve eval ./llama-fp8 --head-dtype fp8 --against ./llama
"""

from collections.abc import Callable
from dataclasses import replace
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
    from fp8serve.calibration.evaluate import evaluate, evaluate_encoder
    from fp8serve.calibration.reports.page import html_encoder_evaluation, html_evaluation
    from fp8serve.calibration.reports.tables import encoder_eval_table, eval_table
    from fp8serve.engine.task import task_of
    from fp8serve.hub import find_model

    check_report(report_file)
    directory, reference = find_model(model), find_model(against) if against else None
    values = on_device(options.values, directory)
    measure: Callable[..., Any]
    page: Callable[[Any], str]
    table: Callable[[Any], Any]
    if task_of(directory) == "generate":
        measure, page, table = evaluate, html_evaluation, eval_table
    elif values.pop("head_dtype") == "bf16":
        measure, page, table = evaluate_encoder, html_encoder_evaluation, encoder_eval_table
    else:
        raise RequestError(f"{model} computes no logits of tokens; leave --head-dtype out.")
    with stage_progress("Evaluating") as progress:
        report: Any = measure(directory, against=reference, progress=progress, command=command_line(context), **values)
    report = replace(report, model=model, against=against)  # as the user named them, instead of directories in a cache
    write_report(report_file, lambda: page(report))
    print_report(report, table, json)
