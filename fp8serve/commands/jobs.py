"""Start, watch, cancel and delete fine-tune jobs of a server.

\b
Examples:
  fp8serve jobs submit chats.jsonl --epochs 3 --follow
  fp8serve jobs list --server http://127.0.0.1:8000
  fp8serve jobs follow JOB
  fp8serve jobs plot JOB
  fp8serve models activate JOB
"""

import shutil
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8serve.charts import Panel, svg_file, text_chart
from fp8serve.client import api as client
from fp8serve.client.api import Api, text_field
from fp8serve.commands.dataclass_options import OptionValues, with_options
from fp8serve.commands.server_options import URL, KeyFile, Server, connected, options_on_command_line
from fp8serve.errors import MachineError
from fp8serve.model.text.data_files import DATA, local_file
from fp8serve.options import options_of
from fp8serve.terminal import AsJson, print_json, print_table, printable, progress, remark
from fp8serve.train.config import API_NAMES, NOT_IN_API, TrainConfig
from fp8serve.train.events import FIRST_COLUMNS, Metrics, Points, as_csv, curves_of, series_of_run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]
JOB_OPTIONS = [option for option in options_of(TrainConfig) if option.name not in NOT_IN_API]
JobOptions: Any = make_dataclass(
    "JobOptions", [(o.name, o.annotation, field(default_factory=partial(copy, o.default))) for o in JOB_OPTIONS]
)
"""The training options that clients of a server can set. The server checks their values."""
JobOrRun = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job, or the directory of a run.")]
MAX_CHART_WIDTH = 100  # characters
LOSS_MASK_QUOTES = ("»", "«")


@app.command("list")
def list_jobs(
    server: Server = URL,
    api_key_file: KeyFile = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 20,
    json: AsJson = False,
) -> None:
    """List the server's jobs, newest first.

    \b
    Examples:
      fp8serve jobs list
      fp8serve jobs list --limit 100 --json
    """
    with connected(server, api_key_file) as api:
        result = client.list_jobs(api, limit)
    if json:
        print_json(result)
    else:
        print_table(("job", "status", "step", "loss", "model"), [_row(job) for job in result])


@app.command()
def show(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Show the state of a job, its progress, and the error if it failed.

    \b
    Examples:
      fp8serve jobs show JOB
      fp8serve jobs show JOB --json
    """
    with connected(server, api_key_file) as api:
        _print(client.check_job(api.get(client.job_path(job))), json)


@app.command()
@with_options()
def submit(
    context: typer.Context,
    data: Annotated[str, typer.Argument(metavar="FILE", help=DATA)],
    options: OptionValues[JobOptions],
    validation: Annotated[str | None, typer.Option(metavar="FILE", help="Data to validate on.")] = None,
    suffix: Annotated[str, typer.Option(help="Part of the result's name.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Print the job's events until it ends.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the data, and print the steps and the memory of the job.")
    ] = False,
    server: Server = URL,
    api_key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Start a fine-tune on a file of data. The server has its own defaults for options.

    \b
    Examples:
      fp8serve jobs submit chats.jsonl --epochs 3 --lr 1e-5
      fp8serve jobs submit chats.jsonl --validation held-out.jsonl --follow
      fp8serve jobs submit rows.parquet --dry-run
    """
    explicit = options_on_command_line(context, (option.name for option in JOB_OPTIONS))
    body = {API_NAMES.get(name, name): options.values[name] for name in explicit}
    with connected(server, api_key_file) as api:
        body["file_id"] = api.upload(local_file(data))
        if validation is not None:
            body["validation_file_id"] = api.upload(local_file(validation))
        body |= {"suffix": suffix} if suffix else {}
        if dry_run:
            return _print_dry_run(api.post("/finetune/validate", body), json)
        job = client.check_job(api.post("/finetune", body))
        if follow:
            remark(f"Job {printable(job['id'])}")
            _watch(api, job["id"], json)
        else:
            _print(job, json)
    return None


@app.command()
def follow(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Print the events of a job until it ends: its steps with their loss, warnings and errors. Ctrl-C does not stop the
    job.

    \b
    Examples:
      fp8serve jobs follow JOB
      fp8serve jobs follow JOB --json
    """
    with connected(server, api_key_file) as api:
        _watch(api, job, json)


@app.command()
def cancel(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Cancel a job. The files that it wrote are not deleted.

    \b
    Examples:
      fp8serve jobs cancel JOB
    """
    with connected(server, api_key_file) as api:
        _print(client.check_job(api.post(client.job_path(job, "/cancel"))), json)


@app.command()
def pause(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Stop a job after writing a checkpoint. `jobs resume` continues it.

    \b
    Examples:
      fp8serve jobs pause JOB
    """
    with connected(server, api_key_file) as api:
        _print(client.check_job(api.post(client.job_path(job, "/pause"))), json)


@app.command()
def resume(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Resume a failed or paused job from its last checkpoint.

    \b
    Examples:
      fp8serve jobs resume JOB
    """
    with connected(server, api_key_file) as api:
        _print(client.check_job(api.post(client.job_path(job, "/resume"))), json)


@app.command()
def delete(job: JobId, server: Server = URL, api_key_file: KeyFile = None, json: AsJson = False) -> None:
    """Delete a finished job with its result and its checkpoints.

    \b
    Examples:
      fp8serve jobs delete JOB
    """
    with connected(server, api_key_file) as api:
        answer = api.delete(client.job_path(job))
    if json:
        print_json(answer)
    else:
        print(f"{printable(text_field(answer, 'id', 'job'))} was deleted.")


def _watch(api: Api, job_id: str, json: bool) -> None:
    """Prints events to standard error, and the finished job to standard output. Exits with 1 unless it succeeded."""
    with progress("Training") as advance:

        def print_event(event: dict[str, Any]) -> None:
            remark(printable(str(event.get("message"))))
            data = event.get("data")
            if event.get("type") == "metrics" and isinstance(data, dict):
                advance(int(data.get("step", 0)), int(data.get("total_steps", 0)))

        try:
            status = client.follow(api, job_id, print_event)
        except KeyboardInterrupt:
            remark(f"The job is still running; fp8serve jobs cancel {printable(job_id)} ends it.")
            raise
    _print(client.check_job(api.get(client.job_path(job_id))), json)
    if not json:
        print_loss_chart(list(client.job_metrics(api, job_id)))
    if status != "succeeded":
        raise typer.Exit(1)


def _print_dry_run(report: Any, json: bool) -> None:
    """Prints the response of `POST /finetune/validate`. Exits with 1 if a row is invalid."""
    if json:
        print_json(report)
    else:
        show_dry_run(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _print(job: dict[str, Any], json: bool) -> None:
    if json:
        print_json(job)
        return
    fields = {"job": job["id"], "status": job["status"], "base model": job.get("base_model")}
    fields |= {"result": job.get("fine_tuned_model"), "error": (job.get("error") or {}).get("message")}
    fields |= {name.replace("_", " "): value for name, value in (job.get("progress") or {}).items()}
    for name, value in fields.items():
        if value is not None and not isinstance(value, dict | list):
            print(f"{printable(name):25} {printable(_number(value))}")


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    progress = job.get("progress") or {}
    steps = f"{progress['step']}/{progress['total_steps']}" if {"step", "total_steps"} <= progress.keys() else "-"
    loss = _number(progress["train_loss"]) if isinstance(progress.get("train_loss"), float) else "-"
    model = job.get("fine_tuned_model") or job.get("base_model")
    return tuple(printable(str(cell)) for cell in (job.get("id"), job.get("status"), steps, loss, model))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def metrics(
    job: JobOrRun,
    server: Server = URL,
    api_key_file: KeyFile = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with every metric.")] = False,
    json: AsJson = False,
) -> None:
    """Show the metrics of a job, one line a step.

    \b
    Examples:
      fp8serve jobs metrics JOB
      fp8serve jobs metrics JOB --csv > losses.csv
      fp8serve jobs metrics ./run --json
    """
    if csv and json:
        raise typer.BadParameter("--csv and --json exclude each other; give one of them.")
    series = read_series(job, server, api_key_file)
    if csv:
        print(as_csv(series), end="")
    elif json:
        print_json(series)
    else:
        print_table(FIRST_COLUMNS, [[_cell(row.get(name)) for name in FIRST_COLUMNS] for row in series])


@app.command()
def plot(
    job: JobOrRun,
    server: Server = URL,
    api_key_file: KeyFile = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Metric to plot; repeat for several.", show_default="the losses"),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plot into this SVG file.")] = None,
) -> None:
    """Plot the losses of a job, or other metrics, by step.

    \b
    Examples:
      fp8serve jobs plot JOB
      fp8serve jobs plot ./run --svg loss.svg
      fp8serve jobs plot JOB --metric reward --metric kl
    """
    series = read_series(job, server, api_key_file)
    if svg is None:
        print(terminal_chart(series, metric or []))
        return
    panels = [Panel(name, curves) for name, curves in _charts(series, metric or []).items()]
    try:
        svg.write_text(svg_file(f"{Path(job).name}, by step", panels, "step"), encoding="utf-8")
    except OSError as problem:
        raise MachineError(f"{svg} cannot be written: {problem.strerror}.") from None


def read_series(job: str, server: str, key_file: Path | None) -> list[Metrics]:
    """Returns the series of a server's job, or of the run in the directory `job`."""
    if Path(job).is_dir():
        return series_of_run(Path(job))
    with connected(server, key_file) as api:
        return list(client.job_metrics(api, job))


def terminal_chart(series: list[Metrics], metrics: list[str]) -> str:
    """Returns a chart of characters. Raises JobError if none of the metrics was reported."""
    width = max(min(MAX_CHART_WIDTH, shutil.get_terminal_size().columns) - 14, 20)
    return printable("\n\n".join(text_chart(curves, width) for curves in _charts(series, metrics).values()))


def _charts(series: list[Metrics], metrics: list[str]) -> dict[str, dict[str, Points]]:
    """Returns the curves of each chart by title: one chart of both losses, or one chart for each of `metrics`. Raises
    JobError if none of the metrics was reported."""
    curves = curves_of(series, metrics)
    return {name: {name: points} for name, points in curves.items()} if metrics else {"loss": curves}


def print_loss_chart(series: list[Metrics]) -> None:
    """Prints a chart of the losses if standard output is a terminal and a loss was reported."""
    if sys.stdout.isatty() and any(row.get("train_loss") is not None for row in series):
        print(terminal_chart(series, []))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


def show_dry_run(report: Mapping[str, Any]) -> None:
    """Prints a dry run. `report` has the fields of `train.validate.ValidationReport`."""
    for line in report["bad_lines"]:
        print(printable(line["message"]))
    if more := report["bad_line_count"] - len(report["bad_lines"]):
        print(f"... and {more} more invalid rows")
    data, memory = report["data"], report["memory_bytes"]["total"]
    print(
        f"{data['rows']} rows, {data['tokens']} tokens, {report['trainable_fraction']:.0%} of them carry loss; "
        f"{report['steps']} steps; about {memory / 2**30:.1f} GiB of memory"
    )
    if report["sample"]:
        begin, end = LOSS_MASK_QUOTES
        print(f"The first row; the tokens between {begin} and {end} carry loss:")
        pieces = (f"{begin}{text}{end}" if has_loss else text for text, has_loss in report["sample"])
        print(printable("".join(pieces)))
